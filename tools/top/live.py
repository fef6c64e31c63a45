"""The live screen of `fskv top`: the alternate screen, single keys, and everything put back at the end."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .frame import draw
from .watch import Frame

_QUIT, _DETAILS = b"qQ\x04", b"dD"  # the last of the first is Ctrl-D
_TICK_S = 1.0  # what is shown of silence goes on counting, and a new size is drawn
_FIXED, _TABLES = 15, 3  # lines beside the rows of tables, and tables that share the others


def can_draw() -> bool:
    """Return whether stdout is a terminal on which a screen can be drawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def run(frame: Callable[[], Frame], interval_s: float) -> None:
    """Draw until q is pressed. Raises KeyboardInterrupt."""
    console, rest = Console(highlight=False), False
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
    with _keys() as keys, live:
        while True:
            rows = max(2, (console.height - _FIXED) // _TABLES)
            shown = draw(frame(), console.width, rows=rows, first=not rest, rest=rest)
            hint = Text(f"  d {'overview' if rest else 'details'}   q quit", "dim")
            live.update(Group(shown, hint), refresh=True)
            if select.select(keys, [], [], min(interval_s, _TICK_S))[0]:
                pressed = b"q"  # or the terminal is gone
                with contextlib.suppress(OSError):
                    pressed = os.read(keys[0], 64) or b"q"
                if any(key in _QUIT for key in pressed):
                    return
                rest ^= any(key in _DETAILS for key in pressed)


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
        mode = termios.tcgetattr(fd)
        mode[6][termios.VSUSP] = (
            b"\x00"  # a process that Ctrl-Z stops would leave its screen behind
        )
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        yield [fd]
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)
