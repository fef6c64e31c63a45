"""The column of a progress display that says how many bytes a second, in the units of all other columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import ProgressColumn, Task
from rich.text import Text


class Speed(ProgressColumn):
    """`1.23 GiB/s`, with `iec` to write the bytes; rich's own has decimal units alone."""

    def __init__(self, iec: Callable[[float], str]) -> None:
        super().__init__()
        self._iec = iec

    def render(self, task: Task) -> Text:
        """Return the cell."""
        speed = task.finished_speed or task.speed
        words = "?" if speed is None else f"{self._iec(speed)}/s"
        return Text(words, style="progress.data.speed")
