"""`fskv prune`: remove what was used least recently, once or for as long as it runs."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from fskv.bounds.evict import Need
from fskv.bounds.limits import Limits
from fskv.errors import ConfigError
from fskv.root.filesystem import Space
from fskv.root.root import FORMAT_FILE
from fskv.sizes import Share, parse_keep_free

from ..exits import Exit, UsageError
from ..interrupt import stopped_by_signals
from ..neighbours import clock_ns, living_heartbeats, wall_clock_ns
from ..options import DryRunOption, JsonOption, RootOption, YesOption, complete_namespace
from ..pruning import Done, Pruning, Wish
from ..root_view import Namespace, RootView
from ..terminal import (
    age_option,
    ago,
    can_ask,
    confirm,
    emit,
    iec,
    many,
    new_table,
    plain,
    print_table,
    progress,
    rfc3339,
    say,
    show,
    size_option,
    tell_failure,
    walk_progress,
)

LINES = {
    "plan": {
        "namespace": "ARCH/MODEL@DIGEST, of which something would go",
        "files": "chunk files that would go",
        "nbytes": "bytes on disk of these",
        "oldest_use": "the least recent last use among them, or null",
        "newest_use": "the most recent last use among them, or null",
    },
    "failure": {"path": "a file that could not be removed", "reason": "why"},
    "state": {
        "nbytes": "bytes on disk (with --watch, about once a minute)",
        "files": "chunk files",
        "free_nbytes": "free bytes of the file system",
        "lease_held": "whether this process counts and prunes for all",
        "pruned_files": "by the holder of the lease so far",
        "pruned_nbytes": "bytes of these",
        "unremovable": "files that it could not remove",
    },
    "summary": {
        "dry_run": "whether nothing was to be removed",
        "files_before": "chunk files of the chosen namespaces; null with --watch --yes, as most here",
        "nbytes_before": "bytes on disk of these, with parts",
        "planned_files": "chunk files that were to go",
        "planned_nbytes": "bytes on disk of these",
        "removed_files": "chunk files that went",
        "removed_nbytes": "bytes on disk of these",
        "used_meanwhile": "files that had been used since they were seen, and got a new turn",
        "unremovable": "files that could not be removed",
        "unlistable": "directories that could not be listed",
        "reached": "whether what was asked for is reached; null where nothing was carried out",
        "interrupted": "whether a signal ended it",
    },
}


_SMALL_NBYTES = 1 << 20


def command(
    root: RootOption,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Prune until no more is on disk, such as 500GiB."),
    ] = None,
    keep_free: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|SHARE",
            help="Prune until so much of the file system is free: 50GiB, or 10% (of inodes too).",
        ),
    ] = None,
    unused_for: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Remove what was not used for so long, such as 30d."),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE",
            autocompletion=complete_namespace,
            help="Only this namespace; may be repeated.",
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT", help="Only this tenant's namespaces; may be repeated."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until a signal ends it.", show_default=False)
    ] = False,
    tenant_max_size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TENANT=]SIZE",
            help="With --watch: a bound on each tenant, or on one; may be repeated.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="With --watch: serve Prometheus metrics; 0 takes any port."
        ),
    ] = None,
    metrics_address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address that these are served on.")
    ] = "127.0.0.1",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what was used least recently, of all namespaces or of some, until a target is reached.

    Works beside engines that read and write: an evicted chunk is a miss for them. Every file is looked at
    again before it goes. A last use is known to 10 minutes only: with --unused-for stays what may have been
    used within AGE. A share (10%) is of the file system, of inodes too. --max-size holds for the chosen
    namespaces together.

    With --watch it runs until SIGTERM or SIGINT, beside any number of engines and other watchers: one of them
    counts and prunes for all. The limits hold for the engines too while it runs, and the smallest of all
    counts. Run it as the user that the engines run as. Where there is no directory or an empty one, it waits
    until an engine has made a root of it; the metrics are up by then.

    Exit code 3 if something could not be removed or listed, or the target was not reached.
    """
    wish = _wish(max_size, keep_free, unused_for)
    if not watch:
        for option, value in (
            ("--tenant-max-size", tenant_max_size),
            ("--metrics-port", metrics_port),
        ):
            if value:
                raise UsageError(f"{option}: found without --watch, expected with it")
    elif namespace or tenant:
        raise UsageError(
            "--namespace, --tenant: found with --watch, expected --tenant-max-size TENANT=SIZE"
        )
    if watch:
        limits = _limits(wish, tenant_max_size or [])
        if limits == Limits():
            raise UsageError("found no limit, expected one such as --max-size SIZE")
        _watch(root, wish, limits, metrics_address, metrics_port, dry_run, yes, as_json=as_json)
        return
    view = RootView.open(root)
    if wish == Wish():
        raise UsageError("found no target, expected --max-size, --keep-free or --unused-for")
    _check_keep_free(view, wish)
    spaces = _chosen(view, namespace, tenant)
    if _prune(view, spaces, wish, dry_run=dry_run, yes=yes, as_json=as_json):
        raise typer.Exit(Exit.PARTIAL)


