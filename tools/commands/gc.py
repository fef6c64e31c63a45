"""`fskv gc`: remove what nobody needs any more."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Annotated

import typer

from ..exits import Exit
from ..garbage import Finding, Kind, Sweep
from ..interrupt import stopped_by_signals
from ..neighbours import clock_ns, wall_clock_ns
from ..options import DryRunOption, JsonOption, RootOption, YesOption
from ..root_view import RootView
from ..terminal import age_option, confirm, emit, iec, many, say, show

LINES = {
    "garbage": {
        "what": "`part`, `directory`, `namespace`, `news` (a list of removed chunks) or `heartbeat` (of an "
        "engine that is gone)",
        "path": "what goes",
        "nbytes": "bytes on disk",
        "files": "chunk files in it, of a namespace",
        "removed": "false in the plan, true once it is gone",
    },
    "foreign": {"path": "an entry that fskv did not make; it stays"},
    "failure": {"path": "what could not be looked at or removed", "reason": "why"},
    "summary": {
        "dry_run": "whether nothing was to be removed",
        "planned": "things that were to go",
        "planned_nbytes": "bytes on disk of these",
        "removed": "things that went",
        "removed_nbytes": "bytes on disk of these",
        "foreign": "entries that fskv did not make",
        "failed": "what could not be looked at or removed",
        "interrupted": "whether a signal ended it",
    },
}
_WORDS = {
    Kind.PART: ("part of a writer that is gone", "parts of writers that are gone"),
    Kind.DIRECTORY: ("empty directory of chunks", "empty directories of chunks"),
    Kind.NAMESPACE: ("namespace", ""),
    Kind.NEWS: ("old list of removed chunks", "old lists of removed chunks"),
    Kind.HEARTBEAT: ("heartbeat of an engine that is gone", "heartbeats of engines that are gone"),
}


class _Tally:
    """Adds up findings as they pass."""

    def __init__(self) -> None:
        self.count: Counter[Kind] = Counter()
        self.nbytes: Counter[Kind] = Counter()

    def add(self, found: Finding) -> None:
        self.count[found.kind] += 1
        self.nbytes[found.kind] += found.nbytes

    @property
    def num_garbage(self) -> int:
        return sum(self.count[kind] for kind in _WORDS)

    @property
    def garbage_nbytes(self) -> int:
        return sum(self.nbytes[kind] for kind in _WORDS)


def command(
    root: RootOption,
    namespaces_unused_for: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Also whole namespaces that were not used for so long, such as 90d."
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what nobody needs: parts of writers that are gone, empty directories, dead namespaces.

    A part goes when its writer is provably gone, or when it is older than an hour. A namespace is dead when
    it has no chunk file, no living engine writes to it, and it is older than an hour. Heartbeats of engines
    go when no engine lives; while one does, it removes those of the dead itself. Old lists of removed chunks
    go after an hour.

    What fskv did not make is listed and never removed. Exit code 3 if something could not be removed.
    """
    view = RootView.open(root)
    unused_s = (
        None
        if namespaces_unused_for is None
        else age_option("--namespaces-unused-for", namespaces_unused_for)
    )
    now_ns = wall_clock_ns() if dry_run else clock_ns(view.path)
    plan, done = _Tally(), _Tally()
    sweep = Sweep(view, now_ns, delete=False, stop=threading.Event(), namespaces_unused_s=unused_s)
    unread = 0
    for found in sweep.findings():
        plan.add(found)
        unread += found.kind is Kind.FOREIGN and bool(found.reason)
        _show(found, removed=False, as_json=as_json)
    if not as_json:
        for kind, words in _WORDS.items():
            if plan.count[kind]:
                say(f"{many(plan.count[kind], *words)}, {iec(plan.nbytes[kind])}")
        if plan.count[Kind.FOREIGN]:
            say(f"foreign entries, which stay: {plan.count[Kind.FOREIGN]:,}")
        if unread:
            what = many(unread, "directory", "directories")
            say(
                f"{what} called like a namespace, without a manifest that says so: `fskv rm` removes them"
            )
    interrupted = False
    if not plan.num_garbage:
        say("nothing to remove")
    elif not dry_run:
        question = f"Remove these ({iec(plan.garbage_nbytes)})?"
        if confirm(question, yes=yes):
            with stopped_by_signals() as stop:
                sweep = Sweep(
                    view, clock_ns(view.path), delete=True, stop=stop, namespaces_unused_s=unused_s
                )
                for found in sweep.findings():
                    if stop.is_set():
                        break
                    done.add(found)
                    if found.kind is Kind.FAILED or (as_json and found.kind is not Kind.FOREIGN):
                        _show(found, removed=True, as_json=as_json)
                interrupted = stop.is_set()
        else:
            say("nothing was done")
    failed = done.count[Kind.FAILED] or plan.count[Kind.FAILED]
    if as_json:
        emit(
            "summary",
            dry_run=dry_run,
            planned=plan.num_garbage,
            planned_nbytes=plan.garbage_nbytes,
            removed=done.num_garbage,
            removed_nbytes=done.garbage_nbytes,
            foreign=plan.count[Kind.FOREIGN],
            failed=failed,
            interrupted=interrupted,
        )
    elif done.num_garbage:
        say(f"removed {done.num_garbage:,}, {iec(done.garbage_nbytes)}")
    if interrupted:
        say("interrupted")
        raise typer.Exit(Exit.INTERRUPTED)
    if failed:
        raise typer.Exit(Exit.PARTIAL)


def _show(found: Finding, *, removed: bool, as_json: bool) -> None:
    if found.kind is Kind.FAILED:
        if as_json:
            emit("failure", path=found.path, reason=found.reason)
        else:
            say(f"{found.path}: {found.reason}")
    elif found.kind is Kind.FOREIGN:
        if as_json:
            emit("foreign", path=found.path)
        else:
            print(f"{'foreign (stays)':<16} {show(found.path)}")
    elif as_json:
        emit(
            "garbage",
            what=found.kind.value,
            path=found.path,
            nbytes=found.nbytes,
            files=found.num_files,
            removed=removed,
        )
    else:
        print(f"{found.kind.value:<16} {show(found.path)}")
