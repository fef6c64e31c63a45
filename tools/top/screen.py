"""The terminal of `fskv top`: the alternate screen, single keys, and everything put back at the end.

However it ends (q, Ctrl-C, a signal, an error), the terminal's mode is restored and the alternate screen is
left. Ctrl-Z is off meanwhile: a stopped process would leave its screen behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..exits import UsageError

_QUIT = b"qQ\x04"  # the last is Ctrl-D
_TICK_S = 1.0  # what is shown of silence goes on counting, whatever the interval


def check_terminal() -> None:
    """Raise UsageError where no screen can be drawn."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        raise UsageError(
            "top: this is no terminal that a screen can be drawn on; give --once or --json"
        )


def run(draw: Callable[[int, int, bool], list[Text]], interval_s: float, count: int | None) -> None:
    """Draw until q is pressed, or `count` intervals are over. Raises KeyboardInterrupt, SystemExit.

    `draw` gets width, height and whether only ASCII can be shown.
    """
    console = Console(highlight=False)
    ascii_only = not console.encoding.lower().startswith("utf")

    def frame() -> Text:
        size = console.size
        lines = draw(size.width, size.height, ascii_only)
        return Text("\n", no_wrap=True, overflow="crop").join(lines)

    ends_at = None if count is None else time.monotonic() + count * interval_s
    with _Signals() as signals, _keys() as keys:
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
        with live:
            while ends_at is None or time.monotonic() < ends_at:
                live.update(frame(), refresh=True)
                wait_s = min(interval_s, _TICK_S)
                if ends_at is not None:
                    wait_s = min(wait_s, max(0.0, ends_at - time.monotonic()))
                ready, _, _ = select.select([signals.fd, *keys], [], [], wait_s)
                if signals.fd in ready:
                    signals.take()
                if any(fd in ready and _quits(fd) for fd in keys):
                    return


def _quits(fd: int) -> bool:
    """Whether q was pressed, or the terminal is gone."""
    try:
        pressed = os.read(fd, 64)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not pressed or any(key in _QUIT for key in pressed)


class _Signals:
    """SIGTERM and SIGHUP end us as an exception would, and a new size of the terminal is drawn at once."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, object] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum, handler in (
            (signal.SIGWINCH, self._resized),
            (signal.SIGTERM, self._ended),
            (signal.SIGHUP, self._ended),
        ):
            self._before[signum] = signal.signal(signum, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _resized(self, signum: int, frame: FrameType | None) -> None:
        """Nothing: the byte in the pipe wakes the loop."""

    def _ended(self, signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Read single keys, without echo, while the body runs; yields where they can be read from."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        # A job in the background would be stopped by the next line.
        foreground = os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, ValueError, termios.error):
        yield []
        return
    if not foreground:
        yield []
        return
    mode = termios.tcgetattr(fd)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
    mode[6][termios.VSUSP] = b"\x00"
    try:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        yield [fd]
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)
