"""`fskv gc`: remove what nobody needs any more."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated

import typer

from fskv.root.remove import PART, Fate, Outcome, Tally

from ..exits import Exit
from ..garbage import HEARTBEAT, NEWS, Sweep
from ..interrupt import stopped_by_signals
from ..neighbours import clock_ns, wall_clock_ns
from ..options import DryRunOption, JsonOption, RootOption, YesOption
from ..removal import DIRECTORY, NAMESPACE
from ..root_view import RootView
from ..terminal import age_option, confirm, emit, iec, many, say, show, tell_failure

LINES = {
    "garbage": {
        "what": "`part`, `directory`, `namespace`, `news` (a list of removed chunks), `heartbeat` "
        "(of an engine that is gone)",
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
    PART: ("part of a writer that is gone", "parts of writers that are gone"),
    DIRECTORY: ("empty directory of chunks", "empty directories of chunks"),
    NAMESPACE: ("namespace", ""),
    NEWS: ("old list of removed chunks", "old lists of removed chunks"),
    HEARTBEAT: ("heartbeat of an engine that is gone", "heartbeats of engines that are gone"),
}


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
    that are gone go when no engine lives; while one does, it removes them itself. Old lists of removed chunks
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
    plan, done = Tally(), Tally()
    sweep = Sweep(view, now_ns, delete=False, stop=threading.Event(), namespaces_unused_s=unused_s)
    unread = 0
    for found in sweep.outcomes():
        plan.add(found)
        unread += found.fate is Fate.FOREIGN and found.what == NAMESPACE
        _show(found, removed=False, as_json=as_json)
    planned, planned_nbytes = _sum(plan.count), _sum(plan.nbytes)
    if not as_json:
        for kind, words in _WORDS.items():
            if plan.count[kind]:
                say(f"{many(plan.count[kind], *words)}, {iec(plan.nbytes[kind])}")
        if plan.count[Fate.FOREIGN]:
            say(f"foreign entries, which stay: {plan.count[Fate.FOREIGN]:,}")
        if unread:
            what = many(unread, "directory", "directories")
            say(
                f"{what} called like a namespace, without a manifest that says so: `fskv rm` removes them"
            )
    interrupted = False
    if not planned:
        say("nothing to remove")
    elif not dry_run:
        if confirm(f"Remove these ({iec(planned_nbytes)})?", yes=yes):
            with stopped_by_signals() as stop:
                now_ns = clock_ns(view.path)
                sweep = Sweep(view, now_ns, delete=True, stop=stop, namespaces_unused_s=unused_s)
                for found in sweep.outcomes():
                    done.add(found)
                    if found.fate is Fate.FAILED or (as_json and found.fate is Fate.GOES):
                        _show(found, removed=True, as_json=as_json)
                interrupted = stop.is_set()
        else:
            say("nothing was done")
    failed = done.count[Fate.FAILED] or plan.count[Fate.FAILED]
    if as_json:
        emit(
            "summary",
            dry_run=dry_run,
            planned=planned,
            planned_nbytes=planned_nbytes,
            removed=_sum(done.count),
            removed_nbytes=_sum(done.nbytes),
            foreign=plan.count[Fate.FOREIGN],
            failed=failed,
            interrupted=interrupted,
        )
    elif removed := _sum(done.count):
        say(f"removed {removed:,}, {iec(_sum(done.nbytes))}")
    if interrupted:
        raise KeyboardInterrupt
    if failed:
        raise typer.Exit(Exit.PARTIAL)


def _sum(counts: Mapping[str, int]) -> int:
    return sum(counts[kind] for kind in _WORDS)


def _show(found: Outcome, *, removed: bool, as_json: bool) -> None:
    if found.fate is Fate.FAILED:
        tell_failure(found.path, found.reason, as_json=as_json)
    elif not as_json:
        what = "foreign (stays)" if found.fate is Fate.FOREIGN else found.what
        print(f"{what:<16} {show(found.path)}")
    elif found.fate is Fate.FOREIGN:
        emit("foreign", path=found.path)
    else:
        emit(
            "garbage",
            what=found.what,
            path=found.path,
            nbytes=found.nbytes,
            files=found.num_files,
            removed=removed,
        )
