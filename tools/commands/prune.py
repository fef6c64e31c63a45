"""`fskv prune`: removes garbage and the least recently used chunks, once or for as long as it runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from fskv.bounds.evict import Pruned, orphaned
from fskv.bounds.limits import Limits
from fskv.root.filesystem import Space
from fskv.root.remove import PART, Fate, Outcome, Tally
from fskv.root.root import FORMAT_FILE
from fskv.sizes import Share, parse_keep_free
from fskv.types import MAX_TOUCH_INTERVAL_S

from ..exits import Exit, UsageError
from ..interrupt import Stop, stopped_by_signals
from ..neighbours import clock_ns
from ..options import DryRunOption, JsonOption, RootOption, YesOption, complete_namespace
from ..pruning import Forecast, Plan
from ..root_view import Namespace, RootView, lines
from ..terminal import (
    age_option,
    confirm,
    emit,
    iec,
    last_use,
    many,
    new_table,
    parsed,
    plain,
    print_table,
    progress,
    rfc3339,
    say,
    show,
    size_option,
    tell,
    tell_failure,
)

LINES = {
    "plan": {
        "namespace": "ARCH/MODEL@DIGEST",
        "files": "chunk files that would go",
        "nbytes": "bytes on disk",
        "oldest_use": "their oldest last use, or null",
        "newest_use": "their newest last use, or null",
    },
    "part": {"path": "a dead writer's part", "nbytes": "bytes on disk"},
    "failure": {"path": "could not be listed or removed", "reason": "why"},
    "summary": {
        "dry_run": "whether `--dry-run` was given",
        "files_before": "chunk files of the chosen namespaces",
        "nbytes_before": "their bytes on disk, with parts",
        "planned_files": "",
        "planned_nbytes": "",
        "removed_files": "",
        "removed_nbytes": "",
        "used_meanwhile": "files used meanwhile, kept for another turn",
        "planned_parts": "",
        "removed_parts": "",
        "removed_parts_nbytes": "",
        "unremovable": "entries that could not be removed",
        "unlistable": "directories that could not be listed",
        "reached": "whether the target is reached; null if nothing was tried",
        "interrupted": "whether a signal ended it",
    },
}


def command(
    root: RootOption,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Prune down to this size, such as 500GiB."),
    ] = None,
    keep_free: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|SHARE",
            help="Prune until so much of the file system is free: 50GiB, or 10% (inodes too).",
        ),
    ] = None,
    unused_for: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Remove chunks unused for so long, such as 30d."),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE",
            autocompletion=complete_namespace,
            help="Only this namespace, or this model; may be repeated.",
        ),
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
        str, typer.Option(metavar="ADDRESS", help="Their address.")
    ] = "127.0.0.1",
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove garbage, and the least recently used chunks until a target is reached.

    Engines may run: a pruned chunk is a miss. A last use is known to 10 minutes, so --unused-for keeps a
    chunk that may have been used within AGE. --max-size counts the chosen namespaces together.

    Garbage is a part of a dead writer, or one older than an hour. It goes with every target, and alone
    without one; with --namespace it stays. Foreign files stay. A damaged namespace stays too, and counts:
    `fskv rm` removes it. Engines and watchers remove empty namespaces and directories.

    With --watch it runs until SIGTERM or Ctrl-C, and then ends with exit code 0. Engines and other watchers
    may run beside it: one of them counts and prunes for all, by the smallest limits of all. Run it as the
    engines' user. If the directory is missing or empty, it waits until an engine has made a root of it.

    Exit code 3 also if the target was not reached.
    """
    limits = _limits(max_size, keep_free, unused_for, tenant_max_size or [])
    has_target, is_chosen = limits != Limits(), bool(namespace)
    if watch:
        if is_chosen or dry_run or as_json or not has_target:
            raise UsageError(
                "--watch: expected a limit such as --max-size SIZE, and none of --namespace, --dry-run and "
                "--json"
            )
        _watch(root, limits, metrics_address, metrics_port, yes)
        return
    if tenant_max_size or metrics_port is not None:
        raise UsageError("--tenant-max-size, --metrics-port: found without --watch")
    if is_chosen and not has_target:
        raise UsageError("found no target, expected one such as --max-size SIZE")
    view = RootView.open(root)
    _check_keep_free(view, limits)
    chosen = [one for name in namespace or () for one in view.of_one_model(name)]
    plan = Plan(view.path, chosen if is_chosen else view.namespaces(), limits)
    if _Prune(plan, has_target, is_chosen, as_json).run(dry_run=dry_run, yes=yes):
        raise typer.Exit(Exit.PARTIAL)


