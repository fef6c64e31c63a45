"""`fskv verify`: checks of names, headers and data of a root's files."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from fskv.root.remove import Fate, Outcome, Tally

from ..check.judge import Finding
from ..check.run import REMOVED, Bad, Run
from ..check.sealed import open_keys
from ..exits import UsageError, outcome
from ..options import (
    DryRunOption,
    JsonOption,
    KeyFileOption,
    NamespaceArgument,
    QuietOption,
    RootOption,
    YesOption,
)
from ..root_view import Namespace, RootView, Unlistable
from ..terminal import can_ask, confirm, emit, iec, many, say, show, tell, walk_progress

LINES = {
    "namespace": {
        "namespace": "ARCH/MODEL@DIGEST",
        "problem": "damage of its namespace.json",
    },
    "bad": {
        "id": "DIGEST/NAME.gGROUP[.rRANK]",
        "namespace": "ARCH/MODEL@DIGEST",
        "path": "the chunk file",
        "finding": "as above",
        "reason": "in words",
        "nbytes": "length, or null",
    },
    "unlistable": {"path": "a directory that could not be listed", "reason": "why"},
    "removal": {
        "id": "DIGEST/NAME.gGROUP[.rRANK]",
        "path": "the chunk file",
        "removed": "",
        "reason": "`removed`, or why not",
        "nbytes": "length; 0 where it is gone",
    },
    "summary": {
        "namespaces": "number of namespaces",
        "files": "chunk files",
        "data_files": "files whose rows were read",
        "encrypted": "files whose rows need --key-file",
        "bad": "the sum of the next four",
        "corrupt": "files",
        "stale": "files",
        "unreadable": "files",
        "changing": "files",
        "vanished": "files removed by others",
        "problems": "namespaces with a damaged namespace.json",
        "foreign": "entries among the chunks that fskv did not make",
        "unlistable": "directories that could not be listed",
        "nbytes_read": "",
        "seconds": "",
        "removed": "files",
        "removed_nbytes": "",
        "dry_run": "whether `--dry-run` was given",
    },
}
_WHY = {
    Fate.GOES: "removed",
    Fate.STAYS: "changed since it was read",
    Fate.VANISHED: "gone meanwhile",
}
_BAD = (Finding.CORRUPT, Finding.STALE, Finding.UNREADABLE, Finding.CHANGING)
_COUNTED = (
    *("files", "data_files", "encrypted", "foreign", "unlistable", "nbytes_read"),
    *(*_BAD, Finding.VANISHED),
)


def command(
    root: RootOption,
    namespace: NamespaceArgument = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read and check every row of every file.")
    ] = False,
    key_file: KeyFileOption = None,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Files read at once.")] = 8,
    remove_bad: Annotated[
        bool, typer.Option("--remove-bad", help="Remove corrupt and stale files, after asking.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check the chunk files of a root: names, headers, lengths, and with --read-data every byte.

    A corrupt file fails a check of its bytes. A stale file is sound and belongs elsewhere by name, directory
    or namespace.json. The system refuses an unreadable file. Two looks at a changing file differ. Engines may
    go on: files that vanish or are replaced are no problem. Data is read around the page cache if the file
    system allows it.

    The data of encrypted files is checked with --key-file alone.

    --remove-bad removes corrupt and stale files only, each while it is still the file that was read.
    Exit code 1 if anything bad was found, removed or not.
    """
    view = RootView.open(root)
    spaces = view.matching(namespace)
    if quiet and as_json:
        raise UsageError("--quiet, --json: found both, expected one of them")
    if (yes or dry_run) and not remove_bad:
        raise UsageError("--yes, --dry-run: found without --remove-bad, which they belong to")
    if remove_bad and not (yes or dry_run or can_ask()):
        # Said before hours of reading, not after.
        raise UsageError("--remove-bad: there is no terminal to ask on; give --yes, or --dry-run")
    keys = open_keys(key_file)
    run = Run(spaces, rows=read_data, threads=threads, keys=keys)
    output = _Output(spaces, quiet=quiet, as_json=as_json)
    bad = _verify(run, output, len(spaces))
    removed = _remove(bad, output, yes=yes, dry_run=dry_run) if remove_bad else Tally()
    output.end(run, removed, rows=read_data, may_remove=remove_bad, dry_run=dry_run)
    problems = sum(run.tally[one] for one in _BAD if one is not Finding.UNREADABLE)
    unread = run.tally[Finding.UNREADABLE] or run.tally["unlistable"]
    undone = unread or removed.count[Fate.FAILED] or removed.count[Fate.FOREIGN]
    raise typer.Exit(outcome(problems=problems or output.problems, partial=undone))


