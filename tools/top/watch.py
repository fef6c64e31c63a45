"""Looks at a root and at endpoints again and again, each on a daemon thread of its own.

Whatever hangs, hangs there: who draws reads the last answer and how long the present look has lasted. One
thread each, which looks, publishes and sleeps; no look begins before the one before it is over, so nothing
piles up. Fields are written by the thread and read by others, each in one assignment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .. import endpoint
from ..exits import CommandError
from ..root_view import RootView
from .count import Count, Counter
from .look import Look, look_at

T = TypeVar("T")
TIMEOUT_S = 5.0  # of one answer of an endpoint
# Counting may take long on a large root: it is at rest at least ten times as long as it takes.
_COUNT_REST = 10
_COUNT_LEAST_S = 5.0


class Watch(Generic[T]):
    """Calls `look` every `interval_s` and keeps what it returned last."""

    def __init__(self, name: str, look: Callable[[], T], rest_s: Callable[[float], float]) -> None:
        """`rest_s` says how long to rest after a look that took so many seconds."""
        self.name = name
        self._look = look
        self._rest_s = rest_s
        self._wake = threading.Event()
        self._stopped = False
        self.answer: T | None = None
        self.problem: Exception | None = None  # of the last look
        self.answers = 0  # looks that are over
        self._begun_at: float | None = None
        self._told_at = time.monotonic()
        self._over = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"fskv-top-{self.name}", daemon=True).start()

    def stop(self) -> None:
        """Begin no further look; one that hangs is left alone."""
        self._stopped = True
        self._wake.set()

    def wait(self, timeout_s: float, answers: int = 1) -> bool:
        """Wait for so many looks to be over."""
        with self._over:
            return self._over.wait_for(lambda: self.answers >= answers, timeout_s)

    @property
    def silent_s(self) -> float:
        """For how long the present look has gone without an answer; 0 where none is under way."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else max(0.0, time.monotonic() - begun_at)

    @property
    def age_s(self) -> float:
        """How long ago the last good answer came, or the watch began."""
        return max(0.0, time.monotonic() - self._told_at)

    def _run(self) -> None:
        while not self._stopped:
            began = self._begun_at = time.monotonic()
            try:
                answer = self._look()
            except Exception as error:  # shown; the next look may do better
                self.problem = error
            else:
                self.answer, self.problem = answer, None
                self._told_at = time.monotonic()
            self._begun_at = None
            with self._over:
                self.answers += 1
                self._over.notify_all()
            self._wake.wait(self._rest_s(time.monotonic() - began))


def watch_root(root: str, interval_s: float) -> Watch[Look]:
    view: list[RootView] = []

    def look() -> Look:
        if not view:
            view.append(RootView.open(root))
        return look_at(view[0])

    return Watch("root", look, lambda took_s: max(0.0, interval_s - took_s))


def watch_sizes(root: str, interval_s: float) -> Watch[Count]:
    counter = Counter()

    def look() -> Count:
        return counter.count(RootView.open(root))

    return Watch(
        "count", look, lambda took_s: max(interval_s, _COUNT_LEAST_S, _COUNT_REST * took_s)
    )


def watch_endpoint(url: str, interval_s: float, timeout_s: float) -> Watch[endpoint.Sample]:
    def look() -> endpoint.Sample:
        text = endpoint.fetch(url, timeout_s)
        return endpoint.read(text, time.monotonic())

    return Watch("metrics", look, lambda took_s: max(0.0, interval_s - took_s))


def words(error: Exception) -> str:
    """Say a look's problem in a few words."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, CommandError | endpoint.NoMetrics):
        return str(error)
    return f"{type(error).__name__}: {error}"
