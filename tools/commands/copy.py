"""`fskv copy`: chunk files from one root to another."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import typer

from fskv.errors import RootError
from fskv.sizes import parse_keep_free

from ..copying import Copier, Fate, Outcome, Room, open_destination
from ..exits import UsageError, outcome
from ..interrupt import stopped_by_signals
from ..options import DryRunOption, JsonOption, NamespacesArgument, RootOption
from ..root_view import ChunkFile, Namespace, RootView, chunk_files
from ..terminal import age_option, emit, iec, many, parsed, progress, say

LINES = {
    "problem": {
        "what": "`bad` (failed a check) or `failed` (the disk said no)",
        "name": "of the file or namespace",
        "problem": "in words",
    },
    "summary": {
        "stored": "files",
        "stored_nbytes": "",
        "there": "good files there before",
        "gone": "files pruned meanwhile",
        "bad": "files and namespaces that failed a check",
        "failed": "those that could not be read or written",
        "no_room": "files without room",
        "unlistable": "directories that could not be listed",
        "dry_run": "whether `--dry-run` was given",
    },
}


@dataclass(slots=True)
class _Tally:
    """Counts outcomes, and prints each problem as it comes."""

    as_json: bool
    newer_ns: int  # files that were used last before that stay
    files: Counter[Fate] = field(default_factory=Counter)
    stored_nbytes: int = 0
    unlistable: int = 0

    def found(self, one: Namespace, stop: threading.Event) -> Iterator[ChunkFile]:
        for shard in one.listed(self):
            for file in chunk_files(one, shard.records):
                if stop.is_set():
                    return
                if file.mtime_ns >= self.newer_ns:
                    yield file

    def add(self, one: Outcome) -> None:
        if one.fate in (Fate.BAD, Fate.FAILED):
            self.complain(one.fate, f"{one.file.namespace.id}/{one.file.relative}", one.why)
            return
        self.files[one.fate] += 1
        self.stored_nbytes += one.nbytes * (one.fate is Fate.STORED)

    def complain(self, fate: Fate, name: str, why: str) -> None:
        self.files[fate] += 1
        say(f"{name}: {why}")
        if self.as_json:
            emit("problem", what=fate, name=name, problem=why)


def command(
    root: RootOption,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The root to copy to.")],
    namespaces: NamespacesArgument = None,
    newer_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only chunks used within this time, such as 12h, 30d."),
    ] = None,
    keep_free: Annotated[
        str,
        typer.Option(
            metavar="SIZE|PERCENT",
            help="Stop where less would stay free at the destination.",
        ),
    ] = "2%",
    create: Annotated[
        bool, typer.Option("--create", help="Make an empty directory into a root first.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Files copied at once.")] = 4,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy namespaces, or their recently used chunks, from one root to another.

    Every byte is checked. Good files at the destination stay: run an interrupted copy again. Times of last
    use are kept. The copy stops at a bound of the destination's living engines, and prunes nothing. The
    destination's owner gets the files. If that user could not read them, nothing is written.
    """
    kept = parsed(parse_keep_free, "--keep-free", keep_free)
    newer_s = None if newer_than is None else age_option("--newer-than", newer_than)
    view = RootView.open(root)
    spaces = {one.id: one for text in namespaces or (None,) for one in view.matching(text)}
    if os.path.realpath(to) == os.path.realpath(view.path):
        raise UsageError(f"--to {to}: is the same root as --root")
    destination = open_destination(to, create=create, writable=not dry_run)
    room = Room(destination.path, kept)
    tally = _Tally(as_json, 0 if newer_s is None else time.time_ns() - int(newer_s * 1e9))
    start = time.monotonic()
    with stopped_by_signals() as stop, progress(rate=True) as drawn:
        known = sys.stderr.isatty() and newer_s is None
        catalogues = (one.catalogue(fresh=False)[0] for one in spaces.values() if known)
        total = sum(one.nbytes for one in catalogues) or None
        task = drawn.add_task("copying", total=total)
        for _, one in sorted(spaces.items()):
            if one.identity is None:
                tally.complain(Fate.BAD, one.id, f"left out: {one.problem}")
                continue
            try:
                copier = Copier(destination, one.identity, room)
            except RootError as error:
                tally.complain(Fate.FAILED, one.id, str(error))
                continue
            for done in copier.copy(tally.found(one, stop), threads, stop):
                tally.add(done)
                drawn.advance(task, done.file.nbytes)
    stop.end()
    _report(tally, room, time.monotonic() - start, dry_run=dry_run)
    files = tally.files
    partial = files[Fate.FAILED] or files[Fate.NO_ROOM] or tally.unlistable
    raise typer.Exit(outcome(problems=files[Fate.BAD], partial=partial))


def _report(tally: _Tally, room: Room, took_s: float, *, dry_run: bool) -> None:
    """Print the sums, and the next step after an incomplete copy."""
    files, nbytes = tally.files, tally.stored_nbytes
    if room.refusal is not None:
        say(f"stopped: {room.refusal}")
        say(
            "make room (fskv prune, a larger bound) and run the same command again: it goes on there"
        )
    if tally.as_json:
        counts = {fate.value: files[fate] for fate in Fate}
        emit(
            "summary",
            **counts,
            stored_nbytes=nbytes,
            unlistable=tally.unlistable,
            dry_run=dry_run,
        )
        return
    rate = f", {iec(nbytes / took_s)}/s" if nbytes and took_s > 0 and not dry_run else ""
    words = [
        f"{many(files[Fate.STORED], 'file')} {'would be ' * dry_run}stored ({iec(nbytes)}{rate})"
    ]
    for fate, text in (
        (Fate.THERE, "were there"),
        (Fate.BAD, "bad"),
        (Fate.FAILED, "failed"),
        (Fate.NO_ROOM, "without room"),
        (Fate.GONE, "gone meanwhile"),
    ):
        if files[fate] or fate is Fate.THERE:
            words.append(f"{files[fate]:,} {text}")
    say(", ".join(words))