def _verify(run: Run, output: _Output, num_namespaces: int) -> list[Bad]:
    """Judge all files, and print each bad one when it is found."""
    bad = []
    with (
        walk_progress("verifying", num_namespaces) as seen,
        contextlib.closing(run.events()) as events,
    ):
        for event in events:
            if isinstance(event, Bad):
                output.bad(event)
                bad.append(event)
            elif isinstance(event, Unlistable):
                output.unlistable(event)
            else:
                seen(*event)
    return bad


def _remove(bad: list[Bad], output: _Output, *, yes: bool, dry_run: bool) -> Tally:
    removed, sure = Tally(), [one for one in bad if one.is_sure]
    if kept := len(bad) - len(sure):
        say(f"{many(kept, 'bad file')} not removed: could not be judged for certain")
    what = f"{many(len(sure), 'bad file')} of {iec(sum(one.nbytes or 0 for one in sure))}"
    if not sure:
        return removed
    if dry_run:
        say(f"would remove {what}")
    elif not confirm(f"Remove {what}?", yes=yes):
        say("nothing was removed")
    else:
        for one in sure:
            try:
                found = one.remove()
            except OSError as error:  # the root is away
                found = Outcome(one.path, Fate.FAILED, error=error)
            output.removal(one, found)
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
        else:
            tell(
                "bad",
                f"{bad.finding.value:10} {bad.id}  {bad.reason}",
                as_json=self._as_json,
                id=bad.id,
                namespace=bad.namespace.id,
                path=bad.path,
                finding=bad.finding.value,
                reason=bad.reason,
                nbytes=bad.nbytes,
            )

    def unlistable(self, what: Unlistable) -> None:
        if self._as_json:
            emit("unlistable", path=what.path, reason=what.reason)
        else:
            say(str(what))

    def removal(self, bad: Bad, found: Outcome) -> None:
        reason = _WHY.get(found.fate) or found.reason or found.fate.value
        if self._as_json:
            emit(
                "removal",
                id=bad.id,
                path=bad.path,
                removed=found.fate is Fate.GOES,
                reason=reason,
                nbytes=found.info.st_size if found.info else 0,
            )
        elif found.fate is not Fate.GOES:
            say(f"{show(bad.id)} stays: {reason}")

    def end(self, run: Run, removed: Tally, *, rows: bool, may_remove: bool, dry_run: bool) -> None:
        tally, num_removed = run.tally, removed.count[REMOVED]
        bad = sum(tally[one] for one in _BAD)
        if self._as_json:
            emit(
                "summary",
                namespaces=len(self._spaces),
                **{name: tally[name] for name in _COUNTED},
                bad=bad,
                problems=self.problems,
                seconds=round(run.seconds, 3),
                removed=num_removed,
                removed_nbytes=removed.nbytes[REMOVED],
                dry_run=dry_run,
            )
            return
        read = f", {tally['data_files']:,} of them read whole" if rows else ""
        found = ", ".join(f"{tally[one]:,} {one}" for one in _BAD if tally[one])
        encrypted, nbytes_read = tally["encrypted"], tally["nbytes_read"]
        good = "all good" if rows and not encrypted else "all headers good"
        good += "" if rows else "; --read-data reads every byte"
        say(f"{many(tally['files'], 'file')}{read}: {found or good}")
        rate = f"{iec(nbytes_read / max(run.seconds, 1e-9))}/s"
        say(f"read {iec(nbytes_read)} in {run.seconds:.1f} s, {rate}")
        if encrypted:
            say(f"{many(encrypted, 'file')} encrypted: --key-file with its keys checks the data")
        if vanished := tally[Finding.VANISHED]:
            say(f"{vanished:,} vanished meanwhile, which is no problem")
        if tally["foreign"]:
            say(f"{tally['foreign']:,} foreign entries among them were left alone")
        if self.problems:
            damaged = many(self.problems, "namespace")
            say(
                f"no engine can use {damaged} with a damaged namespace.json: `fskv rm` removes them"
            )
        if num_removed:
            say(f"removed {many(num_removed, 'file')}, {iec(removed.nbytes[REMOVED])}")
        elif bad and not may_remove:
            say("`fskv inspect ID` shows where a file is bad; --remove-bad removes bad files")
