"""A plot of the curve: hit ratio over the size of the root. matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from ..exits import UsageError
from ..terminal import iec
from .curve import Point

_ENDINGS = (".svg", ".png")


def check(path: str) -> None:
    """Raise UsageError for a plot that could not be drawn: before the work, not after it."""
    if os.path.splitext(path)[1].lower() not in _ENDINGS:
        raise UsageError(f"--plot: found {path!r}, expected a name that ends in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            '--plot: matplotlib is not installed; it comes with fskv\'s extra "report"'
        )


def draw(path: str, points: Sequence[Point], best: Point, num_blocks: int, name: str) -> None:
    """Draw the curve and what a root without a bound would hit; raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state
    axes = figure.subplots()
    sizes = [point.nbytes or 0 for point in points]
    axes.plot(sizes, [100 * point.hits / num_blocks for point in points], marker="o")
    axes.axhline(100 * best.hits / num_blocks, linestyle="--", color="C7", label="no bound")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: iec(nbytes))
    axes.set(xlabel="size of the root", ylabel="hit ratio of blocks, %", title=name)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
