"""Progress of the demo: lines that say what it does, and how long it waits for an engine.

An engine is given up when it makes no progress, however long it has run by the clock. A busy machine makes
every step slower, but a step needs no more computing there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
from rich.console import Console
from rich.markup import escape

from demo.engine import RunningEngine

POLL_S = 0.1
BEAT_S = 15.0  # between two lines of something that takes long
LOG_LINES = 12
# The computing of one step, in seconds of all CPUs; the longest step takes about 60.
STEP_CPU_S = 300.0 * len(os.sched_getaffinity(0))
# An engine that computes for less than IDLE_CPU_S in IDLE_S waits for something that does not come.
IDLE_S, IDLE_CPU_S = 120.0, 2.0


class StoryError(Exception):
    """A part of the demo is not as it must be; the message names the fault in one line."""


class Lines:
    """Prints finished steps and the running phase: live on a terminal, else now and then."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.status = self._console.status("")
        self.phase("")

    def say(self, text: str) -> None:
        self._console.print(text)

    def phase(self, text: str) -> None:
        """Begin a phase; `text` describes the phase."""
        self._phase, self._since, self._beat_s = text, time.monotonic(), BEAT_S

    def waiting(self) -> None:
        """Show that the phase goes on; callers do this all the time."""
        seconds = time.monotonic() - self._since
        text = f"    ... {escape(self._phase)}, {seconds:.0f} s"
        self.status.update(text)
        if not self._console.is_terminal and seconds >= self._beat_s:
            self._beat_s += BEAT_S
            self.say(text)

    def done(self, what: str, detail: str, problems: list[str]) -> None:
        mark = "[bold red]✗[/]" if problems else "[green]✓[/]"
        self.say(f"  {mark} {what}: {escape(detail)}")
        for text in problems:
            self.say(f"    [bold red]{escape(text)}[/]")

    def log(self, path: str | os.PathLike[str]) -> None:
        """Show the last lines of a log."""
        with open(path, errors="replace") as file:
            for line in file.readlines()[-LOG_LINES:]:
                self.say(f"    [dim]| {escape(line.rstrip()[:160])}[/]")


@contextmanager
def living(engine: RunningEngine, name: str, lines: Lines) -> Iterator[None]:
    """Kill an engine with all of its processes at the end of the block; a StoryError there gets its log."""
    try:
        yield
    except StoryError as error:
        lines.log(engine.log_path)
        raise StoryError(f"{name}: {error}; log: {engine.log_path}") from None
    finally:
        engine.kill()


def follow(pid: int, done: Callable[[], bool], lines: Lines) -> None:
    """Wait until one step of an engine is `done`; raises StoryError when that makes no progress any more."""
    begun_cpu_s = idle_cpu_s = _cpu_s(pid)
    idle_since = time.monotonic()
    while not done():
        time.sleep(POLL_S)
        lines.waiting()
        cpu_s, now = _cpu_s(pid), time.monotonic()
        if cpu_s - begun_cpu_s > STEP_CPU_S:
            raise StoryError(f"given up: it computed for {STEP_CPU_S:.0f} CPU seconds in vain")
        if cpu_s - idle_cpu_s > IDLE_CPU_S:
            idle_cpu_s, idle_since = cpu_s, now
        elif now - idle_since > IDLE_S:
            raise StoryError(f"given up: it has computed nothing for {IDLE_S:.0f} s")


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its descendants, those that ended included."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        engine = psutil.Process(pid)
        for process in (engine, *engine.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
    return total
