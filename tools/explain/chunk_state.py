"""What is under the name of one chunk file, for a prompt: what a lookup sees of it, and then a load.

A lookup compares lengths alone; so what is not there, is no regular file or has another length is told apart
from what only the load will find, which is `check.judge`'s to say.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from dataclasses import dataclass, replace

from fskv import namespace
from fskv.format.chunk_file import FileLayout
from fskv.namespace import ChunkName, GroupIdentity, Identity

from ..check.expect import Expected, expected_of
from ..check.judge import Finding, Reader, judge
from ..exits import UsageError

_MAX_RANKS = 4096
_MAX_CHUNK_NBYTES = 1 << 40
_NO_WAY = (errno.ENOTDIR, errno.ELOOP)
GOOD, ABSENT, NO_FILE, WRONG_SIZE = "good", "absent", "no regular file", "wrong size"


@dataclass(frozen=True, slots=True)
class FileState:
    """What is under the name of one file: the first check that fails, or GOOD."""

    path: str
    rank: int | None
    state: str  # or one of check.judge's findings
    detail: str = ""  # what is wrong, in words
    nbytes: int | None = None
    mtime_ns: int | None = None
    first_block: int | None = None  # None where the header could not be read

    @property
    def found(self) -> bool:
        """Whether a lookup, which compares the length alone, takes it for a hit."""
        return self.state not in (ABSENT, NO_FILE, WRONG_SIZE)


@dataclass(frozen=True)
class GroupFiles:
    """What the files of one group of a namespace must look like."""

    group: GroupIdentity
    namespace_path: str
    ranks: tuple[int | None, ...]
    expected: Expected

    @classmethod
    def of(cls, identity: Identity, group: GroupIdentity, namespace_path: str) -> GroupFiles:
        """Raises UsageError where the identity describes no files that could exist."""
        if identity.blocks_per_chunk * sum(group.page_nbytes) >= _MAX_CHUNK_NBYTES:
            raise UsageError(
                f"groups: a chunk of group {group.group_idx} would be larger than 1 TiB"
            )
        expected = expected_of(identity, identity.digest16)
        return cls(group, namespace_path, file_ranks(identity), expected)

    @property
    def layout(self) -> FileLayout | None:
        """None with pipeline stages: pages and layers differ from rank to rank, and no identity has them."""
        return (self.expected.layouts or {}).get(self.group.group_idx)

    @property
    def file_nbytes(self) -> int | None:
        return self.layout.file_nbytes if self.layout else None

    def path(self, key: bytes, rank: int | None) -> str:
        name = namespace.chunk_path(key, self.group.group_idx, rank)
        return f"{self.namespace_path}/{name}"

    def looks_present(self, key: bytes) -> bool:
        """Answer as the engine's lookup does: every rank's file is there with its length."""
        return all(self._seen(key, rank).found for rank in self.ranks)

    def states(self, key: bytes, reader: Reader, *, read_data: bool) -> tuple[FileState, ...]:
        """Check the file of every rank of one chunk."""
        return tuple(self._loaded(key, rank, reader, read_data) for rank in self.ranks)

    def _seen(self, key: bytes, rank: int | None) -> FileState:
        """Look at a file as a lookup does."""
        path = self.path(key, rank)
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return FileState(path, rank, ABSENT, "no such file")
        except OSError as error:
            kind = NO_FILE if error.errno in _NO_WAY else Finding.UNREADABLE
            return FileState(path, rank, kind, error.strerror or type(error).__name__)
        nbytes, mtime_ns = info.st_size, info.st_mtime_ns
        if not stat.S_ISREG(info.st_mode):
            return FileState(path, rank, NO_FILE, "a link, a directory or a device in its place")
        if self.file_nbytes is not None and nbytes != self.file_nbytes:
            words = f"{nbytes} bytes, expected {self.file_nbytes}"
            return FileState(path, rank, WRONG_SIZE, words, nbytes, mtime_ns)
        return FileState(path, rank, GOOD, "", nbytes, mtime_ns)

    def _loaded(self, key: bytes, rank: int | None, reader: Reader, read_data: bool) -> FileState:
        """Look at a file as a load does."""
        seen = self._seen(key, rank)
        if seen.state != GOOD:
            return seen
        chunk = ChunkName(namespace.chunk_name(key), self.group.group_idx, rank)
        found = judge(reader, seen.path, chunk=chunk, expected=self.expected, rows=read_data)
        if found.header is None or found.bad:
            state = ABSENT if found.finding is Finding.VANISHED else found.finding
            return replace(seen, state=state, detail=found.reason or "gone meanwhile")
        if found.header.key_hash != key:  # `judge` knows names alone
            words = f"holds another key of the same name: {found.header.key_hash.hex()}"
            return replace(seen, state=Finding.STALE, detail=words)
        return replace(seen, first_block=found.header.first_block)


def file_ranks(identity: Identity) -> tuple[int | None, ...]:
    """Return what stands for a rank in the names of a chunk's files: one for each file.

    As the adapter names them: nothing with one rank; with `canonical_layout` the slices of KV heads, whose
    number is the end of `canonical_format`.
    """
    number = math.prod(max(1, identity.topology.get(name, 1)) for name in ("tp", "pp", "pcp"))
    if identity.canonical_format is not None:
        slices = identity.canonical_format.rpartition("/")[2]
        number = int(slices) if slices.isdecimal() and len(slices) <= 6 else 0
    if not 1 <= number <= _MAX_RANKS:
        raise UsageError(f"topology, canonical_format: expected 1 to {_MAX_RANKS} files of a chunk")
    return (None,) if number == 1 else tuple(range(number))
