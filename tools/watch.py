"""Keeps a root within bounds for as long as it runs, beside engines and other watchers: `fskv prune --watch`.

It takes part as an engine's maintenance process does (fskv.maintenance): its limits are in a claim, so that
they hold for every engine while it lives, and if it has the lease it counts and prunes for all.

All that touches the root happens on one daemon thread (and the worker threads of its walks). The main thread
only waits for a signal, and leaves without that thread where the root hangs: nobody can end a system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from fskv.claims import Claim, Limits
from fskv.maintenance import Maintainer, Seen, pause_after
from fskv.process import unique_name

from .exits import CommandError, Exit
from .exporter import Watched
from .interrupt import stopped_by_signals
from .terminal import iec, say

_IDLE_S = 1.0
_LEAVE_S = 10.0  # for the claim and the lease; the root does not answer then
_TOLD_S = 60.0  # how often what was pruned is said


class _Said(logging.Handler):
    """Shows what fskv.maintenance logs as the rest: names from a disk are in it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


class Watcher:
    """One watcher: `start`, `watched` from any thread, `run` on the main one."""

    def __init__(self, root: str, limits: Limits) -> None:
        self._root = root
        self._claim = Claim(unique_name(), None, None, limits)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="fskv-watch", daemon=True)
        # Written by that thread, each as one assignment.
        self._seen: Seen | None = None
        self._answered_at = time.monotonic()
        self._failure: BaseException | None = None

    def watched(self) -> Watched:
        return Watched(self._seen, time.monotonic() - self._answered_at)

    def run(self, told: Callable[[Seen], None] = lambda _: None) -> None:
        """Watch until a signal comes; `told` is called about once a minute with what was seen.

        Raises CommandError where it cannot go on. Where the root does not answer, the process ends here.
        """
        logger = logging.getLogger("fskv")
        handler = _Said()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            with stopped_by_signals() as stop:
                self._thread.start()
                self._wait(stop, told)
                self._stop.set()
                self._thread.join(_LEAVE_S)
                if self._thread.is_alive():
                    say(f"{self._root} does not answer: leaving without giving back the lease")
                    os._exit(Exit.PARTIAL)
        finally:
            logger.removeHandler(handler)
        if self._failure is not None:
            raise CommandError(f"ended: {self._failure!r}")

    def _wait(self, stop: threading.Event, told: Callable[[Seen], None]) -> None:
        told_at, held = float("-inf"), False
        while not stop.wait(0.2) and self._thread.is_alive():
            seen = self._seen
            if seen is None or seen.usage is None:
                continue
            if seen.holder != held or time.monotonic() - told_at > _TOLD_S:
                told_at, held = time.monotonic(), seen.holder
                told(seen)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error

    async def _serve(self) -> None:
        maintainer = Maintainer(self._root, self._claim)
        interval_s = _IDLE_S
        while not self._stop.is_set():
            started = time.monotonic()
            busy = await maintainer.try_step()
            if maintainer.seen is not self._seen:
                self._seen, self._answered_at = maintainer.seen, time.monotonic()
            pause_s = pause_after(time.monotonic() - started)
            interval_s = pause_s if busy else min(_IDLE_S, 1.5 * interval_s)
            await asyncio.to_thread(self._stop.wait, interval_s)
        with contextlib.suppress(OSError):
            await maintainer.close()


def sentence(seen: Seen) -> str:
    """Say what was seen, for a person."""
    usage = seen.usage
    assert usage is not None
    who = "counts and prunes" if seen.holder else "another process counts and prunes"
    return (
        f"{iec(usage.nbytes)} in {usage.num_files:,} files, {iec(seen.space.free_nbytes)} free;"
        f" {who}: {iec(usage.pruned_nbytes)} in {usage.pruned_files:,} files pruned so far"
    )