def _wish(max_size: str | None, keep_free: str | None, unused_for: str | None) -> Wish:
    free: int | Share = 0
    if keep_free is not None:
        try:
            free = parse_keep_free(
                "--keep-free", int(keep_free) if keep_free.isdecimal() else keep_free
            )
        except (ConfigError, ValueError) as error:
            raise UsageError(str(error).removeprefix("option ")) from None
    return Wish(
        None if max_size is None else _bound("--max-size", max_size),
        free,
        None if unused_for is None else age_option("--unused-for", unused_for),
    )


def _bound(option: str, text: str) -> int:
    """Read a bound; one without a unit that is smaller than a chunk is almost surely a slip, and is said."""
    nbytes = size_option(option, text)
    if text.isdecimal() and nbytes < _SMALL_NBYTES:
        say(f"{option} {text} means {many(nbytes, 'byte')}: expected a unit, such as {text}GiB")
    return nbytes


def _check_keep_free(view: RootView, wish: Wish) -> None:
    """Refuse to keep free what the file system does not have: everything would go for it."""
    total = Space.of(view.path).total_nbytes
    if not isinstance(wish.keep_free, Share) and 0 < total <= wish.keep_free:
        found = iec(wish.keep_free)
        raise UsageError(
            f"--keep-free: found {found}, expected less than the {iec(total)} of the file system"
        )


def _chosen(view: RootView, names: list[str] | None, tenants: list[str] | None) -> list[Namespace]:
    spaces = view.namespaces()
    if names:
        wanted = {view.namespace(name).id for name in names}
        spaces = [one for one in spaces if one.id in wanted]
    if tenants:
        ours = {one.id for one in view.of_tenants(tenants)}
        spaces = [one for one in spaces if one.id in ours]
        if not spaces:
            raise UsageError(f"--tenant {', '.join(tenants)}: no such namespace in {view.path}")
    return spaces


# --- once -------------------------------------------------------------------------------


