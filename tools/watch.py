"""Keeps a root within bounds for as long as it runs, beside engines and other watchers: `fskv prune --watch`.

It takes part like an engine's maintenance process (fskv.bounds.maintenance). Its limits are in a heartbeat,
so they hold for every engine while it lives. If it has the lease, it counts and prunes for all.

If there is no root yet (a node's first engine has not started), it waits for one, with its metrics up.

All that touches the root happens on one daemon thread (and the worker threads of its walks). The main thread
only waits for a signal. If the root hangs, it leaves without the daemon thread, because a system call cannot
be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.maintenance import LOOK_S, Maintainer, Seen
from fskv.errors import FskvError
from fskv.root.process_id import unique_name
from fskv.root.root import Root

from .exits import CommandError, Exit, NotARoot
from .exporter import Watched
from .interrupt import stopped_by_signals
from .root_view import RootView
from .terminal import iec, say

_AWAIT_S = 2.0  # between looks for a root that is not there yet
_LEAVE_S = 10.0  # for the heartbeat and the lease; the root does not answer then


class _Said(logging.Handler):
    """Prints the log of fskv.bounds.maintenance by `say`: its names from a disk become printable."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage().removeprefix("fskv: "))


class Watcher:
    """One watcher: `run` is for the main thread, `watched` for any thread."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._stop = threading.Event()
        self._started_at = time.monotonic()
        # Written by the thread that touches the root, each as one assignment.
        self._seen: Seen | None = None
        self._answered_at: float | None = None
        self._failure: BaseException | None = None

    def watched(self) -> Watched:
        answered_at = self._answered_at or self._started_at
        return Watched(self._seen, time.monotonic() - answered_at)

    def run(self, limits: Limits, check: Callable[[RootView], None]) -> None:
        """Wait for the root, let `check` refuse it, and watch until a signal comes.

        Raises NotARoot for what is there and will not become a root by itself, what `check` raises, and
        CommandError where it cannot go on. Where the root does not answer, the process ends here.
        """
        beat = Heartbeat(unique_name(), None, None, limits)
        thread = threading.Thread(
            target=self._main, args=(beat, check), name="fskv-watch", daemon=True
        )
        logger = logging.getLogger("fskv")
        handler = _Said()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            with stopped_by_signals() as stop:
                thread.start()
                self._wait(thread, stop)
                self._stop.set()
                thread.join(_LEAVE_S)
                if thread.is_alive():
                    say(f"{self._root} does not answer: leaving without giving back the lease")
                    os._exit(Exit.PARTIAL)
        finally:
            logger.removeHandler(handler)
        if isinstance(self._failure, CommandError):
            raise self._failure
        if self._failure is not None:
            raise CommandError(f"ended: {self._failure!r}")

    def _wait(self, thread: threading.Thread, stop: threading.Event) -> None:
        """Wait for a signal, and name the leader when it changes."""
        held = None
        while not stop.wait(0.2) and thread.is_alive():
            seen = self._seen
            if seen is not None and seen.usage is not None and seen.holder != held:
                held = seen.holder
                size = f"{iec(seen.usage.nbytes)} in {seen.usage.num_files:,} files"
                say(f"{size}: {'this' if held else 'another'} process counts and prunes")

    # --- on the thread that touches the root --------------------------------------------------

    def _main(self, beat: Heartbeat, check: Callable[[RootView], None]) -> None:
        try:
            view = self._await_root()
            if view is not None:
                check(view)
                say(f"watching {self._root}")
                asyncio.run(self._serve(beat))
        except BaseException as error:
            self._failure = error

    def _await_root(self) -> RootView | None:
        """Return the root once it is there; None where a signal came first."""
        while not self._stop.is_set():
            try:
                return RootView.open(self._root)
            except NotARoot:
                if not _may_become_a_root(self._root):
                    raise
            if self._answered_at is None:
                say(f"waiting for an fskv root at {self._root}: no engine has made one yet")
            self._answered_at = time.monotonic()
            self._stop.wait(_AWAIT_S)
        return None

    async def _serve(self, beat: Heartbeat) -> None:
        maintainer = Maintainer(self._root, beat)
        while not self._stop.is_set():
            started = time.monotonic()
            pause_s = await maintainer.try_step()
            took_s = time.monotonic() - started
            if maintainer.seen is not self._seen:
                self._seen, self._answered_at = maintainer.seen, time.monotonic()
            # However slow the root is, few requests to a server: as fskv.bounds.serve.
            await asyncio.to_thread(self._stop.wait, max(pause_s, min(LOOK_S, 2 * took_s)))
        with contextlib.suppress(OSError):
            maintainer.close()


def _may_become_a_root(path: str) -> bool:
    """Return whether an engine may yet make a root of this path: nothing or an empty directory is there."""
    with contextlib.suppress(FskvError):
        Root.open(path, create=True, writable=False)  # passes over an empty directory
        return True
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    return False
