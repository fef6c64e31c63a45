"""Looks at a root and at endpoints again and again, each on a daemon thread of its own.

A look that hangs keeps its thread: the screen shows the last answer, and for how long the look has hung. No
look begins before the one before it is over, so nothing piles up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .. import survey
from ..endpoint import Endpoint, Scraper, words_of
from ..root_view import RootView

T = TypeVar("T")
SLOW_S = 3.0  # a look that takes longer is said to be without an answer
_REST = 10  # times as long as a look takes: a walk over a large root may take minutes


class Watch(Generic[T]):
    """Calls `look` again and again, and keeps its last result."""

    def __init__(self, look: Callable[[Callable[[], object]], T], every_s: float) -> None:
        """`look` gets a function to call again and again while the look makes progress."""
        self._look, self._every_s = look, every_s
        self._over = threading.Condition()
        self._stopped = threading.Event()
        self._heard_at = time.monotonic()
        self.answer: T | None = None
        self.problem: Exception | None = None  # of the last look
        self.answers = 0  # looks that are over
        threading.Thread(target=self._run, name="fskv-top", daemon=True).start()

    def stop(self) -> None:
        """Begin no further look; a look that hangs is left alone."""
        self._stopped.set()

    def wait(self, until_s: float, answers: int = 1) -> None:
        """Wait for `answers` looks until `until_s`; longer for the first look, while it makes progress."""
        with self._over:
            while self.answers < answers and (
                time.monotonic() < until_s or (self.answers == 0 and self.silent_s < SLOW_S)
            ):
                self._over.wait(0.1)

    def _hear(self) -> None:
        self._heard_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the present look last made progress; 0 between two looks."""
        return max(0.0, round(time.monotonic() - self._heard_at, 1))

    @property
    def words(self) -> str | None:
        """The fault of the last look, in a few words."""
        return None if self.problem is None else words_of(self.problem)

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = self._heard_at = time.monotonic()
            try:
                self.answer, self.problem = self._look(self._hear), None
            except Exception as error:  # shown; the next look may do better
                self.problem = error
            self._heard_at = float("inf")
            with self._over:
                self.answers += 1
                self._over.notify_all()
            took_s = time.monotonic() - began
            self._stopped.wait(max(self._every_s - took_s, _REST * took_s))


@dataclass(frozen=True, slots=True)
class Frame:
    """The knowledge of `top` at one moment."""

    root: str
    problem: str | None  # of the last look at the root
    no_answer_s: float
    survey: survey.Survey | None
    endpoints: list[Endpoint]

    @property
    def partial(self) -> bool:
        """True if the root did not answer, or something in it could not be read or listed."""
        seen = self.survey
        failed = self.problem or self.no_answer_s
        return seen is None or bool(failed or seen.problem or seen.unlistable)


class Watches:
    """The watches of one run of `top`."""

    def __init__(self, root: str, urls: list[str], interval_s: float) -> None:
        self._path = root
        self._observer: survey.Observer | None = None
        self.root = Watch(self._look, interval_s)
        self._endpoints = {url: Watch(Scraper(url).look, interval_s) for url in urls}
        self._all: list[Watch[Any]] = [self.root, *self._endpoints.values()]

    def _look(self, told: Callable[[], object]) -> survey.Survey:
        if self._observer is None:
            self._observer = survey.Observer(RootView.open(self._path))
        return self._observer.look(told=told)

    def close(self) -> None:
        """Begin no further look."""
        for one in self._all:
            one.stop()

    def wait(self, until_s: float, answers: int) -> None:
        """Wait for so many looks at the root and at each endpoint."""
        for one in self._all:
            one.wait(until_s, answers)

    def frame(self) -> Frame:
        """Return the present frame."""
        root = self.root
        silent_s = root.silent_s if root.silent_s > SLOW_S else 0.0
        ends = [_endpoint(url, one) for url, one in self._endpoints.items()]
        path = root.answer.root if root.answer else self._path
        return Frame(path, root.words, silent_s, root.answer, ends)


def _endpoint(url: str, watch: Watch[Endpoint]) -> Endpoint:
    """Return the last answer, or why there is none now."""
    if watch.silent_s > SLOW_S:
        return Endpoint(url, f"no answer for {watch.silent_s:.0f} s")
    if watch.answer is None or watch.problem is not None:
        return Endpoint(url, watch.words or "looking")
    return watch.answer
