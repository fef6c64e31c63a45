"""What fskv does on a machine with a GPU: `make gpu [PART=a] [OUT=DIRECTORY] [DIR=STORAGE]`.

Each part ends within 560 s, whatever happens. Without a part all three run in a row. A part begins with facts
about the machine and fskv's C extension. Where a copy of that cannot be made, one sentence says so, and
nothing more is run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import page, plan
from benchmarks.gpu.steps import Outcome, run

_REPOSITORY = Path(__file__).resolve().parents[2]
PART_S = 540.0  # of steps; what a killed one takes to end comes on top
PREFIX: tuple[str, ...] = ()  # before a step's command; a test rehearses the steps with one


def run_part(part: str, *, quick: bool, directory: str, out: str) -> bool:
    """Run a part and write the page after each step; return whether the parts that follow make sense."""
    steps = plan.steps(part, quick=quick)
    outcomes = [Outcome(step.name) for step in steps]
    end = time.monotonic() + PART_S
    try:
        for step, outcome in zip(steps, outcomes, strict=True):
            print(f"{part}: {step.name} ...", end=" ", file=sys.stderr, flush=True)
            run(step, directory, outcome, end - time.monotonic(), PREFIX)
            print(f"{outcome.status} {outcome.why}"[:100], file=sys.stderr, flush=True)
            page.write(out, part, outcomes)
            if step.name == plan.EXTENSION and outcome.status != "good":
                print(f"make gpu: {outcome.why}", file=sys.stderr)
                return False
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the page comes first
        page.write(out, part, outcomes)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("part", nargs="*", metavar="PART", help="a: copies, b: rates, c: GDS and repetitions (all)")
    add("--dir", default=".cache", help="a directory on the storage to use (.cache)")
    add("--out", default=".cache/gpu", help="where the page goes (.cache/gpu)")
    add("--quick", action="store_true", help="small sizes: a rehearsal")
    options = made.parse_args(arguments)
    if not set(options.part) <= set(plan.PARTS):
        made.error("a part is a, b or c")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    directory, out = map(os.path.abspath, (options.dir, options.out))
    os.chdir(_REPOSITORY)
    # Of this checkout, also where fskv is installed from another one.
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for place in (directory, out):
        os.makedirs(place, exist_ok=True)
    try:
        for part in options.part or plan.PARTS:
            if not run_part(part, quick=options.quick, directory=directory, out=out):
                return 1
    except KeyboardInterrupt:
        return 130
    finally:
        text, good = page.as_text([out])
        print(text, end="")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