def _prune(
    view: RootView,
    spaces: list[Namespace],
    wish: Wish,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> bool:
    """Plan, ask and prune; returns whether something was left undone."""
    pruning = _looked(view, spaces, wish)
    before = pruning.num_files, pruning.nbytes
    planned = _show_plan(pruning, pruning.need(wall_clock_ns()), as_json=as_json)
    done, reached, interrupted = Done(), None, False
    if not dry_run and (planned[0] or pruning.need(wall_clock_ns()).nbytes > 0):
        if planned[0] and not confirm(
            f"Remove {many(planned[0], 'file')} ({iec(planned[1])}) from {view.path}?", yes=yes
        ):
            say("nothing was done")
        else:
            done, interrupted = _carry_out(view, pruning, planned[0])
            reached = done.reached
    elif not dry_run:
        reached = True
    for path, error in done.failures.items():
        tell_failure(path, error.strerror or str(error), as_json=as_json)
    if as_json:
        emit(
            "summary",
            dry_run=dry_run,
            files_before=before[0],
            nbytes_before=before[1],
            planned_files=planned[0],
            planned_nbytes=planned[1],
            removed_files=done.num_files,
            removed_nbytes=done.nbytes,
            used_meanwhile=done.used_meanwhile,
            unremovable=len(done.failures),
            unlistable=pruning.unlistable,
            reached=reached,
            interrupted=interrupted,
        )
    elif done.num_files or reached is not None:
        say(
            f"removed {many(done.num_files, 'file')}, {iec(done.nbytes)};"
            f" {iec(pruning.nbytes)} in {pruning.num_files:,} files are left"
        )
        if reached is False and not interrupted:
            say("the target is not reached: nothing more could be removed, or writers were faster")
    if interrupted:
        raise KeyboardInterrupt
    return bool(done.failures or pruning.unlistable or reached is False)


def _looked(view: RootView, spaces: list[Namespace], wish: Wish) -> Pruning:
    pruning = Pruning(view.path, spaces, wish)
    with walk_progress("looking", len(spaces)) as seen:
        pruning.look(seen)
    return pruning


def _show_plan(pruning: Pruning, need: Need, *, as_json: bool) -> tuple[int, int]:
    """Print what would go; returns files and bytes."""
    found = pruning.forecast(need)
    table = None
    if found and not as_json:
        table = new_table(
            "ARCH", "MODEL@DIGEST", "FILES", "SIZE", "LAST USED", right=("FILES", "SIZE")
        )
    for one, part in found:
        if table is not None:
            cells = [show(one.arch), show(one.name), f"{part.num_files:,}", iec(part.nbytes)]
            uses = [ago(part.oldest_ns), ago(part.newest_ns)]
            table.add_row(*map(plain, [*cells, " to ".join(dict.fromkeys(uses))]))
        else:
            emit(
                "plan",
                namespace=one.id,
                files=part.num_files,
                nbytes=part.nbytes,
                oldest_use=rfc3339(part.oldest_ns),
                newest_use=rfc3339(part.newest_ns),
            )
    files = sum(part.num_files for _, part in found)
    nbytes = sum(part.nbytes for _, part in found)
    if table is not None:
        print_table(table)
    if not as_json:
        say(
            f"{files:,} of {pruning.num_files:,} files would go,"
            f" {iec(nbytes)} of {iec(pruning.nbytes)}"
        )
    return files, nbytes


def _carry_out(view: RootView, pruning: Pruning, planned: int) -> tuple[Done, bool]:
    with stopped_by_signals() as stop, progress() as drawn:
        task = drawn.add_task("removing", total=planned)
        done = pruning.carry_out(
            pruning.need(clock_ns(view.path)),
            stop,
            lambda done: drawn.update(
                task, completed=done.num_files, total=max(planned, done.num_files)
            ),
        )
        return done, stop.is_set()


# --- for as long as it runs ---------------------------------------------------------------


def _limits(wish: Wish, of_tenants: list[str]) -> Limits:
    each, named = None, {}
    for text in of_tenants:
        name, equals, size = text.rpartition("=")
        nbytes = _bound("--tenant-max-size", size)
        if equals:
            named[name] = nbytes
        else:
            each = nbytes
    unused_s = None if wish.unused_s is None else int(wish.unused_s)
    return Limits(wish.max_nbytes, wish.keep_free, each, named, unused_s)


def _watch(
    root: str,
    wish: Wish,
    limits: Limits,
    address: str,
    port: int | None,
    dry_run: bool,
    yes: bool,
    *,
    as_json: bool,
) -> None:
    """Wait for the root, show what goes now unless it is not asked for, and watch."""
    from ..exporter import serve
    from ..watch import Watcher, sentence

    counts: dict[str, Any] = dict.fromkeys(LINES["summary"])
    counts |= {"dry_run": dry_run, "interrupted": False}
    watcher = Watcher(root)
    view: RootView | None
    if not root or dry_run or not (yes or can_ask()):
        view = RootView.open(root)  # it ends at once, root or not
    else:
        if port is not None:
            taken = serve(watcher.watched, os.path.abspath(root), address, port)
            say(f"metrics: http://{address}:{taken}/metrics")
        view = watcher.await_root()
    if view is None:
        if as_json:
            emit("summary", **{**counts, "interrupted": True})
        say("ended: there was no root yet")
        return
    _check_keep_free(view, wish)
    if not yes or dry_run:
        # Not with --yes: a daemon that starts again need not look at a million files first.
        pruning = _looked(view, view.namespaces(), wish)
        planned = _show_plan(pruning, pruning.need(wall_clock_ns()), as_json=as_json)
        counts |= {"planned_files": planned[0], "planned_nbytes": planned[1]}
        counts |= {"files_before": pruning.num_files, "nbytes_before": pruning.nbytes}
        if any(beat.namespace for beat in living_heartbeats(view.path, wall_clock_ns())):
            say("engines run here: the limits hold for them, too")
        question = f"Keep {view.path} within these limits until a signal comes?"
        if dry_run or not confirm(question, yes=yes):
            say("nothing was done")
            if as_json:
                emit("summary", **counts)
            return

    def told(seen: Any) -> None:
        if not as_json:
            say(sentence(seen))
            return
        emit(
            "state",
            nbytes=seen.usage.nbytes,
            files=seen.usage.num_files,
            free_nbytes=seen.space.free_nbytes,
            lease_held=seen.holder,
            pruned_files=seen.usage.pruned_files,
            pruned_nbytes=seen.usage.pruned_nbytes,
            unremovable=seen.usage.unremovable,
        )

    if os.geteuid() != os.stat(f"{view.path}/{FORMAT_FILE}").st_uid:
        say(f"{view.path} belongs to another user: engines may not read this watcher's limits")
    say(f"watching {view.path}")
    watcher.run(limits, told)
    if as_json:
        emit("summary", **{**counts, "interrupted": True})
    say("ended: the limits are withdrawn and the lease given back")
