"""`fskv copy`: chunk files from one root to another."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from ..exits import UsageError
from ..options import DryRunOption, JsonOption, NamespacesArgument, RootOption
from ..root_view import RootView
from ..terminal import progress
from ..transfer.copy import copy
from ..transfer.destination import Destination, Options
from ..transfer.options import (
    ChunkOption,
    CreateOption,
    GroupOption,
    KeepFreeOption,
    NewerOption,
    OlderOption,
    ReadBackOption,
    ThreadsOption,
    keep_free_option,
)
from ..transfer.selection import Found, Selection
from ..transfer.tally import PROBLEM_LINE, Fate, Tally
from .import_ import TRANSFERRED, open_root, report

LINES = {
    "problem": PROBLEM_LINE,
    "summary": {**TRANSFERRED, "gone": "files that were pruned from the source meanwhile"},
}


def command(
    root: RootOption,
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The root to copy to.")],
    namespaces: NamespacesArgument = None,
    chunk: ChunkOption = None,
    newer_than: NewerOption = None,
    older_than: OlderOption = None,
    group: GroupOption = None,
    keep_free: KeepFreeOption = "2%",
    read_back: ReadBackOption = False,
    create: CreateOption = False,
    threads: ThreadsOption = 4,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy namespaces, or some of their chunks, from one root to another.

    Every file is checked, all of its bytes, between the read and the write. Good files that are there already
    stay: if a copy was interrupted, run it again. The bounds of the other root's engines hold, as for an
    engine. Times of last use are kept. What root writes is given to the owner of the other root; where its
    engines could not read it nothing is written.

    Exit code 1 if something is bad, 3 if something could not be read or stored.
    """
    options = Options(keep_free_option(keep_free), read_back, threads)
    selection = Selection.of(namespaces, chunk, newer_than, older_than, group)
    view = RootView.open(root)
    found = Found.look(view, selection)
    if os.path.realpath(to) == os.path.realpath(view.path):
        raise UsageError(f"--to {to}: is the same root as --root")
    tally = Tally(as_json)
    with Destination(
        open_root(to, create=create, writable=not dry_run, option="--to"), options
    ) as destination:
        start = time.monotonic()
        with progress(rate=True) as drawn:
            total = found.total_nbytes() if sys.stderr.isatty() else None
            task = drawn.add_task("copying", total=total)
            copy(
                found,
                destination,
                tally,
                num_threads=threads,
                advance=lambda nbytes: drawn.advance(task, nbytes),
            )
        took_s = time.monotonic() - start
    tally.add_rest(found.problems, found.unlistable)
    gone = {"gone": tally.files[Fate.GONE]} if as_json else {}
    report(tally, destination, took_s, dry_run=dry_run, as_json=as_json, **gone)
    raise typer.Exit(tally.exit)
