"""What the benchmarks print: a table for people, one JSON line for programs, an exit code for both."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.rig import BenchmarkError
from fskv.errors import FskvError

PLAIN_WIDTH = 130  # of a table that goes into a file or a pipe

_plain = None if sys.stderr.isatty() else PLAIN_WIDTH
_err = Console(stderr=True, highlight=False, width=_plain)


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float | int]:
    """Return median, least, greatest and number of the values, ready for JSON."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "rounds": len(values),
    }


def show(value: dict[str, float | int], digits: int = 2) -> str:
    """Return a spread as the tables show it."""
    return f"{value['median']:.{digits}f} [{value['min']:.{digits}f} - {value['max']:.{digits}f}]"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def say(text: str) -> None:
    """Print one line of progress on stderr."""
    _err.print(text, markup=False)


def publish(
    name: str,
    facts: dict[str, Any],
    table: tuple[str, Sequence[str], Sequence[Sequence[str]]],
    *,
    as_json: bool,
) -> None:
    """Print the table (title, columns, rows), or the facts with the machine's as one JSON line."""
    if as_json:
        machine = {
            "cpus": len(os.sched_getaffinity(0)),
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        print(json.dumps({"benchmark": name, **facts, "machine": machine}))
        return
    title, columns, rows = table
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, column in enumerate(columns):
        shown.add_column(column, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(highlight=False, markup=False, width=width, soft_wrap=False)
    console.print(title)
    console.print(shown)


def judged(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    report: Callable[[dict[str, Any], argparse.Namespace], None],
) -> int:
    """Measure and report as `command`; 1 where the facts say by "good" that not all was well."""

    def run() -> int:
        facts = measure(options)
        report(facts, options)
        return 0 if facts.get("good", True) else 1

    return command(f"benchmarks.{name}", run)


def command(name: str, run: Callable[[], int]) -> int:
    """Run a benchmark and return its exit code: 2 for what makes it impossible, 130 after Ctrl-C."""
    # `kill` and a closed terminal end it as Ctrl-C does, which a shell may have made it ignore.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return run()
    except (BenchmarkError, FskvError, OSError, ValueError) as error:
        say(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