def _limits(
    max_size: str | None, keep_free: str | None, unused_for: str | None, of_tenants: list[str]
) -> Limits:
    each, named = None, {}
    for text in of_tenants:
        name, equals, size = text.rpartition("=")
        nbytes = size_option("--tenant-max-size", size)
        if equals:
            named[name] = nbytes
        else:
            each = nbytes
    return Limits(
        None if max_size is None else size_option("--max-size", max_size),
        0 if keep_free is None else parsed(parse_keep_free, "--keep-free", keep_free),
        each,
        named,
        None if unused_for is None else int(age_option("--unused-for", unused_for)),
    )


def _check_keep_free(view: RootView, limits: Limits) -> None:
    """Refuse to keep more free than the file system has: everything would go for it."""
    total = Space.of(view.path).total_nbytes
    if not isinstance(limits.keep_free, Share) and 0 < total <= limits.keep_free:
        found = iec(limits.keep_free)
        raise UsageError(
            f"--keep-free: found {found}, expected less than the {iec(total)} of the file system"
        )


# --- once -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Prune:
    """One prune: look, show the plan, ask, remove, and sum up."""

    plan: Plan
    has_target: bool
    is_chosen: bool  # namespaces were chosen: parts of the dead stay
    as_json: bool
    parts: Tally = field(default_factory=Tally)  # of the dead

    def run(self, *, dry_run: bool, yes: bool) -> bool:
        """Return whether something was left undone."""
        self._look()
        before = self.plan.num_files, self.plan.nbytes
        need, unseen = self.plan.need(time.time_ns()), self.parts.count[Fate.FAILED]
        files, nbytes = self._show(self.plan.forecast(need))
        done, gone, reached, stop = Pruned(), Tally(), None, Stop()
        what = _words(files, nbytes, self.parts) if files or self.parts.count[PART] else ""
        if not (what or need):
            say("nothing to remove")
            reached = None if dry_run else True
        elif dry_run:
            say("nothing was removed")
            if need.nbytes > nbytes or need.num_files > files:
                say("the target would not be reached: nothing more could be removed")
        elif what and not confirm(f"Remove {what} from {self.plan.root}?", yes=yes):
            say("nothing was done")
        else:
            with stopped_by_signals() as stop:
                done, reached, gone = self._carry_out(files, stop)
            left = _words(self.plan.num_files, self.plan.nbytes, Tally())
            say(f"removed {_words(done.num_files, done.nbytes, gone)}; {left} left")
            if not (reached or stop.is_set()):
                say("the target is not reached: nothing more could be removed")
        if self.as_json:
            emit(
                "summary",
                dry_run=dry_run,
                files_before=before[0],
                nbytes_before=before[1],
                planned_files=files,
                planned_nbytes=nbytes,
                removed_files=done.num_files,
                removed_nbytes=done.nbytes,
                used_meanwhile=done.used_meanwhile,
                planned_parts=self.parts.count[PART],
                removed_parts=gone.count[PART],
                removed_parts_nbytes=gone.nbytes[PART],
                unremovable=len(done.failures) + unseen,
                unlistable=self.plan.unlistable,
                reached=reached,
                interrupted=stop.is_set(),
            )
        stop.end()
        return bool(done.failures or unseen or self.plan.unlistable or reached is False)

    def _look(self) -> None:
        """Walk once: take all chunk files, and find orphaned parts."""
        for one in self.plan.catalogues:
            if one.problem is not None:
                say(f"{show(one.id)}: {one.problem}; it stays, `fskv rm` removes it")
        self.plan.look()
        for found in self._orphaned(time.time_ns(), delete=False):
            self.parts.add(found)
            if found.fate is Fate.FAILED:
                tell_failure(found.path, found.reason, as_json=self.as_json)
            elif found.fate is Fate.GOES:
                facts = {"path": found.path, "nbytes": found.nbytes}
                tell("part", f"orphaned part   {found.path}", as_json=self.as_json, **facts)

    def _orphaned(self, now_ns: int, *, delete: bool) -> Iterable[Outcome]:
        """Find, or remove, the parts of the dead. Raises OSError where the root is away."""
        if self.is_chosen:
            return ()
        return orphaned(self.plan.ours, now_ns, self.plan.root, delete=delete)

    def _show(self, found: list[tuple[Namespace, Forecast]]) -> tuple[int, int]:
        """Print the plan; returns files and bytes."""
        table = new_table("ARCH", "MODEL@DIGEST", ">FILES", ">SIZE", "LAST USED")
        for one, part in found if self.as_json else ():
            emit(
                "plan",
                namespace=one.id,
                files=part.num_files,
                nbytes=part.nbytes,
                oldest_use=rfc3339(part.oldest_ns),
                newest_use=rfc3339(part.newest_ns),
            )
        parts = dict(found)
        for name, spaces in lines(parts).items():
            going, arch = [parts[one] for one in spaces], spaces[0].arch
            oldest = last_use(min(one.oldest_ns for one in going))
            newest = last_use(max(one.newest_ns for one in going))
            cells = [arch, name.removeprefix(f"{arch}/")]
            cells += [f"{sum(one.num_files for one in going):,}"]
            cells += [iec(sum(one.nbytes for one in going))]
            cells += [oldest if oldest == newest else f"{oldest} to {newest}"]
            table.add_row(*map(plain, cells))
        if found and not self.as_json:
            print_table(table)
            every = f"uses are recorded every {MAX_TOUCH_INTERVAL_S // 60} min"
            say(f"{every}: a file may have been used that much later")
        files = sum(part.num_files for _, part in found)
        nbytes = sum(part.nbytes for _, part in found)
        if self.has_target:
            size = f"{iec(nbytes)} of {iec(self.plan.nbytes)}"
            say(f"{files:,} of {self.plan.num_files:,} files would go, {size}")
        return files, nbytes

    def _carry_out(self, planned: int, stop: threading.Event) -> tuple[Pruned, bool, Tally]:
        now_ns, gone = clock_ns(self.plan.root), Tally()
        with progress() as drawn:
            task = drawn.add_task("removing", total=planned)
            done, reached = self.plan.carry_out(
                now_ns, stop, lambda files: drawn.advance(task, files)
            )
        try:
            for found in self._orphaned(now_ns, delete=True):
                gone.add(found)
                if found.error is not None and found.fate is Fate.FAILED:
                    done.failures[found.path] = found.error
                if stop.is_set():
                    break
        except OSError as away:  # the root
            done.failures[self.plan.root] = away
        for path, error in done.failures.items():
            tell_failure(path, error.strerror or str(error), as_json=self.as_json)
        return done, reached, gone


