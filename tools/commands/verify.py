"""`fskv verify`: are the files of a root what they say they are?"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Annotated

import typer

from fskv.root.remove import Fate, Outcome, Tally

from ..check.choose import EVERYTHING, NUM_BUCKETS, Subset
from ..check.choose import parse as parse_subset
from ..check.judge import Finding
from ..check.removal import REMOVED, RemovalPlan, execute
from ..check.run import Bad, Job, Run, Survey, survey
from ..exits import UsageError, outcome
from ..options import (
    DryRunOption,
    JsonOption,
    NamespaceArgument,
    QuietOption,
    RootOption,
    YesOption,
)
from ..root_view import FileOf, Namespace, RootView, Unlistable
from ..terminal import age_option, confirm, emit, iec, many, progress, say, show

LINES = {
    "namespace": {
        "namespace": "ARCH/MODEL@DIGEST of one whose namespace.json is damaged",
        "problem": "what is wrong with it",
    },
    "bad": {
        "id": "DIGEST/NAME.gGROUP[.rRANK]",
        "namespace": "ARCH/MODEL@DIGEST",
        "path": "the chunk file",
        "finding": "corrupt, stale, unreadable or changing",
        "reason": "what was found, in words",
        "nbytes": "length of the file; null where it could not be opened",
    },
    "unlistable": {"path": "a directory that could not be listed", "reason": "why"},
    "removal": {
        "id": "DIGEST/NAME.gGROUP[.rRANK]",
        "path": "the chunk file",
        "removed": "whether it was removed",
        "reason": "`removed`, or why not: it is good now, gone, or cannot be removed",
        "nbytes": "length of the file; 0 where it is gone",
    },
    "summary": {
        "namespaces": "number of namespaces that were looked at",
        "files": "chunk files judged",
        "data_files": "of them those whose rows were read",
        "bad": "files that are corrupt, stale, unreadable or changing",
        "corrupt": "files that fail a check of their own bytes",
        "stale": "sound files that are not what their name and namespace say",
        "unreadable": "files that nobody could read",
        "changing": "files that gave two answers; a chunk file never changes",
        "vanished": "files that were removed meanwhile: no problem",
        "problems": "namespaces whose namespace.json is damaged",
        "foreign": "entries in directories of chunks that are not fskv's",
        "parts": "files that were being written, or left by a dead writer",
        "unlistable": "directories that could not be listed",
        "nbytes_read": "bytes read",
        "seconds": "duration of the reading",
        "bytes_per_s": "bytes read per second",
        "complete": "whether all was looked at",
        "resume": "value for `--from` that goes on where this run stopped, or null",
        "seed": "of a random subset, or null",
        "removed": "files removed",
        "removed_nbytes": "their length",
        "dry_run": "whether `--dry-run` was given",
    },
}
_BAD = (Finding.CORRUPT, Finding.STALE, Finding.UNREADABLE, Finding.CHANGING)


def command(
    root: RootOption,
    namespace: NamespaceArgument = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read and check every row of every file.")
    ] = False,
    read_data_subset: Annotated[
        str | None,
        typer.Option(
            metavar="SUBSET",
            help="Read the rows of some: `1/8` (one of eight parts), `5%` or `50GiB` (at random).",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the random subset. Default: another each time.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Files read at once.")] = 8,
    max_duration: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Stop after so long, such as 30m; says how to go on."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="DIGEST/HEX", help="Go on where a run that stopped said."),
    ] = None,
    remove_bad: Annotated[
        bool, typer.Option("--remove-bad", help="Remove corrupt and stale files, after asking.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check the chunk files of a root: names, headers, lengths, and with --read-data every byte.

    A file is corrupt when its own bytes fail a check, stale when it is sound but not what its name, directory
    and namespace.json say, unreadable when the system refuses it, changing when two looks at it differ. One
    that vanishes or is replaced meanwhile is no problem: engines may go on. Data is read around the page
    cache where the file system allows it.

    --remove-bad removes corrupt and stale files only, each after it was read once more and while it is still
    the file of that name. Nothing else is ever written. Exit code 1 if anything bad was found (removed or
    not), otherwise 3 if a part could not be read or time ran out.
    """
    view = RootView.open(root)
    spaces = view.matching(namespace)
    if quiet and as_json:
        raise UsageError("--quiet, --json: found both, expected one of them")
    if (yes or dry_run) and not remove_bad:
        raise UsageError("--yes, --dry-run: found without --remove-bad, which they belong to")
    if remove_bad and not (yes or dry_run or (sys.stdin.isatty() and sys.stderr.isatty())):
        # Said before hours of reading, not after.
        raise UsageError("--remove-bad: there is no terminal to ask on; give --yes, or --dry-run")
    if read_data and read_data_subset is not None:
        raise UsageError("--read-data, --read-data-subset: found both, expected one of them")
    seed = secrets.randbits(32) if seed is None else seed
    job = Job(
        spaces,
        rows=read_data or read_data_subset is not None,
        subset=EVERYTHING if read_data_subset is None else parse_subset(read_data_subset, seed),
        threads=threads,
        deadline=_deadline(max_duration),
        start=_start(spaces, start),
    )
    is_random = job.subset.is_random
    if is_random and not as_json:
        say(f"seed {seed}")
    output = _Output(spaces, quiet=quiet, as_json=as_json)
    plan = RemovalPlan(job.rows) if remove_bad else None
    run = _verify(job, output, plan)
    removed = _remove(plan, output, yes=yes, dry_run=dry_run) if plan is not None else Tally()
    output.end(run, removed, seed if is_random else None, may_remove=remove_bad, dry_run=dry_run)
    bad = sum(
        run.tally.findings[finding] for finding in (*_BAD,) if finding is not Finding.UNREADABLE
    )
    unread = run.tally.findings[Finding.UNREADABLE] or run.tally.unlistable
    undone = unread or not run.complete or removed.count[Fate.FAILED] or removed.count[Fate.FOREIGN]
    raise typer.Exit(outcome(problems=bad or output.problems, partial=undone))


