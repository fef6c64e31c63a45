"""Plots as inline SVG: pure functions from numbers to text.

Each plot is as wide as the page: what lies along x is in percent, text keeps its size, so that it can be read
on a telephone. Colours are classes, which the page defines for light and dark. A plot carries a title and a
description for those who do not see it; the page gives its numbers as a table beside it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HEIGHT = 180  # of the area of a plot; labels come below
_LABELS = 24
_STEPS = (1, 2, 2.5, 5)


@dataclass(frozen=True, slots=True)
class Tick:
    at: float  # share of the width
    text: str


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def nice_steps(most: float, wanted: int = 4, base: float = 10.0) -> list[float]:
    """Return the values of grid lines from 0 to at least `most`: round numbers, about `wanted`.

    `base` 1024 makes numbers that are round in IEC units.
    """
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    unit = base ** math.floor(math.log(most, base)) if base != 10.0 else 1.0
    rough = most / unit / wanted
    power = 10 ** math.floor(math.log10(rough))
    step = next((s * power for s in (*_STEPS, 10) if s * power >= rough - 1e-12), 10 * power) * unit
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def columns(
    name: str,
    title: str,
    description: str,
    values: Sequence[float],
    labels: Sequence[str],
    said: Sequence[str],
    write: Callable[[float], str],
    base: float = 10.0,
) -> str:
    """Draw a histogram. `said` is what a pointer on a column shows; `write` words the grid lines."""
    steps = nice_steps(max(values, default=0), base=base)
    top = steps[-1]
    slot = 100 / max(1, len(values))
    parts = [_grid(steps, write)]
    for at, (value, label, text) in enumerate(zip(values, labels, said, strict=True)):
        tall = HEIGHT * value / top if value > 0 else 0.0
        # What is there can be seen, however little it is.
        tall = max(tall, 1.5) if value > 0 else 0.0
        parts.append(
            f'<rect class="mark" x="{slot * at + slot * 0.09:.2f}%" y="{HEIGHT - tall:.2f}" '
            f'width="{slot * 0.82:.2f}%" height="{tall:.2f}" rx="2">'
            f"<title>{escape(text)}</title></rect>"
        )
        parts.append(
            f'<text class="tick" x="{slot * (at + 0.5):.2f}%" y="{HEIGHT + 17}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    return _svg(name, title, description, "".join(parts))


def area(
    name: str,
    title: str,
    description: str,
    points: Sequence[tuple[float, float]],
    ticks: Sequence[Tick],
    write: Callable[[float], str],
    base: float = 10.0,
) -> str:
    """Draw a curve over a filled area. x runs from 0 to 1."""
    steps = nice_steps(max((y for _, y in points), default=0), base=base)
    top = steps[-1]
    line = " ".join(
        f"{'ML'[at > 0]}{1000 * x:.1f},{HEIGHT * (1 - y / top):.2f}"
        for at, (x, y) in enumerate(points)
    )
    parts = [_grid(steps, write)]
    if points:
        parts.append(
            f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 1000 {HEIGHT}" '
            f'preserveAspectRatio="none" class="inner">'
            f'<path class="fill" d="{line} L1000,{HEIGHT} L0,{HEIGHT} Z"/>'
            f'<path class="line" d="{line}" vector-effect="non-scaling-stroke"/></svg>'
        )
    for tick in ticks:
        anchor = "start" if tick.at < 0.02 else "end" if tick.at > 0.98 else "middle"
        parts.append(
            f'<text class="tick" x="{100 * tick.at:.2f}%" y="{HEIGHT + 17}" '
            f'text-anchor="{anchor}">{escape(tick.text)}</text>'
        )
    return _svg(name, title, description, "".join(parts))


def bar(share: float, *, over: bool = False) -> str:
    """Draw a share as a bar, for a cell of a table that says the number beside it."""
    wide = 100 * min(1.0, max(0.0, share))
    wide = max(wide, 0.8) if share > 0 else 0.0
    return (
        '<svg class="bar" width="100%" height="10" aria-hidden="true">'
        '<rect class="rail" x="0" y="0" width="100%" height="10" rx="3"/>'
        f'<rect class="{"over" if over else "mark"}" x="0" y="0" width="{wide:.2f}%" height="10" rx="3"/>'
        "</svg>"
    )


def _grid(steps: Sequence[float], write: Callable[[float], str]) -> str:
    parts = []
    for value in steps:
        y = HEIGHT * (1 - value / steps[-1])
        parts.append(
            f'<line class="{"axis" if value == 0 else "grid"}" x1="0" x2="100%" y1="{y:.2f}" y2="{y:.2f}"/>'
            f'<text class="tick" x="-8" y="{y + 4:.2f}" text-anchor="end">{escape(write(value))}</text>'
        )
    return "".join(parts)


def _svg(name: str, title: str, description: str, content: str) -> str:
    return (
        f'<svg class="plot" width="100%" height="{HEIGHT + _LABELS}" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(description)}</desc>{content}</svg>'
    )