def _words(num_files: int, nbytes: int, parts: Tally) -> str:
    found = ("file", num_files, nbytes), ("orphaned part", parts.count[PART], parts.nbytes[PART])
    words = [f"{many(number, noun)} ({iec(size)})" for noun, number, size in found if number]
    return " and ".join(words) or "nothing"


# --- for as long as it runs ---------------------------------------------------------------


def _watch(root: str, limits: Limits, address: str, port: int | None, yes: bool) -> None:
    """Ask, wait for the root, and watch."""
    from ..exporter import serve
    from ..watch import Watcher

    if not root:
        raise UsageError("--root: found nothing, expected the directory of a cache root")
    path = os.path.abspath(root)
    if not confirm(f"Keep {path} within these limits until a signal comes?", yes=yes):
        say("nothing was done")
        return
    watcher = Watcher(path)
    if port is not None:
        taken = serve(watcher.watched, path, address, port)
        say(f"metrics: http://{address}:{taken}/metrics")

    def check(view: RootView) -> None:
        _check_keep_free(view, limits)
        if os.geteuid() != os.stat(f"{view.path}/{FORMAT_FILE}").st_uid:
            say(f"{view.path} belongs to another user: engines may not read this watcher's limits")

    watcher.run(limits, check)
    say("ended: the limits are withdrawn and the lease given back")
