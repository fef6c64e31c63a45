"""Removes bad chunk files, and nothing else.

What a run has found may be minutes old: an engine may have discarded the file and stored the chunk again, and
file systems give out inode numbers anew. So each file is opened and judged again, and is unlinked only while
it is open, still bad, and still what its name says. Its directory is reached from the root by one name at a
time, without following a symbolic link, and the name is removed from that very directory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fskv.namespace import ChunkName, chunk_file, parse_chunk_file
from fskv.root.beneath import opened

from ..root_view import FileOf, Namespace
from .expect import expected_of
from .judge import Finding, OpenFile, Reader, Verdict, judge
from .run import Bad

_ENTRY = struct.Struct("<I16sII")  # namespace, name, group, rank + 1
_REMOVED = "removed"


@dataclass(slots=True)
class RemovalPlan:
    """The bad files that may go: corrupt and stale ones, each of which was judged by itself.

    Not those that nobody could read or that change. Where a namespace's own manifest is damaged, "stale" may
    be the manifest's fault: those stay.
    """

    spaces: Sequence[Namespace]
    rows: bool
    entries: bytearray = field(default_factory=bytearray)  # 28 bytes a file
    nbytes: int = 0
    kept: int = 0

    def __len__(self) -> int:
        return len(self.entries) // _ENTRY.size

    def add(self, bad: Bad) -> bool:
        """Take a bad file into the plan; False if it is to stay."""
        chunk = parse_chunk_file(bad.name)
        sure = bad.finding is Finding.CORRUPT or (
            bad.finding is Finding.STALE and bad.namespace.identity is not None
        )
        if chunk is None or not (sure and bad.alone and bad.nbytes is not None):
            self.kept += 1
            return False
        rank1 = 0 if chunk.rank is None else chunk.rank + 1
        space_idx = self.spaces.index(bad.namespace)
        name = bytes.fromhex(chunk.name)
        self.entries += _ENTRY.pack(space_idx, name, chunk.group_idx, rank1)
        self.nbytes += bad.nbytes
        return True


@dataclass(frozen=True, slots=True)
class Removal(FileOf):
    """What became of one file of the plan."""

    removed: bool
    reason: str  # why it was or was not
    failed: bool  # it is still there and still bad
    nbytes: int


def execute(plan: RemovalPlan) -> Iterator[Removal]:
    """Remove what is still bad, one file at a time."""
    reader = Reader()
    expected = [expected_of(one.identity, one.digest16) for one in plan.spaces]
    for space_idx, digest, group_idx, rank1 in _ENTRY.iter_unpack(plan.entries):
        chunk = ChunkName(digest.hex(), group_idx, rank1 - 1 if rank1 else None)
        space, name = plan.spaces[space_idx], chunk_file(*chunk)
        try:
            with opened(space.root, FileOf(space, name).directory) as fd:
                verdict = judge(
                    reader,
                    name,
                    dir_fd=fd,
                    chunk=chunk,
                    expected=expected[space_idx],
                    rows=plan.rows,
                    if_bad=partial(_unlink, name, fd),
                )
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            yield Removal(space, name, False, error.strerror or str(error), not gone, 0)
            continue
        nbytes = verdict.info.st_size if verdict.info else 0
        if verdict.reason == _REMOVED:
            yield Removal(space, name, True, _REMOVED, False, nbytes)
        elif verdict.bad:
            yield Removal(space, name, False, verdict.reason, True, nbytes)
        else:
            why = "good now" if verdict.finding is Finding.OK else "gone meanwhile"
            yield Removal(space, name, False, why, False, nbytes)


def _unlink(name: str, fd: int, file: OpenFile, verdict: Verdict) -> Verdict:
    if verdict.finding not in (Finding.CORRUPT, Finding.STALE):
        return verdict
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        return Verdict(Finding.VANISHED, "gone meanwhile", None, file.info)
    except OSError as error:
        return replace(verdict, finding=Finding.UNREADABLE, reason=error.strerror or str(error))
    return replace(verdict, finding=Finding.VANISHED, reason=_REMOVED)
