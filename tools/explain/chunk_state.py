"""The state of one chunk file for a prompt, as a lookup sees it, and then a load.

A lookup compares lengths alone; what only a load notices is `check.judge`'s to say.
"""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass

from fskv import namespace
from fskv.format.chunk_file import FileLayout
from fskv.namespace import ChunkName, GroupIdentity, Identity

from ..check.expect import Expected, expected_of
from ..check.judge import Finding, Reader, judge
from ..exits import UsageError

_MAX_RANKS = 4096
_MAX_CHUNK_NBYTES = 1 << 40
GOOD, ABSENT = "good", "absent"


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of one file name."""

    path: str
    rank: int | None
    found: bool  # whether a lookup, which compares the length alone, takes it for a hit
    state: str  # GOOD, ABSENT, or what check.judge finds wrong
    detail: str = ""  # what is wrong, in words
    nbytes: int | None = None
    mtime_ns: int | None = None
    first_block: int | None = None  # None where the header could not be read


@dataclass(frozen=True)
class GroupFiles:
    """The expected facts of the files of one group of a namespace."""

    group: GroupIdentity
    namespace_path: str
    ranks: tuple[int | None, ...]
    expected: Expected

    @classmethod
    def of(cls, identity: Identity, group: GroupIdentity, namespace_path: str) -> GroupFiles:
        """Return the facts of one group. Raises UsageError where such files cannot exist."""
        if identity.blocks_per_chunk * sum(group.page_nbytes) >= _MAX_CHUNK_NBYTES:
            raise UsageError(
                f"groups: a chunk of group {group.group_idx} would be larger than 1 TiB"
            )
        expected = expected_of(identity, identity.digest16)
        return cls(group, namespace_path, file_ranks(identity), expected)

    @property
    def file_nbytes(self) -> int | None:
        """The length of a file; None with pipeline stages, whose ranks have different pages and layers."""
        layout: FileLayout | None = (self.expected.layouts or {}).get(self.group.group_idx)
        return layout.file_nbytes if layout else None

    def looks_present(self, key: bytes) -> bool:
        """Answer as the engine's lookup does: every rank's file is there with its length."""
        return all(self._is_hit(self._stat(self._path(key, rank))) for rank in self.ranks)

    def states(self, key: bytes, reader: Reader) -> tuple[FileState, ...]:
        """Look at the file of every rank of one chunk."""
        return tuple(self._state(key, rank, reader) for rank in self.ranks)

    def _path(self, key: bytes, rank: int | None) -> str:
        return f"{self.namespace_path}/{namespace.chunk_path(key, self.group.group_idx, rank)}"

    @staticmethod
    def _stat(path: str) -> os.stat_result | None:
        try:
            return os.lstat(path)
        except OSError:
            return None

    def _is_hit(self, info: os.stat_result | None) -> bool:
        if info is None or not stat.S_ISREG(info.st_mode):
            return False
        return self.file_nbytes in (None, info.st_size)

    def _state(self, key: bytes, rank: int | None, reader: Reader) -> FileState:
        path = self._path(key, rank)
        info = self._stat(path)
        chunk = ChunkName(namespace.chunk_name(key), self.group.group_idx, rank)
        judged = judge(reader, path, chunk=chunk, expected=self.expected, rows=False)
        if judged.finding is Finding.VANISHED:
            return FileState(path, rank, False, ABSENT, "no such file")
        state, detail, first_block = GOOD, judged.reason, None
        if judged.header is None or judged.bad:
            state = judged.finding
        elif judged.header.key_hash != key:  # `judge` knows names alone
            state = Finding.STALE
            detail = f"holds another key of the same name: {judged.header.key_hash.hex()}"
        else:
            first_block = judged.header.first_block
        nbytes, mtime_ns = (info.st_size, info.st_mtime_ns) if info else (None, None)
        is_hit = self._is_hit(info)
        return FileState(path, rank, is_hit, state, detail, nbytes, mtime_ns, first_block)


def file_ranks(identity: Identity) -> tuple[int | None, ...]:
    """Return the ranks in the names of a chunk's files: one for each file.

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
