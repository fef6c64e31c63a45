"""The live screen of `fskv top`, drawn by rich on the terminal's alternate screen until q or Ctrl-C."""

from __future__ import annotations

import bisect
import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live

from .frame import draw
from .watch import Frame

_QUIT = b"qQ\x04"  # the last is Ctrl-D
_TICK_S = 1.0  # the shown length of a silence goes on counting, and a new size is drawn


def can_draw() -> bool:
    """Return whether stdout is a terminal on which a screen can be drawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def run(frame: Callable[[], Frame], interval_s: float) -> None:
    """Show a new frame each `interval_s` seconds, until q is pressed. Raises KeyboardInterrupt."""
    console = Console(highlight=False)
    # A process that Ctrl-Z stops would leave its screen behind.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
    with _keys() as keys, live:
        while True:
            live.update(fitting(frame(), console), refresh=True)
            if select.select(keys, [], [], min(interval_s, _TICK_S))[0]:
                pressed = b"q"  # or the terminal is gone
                with contextlib.suppress(OSError):
                    pressed = os.read(keys[0], 64) or b"q"
                if any(key in _QUIT for key in pressed):
                    return


def fitting(frame: Frame, console: Console) -> Group:
    """Return the part that fits on the screen: all, or the rows that fit without namespaces."""
    width, height = console.width, console.height

    def is_too_high(rows: int, whole: bool = False) -> bool:
        lines = console.render_lines(draw(frame, width, rows, whole=whole), pad=False)
        return len(lines) > height

    if not is_too_high(height, whole=True):
        return draw(frame, width, height)
    fit = bisect.bisect_left(range(1, height + 1), True, key=is_too_high)
    return draw(frame, width, max(2, fit), whole=False)


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Read single keys, without echo, while the body runs; yields where they can be read from."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        # A job in the background would be stopped by a change of the terminal's mode.
        foreground = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, termios.error):
        foreground = False
    if not foreground:
        yield []
        return
    try:
        tty.setcbreak(fd)
        yield [fd]
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)
