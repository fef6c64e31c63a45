"""Looks at a root and at endpoints again and again, each on a daemon thread of its own.

What hangs, hangs there: who draws reads the last answer, and for how long the present look has lasted. No
look begins before the one before it is over, so nothing piles up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .. import survey
from ..endpoint import Endpoint, Scraper
from ..root_view import RootView

T = TypeVar("T")
SLOW_S = 3.0  # a look that takes longer is said to be without an answer
# Counting may take long on a large root: it is at rest at least ten times as long as it takes.
_WALK_REST, _WALK_LEAST_S = 10, 5.0


class Watch(Generic[T]):
    """Calls `look` again and again, and keeps what it returned last."""

    def __init__(self, look: Callable[[], T], every_s: float, rest: float = 0) -> None:
        """A look begins every `every_s`, and not before `rest` times as long as the last one took."""
        self._look, self._every_s, self._rest = look, every_s, rest
        self._over = threading.Condition()
        self._stopped = threading.Event()
        self._begun_at = self._told_at = time.monotonic()
        self.answer: T | None = None
        self.problem: Exception | None = None  # of the last look
        self.answers = 0  # looks that are over
        threading.Thread(target=self._run, name="fskv-top", daemon=True).start()

    def stop(self) -> None:
        """Begin no further look; one that hangs is left alone."""
        self._stopped.set()

    def wait(self, until_s: float, answers: int = 1) -> bool:
        """Wait for so many looks to be over, until a time of the monotonic clock."""
        with self._over:
            left_s = max(0.0, until_s - time.monotonic())
            return self._over.wait_for(lambda: self.answers >= answers, left_s)

    @property
    def silent_s(self) -> float:
        """For how long the present look has gone without an answer; 0 if it is not long."""
        silent_s = time.monotonic() - self._begun_at
        return round(silent_s, 1) if silent_s > SLOW_S else 0.0

    @property
    def age_s(self) -> float:
        """How long ago the last good answer came, or the watch began."""
        return time.monotonic() - self._told_at

    @property
    def words(self) -> str | None:
        """What is wrong with the last look, in a few words."""
        error = self.problem
        text = error.strerror if isinstance(error, OSError) else error and str(error)
        return None if error is None else text or type(error).__name__

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = self._begun_at = time.monotonic()
            try:
                self.answer, self.problem = self._look(), None
                self._told_at = time.monotonic()
            except Exception as error:  # shown; the next look may do better
                self.problem = error
            self._begun_at = float("inf")
            with self._over:
                self.answers += 1
                self._over.notify_all()
            took_s = time.monotonic() - began
            self._stopped.wait(max(0.0, self._every_s - took_s, self._rest * took_s))


@dataclass(frozen=True, slots=True)
class Frame:
    """What `top` knows at one moment; its fields are those of a JSON line."""

    root: str
    problem: str | None
    no_answer_s: float
    age_s: float
    survey: survey.Survey | None
    endpoints: list[Endpoint]

    @property
    def partial(self) -> bool:
        """Whether the root did not answer, or something in it could not be read or listed."""
        seen = self.survey
        return seen is None or bool(self.problem or self.no_answer_s or seen.unlistable)


class Watches:
    """The watches of one run of `top`."""

    def __init__(self, root: str, urls: list[str], interval_s: float) -> None:
        self._path, self._interval_s = root, interval_s
        self._observer: survey.Observer | None = None
        self._walk: Watch[survey.Walk | None] | None = None
        self.root = Watch(self._look, interval_s)
        self._endpoints = {url: Watch(Scraper(url).look, interval_s) for url in urls}

    def _look(self) -> survey.Survey:
        if self._observer is None:
            self._observer = survey.Observer(RootView.open(self._path))
        walked = self._walk.answer if self._walk is not None else None
        return self._observer.look(walked if self._observer.needs_walk else None)

    def _count(self) -> survey.Walk | None:
        observer = self._observer
        return survey.walk(observer.view) if observer and observer.needs_walk else None

    def close(self) -> None:
        """Begin no further look."""
        for one in (self.root, self._walk, *self._endpoints.values()):
            if one is not None:
                one.stop()

    def wait(self, until_s: float, answers: int) -> None:
        """Wait for so many looks at the root and at each endpoint, and for a walk if there is to be one."""
        self.root.wait(until_s)
        self.frame()
        if self._walk is not None and self._walk.wait(until_s) and self._walk.answer is not None:
            while time.monotonic() < until_s and self._lacks_sizes:
                self.root.wait(until_s, self.root.answers + 1)
        self.root.wait(until_s, answers)
        for one in self._endpoints.values():
            one.wait(until_s, answers)

    @property
    def _lacks_sizes(self) -> bool:
        """Whether the last look at the root was before the first walk."""
        seen = self.root.answer
        walks = self._observer is not None and self._observer.needs_walk
        return walks and seen is not None and seen.counted_by != "walk"

    def frame(self) -> Frame:
        """Return what is known now. A walk begins where nobody counts the root."""
        root = self.root
        if self._walk is None and self._observer is not None and self._observer.needs_walk:
            self._walk = Watch(self._count, max(self._interval_s, _WALK_LEAST_S), _WALK_REST)
        seen = root.answer
        problem = root.words or (seen.problem if seen else None)
        ends = [_endpoint(url, one) for url, one in self._endpoints.items()]
        path = seen.root if seen else self._path
        return Frame(path, problem, root.silent_s, round(root.age_s, 1), seen, ends)


def _endpoint(url: str, watch: Watch[Endpoint]) -> Endpoint:
    """Return the last answer, or why there is none now."""
    if watch.silent_s:
        return Endpoint(url, f"no answer for {watch.silent_s:.0f} s")
    if watch.answer is None or watch.problem is not None:
        return Endpoint(url, watch.words or "looking")
    return watch.answer
