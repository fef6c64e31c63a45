"""`fskv rm`: remove namespaces."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from fskv.index.scan import file_name, shard_path
from fskv.index.snapshot import Catalogue
from fskv.namespace import parse_chunk_file
from fskv.root.process_id import is_our_part
from fskv.root.remove import (
    PART,
    Fate,
    Outcome,
    Place,
    Tally,
    always,
    remove_directory,
    remove_namespace,
    sweep,
)
from fskv.root.root import CHUNK_DIR, MANIFEST_FILE, RATE_FILE, SNAPSHOT_FILE, TMP_DIR

from ..exits import Exit, UsageError
from ..interrupt import Stop, stopped_by_signals
from ..neighbours import News, clock_ns, living_heartbeats
from ..options import DryRunOption, JsonOption, RootOption, YesOption, complete_namespace
from ..pruning import Plan
from ..root_view import Namespace, RootView, lines
from ..terminal import confirm, emit, iec, many, say, show, tell, tell_failure, walk_progress

LINES = {
    "plan": {
        "namespace": "ARCH/MODEL@DIGEST",
        "files": "chunk files that would go",
        "nbytes": "bytes on disk, with parts",
        "in_use": "whether a living engine writes to it",
    },
    "foreign": {"path": "not made by fskv, or new meanwhile: it stays"},
    "failure": {"path": "could not be removed", "reason": "why"},
    "summary": {
        "dry_run": "whether `--dry-run` was given",
        "planned_files": "",
        "planned_nbytes": "with parts",
        "removed_files": "",
        "removed_nbytes": "with parts",
        "foreign": "entries that stay",
        "unremovable": "entries that could not be removed",
        "unlistable": "directories that could not be listed",
        "interrupted": "whether a signal ended it",
    },
}
_KNOWN = {MANIFEST_FILE, CHUNK_DIR, TMP_DIR, SNAPSHOT_FILE, RATE_FILE}  # in a namespace
_CHUNK, _DIRECTORY = "chunk", "directory"  # what goes, beside PART


def command(
    root: RootOption,
    namespaces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMESPACE|MODEL",
            autocompletion=complete_namespace,
            help="Namespaces as in `ls`, or all of a model.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT",
            help="All namespaces of this tenant (exact name); may be repeated.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also a namespace to which a living engine writes."),
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove whole namespaces, damaged ones too.

    Foreign files stay, with their directories and the namespace's identity. Engines miss the removed chunks.

    A namespace to which a living engine writes is refused. With --force it goes: stores under way fail, and
    the next one makes the namespace again. Exit code 3 also if foreign files keep a namespace.
    """
    view = RootView.open(root)
    chosen = view.of_tenants(tenant) if tenant else []
    chosen += [one for word in namespaces or [] for one in view.of_one_model(word)]
    if not chosen:
        raise UsageError("found nothing to remove, expected namespaces or --tenant")
    plan = Plan(view.path, chosen)
    now_ns = time.time_ns() if dry_run else clock_ns(view.path)
    in_use = {beat.namespace for beat in living_heartbeats(view.path, now_ns)}
    plan.look()
    for name, spaces in lines(plan.catalogues).items():
        _tell(name, {one: plan.catalogues[one] for one in spaces}, in_use, as_json=as_json)
    busy = [] if force else [one.id for one in plan.catalogues if one.id in in_use]
    refusal = f"{', '.join(busy)}: a living engine writes to it; stop it first, or give --force"
    files, nbytes = sum(known.num_files for known in plan.catalogues.values()), plan.nbytes
    removed, stop = Tally(), Stop()
    what = f"{many(files, 'file')} ({iec(nbytes)}) of {many(len(plan.catalogues), 'namespace')}"
    if dry_run:
        say(f"would remove {what}; nothing was removed")
        if busy:
            say(f"without --dry-run it is refused: {refusal}")
    elif busy:
        raise UsageError(show(refusal))
    elif not confirm(f"Remove {what}?", yes=yes):
        say("nothing was done")
    else:
        with stopped_by_signals() as stop:
            removed = _remove(plan, stop, as_json=as_json)
        say(f"removed {many(removed.count[_CHUNK], 'file')}, {iec(_nbytes(removed))}")
    foreign, failed = removed.count[Fate.FOREIGN], removed.count[Fate.FAILED]
    if as_json:
        emit(
            "summary",
            dry_run=dry_run,
            planned_files=files,
            planned_nbytes=nbytes,
            removed_files=removed.count[_CHUNK],
            removed_nbytes=_nbytes(removed),
            foreign=foreign,
            unremovable=failed,
            unlistable=plan.unlistable,
            interrupted=stop.is_set(),
        )
    stop.end()
    if foreign or failed or plan.unlistable:
        raise typer.Exit(Exit.PARTIAL)


