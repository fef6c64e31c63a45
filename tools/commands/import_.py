"""`fskv import`: an archive into a root."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from fskv.errors import FskvError
from fskv.root.files import create_file
from fskv.root.process_id import unique_name
from fskv.root.root import PART_PREFIX, Root

from ..archive.compression import Readable, reader_of
from ..archive.layout import ArchiveError
from ..archive.receive import Receiver
from ..exits import CommandError, Exit, NotARoot, UsageError
from ..options import DryRunOption, JsonOption, RootOption
from ..terminal import emit, iec, progress, say, show
from ..transfer.destination import Destination, Options
from ..transfer.options import (
    CreateOption,
    KeepFreeOption,
    ReadBackOption,
    ThreadsOption,
    keep_free_option,
)
from ..transfer.tally import PROBLEM_LINE, Fate, Tally

_DRAIN_NBYTES = 1 << 20  # what tar programs put behind the end

TRANSFERRED = {
    "stored": "files that were stored",
    "stored_nbytes": "their length",
    "there": "good files that were there already",
    "bad": "files that failed a check",
    "failed": "files that could not be read or written",
    "no_room": "files that were not stored because the root is full",
    "pruned": "files of these namespaces that somebody pruned meanwhile",
    "other": "other things that were left out",
    "dry_run": "whether nothing was written",
}
LINES = {
    "problem": PROBLEM_LINE,
    "summary": {
        **TRANSFERRED,
        "archive": "why the archive is not whole as it was written, or null",
    },
}


def command(
    root: RootOption,
    archive: Annotated[str, typer.Argument(metavar="ARCHIVE|-", help="A file, or - for stdin.")],
    keep_free: KeepFreeOption = "2%",
    read_back: ReadBackOption = False,
    create: CreateOption = False,
    threads: ThreadsOption = 4,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Store what is in an archive of `fskv export`, compressed or not.

    Every file is checked, all of its bytes, before it is written; what the format does not describe is never
    written. Good files that are there already stay: if an import was interrupted, run it again. The bounds of
    the root's engines hold, as for an engine: when one is reached, what was used least recently is pruned.
    What root writes is given to the root's owner; where its engines could not read it nothing is written.

    Exit code 1 if something in the archive is bad or missing, 3 if something could not be stored.
    """
    options = Options(keep_free_option(keep_free), read_back, threads)
    tally = Tally(as_json)
    with _opened(archive) as (file, total):
        opened = open_root(root, create=create, writable=not dry_run)
        with Destination(opened, options) as destination:
            receiver = Receiver(destination, tally)
            start = time.monotonic()
            with progress(rate=True) as drawn:
                task = drawn.add_task("importing", total=total)
                counted = _Counted(file, lambda nbytes: drawn.advance(task, nbytes))
                try:
                    receiver.receive(reader_of(counted), threads)
                except ArchiveError as error:
                    receiver.problem = str(error)
                if receiver.problem is None and destination.exhausted is None:
                    counted.drain()
            took_s = time.monotonic() - start
    if receiver.problem is not None:
        say(f"{show(archive)}: {receiver.problem}")
    report(tally, destination, took_s, dry_run=dry_run, as_json=as_json, archive=receiver.problem)
    raise typer.Exit(Exit.PROBLEMS if receiver.problem else tally.exit)


def open_root(path: str, *, create: bool, writable: bool, option: str = "--root") -> Root:
    """Open a root to write to. Raises NotARoot, in one sentence."""
    if not path:
        raise UsageError(f"{option}: found nothing, expected the directory of a cache root")
    try:
        opened = Root.open(os.path.abspath(path), create=create, writable=writable)
    except FskvError as error:
        text = str(error).replace("option 'root'", option)
        raise NotARoot(text.replace("an engine makes", "--create makes")) from None
    if writable:
        _refuse_what_its_owner_could_not_read(opened, option)
    return opened


def _refuse_what_its_owner_could_not_read(root: Root, option: str) -> None:
    owner = os.stat(root.path).st_uid
    if owner == os.geteuid() or root.file_mode & stat.S_IRGRP:
        return
    path = f"{root.path}/{PART_PREFIX}{unique_name()}.part"
    try:
        fd = create_file(path, root.file_mode)
    except OSError as error:
        raise NotARoot(f"{option}: {root.path}: nothing can be written: {error.strerror}") from None
    try:
        found = os.fstat(fd).st_uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
    if found != owner:
        raise NotARoot(
            f"{option}: {root.path} belongs to uid {owner}, whose engines could not read what uid "
            f"{os.geteuid()} writes; run this as that user"
        )


def report(
    tally: Tally,
    destination: Destination,
    took_s: float,
    *,
    dry_run: bool,
    as_json: bool,
    **more: str | int | None,
) -> None:
    """Say what was done, and how to go on where it was not all."""
    files, nbytes = tally.files, tally.nbytes[Fate.STORED]
    if destination.exhausted is not None:
        say(f"stopped: {destination.exhausted}")
        say(
            "make room (fskv prune, a larger bound) and run the same command again: it goes on there"
        )
    if as_json:
        emit(
            "summary",
            stored=files[Fate.STORED],
            stored_nbytes=nbytes,
            there=files[Fate.THERE],
            bad=files[Fate.BAD],
            failed=files[Fate.FAILED],
            no_room=files[Fate.NO_ROOM],
            pruned=destination.pruned,
            other=tally.other,
            dry_run=dry_run,
            **more,
        )
        return
    rate = f", {iec(nbytes / took_s)}/s" if nbytes and took_s > 0 else ""
    words = [
        f"{files[Fate.STORED]:,} files {'would be ' * dry_run}stored ({iec(nbytes)}{rate})",
        f"{files[Fate.THERE]:,} were there",
    ]
    for fate, text in (
        (Fate.BAD, "bad"),
        (Fate.FAILED, "failed"),
        (Fate.NO_ROOM, "without room"),
        (Fate.GONE, "gone meanwhile"),
    ):
        if files[fate]:
            words.append(f"{files[fate]:,} {text}")
    if tally.other:
        words.append(f"{tally.other:,} other things left out")
    if destination.pruned:
        words.append(f"{destination.pruned:,} pruned meanwhile")
    say(", ".join(words))


@contextlib.contextmanager
def _opened(archive: str) -> Iterator[tuple[Readable, int | None]]:
    """Yield the archive's file and its length, None where nobody knows it."""
    if archive == "-":
        if sys.stdin.isatty():
            raise UsageError(
                "an archive does not come from a terminal: give a file, or pipe it here"
            )
        yield sys.stdin.buffer, None
        return
    try:
        file = open(archive, "rb", buffering=0)  # noqa: SIM115  below
    except OSError as error:
        raise CommandError(f"{show(archive)}: {error.strerror}") from None
    with file:
        info = os.fstat(file.fileno())
        yield file, info.st_size if stat.S_ISREG(info.st_mode) else None


class _Counted:
    """Reads the archive and tells how far it is."""

    def __init__(self, file: Readable, advance: Callable[[int], object]) -> None:
        self._file = file
        self._advance = advance

    def read(self, nbytes: int) -> bytes:
        content = self._file.read(nbytes)
        self._advance(len(content))
        return content

    def drain(self) -> None:
        """Read what is behind the end: whoever writes to our pipe should not die of it."""
        left = _DRAIN_NBYTES
        while left and (content := self.read(left)):
            left -= len(content)
