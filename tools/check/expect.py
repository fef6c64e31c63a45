"""The expected content of a chunk file, by its name, its directory and the namespace's manifest. Pure.

Step 7 of "What readers MUST check" (docs/format.md) compares a file with what an engine expects. Without an
engine the same follows from `namespace.json`: its digest, the groups, their page sizes and layer names. With
pipeline stages the manifest has no pages, and no layout is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fskv import namespace
from fskv.errors import ChunkStale
from fskv.format.chunk_file import ChunkHeader, FileLayout
from fskv.format.integrity import CHECKSUM, ENCRYPTED
from fskv.namespace import ChunkName, GroupIdentity, Identity
from fskv.root.key_file import KeySet


@dataclass(frozen=True, slots=True)
class Expected:
    """The facts that the files of one namespace have in common, as far as they are known."""

    digest: bytes | None = None  # of the namespace: from a manifest that can be read
    digest16: str | None = None  # of the namespace: from the directory's name
    layouts: Mapping[int, FileLayout | None] | None = None  # by group; None: not in the manifest
    checksum: str | None = None
    keys: KeySet | None = None  # with which its files can be decrypted

    def layout(self, name: ChunkName | None) -> FileLayout | None:
        """Return the layout of the files of that name's group, if it is known."""
        return self.layouts.get(name.group_idx) if self.layouts and name else None

    def compare(self, header: ChunkHeader, name: ChunkName | None) -> None:
        """Raise ChunkStale unless the header is that of a file of this name, in this namespace."""
        if name is not None:
            found = namespace.chunk_name(header.key_hash)
            if found != name.name:
                raise ChunkStale(f"holds the key of {found}, not of its own name")
            _same("group", header.group_idx, name.group_idx)
            _same("rank", header.rank, name.rank or 0)
        if self.digest is not None:
            _same("namespace", header.namespace_digest.hex(), self.digest.hex())
        elif self.digest16 is not None:
            _same("namespace", header.namespace_digest.hex()[:16], self.digest16)
        if self.layouts is not None and header.group_idx not in self.layouts:
            raise ChunkStale(f"group {header.group_idx}: the namespace has no such group")
        layout = self.layouts.get(header.group_idx) if self.layouts else None
        if layout is not None:
            _same("number of blocks", header.num_blocks, layout.num_blocks)
            if header.page_nbytes != layout.page_nbytes:
                raise ChunkStale("has pages of other sizes than the namespace says")
            _same("layout", header.layout_digest.hex(), layout.digest.hex())
        if self.checksum is not None:
            _same("checksum", header.checksum, self.checksum)
        _same("header length", header.header_nbytes, layout_of(header).header_nbytes)


NOTHING = Expected()


def _same(what: str, found: int | str, expected: int | str) -> None:
    if found != expected:
        raise ChunkStale(f"another {what}: {found}, expected {expected}")


def layout_of(header: ChunkHeader) -> FileLayout:
    """Return the layout that a header gives for the files of its group."""
    return FileLayout(header.num_blocks, header.page_nbytes, header.layout_digest, header.encrypted)


@lru_cache(maxsize=16)  # a copy asks for each of its files
def expected_of(identity: Identity | None, digest16: str, keys: KeySet | None = None) -> Expected:
    """Return the expected facts of the files below a directory of this name and with this manifest.

    `keys` are an operator's, for namespaces that are encrypted.
    """
    if identity is None:
        return Expected(digest16=digest16)
    layouts = {group.group_idx: _group_layout(identity, group) for group in identity.groups}
    checksum = CHECKSUM if identity.encryption is None else ENCRYPTED
    return Expected(identity.digest, digest16, layouts, checksum, keys)


def _group_layout(identity: Identity, group: GroupIdentity) -> FileLayout | None:
    if not group.page_nbytes:
        return None  # pipeline stages: the pages differ from rank to rank
    digest = namespace.layout_digest(group, identity.blocks_per_chunk)
    encrypted = identity.encryption is not None
    return FileLayout(identity.blocks_per_chunk, group.page_nbytes, digest, encrypted)
