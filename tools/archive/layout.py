"""What is in an archive, and in what order. docs/archive.md is the contract.

A tar stream: for each namespace `<arch>/<model>@<digest16>/namespace.json` and then its chunk files under the
names that they have in a root; at the end `fskv-archive.json`, which says how much there was. Pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from fskv import namespace
from fskv.errors import IdentityMismatch
from fskv.namespace import Identity, Json

TRAILER = "fskv-archive.json"
FORMAT = 1
MAX_TRAILER_NBYTES = 64 << 10
MAX_MANIFEST_NBYTES = 16 << 20  # docs/format.md
_MANIFEST = re.compile(r"([A-Za-z0-9._-]{1,40}/[A-Za-z0-9._@-]{1,255})/namespace\.json")
_CHUNK = re.compile(
    rf"([A-Za-z0-9._-]{{1,40}}/[A-Za-z0-9._@-]{{1,255}})/({namespace.CHUNK_DIR}/.{{1,200}})"
)


class ArchiveError(Exception):
    """The stream is no archive of fskv's, or not a whole one; nothing after this place can be read."""


@dataclass(slots=True)
class Contents:
    """What has gone by, in the order in which it did: both sides count, and the trailer compares."""

    namespaces: int = 0
    files: int = 0
    nbytes: int = 0  # of the files
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add_manifest(self, name: str, content: bytes) -> None:
        self.namespaces += 1
        self._feed(name, len(content), 0, content)

    def add_file(self, name: str, nbytes: int, mtime_ns: int, header: bytes) -> None:
        """Count a chunk file. Its header holds the digests of its rows, so it stands for the payload too."""
        self.files += 1
        self.nbytes += nbytes
        self._feed(name, nbytes, mtime_ns, header)

    def _feed(self, name: str, nbytes: int, mtime_ns: int, content: bytes) -> None:
        line = f"{name} {nbytes} {mtime_ns} {hashlib.sha256(content).hexdigest()}\n"
        self._digest.update(line.encode())

    @property
    def _tree(self) -> dict[str, Json]:
        return {
            "format": FORMAT,
            "namespaces": self.namespaces,
            "files": self.files,
            "nbytes": self.nbytes,
            "digest": self._digest.hexdigest(),
        }

    def trailer(self, creator: str) -> bytes:
        """Return the content of the last member."""
        return (json.dumps({**self._tree, "creator": creator}, indent=2) + "\n").encode()

    def differs(self, trailer: bytes) -> str | None:
        """Say how what has gone by differs from what the trailer says; None if it does not."""
        try:
            told = namespace.parse_json(trailer)
        except ValueError as error:
            return f"its last member, {TRAILER}, cannot be read: {error}"
        if not isinstance(told, dict) or told.get("format") != FORMAT:
            return f"its last member, {TRAILER}, is not of format {FORMAT}"
        for name, found in self._tree.items():
            if told.get(name) != found:
                if name == "digest":
                    return "some of it is not what was written, or in another order"
                return f"it should have {told.get(name)!r:.40} {name}, found {found}"
        return None


def manifest_name(identity: Identity) -> str:
    return f"{namespace.directory(identity)}/namespace.json"


def read_manifest(name: str, content: bytes) -> Identity:
    """Return the identity in a member; raises ValueError unless it is the one that its name says."""
    try:
        identity = Identity.from_manifest(namespace.parse_json(content))
    except IdentityMismatch as error:
        raise ValueError(str(error)) from None
    if manifest_name(identity) != name:
        raise ValueError(f"it describes {namespace.directory(identity)}")
    return identity


def namespace_of_manifest(name: str) -> str | None:
    """Return the namespace whose manifest a member of that name is; None if it is none."""
    match = _MANIFEST.fullmatch(name)
    return match[1] if match else None


def split_chunk(name: str) -> tuple[str, str] | None:
    """Return namespace and name within it of a chunk file's member; None if it is none."""
    match = _CHUNK.fullmatch(name)
    if match is None or namespace.parse_chunk_path(match[2]) is None:
        return None
    return match[1], match[2]
