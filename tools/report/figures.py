"""The figure of a report, drawn by matplotlib: SVG as `data:` URLs, one for light pages and one for dark.

An image holds no text of a root, and what is in it can do nothing to the page around it.
"""

from __future__ import annotations

import base64
import io
import math

from ..survey import DAY, EDGES, HOUR, MINUTE, Walk
from ..terminal import iec

# Of the whole page. On its grounds text has a contrast of 4.5 at least, a mark of 3 (WCAG 2.2).
LIGHT = {"card": "#ffffff", "text": "#57606a", "rule": "#d8dee4", "mark": "#2f6fb2"}
DARK = {"card": "#181d24", "text": "#a3adb9", "rule": "#313a45", "mark": "#63a8ee"}
_TICKS = (
    *((10 * MINUTE, "10 min"), (HOUR, "1 h"), (6 * HOUR, "6 h"), (DAY, "1 d"), (7 * DAY, "7 d")),
    *((30 * DAY, "30 d"), (180 * DAY, "180 d"), (730 * DAY, "2 y")),
)


def by_last_use(walk: Walk) -> dict[str, str]:
    """Draw the bytes to remove over the age of the last use; return the images as URLs."""
    return {"light": _curve(walk, LIGHT), "dark": _curve(walk, DARK)}


def _curve(walk: Walk, colours: dict[str, str]) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator

    style = {f"{name}.color": colours["text"] for name in ("text", "xtick", "ytick")}
    style |= {"axes.edgecolor": colours["rule"], "grid.color": colours["rule"]}
    last = min(len(EDGES) - 1, max(walk.by_age.nonzero()[0], default=0) + 2)
    beyond = walk.by_age[::-1].cumsum()[::-1][:last]
    unit = 1024 ** int(math.log(max(1, beyond[0]), 1024))  # grid lines are round in IEC units
    with rc_context({**style, "svg.hashsalt": "fskv", "font.size": 10, "ytick.major.size": 0}):
        canvas = Canvas(figsize=(9.0, 3.2), layout="constrained", facecolor="none")
        axes = canvas.add_subplot(facecolor="none")
        axes.fill_between(EDGES[:last], beyond / unit, color=colours["mark"], alpha=0.25, lw=0)
        axes.plot(EDGES[:last], beyond / unit, color=colours["mark"], linewidth=1.8)
        axes.set_xscale("symlog", linthresh=10 * MINUTE, linscale=0.5)
        axes.set_xlim(0, EDGES[last])
        axes.set_ylim(0)
        ticks = {at: label for at, label in _TICKS if at < EDGES[last]}
        axes.set_xticks([*ticks], [*ticks.values()])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(lambda value, _: iec(value * unit))
        axes.grid(axis="y", linewidth=0.7)
        axes.spines[["top", "right", "left"]].set_visible(False)
        file = io.BytesIO()
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
