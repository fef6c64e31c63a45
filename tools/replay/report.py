"""What a replay reports: JSON lines, a table for people, and a plot.

docs/benchmarks.md, "The lines of replay --json", describes every field; test_replay.py holds the two
together. matplotlib is imported by `plot` only.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from fskv.bounds.limits import GUARD_PART

from ..terminal import iec
from .trace import Trace, lru_hits

SCHEMA = 1  # raised when a field changes its meaning or goes; new fields do not raise it

_CURVE_POINTS = 16
# Where fskv does what it should, its line covers the other two: they are wider and dashed.
_STYLES: dict[str, dict[str, Any]] = {
    "ideal": {"color": "C7", "linestyle": "--", "linewidth": 2.5},
    "exact LRU": {"color": "C0", "linestyle": ":", "linewidth": 3.0},
    "fskv": {"color": "C3", "linestyle": "-", "linewidth": 1.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Some consecutive requests of the trace; counts are theirs alone, but for `requests`."""

    requests: int  # up to and with the last one
    trace_s: float
    seconds: float
    blocks: int
    hits: int
    ideal_hits: int
    lru_hits: int
    stored: int
    bytes_on_disk: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came out of a replay; see docs/benchmarks.md."""

    hit_ratio: float
    ideal_hit_ratio: float
    lru_hit_ratio: float
    requests: int
    blocks: int
    block_bytes: int
    file_bytes: int
    processes: int
    concurrent: bool
    speed: float | None
    continued: bool
    seconds: float
    bytes_written: int
    bytes_read: int
    loaded_files: int
    stored_files: int
    existing_files: int
    evicted_files: int
    failures: dict[str, int]
    wrong_bytes: int
    lookup_p50_s: float
    lookup_p99_s: float
    lookup_max_s: float
    lookup_s: float
    load_s: float
    store_s: float
    waited_s: float
    capacity_bytes: int | None
    capacity_blocks: int | None
    max_bytes_on_disk: int
    max_in_flight_bytes: int
    samples: int
    data_path: str

    @property
    def problems(self) -> list[str]:
        """Return what must never be, one sentence each."""
        found = []
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} loaded bytes differ from what was stored")
        if self.capacity_bytes is not None:
            # Until the leader has looked again a process knows only what it stores itself.
            most = self.processes * (self.capacity_bytes + self.capacity_bytes // GUARD_PART)
            if self.max_bytes_on_disk > most + self.max_in_flight_bytes:
                found.append(
                    f"{self.max_bytes_on_disk} bytes were on disk, expected at most {most} and "
                    f"{self.max_in_flight_bytes} in flight"
                )
        return found


def interval_line(interval: Interval) -> dict[str, object]:
    """Return an interval as an object of --json."""
    return {"type": "interval", **asdict(interval)}


def summary_line(summary: Summary) -> dict[str, object]:
    """Return the last object of --json."""
    line = {"type": "summary", "schema": SCHEMA, **asdict(summary)}
    return {**line, "problems": summary.problems}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 99th percentile (nearest rank) and maximum; zeros of nothing."""
    ordered = sorted(values) or [0.0]
    rank = (len(ordered) - 1) / 100
    return ordered[round(50 * rank)], ordered[math.ceil(99 * rank)], ordered[-1]


# --- for people -------------------------------------------------------------------------------


