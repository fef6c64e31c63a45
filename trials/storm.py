"""Writers are killed at random moments and files are damaged: is anything wrong ever served?

Writers of real stores are SIGKILLed and replaced while readers load, and files are damaged from outside. What
a process was served lies in memory that the controller maps. It knows the content by the chunk's number.

Exit code 1: something wrong was served, a process did not give back what it took, a part was left by somebody
who was not killed, or not every chunk healed. --no-verify and --break take a safety away, as negative
controls, and must exit with 1.

    python -m trials.storm [--kills 200] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.child import preload
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.report import judged, publish
from benchmarks.rig import work_directory
from trials.storm_kills import KillStorm
from trials.storm_party import SAFETIES

_WIDTH = 90  # of the table's second column
_LIMIT_S = 240.0  # beside the kills; it is over long before


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the storm and return the facts."""
    preload("trials.storm_process", "trials.storm_kills")
    with work_directory(options.dir) as directory:
        found = KillStorm(
            os.path.realpath(directory),
            kills=options.kills,
            mean_s=options.mean_s,
            seed=options.seed,
            direct_io=options.direct_io,
            broken=options.broken,
            limit_s=_LIMIT_S + 2 * options.kills * options.mean_s,
        ).run()
    return {"settings": settings(options), **found, "good": not found["problems"]}


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows: list[list[str]] = []

    def add(title: str, value: object) -> None:
        if isinstance(value, dict):
            value = ", ".join(f"{key} {n}" for key, n in value.items())
        first, *more = textwrap.wrap(str(value), _WIDTH) or ["none"]
        rows.append([title, first])
        rows.extend(["", line] for line in more)

    add("chunks served / wrong", f"{facts['served']} / {facts['wrong']}")
    for title in _SHOWN:
        add(title.replace("_", " "), facts[title])
    for problem in facts["problems"]:
        add("PROBLEM", problem)
    title = f"Seed {options.seed}. " + (
        f"A NEGATIVE CONTROL, without {options.broken}." if options.broken else "All checks on."
    )
    publish("storm", facts, (title, ("", "found"), rows), as_json=options.json)


_SHOWN = (
    *("kills", "killed", "seconds", "planted", "wrong_by_last_damage", "healed", "ended"),
    *("orphans", "orphans_with_data", "orphans_collected", "parts_leaked"),
    *("processes", "slots", "threads", "files"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("storm", __doc__)
    made.set_defaults(direct_io="auto")
    add = made.add_argument
    add("--kills", type=positive, default=200, help="(200)")
    add("--mean-s", type=positive_float, default=0.25, help="between two kills (0.25)")
    add("--seed", type=int, default=1, help="of moments, damage, keys and kinds of writers (1)")
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
