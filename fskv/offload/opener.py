"""Opens the namespaces of new weights beside an engine's thread, since a mount may hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fskv.observe.state_log import Once
from fskv.offload.mover import Opened

OPENING = "the namespace of new weights is being opened"  # why an engine rests meanwhile

_AGAIN_S = 5.0  # after a namespace that could not be opened
# An engine that steps without a pause hardly gives the interpreter to a thread: 1 s instead of 10 ms. So each
# of its first calls waits a moment.
_YIELD_S, _YIELDS = 0.002, 50


class Opener:
    """Opens the namespaces of epochs on a thread, one at a time: a mount that hangs keeps one thread."""

    def __init__(self, open_: Callable[[Any], Opened]) -> None:
        self._open = open_
        self._thread: threading.Thread | None = None
        self._opened: tuple[object, Opened] | None = None
        self._yields = 0  # that are left to the thread
        self._say = Once().say

    def take(self, epoch: object) -> Opened | None:
        """Return what was opened for the epoch, once; None: not yet. Call it again and again."""
        if self._thread is not None and self._thread.is_alive():
            if not self._yields:
                return None
            self._yields -= 1
            self._thread.join(_YIELD_S)
            if self._thread.is_alive():
                return None
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == epoch:
            return opened[1]
        self._yields = _YIELDS
        self._thread = threading.Thread(
            target=self._run, args=(epoch,), name="fskv-epoch", daemon=True
        )
        with suppress(RuntimeError):  # no thread can be had
            self._thread.start()
        return None

    def _run(self, epoch: object) -> None:
        try:
            self._opened = epoch, self._open(epoch)
        except Exception as error:
            self._say(f"the namespace of new weights cannot be opened: {error}", logging.WARNING)
            time.sleep(_AGAIN_S)
