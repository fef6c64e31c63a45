"""What a chunk file must say, as far as its name, its directory and the namespace's manifest tell. Pure.

Step 7 of "What readers MUST check" (docs/format.md) compares a file with what an engine expects. Without an
engine the same follows from `namespace.json`: its digest, the groups, their page sizes and layer names. With
pipeline stages the manifest has no pages; then only the files of a group and rank can be compared with each
other, which `census` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from fskv import namespace
from fskv.errors import ChunkStale
from fskv.format.chunk_file import ChunkHeader, FileLayout
from fskv.namespace import ChunkName, GroupIdentity, Identity

_MAX_VARIANTS = 16  # of layouts that are counted for a group and rank


@dataclass(frozen=True, slots=True)
class Expected:
    """What the files of one namespace have in common; nothing where nobody knows."""

    digest: bytes | None = None  # of the namespace: from a manifest that can be read
    digest16: str | None = None  # of the namespace: from the directory's name
    layouts: Mapping[int, FileLayout | None] | None = None  # by group; None: not in the manifest

    def layout(self, name: ChunkName | None) -> FileLayout | None:
        """Return what the files of that name's group look like, if that is known."""
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
        _same("header length", header.header_nbytes, layout_of(header).header_nbytes)


NOTHING = Expected()


def _same(what: str, found: int | str, expected: int | str) -> None:
    if found != expected:
        raise ChunkStale(f"another {what}: {found}, expected {expected}")


def layout_of(header: ChunkHeader) -> FileLayout:
    """Return what a header says about the files of its group."""
    return FileLayout(header.num_blocks, header.page_nbytes, header.layout_digest)


@lru_cache(maxsize=16)  # an archive asks for each of its files
def expected_of(identity: Identity | None, digest16: str) -> Expected:
    """Return what the files below a directory of this name and with this manifest must say."""
    if identity is None:
        return Expected(digest16=digest16)
    layouts = {group.group_idx: _group_layout(identity, group) for group in identity.groups}
    return Expected(identity.digest, digest16, layouts)


def _group_layout(identity: Identity, group: GroupIdentity) -> FileLayout | None:
    if not group.page_nbytes:
        return None  # pipeline stages: the pages differ from rank to rank
    digest = namespace.layout_digest(group, identity.blocks_per_chunk)
    return FileLayout(identity.blocks_per_chunk, group.page_nbytes, digest)


# --- files that can only be compared with each other --------------------------------------


@dataclass(slots=True)
class Census:
    """The layouts of the files whose layout no manifest tells: those of a group and rank must be one.

    16 bytes for each file: which of them are not like the others is known only at the end.
    """

    groups: dict[tuple[int, int | None], dict[tuple[bytes, int], bytearray]] = field(
        default_factory=dict
    )
    uncounted: Counter[tuple[int, int | None]] = field(default_factory=Counter)

    def add(self, name: ChunkName, header: ChunkHeader) -> None:
        variants = self.groups.setdefault((name.group_idx, name.rank), {})
        variant = header.layout_digest, header.header_nbytes + header.payload_nbytes
        if variant not in variants and len(variants) == _MAX_VARIANTS:
            self.uncounted[name.group_idx, name.rank] += 1
            return
        variants.setdefault(variant, bytearray()).extend(bytes.fromhex(name.name))

    def odd(self) -> list[tuple[ChunkName, str]]:
        """Return the files that are not like most of their group and rank, and why."""
        found = []
        for (group_idx, rank), variants in self.groups.items():
            usual = max(variants, key=lambda variant: len(variants[variant]))
            for variant, names in variants.items():
                if variant == usual:
                    continue
                why = (
                    f"another layout: {variant[0].hex()} and {variant[1]} bytes, where most of group "
                    f"{group_idx} have {usual[0].hex()} and {usual[1]}"
                )
                found += [
                    (ChunkName(names[at : at + 16].hex(), group_idx, rank), why)
                    for at in range(0, len(names), 16)
                ]
        return found