def _deadline(text: str | None) -> float | None:
    return None if text is None else time.monotonic() + age_option("--max-duration", text)


def _start(spaces: list[Namespace], text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    digest16, _, shard = text.partition("/")
    found = [idx for idx, space in enumerate(spaces) if space.digest16 == digest16]
    if len(found) != 1 or len(shard) != 3 or set(shard) - set("0123456789abcdef"):
        raise UsageError(
            f"--from: found {show(text)}, expected DIGEST/HEX as a run that stopped said"
        )
    return found[0], int(shard, 16)


def _resume_text(run: Run) -> str | None:
    place = run.resume
    return None if place is None else f"{place[0].digest16}/{min(place[1], 0xFFF):03x}"


# --- the work, with its progress --------------------------------------------------------


def _verify(job: Job, output: _Output, plan: RemovalPlan | None) -> Run:
    whole = job.rows and job.subset.parts == 1 and job.subset.num_buckets == NUM_BUCKETS
    total = None
    with progress(rate=job.rows) as drawn:
        if job.subset.nbytes is not None or os.isatty(2):
            task = drawn.add_task("counting", total=None)
            total = survey(
                job, lambda found: drawn.update(task, completed=found.nbytes or found.files)
            )
            drawn.remove_task(task)
        if job.subset.nbytes is not None and total is not None:
            job = replace(job, subset=_fitting(job.subset, total))
        run = Run(job)
        amount = None if total is None else total.nbytes if job.rows else total.files
        task = drawn.add_task("reading" if whole or job.rows else "headers", total=amount)
        try:
            with contextlib.closing(_pass_on(run, output, plan)) as ticks:
                for _ in ticks:
                    done = run.tally.done_nbytes if job.rows else run.tally.files
                    drawn.update(task, completed=done)
        except KeyboardInterrupt:
            say(
                f"stopped after {run.tally.files:,} files; --from {_resume_text(run)} goes on there"
            )
            raise
    return run


def _fitting(subset: Subset, total: Survey) -> Subset:
    chosen = subset.fit(total.by_bucket)
    total.nbytes = sum(total.by_bucket[: chosen.num_buckets])
    return chosen


def _pass_on(run: Run, output: _Output, plan: RemovalPlan | None) -> Generator[None]:
    with contextlib.closing(run.events()) as events:
        for event in events:
            if isinstance(event, Bad):
                output.bad(event)
                if plan is not None:
                    plan.add(event)
            elif isinstance(event, Unlistable):
                output.unlistable(event)
            yield


def _remove(plan: RemovalPlan, output: _Output, *, yes: bool, dry_run: bool) -> Tally:
    removed = Tally()
    if plan.kept:
        say(f"{many(plan.kept, 'bad file')} not removed: could not be judged for certain")
    if not plan.files:
        return removed
    what = f"{many(len(plan.files), 'bad file')} of {iec(plan.nbytes)}"
    if dry_run:
        say(f"would remove {what}")
        return removed
    if not confirm(f"Remove {what}?", yes=yes):
        say("nothing was removed")
        return removed
    for file, found in execute(plan):
        output.removal(file, found)
        removed.add(found)
    return removed


# --- what is printed --------------------------------------------------------------------


class _Output:
    """Prints findings as they come: nothing is held back until the end."""

    def __init__(self, spaces: list[Namespace], *, quiet: bool, as_json: bool) -> None:
        self._spaces = spaces
        self._quiet = quiet
        self._as_json = as_json
        self.problems = 0
        for space in spaces:
            if space.problem is not None:
                self.problems += 1
                if as_json:
                    emit("namespace", namespace=space.id, problem=space.problem)
                else:
                    say(f"{show(space.id)}: {space.problem}")

    def bad(self, bad: Bad) -> None:
        if self._quiet:
            print(show(bad.id))
        elif self._as_json:
            emit(
                "bad",
                id=bad.id,
                namespace=bad.namespace.id,
                path=bad.path,
                finding=bad.finding.value,
                reason=bad.reason,
                nbytes=bad.nbytes,
            )
        else:
            print(f"{bad.finding.value:10} {show(bad.id)}  {show(bad.reason)}")

    def unlistable(self, what: Unlistable) -> None:
        if self._as_json:
            emit("unlistable", path=what.path, reason=what.reason)
        else:
            say(str(what))

    def removal(self, file: FileOf, found: Outcome) -> None:
        reason = found.reason or found.what
        if self._as_json:
            emit(
                "removal",
                id=file.id,
                path=file.path,
                removed=found.fate is Fate.GOES,
                reason=reason,
                nbytes=found.info.st_size if found.info else 0,
            )
        elif found.fate is not Fate.GOES:
            say(f"{show(file.id)} stays: {reason}")

    def end(
        self, run: Run, removed: Tally, seed: int | None, *, may_remove: bool, dry_run: bool
    ) -> None:
        tally, seconds = run.tally, max(run.seconds, 1e-9)
        counts = {finding.value: tally.findings[finding] for finding in (*_BAD, Finding.VANISHED)}
        bad = sum(counts[finding.value] for finding in _BAD)
        resume = _resume_text(run)
        if self._as_json:
            emit(
                "summary",
                namespaces=len(self._spaces),
                files=tally.files,
                data_files=tally.data_files,
                bad=bad,
                **counts,
                problems=self.problems,
                foreign=tally.foreign,
                parts=tally.parts,
                unlistable=tally.unlistable,
                nbytes_read=tally.nbytes_read,
                seconds=round(run.seconds, 3),
                bytes_per_s=int(tally.nbytes_read / seconds),
                complete=run.complete,
                resume=resume,
                seed=seed,
                removed=removed.count[REMOVED],
                removed_nbytes=removed.nbytes[REMOVED],
                dry_run=dry_run,
            )
            return
        read = f", {tally.data_files:,} of them read whole" if run.job.rows else ", headers only"
        found = ", ".join(f"{counts[one.value]:,} {one.value}" for one in _BAD if counts[one.value])
        say(f"{many(tally.files, 'file')}{read}: {found or 'all good'}")
        rate = f"{iec(tally.nbytes_read / seconds)}/s"
        say(f"read {iec(tally.nbytes_read)} in {run.seconds:.1f} s, {rate}")
        if counts["vanished"]:
            say(f"{counts['vanished']:,} vanished meanwhile, which is no problem")
        if tally.foreign:
            say(f"{tally.foreign:,} foreign entries among them were left alone")
        if removed.count[REMOVED]:
            say(f"removed {many(removed.count[REMOVED], 'file')}, {iec(removed.nbytes[REMOVED])}")
        elif bad and not may_remove:
            say("`fskv inspect ID` shows where a file is bad; --remove-bad removes bad files")
        if resume is not None:
            say(f"time ran out; --from {resume} goes on there")
