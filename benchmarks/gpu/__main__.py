"""The first hour on a machine with a GPU: `make gpu`, or its three parts one by one, of 560 s at most each.

Each step is a process of its own, bounded in time. Whatever happens, Ctrl-C included, `page.txt` and
`page.json` in --out say what was run, measured, skipped and why; parts add to the page that they find there.
Nothing is begun where the C extension does not work.

    python -m benchmarks.gpu [a] [b] [c] [--dir STORAGE] [--out DIRECTORY] [--only NAME...]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import page, plan
from benchmarks.gpu.steps import Outcome, Step, adopt_orphans, run

_REPOSITORY = Path(__file__).resolve().parents[2]
_SIMULATION = str(_REPOSITORY / "tests" / "lab" / "on_simulation.py")
_SIMULATED = "SIMULATED: no GPU was used, and no figure is one's. "


def run_all(steps: Sequence[Step], options: argparse.Namespace) -> list[Outcome]:
    """Run the steps in order and write the page after each of them; return how they went."""
    outcomes = [Outcome(step.name) for step in steps]
    before = page.outcomes(options.out, but={step.name for step in steps})
    begin = time.monotonic()
    prefix = (_SIMULATION,) if options.simulated else ()
    started = time.strftime("%Y-%m-%d %H:%M")

    def write() -> None:
        title = f"{_SIMULATED if options.simulated else ''}fskv on a GPU, {started}, "
        facts = {"started": started, "simulated": options.simulated}
        page.write(
            options.out, f"{title}{time.monotonic() - begin:.0f} s", facts, [*before, *outcomes]
        )

    try:
        for step, outcome in zip(steps, outcomes, strict=True):
            write()
            print(f"{step.name} ...", end=" ", file=sys.stderr, flush=True)
            if options.simulated and step.real:
                outcome.status, outcome.why = "skipped", "not over the simulation"
            else:
                run(step, options.dir, outcome, prefix)
            print(f"{outcome.status} {outcome.why}"[:100], file=sys.stderr, flush=True)
            if step.name == plan.EXTENSION and outcome.status != "good":
                break
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the page comes first
        write()
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="make gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("part", nargs="*", metavar="PART", help="a: looks, b: rates, c: checks (all)")
    add("--dir", default=".cache", help="a directory on the storage to use (.cache)")
    add("--out", default=".cache/gpu", help="where the page goes (.cache/gpu)")
    add("--only", nargs="+", metavar="NAME", help="steps whose names begin so")
    add("--quick", action="store_true", help="small sizes: a rehearsal")
    add("--simulated", action="store_true", help="over the simulated driver of the tests")
    options = made.parse_args(arguments)
    parts = options.part or plan.PARTS
    if unknown := set(parts) - set(plan.PARTS):
        made.error(f"no such part: {', '.join(sorted(unknown))}; expected a, b or c")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    options.dir, options.out = map(os.path.abspath, (options.dir, options.out))
    os.chdir(_REPOSITORY)
    # Of this checkout, also where fskv is installed from another one.
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # What plays a GPU is slow, and machines without one are busy.
    times = 5 if options.simulated else 1
    found = {step.name: step for part in parts for step in plan.steps(part, quick=options.quick)}
    steps = [
        replace(step, limit_s=times * step.limit_s)
        for step in found.values()
        if not options.only or step.name.startswith(tuple(options.only))
    ]
    for directory in (options.dir, options.out):
        os.makedirs(directory, exist_ok=True)
    adopt_orphans()
    try:
        outcomes = run_all(steps, options)
    except KeyboardInterrupt:
        return 130
    finally:
        with open(os.path.join(options.out, "page.txt")) as file:
            print(file.read(), end="")
    return 1 if any(outcome.status in ("failed", "killed") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
