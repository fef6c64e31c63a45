"""Kills, full disks and failing mounts around real stores and loads: is anything wrong ever served?

Three parts, in this order:

  kills   writers are SIGKILLed at random moments, and files damaged from outside, while others read
  space   a small file system runs full, room is made, stores go on; needs root for the mount
  mount   a FUSE file system gives errors, hangs, short, flipped and cut transfers; needs FUSE and mfusepy

What processes are served lies in memory that the controller maps and compares with the content that it knows
by the chunk's number. Exit code 1: something wrong was served, a process did not give back what it took, a
part was left by somebody who was not killed, or an operation did not end as it must. The options --no-verify
and --break take a safety away, as negative controls, and must exit with 1.

    python -m trials.storm [--kills 200] [--seed N] [--json] [--parts kills,space,mount]
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.child import preload
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.report import judged, publish, say
from benchmarks.rig import work_directory
from trials.storm_bad_mount import bad_mount
from trials.storm_full_disk import full_disk
from trials.storm_kills import KillStorm
from trials.storm_party import SAFETIES

_WIDTH = 90  # of the table's second column
_LIMIT_S = 240.0  # of one part; it is over long before


def kills(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    return KillStorm(
        directory,
        kills=options.kills,
        mean_s=options.mean_s,
        seed=options.seed,
        direct_io=options.direct_io,
        broken=options.broken,
        limit_s=_LIMIT_S + 2 * options.kills * options.mean_s,
    ).run()


def space(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    return full_disk(directory, options.seed, options.direct_io, options.broken, _LIMIT_S)


def mount(directory: str, options: argparse.Namespace) -> dict[str, Any]:
    return bad_mount(directory, options.seed, options.direct_io, options.broken, _LIMIT_S)


PARTS: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {
    "kills": kills,
    "space": space,
    "mount": mount,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts and return the facts."""
    preload("trials.storm_process", "trials.storm_kills")
    found: dict[str, Any] = {}
    with work_directory(options.dir) as directory:
        for name in options.parts:
            own = os.path.join(directory, name)
            os.mkdir(own)
            say(f"{name} ...")
            found[name] = PARTS[name](own, options)
    problems = [f"{name}: {text}" for name, facts in found.items() for text in facts["problems"]]
    ran = [facts for facts in found.values() if "skipped" not in facts]
    return {
        "settings": settings(options),
        "parts": found,
        "served": sum(facts["served"] for facts in ran),
        "wrong": sum(facts["wrong"] for facts in ran),
        "problems": problems,
        "good": bool(ran) and not problems,
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows: list[list[str]] = []

    def add(title: str, value: object) -> None:
        if isinstance(value, dict):
            value = ", ".join(f"{key} {n}" for key, n in value.items())
        first, *more = textwrap.wrap(str(value), _WIDTH) or ["none"]
        rows.append([title, first])
        rows.extend(["", line] for line in more)

    for name, part in facts["parts"].items():
        if "skipped" in part:
            add(name, f"skipped: {part['skipped']}")
            continue
        add(f"{name}: chunks served / wrong", f"{part['served']} / {part['wrong']}")
        for title in _SHOWN:
            if title in part:
                add("  " + title.replace("_", " "), part[title])
        for problem in part["problems"]:
            add("  PROBLEM", problem)
    title = f"Seed {options.seed}. " + (
        f"A NEGATIVE CONTROL, without {options.broken}." if options.broken else "All checks on."
    )
    publish("storm", facts, (title, ("", "found"), rows), as_json=options.json)


_SHOWN = (
    *("kills", "killed", "seconds", "planted", "wrong_by_last_damage", "healed"),
    *("file_system", "stores", "steps", "num_steps", "faults_met", "wrong_by_step"),
    "ended",
    *("orphans", "orphans_with_data", "orphans_collected", "parts_leaked"),
    *("processes", "slots", "threads", "files"),
)


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if not names or set(names) - set(PARTS):
        raise ValueError
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("storm", __doc__)
    made.set_defaults(direct_io="auto")
    add = made.add_argument
    add("--kills", type=positive, default=200, help="(200)")
    add("--mean-s", type=positive_float, default=0.25, help="between two kills (0.25)")
    add("--seed", type=int, default=1, help="of moments, damage, keys and kinds of writers (1)")
    add("--parts", type=_parts, default=list(PARTS), help="which, with commas (kills,space,mount)")
    add(
        "--no-verify",
        action="store_const",
        const="checks",
        dest="broken",
        help="negative control: loads without checks",
    )
    add("--break", choices=SAFETIES, dest="broken", help="negative control: without this safety")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("storm", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
