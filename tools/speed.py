"""The column of a progress display that says how many bytes a second, in the units of all other columns."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

from .terminal import iec


class Speed(ProgressColumn):
    """`1.23 GiB/s`; rich's own has decimal units alone."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        words = "?" if speed is None else f"{iec(speed)}/s"
        return Text(words, style="progress.data.speed")
