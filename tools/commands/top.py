"""`fskv top`: its options; the work is done in `tools.survey` and `tools.top`."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from typing import Annotated

import typer

from fskv.errors import FskvError

from .. import endpoint
from ..exits import CommandError, Exit
from ..options import RootOption, seconds

_FIRST_S = 5.0  # that answers are waited for, beside the interval
_NO_TERMINAL = 140  # columns


def command(
    root: RootOption,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="URL[,URL]",
            help="Metrics of engines: HOST:PORT, or a whole URL.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3600, callback=seconds, help="Seconds between two looks."),
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, after one interval, and end.")
    ] = False,
) -> None:
    """Watch a root and its engines: activity, room, hits and faults.

    It reads the shared files of engines. Where no engine counts the root, it counts the files itself.
    --metrics adds hits. The key q ends it. Without a terminal it prints one frame, as with --once.
    """
    from rich.console import Console

    from ..top import live, watch
    from ..top.frame import draw

    urls = endpoint.addresses(metrics)
    until_s = time.monotonic() + interval + _FIRST_S
    with closing(watch.Watches(root, urls, interval)) as watches:
        watches.root.wait(until_s)
        problem = watches.root.problem
        if isinstance(problem, CommandError | FskvError | OSError):
            raise problem  # it is no root
        if not once and live.can_draw():
            live.run(watches.frame, interval)
            return
        watches.wait(until_s, 2)
        frame = watches.frame()
    width = shutil.get_terminal_size((_NO_TERMINAL, 0)).columns
    Console(highlight=False, width=width).print(draw(frame, width))
    if frame.partial:
        raise typer.Exit(Exit.PARTIAL)
