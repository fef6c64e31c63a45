"""`fskv doctor`: a machine, a mount and a root, and what to do about them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from typing import Annotated

import typer

from fskv.bounds.limits import Limits

from ..doctor.configured import Configured, health_files, read
from ..doctor.finding import Check, Finding, Level, Subject
from ..doctor.rounds import examine
from ..doctor.scratch import Scratch
from ..doctor.visit import OF_MACHINE
from ..doctor.visitor import visit
from ..exits import Exit
from ..options import JsonOption, root_option
from ..terminal import emit, new_table, plain, print_table, say

LINES = {
    "finding": {
        "check": "what was looked at",
        "level": "`ok`, `hint`, `warning` or `problem`",
        "found": "what was found, in words",
        "advice": "what to do, or null",
    },
    "summary": {
        "root": "the root that was looked at, or null for none or several",
        "ok": "number of findings of that level",
        "hint": "number of findings of that level",
        "warning": "number of findings of that level",
        "problem": "number of findings of that level",
    },
}
_STYLES = {
    Level.OK: "green",
    Level.HINT: "cyan",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}


def command(
    root: Annotated[
        str | None,
        root_option("The cache root, or a directory that is to be one. Default: only the machine."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds that each check may take.")
    ] = 10.0,
    no_write: Annotated[bool, typer.Option("--no-write", help="Try nothing out.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE|LINE",
            help="What an engine gets: the JSON of --kv-transfer-config, a file with it, a line of vllm "
            "serve, its YAML file, or YAML of Kubernetes, compose or a chart. Its roots are looked at, "
            "instead of --root.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine, the mount and the root, and say what to do about what is found.

    What the file system does (O_DIRECT, rename, links, clocks and more) is tried out with files of a moment
    in the root, which are removed again; nothing is written to what is no root. A mount that hangs is a
    finding. The worst is printed last. Exit code 1 if there is a problem; hints and warnings are 0.
    """
    configured = Configured(()) if config is None else read(config)
    roots: dict[str, list[Limits]] = {}
    for store in configured.stores:
        roots.setdefault(store.root, []).append(Limits(store.max_bytes, store.keep_free))
    if config is None and root:
        roots = {os.path.abspath(root): []}
    counted: Counter[Level] = Counter()
    shown: list[Finding] = []
    findings = _findings(configured, roots, timeout, may_write=not no_write)
    with closing(findings) as found:
        for finding in found:
            counted[finding.level] += 1
            if as_json:
                emit(
                    "finding",
                    check=finding.check,
                    level=finding.level,
                    found=finding.found,
                    advice=finding.advice or None,
                )
            else:
                shown.append(finding)
    if as_json:
        emit(
            "summary",
            root=next(iter(roots)) if len(roots) == 1 else None,
            **{level.value: counted[level] for level in Level},
        )
    else:
        _print(shown)
        say(", ".join(f"{counted[level]} {level}" for level in Level if counted[level]))
    raise typer.Exit(Exit.PROBLEMS if counted[Level.PROBLEM] else Exit.OK)


def _findings(
    configured: Configured,
    roots: dict[str, list[Limits]],
    timeout_s: float,
    *,
    may_write: bool,
) -> Generator[Finding]:
    yield from configured.findings
    of_files = Check("health file", lambda _subject: health_files(configured.stores))
    yield from examine((of_files, *OF_MACHINE), Subject(None, timeout_s, Scratch(may_write=False)))
    for root, told in roots.items():
        yield from visit(root, timeout_s, may_write=may_write, told=told)


def _print(findings: list[Finding]) -> None:
    """Print the worst last: a terminal shows the end of what does not fit."""
    table = new_table("", "CHECK", "FOUND")
    for finding in sorted(findings, key=lambda one: list(Level).index(one.level)):
        level, found = plain(finding.level), plain(finding.found)
        level.stylize(_STYLES[finding.level])
        if finding.advice:
            found.append(f"\n→ {finding.advice}", style="dim")
        table.add_row(level, plain(finding.check), found)
    print_table(table)