def table(summary: Summary) -> Table:
    """Lay out a summary, the hit ratios first."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown.add_column(f"{summary.requests:,} requests, {summary.blocks:,} blocks", no_wrap=True)
    shown.add_column("", justify="right", no_wrap=True)
    shown.add_column("")
    behind = 100 * (summary.lru_hit_ratio - summary.hit_ratio)
    bound = "unlimited"
    if summary.capacity_bytes is not None:
        bound = f"{iec(summary.capacity_bytes)} or {summary.capacity_blocks:,} blocks"
    engines = f"{summary.processes} process" + "es" * (summary.processes > 1)
    turns = "at the same time" if summary.concurrent else "one request at a time"
    rows = [
        ("hit ratio", _share(summary.hit_ratio), "of blocks; loaded and compared"),
        (
            "exact LRU",
            _share(summary.lru_hit_ratio),
            f"{bound}; fskv {round(-behind, 3) + 0.0:+.3f} points",
        ),
        ("ideal", _share(summary.ideal_hit_ratio), "an unlimited cache"),
        ("time", f"{summary.seconds:.1f} s", f"{engines}, {turns}"),
        (
            "lookup of a request",
            f"{_ms(summary.lookup_p50_s)}",
            f"median; 99 % {_ms(summary.lookup_p99_s)}, most {_ms(summary.lookup_max_s)}",
        ),
        ("written", iec(summary.bytes_written), f"{summary.stored_files:,} files"),
        ("read", iec(summary.bytes_read), f"{summary.loaded_files:,} files"),
        ("found there", f"{summary.existing_files:,}", "files, by a store"),
        ("evicted", f"{summary.evicted_files:,}", "files"),
        (
            "most on disk",
            iec(summary.max_bytes_on_disk),
            f"{summary.samples:,} walks; most in flight {iec(summary.max_in_flight_bytes)}",
        ),
        ("waited for room", f"{summary.waited_s:.1f} s", "pruning; in all processes"),
        ("wrong bytes", f"{summary.wrong_bytes:,}", ""),
        *((f"failed: {name}", f"{count:,}", "") for name, count in summary.failures.items()),
        ("data path", "", summary.data_path),
    ]
    for row in rows:
        shown.add_row(*row)
    return shown


def _share(ratio: float) -> str:
    return f"{100 * ratio:.3f} %"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


# --- the plot ---------------------------------------------------------------------------------


def check_plot(path: str) -> None:
    """Raise ValueError for a plot that could not be drawn: known before a run, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot: matplotlib is not installed (fskv\'s extra "plot")')
    if os.path.splitext(path)[1].lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: found {path!r}, expected a name ending in .png, .svg or .pdf")
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory) or not os.access(directory, os.W_OK):
        raise ValueError(f"--plot: {directory} is no directory that can be written")


def plot(path: str, summary: Summary, intervals: Sequence[Interval], trace: Trace) -> None:
    """Draw the hit ratio over the trace's time, and over capacity; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state
    over_time, over_capacity = figure.subplots(1, 2)

    minutes = [interval.trace_s / 60 for interval in intervals]
    for name, counts in (
        ("ideal", [interval.ideal_hits for interval in intervals]),
        ("exact LRU", [interval.lru_hits for interval in intervals]),
        ("fskv", [interval.hits for interval in intervals]),
    ):
        shares = [
            100 * count / (interval.blocks or 1)
            for count, interval in zip(counts, intervals, strict=True)
        ]
        marker = "o" if len(intervals) == 1 else ""
        over_time.plot(minutes, shares, marker=marker, label=name, **_STYLES[name])
    over_time.set(xlabel="time in the trace, minutes", ylabel="hit ratio of blocks, %")
    over_time.set_ylim(bottom=0)
    over_time.legend()

    capacities = _capacities(len({i for r in trace.requests for i in r.hash_ids}))
    curve = [
        100 * sum(lru_hits(trace.requests, capacity)) / max(1, summary.blocks)
        for capacity in capacities
    ]
    over_capacity.plot(capacities, curve, label="exact LRU", **_STYLES["exact LRU"])
    over_capacity.axhline(100 * summary.ideal_hit_ratio, label="ideal", **_STYLES["ideal"])
    at = summary.capacity_blocks or capacities[-1]
    over_capacity.plot([at], [100 * summary.hit_ratio], "o", color="C3", label="fskv")
    over_capacity.set_xscale("log")
    over_capacity.set(xlabel=f"capacity, blocks of {summary.block_bytes:,} bytes")
    over_capacity.set_ylim(bottom=0)
    over_capacity.legend()
    figure.savefig(path, dpi=120)


def _capacities(num_unique: int) -> list[int]:
    """Return capacities from a few blocks to all of the trace's, evenly on a logarithmic axis."""
    most = max(2, num_unique)
    least = min(most, max(1, most // 1000))
    steps = _CURVE_POINTS - 1
    return sorted({round(least * (most / least) ** (i / steps)) for i in range(_CURVE_POINTS)})