def _tell(
    name: str, going: dict[Namespace, Catalogue], in_use: set[str | None], *, as_json: bool
) -> None:
    """Print a line of the plan."""
    busy = {one.id for one in going if one.id in in_use}
    if as_json:
        for one, known in going.items():
            facts = {"files": known.num_files, "nbytes": known.nbytes, "in_use": one.id in busy}
            emit("plan", namespace=one.id, **facts)
        return
    files = sum(known.num_files for known in going.values())
    text = f"{name}: {many(files, 'file')}, {iec(sum(known.nbytes for known in going.values()))}"
    print(show(text + "  (a living engine writes to it)" * bool(busy)))


def _nbytes(tally: Tally) -> int:
    return tally.nbytes[_CHUNK] + tally.nbytes[PART]


def _remove(plan: Plan, stop: threading.Event, *, as_json: bool) -> Tally:
    news, tally, failed = News(plan.root), Tally(), set()
    with walk_progress("removing", len(plan.catalogues)) as seen:
        for number, (one, known) in enumerate(plan.catalogues.items()):
            if stop.is_set():
                break
            for found in _removed(one, known, news, stop):
                if found.path in failed:
                    continue  # it is named already
                tally.add(found)
                if found.what == _DIRECTORY:
                    seen(number, int(found.name, 16))
                elif found.fate is Fate.FAILED:
                    failed.add(found.path)
                    tell_failure(found.path, found.reason, as_json=as_json)
                elif found.fate is Fate.FOREIGN:
                    tell("foreign", f"stays   {found.path}", as_json=as_json, path=found.path)
    return tally


def _removed(
    one: Namespace, known: Catalogue, news: News, stop: threading.Event
) -> Iterator[Outcome]:
    """Remove fskv's files of a namespace, tell engines, and name the entries that stay.

    The root is valid at any moment: chunk files and parts go first, then the empty directories, and the
    manifest only once nothing else is left.
    """
    try:
        for idx in sorted({*dict(known.shards()), *known.parts}):
            path = shard_path(one.path, idx)
            parts = [os.path.basename(part.path) for part in known.parts.get(idx, ())]
            names = [*map(file_name, known.records(idx)), *parts]
            yield from _remove_files(one, path, names, news, stop)
            if stop.is_set():
                return
            yield remove_directory(one.root, path, always(_DIRECTORY))
        known.remove_empty(one.root, None)
        tmp = f"{one.path}/{TMP_DIR}"
        yield from sweep(one.root, tmp, lambda name, _: PART if is_our_part(name) else Fate.STAYS)
        whole = remove_namespace(one.root, one.path, damaged=one.problem is not None)
        yield whole
        if whole.fate is Fate.STAYS:
            left = list(_left(one))  # nothing, where what is called as fskv's is of another kind
            yield from left or [Outcome(one.path, Fate.FOREIGN)]
    except OSError as error:  # the root is away
        yield Outcome(one.root, Fate.FAILED, error=error)


def _judge(name: str, _: os.stat_result) -> str:
    return PART if is_our_part(name) else _CHUNK


def _remove_files(
    one: Namespace, path: str, names: list[str], news: News, stop: threading.Event
) -> Iterator[Outcome]:
    gone = []
    try:
        with Place(one.root, path) as place:
            for name in names:
                if stop.is_set():
                    return
                found = place.remove(name, _judge)
                if found.fate is Fate.GOES and (chunk := parse_chunk_file(name)) is not None:
                    gone.append((bytes.fromhex(chunk.name), chunk.group_idx))
                yield found
    finally:
        if gone:
            news.tell(one.id, gone)


def _left(one: Namespace) -> Iterator[Outcome]:
    """Name the entries that are left: foreign ones, or new ones. No link is followed."""
    with Place(one.root, one.path, os.O_RDONLY) as place:
        for where, below, names, fd in [] if place.error else os.fwalk(".", dir_fd=place.fd):
            path = os.path.normpath(f"{one.path}/{where}")
            if not (below or names or os.path.basename(path) in _KNOWN):
                yield Outcome(path, Fate.FOREIGN)
            modes = {name: os.lstat(name, dir_fd=fd).st_mode for name in below}
            for name in [*names, *(name for name in below if stat.S_ISLNK(modes[name]))]:
                if where != "." or name not in _KNOWN:
                    yield Outcome(f"{path}/{name}", Fate.FOREIGN)
