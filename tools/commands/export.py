"""`fskv export`: chunk files of a root as one archive."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import Annotated, BinaryIO, cast

import typer

from fskv.root.files import publishing
from fskv.root.process_id import unique_name

from ..archive.compression import compressed
from ..archive.send import send
from ..exits import NotDone, UsageError
from ..options import JsonOption, NamespacesArgument, RootOption
from ..root_view import RootView
from ..terminal import emit, iec, many, progress, say, show
from ..transfer.options import (
    ChunkOption,
    GroupOption,
    NewerOption,
    OlderOption,
    ThreadsOption,
)
from ..transfer.selection import Found, Selection
from ..transfer.tally import PROBLEM_LINE, Fate, Tally

LINES = {
    "problem": PROBLEM_LINE,
    "summary": {
        "namespaces": "namespaces in the archive",
        "files": "chunk files in the archive",
        "nbytes": "their length",
        "bad": "files that failed a check and were left out",
        "failed": "files that could not be read",
        "gone": "files that were pruned meanwhile",
        "other": "namespaces and directories that were left out",
    },
}


def command(
    root: RootOption,
    namespaces: NamespacesArgument = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A new file. Default: standard output."
        ),
    ] = None,
    chunk: ChunkOption = None,
    newer_than: NewerOption = None,
    older_than: OlderOption = None,
    group: GroupOption = None,
    zstd: Annotated[bool, typer.Option("--zstd", help="Compress (package zstandard).")] = False,
    threads: ThreadsOption = 4,
    as_json: JsonOption = False,
) -> None:
    """Write namespaces, or some of their chunks, into one tar archive.

    Every file is checked, all of its bytes, before it goes in; one that fails is left out and reported. The
    archive keeps the times of last use and ends with a count and a digest, so that `fskv import` notices
    when some of it is missing. Any tar can list and unpack it.

    --json needs -o. Exit code 1 if something bad was left out, 3 if something could not be read.
    """
    if as_json and output is None:
        raise UsageError("--json: the archive goes to standard output; give -o FILE as well")
    selection = Selection.of(namespaces, chunk, newer_than, older_than, group)
    view = RootView.open(root)
    found = Found.look(view, selection)
    tally = Tally(as_json)
    with (
        _opened(output, view.path) as file,
        compressed(file, zstd=zstd) as out,
        progress(rate=True) as drawn,
    ):
        total = found.total_nbytes() if sys.stderr.isatty() else None
        task = drawn.add_task("exporting", total=total)
        contents = send(
            found,
            out,
            tally,
            num_threads=threads,
            advance=lambda nbytes: drawn.advance(task, nbytes),
        )
    tally.add_rest(found.problems, found.unlistable)
    if as_json:
        emit(
            "summary",
            namespaces=contents.namespaces,
            files=contents.files,
            nbytes=contents.nbytes,
            bad=tally.files[Fate.BAD],
            failed=tally.files[Fate.FAILED],
            gone=tally.files[Fate.GONE],
            other=tally.other,
        )
    else:
        left = tally.files[Fate.BAD] + tally.files[Fate.FAILED]
        say(
            f"{many(contents.files, 'file')}, {iec(contents.nbytes)}, of "
            f"{many(contents.namespaces, 'namespace')}" + (f"; {left:,} left out" if left else "")
        )
    raise typer.Exit(tally.exit)


@contextlib.contextmanager
def _opened(output: str | None, root: str) -> Iterator[BinaryIO]:
    """Yield where the archive goes; a file appears when it is whole, and never replaces another."""
    if output is None:
        if sys.stdout.isatty():
            raise UsageError(
                "an archive is nothing for a terminal: give -o FILE, or pipe it somewhere"
            )
        sys.stdout.flush()
        yield cast("BinaryIO", sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    path = os.path.abspath(output)
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if real.startswith(f"{os.path.realpath(root)}/"):
        raise UsageError(f"-o {show(output)}: is in the root itself; expected another place")
    try:
        with _written(path) as file:
            yield file
    except FileExistsError:
        raise UsageError(f"-o {show(output)}: is there already; expected a new file") from None
    except BrokenPipeError:
        raise
    except OSError as error:  # those of the root are told, file by file
        raise NotDone(f"-o {show(output)}: {error.strerror or error}") from None


@contextlib.contextmanager
def _written(path: str) -> Iterator[BinaryIO]:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(os.stat(path).st_mode):
            raise FileExistsError(path)
        with open(path, "wb") as file:  # a device or a pipe
            yield file
        return
    part = f"{path}.{unique_name()}.part"
    with publishing(path, 0o666, part=part, exclusive=True, umask=True) as file:
        yield file
