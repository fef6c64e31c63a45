"""`fskv doctor`: checks of a machine, a mount and a root, with remedies."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from fskv.bounds.limits import Limits
from fskv.config import StoreConfig

from ..doctor.configured import read
from ..doctor.finding import Finding, Level, Subject
from ..doctor.rounds import of_machine, of_root
from ..exits import Exit, UsageError
from ..options import JsonOption, root_option, seconds
from ..terminal import emit, many, new_table, plain, print_table, say

LINES = {
    "finding": {
        "check": "its subject",
        "level": "`problem`, `warning`, `hint`, `note` (of an absent thing) or `ok`",
        "found": "in words",
        "advice": "the remedy, or null",
    },
    "summary": {
        "root": "null for none or several",
        **{level.value: "findings of that level" for level in Level},
    },
}
_STYLES = {
    Level.PROBLEM: "bold red",
    Level.WARNING: "yellow",
    Level.HINT: "cyan",
    Level.NOTE: "dim",
    Level.OK: "green",
}


def command(
    root: Annotated[
        str | None,
        root_option("The cache root, or a directory to become one. Default: none."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=600, callback=seconds, help="Seconds for each check."),
    ] = 10.0,
    no_write: Annotated[bool, typer.Option("--no-write", help="Write no test files.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE|LINE",
            help="An engine's configuration: the JSON of --kv-transfer-config, a file with it, a line or a "
            "script of vllm serve, or YAML that starts servers. Its roots count instead of --root.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, the mount and the root, and give a remedy for each finding.

    It tries O_DIRECT, rename, links and clocks with short-lived files in the root. It writes nothing
    outside of roots, nor for engines that only load. A mount that hangs is a finding. Exit code 1 if there is
    a problem, else 0.
    """
    if root == "":
        raise UsageError("--root: found nothing, expected the directory of a cache root")
    found, configured = ([], []) if config is None else read(config)
    stores: dict[str, list[StoreConfig]] = {}
    if config is None and root:
        stores[os.path.abspath(root)] = []
    for store in configured:
        stores.setdefault(store.root, []).append(store)
    found += of_machine()
    for path, own in stores.items():
        subject = Subject(
            path,
            timeout,
            may_write=not no_write,
            told=tuple(Limits(one.max_bytes, one.keep_free) for one in own if one.store),
            only_loads=bool(own) and not any(one.store for one in own),
            health_files=tuple(dict.fromkeys(one.health_file for one in own if one.health_file)),
            key_files=tuple(dict.fromkeys(one.key_file for one in own if one.key_file)),
        )
        found += of_root(subject)
    found.sort(key=lambda one: list(Level).index(one.level))
    counted = Counter(one.level for one in found)
    if as_json:
        for one in found:
            emit("finding", **{**asdict(one), "advice": one.advice or None})
        only = next(iter(stores)) if len(stores) == 1 else None
        emit("summary", root=only, **{level.value: counted[level] for level in Level})
    else:
        _print(found)
        levels = [one for one in Level if counted[one]]
        say(", ".join(many(counted[one], one, "ok" * (one == "ok")) for one in levels))
    raise typer.Exit(Exit.PROBLEMS if counted[Level.PROBLEM] else Exit.OK)


def _print(findings: list[Finding]) -> None:
    table = new_table("", "CHECK", "FOUND")
    for finding in findings:
        level, found = plain(finding.level), plain(finding.found)
        level.stylize(_STYLES[finding.level])
        if finding.advice:
            found.append(f"\n→ {finding.advice}", style="dim")
        table.add_row(level, plain(finding.check), found)
    print_table(table)
