"""Removes bad chunk files, and nothing else.

What a run has found may be minutes old: an engine may have discarded the file and stored the chunk again, and
file systems give out inode numbers anew. So each file is opened and judged again, and is unlinked only while
it is open, still bad, and still what its name says (fskv.root.remove).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fskv.namespace import parse_chunk_file
from fskv.root.remove import Fate, Outcome, Place

from ..root_view import FileOf, Namespace
from .expect import Expected, expected_of
from .judge import Finding, OpenFile, Reader, Verdict, judge
from .run import Bad

REMOVED, _GONE = "removed", "gone meanwhile"


@dataclass(slots=True)
class RemovalPlan:
    """The bad files that may go: corrupt and stale ones, each of which was judged by itself.

    Not those that nobody could read or that change. Where a namespace's own manifest is damaged, "stale" may
    be the manifest's fault: those stay.
    """

    rows: bool
    files: list[FileOf] = field(default_factory=list)
    nbytes: int = 0
    kept: int = 0

    def add(self, bad: Bad) -> None:
        """Take a bad file into the plan, unless it is to stay."""
        sure = bad.finding is Finding.CORRUPT or (
            bad.finding is Finding.STALE and bad.namespace.identity is not None
        )
        if not (parse_chunk_file(bad.name) and sure and bad.alone and bad.nbytes is not None):
            self.kept += 1
            return
        self.files.append(FileOf(bad.namespace, bad.name))
        self.nbytes += bad.nbytes


def execute(plan: RemovalPlan) -> Iterator[tuple[FileOf, Outcome]]:
    """Remove what is still bad, one file at a time, until the root is away; an outcome says why."""
    reader = Reader()
    expected: dict[Namespace, Expected] = {}
    for file in plan.files:
        space = file.namespace
        if space not in expected:
            expected[space] = expected_of(space.identity, space.digest16)
        try:
            with Place(space.root, file.directory) as place:
                yield file, _outcome(place, file, reader, expected[space], rows=plan.rows)
        except OSError as error:
            yield file, Outcome(file.path, Fate.FAILED, error=error)
            return


def _outcome(
    place: Place, file: FileOf, reader: Reader, expected: Expected, *, rows: bool
) -> Outcome:
    if place.error is not None:
        return place.remove(file.name)
    removals = []

    def remove(bad: OpenFile, verdict: Verdict) -> Verdict:
        """Remove it while it is open: its inode is no other file's."""

        def judge_again(_: str, now: os.stat_result) -> str:
            return REMOVED if _version(now) == _version(bad.info) else Fate.STAYS

        if verdict.finding in (Finding.CORRUPT, Finding.STALE):
            removals.append(place.remove(file.name, judge_again))
        return verdict

    chunk = parse_chunk_file(file.name)
    verdict = judge(
        reader, file.name, dir_fd=place.fd, chunk=chunk, expected=expected, rows=rows, if_bad=remove
    )
    if removals and removals[0].fate is Fate.GOES:
        return replace(removals[0], nbytes=verdict.info.st_size if verdict.info else 0)
    if removals and removals[0].fate is Fate.FAILED:
        return removals[0]
    if verdict.bad and not removals:
        return Outcome(file.path, Fate.FAILED, verdict.reason, verdict.info)
    is_good = verdict.finding is Finding.OK
    fate, why = (Fate.STAYS, "good now") if is_good else (Fate.VANISHED, _GONE)
    return Outcome(file.path, fate, why, verdict.info)


def _version(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
