"""The options that the benchmarks share, and the types of their values."""

from __future__ import annotations

import argparse

IO_THREADS = 4


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def parser(name: str, description: str | None, *, io: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has, and with `io` those of moving files."""
    made = argparse.ArgumentParser(
        prog=f"benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    add("--dir", default="/dev/shm", help="where the files go (/dev/shm)")  # noqa: S108
    if not io:
        return made
    add("--direct-io", choices=("auto", "on", "off"), default="off", help="O_DIRECT (off)")
    add("--threads", type=positive, default=IO_THREADS, help=f"I/O threads ({IO_THREADS})")
    return made


def add_pages(made: argparse.ArgumentParser) -> None:
    """Add the options that say what the KV pages look like."""
    add = made.add_argument
    add("--chunk-kib", type=positive, default=2048, help="(2048)")
    add("--page-kib", type=positive, default=32, help="a block's bytes in one layer (32)")
    add("--layers", type=positive, default=16, help="KV tensors (16)")


def add_jobs(made: argparse.ArgumentParser) -> None:
    """Add the options that say how much is moved and how often."""
    add = made.add_argument
    add("--rounds", type=positive, default=7, help="(7)")
    add("--job-chunks", type=positive, default=32, help="chunks of a job (32)")


def add_traffic(made: argparse.ArgumentParser) -> None:
    """Add the options of traffic for some time."""
    add_jobs(made)
    add = made.add_argument
    add("--seconds", type=positive_float, default=1.0, help="of a loaded phase (1)")
    add("--step-ms", type=positive_float, default=5.0, help="between two polls of the worker (5)")
    add("--places", type=positive, default=128, help="chunks of KV to store; as many to load (128)")


def settings(options: argparse.Namespace) -> dict[str, object]:
    """Return what was asked for, ready for JSON."""
    return {name: value for name, value in vars(options).items() if name != "json"}
