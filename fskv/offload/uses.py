"""Remembers the uses of prefixes, so that eviction takes the end of a prefix before its head.

A request uses all chunks of its prefix, including those in the engine's own cache. In a *use* all of them get
one time, less a millisecond for each chunk before them, at every store and touch (`stamp_use` in
csrc/chunk_io.h). So the deepest chunk of a prefix is its oldest. A use lasts for `touch_interval_s`. The
first request that finds the chunks stored by a use begins another one, so used chunks are younger than unused
ones.

On the scheduler's thread. A prefix that was touched in its use costs a request one look into a dictionary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

_MAX_KEYS = 100_000
# A request that goes on may store with the time of its use for as long as ten intervals, or this.
_LEAST_S = 60.0
_AT_ONCE_S = 10.0


class Begun(NamedTuple):
    """A use of the prefixes that begin with one chunk."""

    number: int
    at: float
    of_stored: bool  # its first request has found what was stored before


class Uses(Generic[_K]):
    """The uses of prefixes. The keys of one group's chunks stand for the chunks of all groups."""

    def __init__(
        self,
        interval_s: Callable[[], float],
        is_stored_now: Callable[[_K], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval_s` returns the length of a use: it follows the root.

        `is_stored_now` says which chunks are on their way to the disk, and cannot be touched yet.
        """
        self._interval_s = interval_s
        self._is_stored_now = is_stored_now
        self._clock = clock
        self._numbers = itertools.count()
        self._of_head: dict[_K, Begun] = {}  # the least recently begun first
        self._touched: dict[_K, int] = {}  # -> the use in which it was
        self._waits_for: dict[
            _K, _K
        ] = {}  # head -> a chunk of its prefix that was stored when last asked

    def begin(self, keys: Sequence[_K], num_there: int) -> tuple[Begun, int]:
        """Begin or continue the use of a request's prefix; its first `num_there` chunks are there already.

        Return the use, and the index of the first of those chunks that has to be touched.
        """
        use = self._of_head.get(keys[0])
        if use is None or (
            self._is_over(use, num_there) and not self._waits(keys, max(1, num_there))
        ):
            use = Begun(next(self._numbers), self._clock(), bool(num_there))
            _put(self._of_head, keys[0], use)
        start = num_there
        while start and self._touched.get(keys[start - 1]) != use.number:
            start -= 1
            _put(self._touched, keys[start], use.number)
        return use, start

    def is_old(self, use: Begun) -> bool:
        """Return whether a request that stores more begins another use first."""
        interval_s = self._interval_s()
        return self._clock() - use.at > max(interval_s, min(_LEAST_S, 10 * max(1.0, interval_s)))

    def _waits(self, keys: Sequence[_K], num: int) -> bool:
        """Return whether one of the first `num` chunks is being stored; the last one found is asked first."""
        last = self._waits_for.get(keys[0])
        if last is not None and self._is_stored_now(last):
            return True
        found = next((key for key in keys[:num] if self._is_stored_now(key)), None)
        self._waits_for.pop(keys[0], None)
        if found is not None:
            _put(self._waits_for, keys[0], found)
        return found is not None

    def _is_over(self, use: Begun, num_there: int) -> bool:
        age_s = self._clock() - use.at
        interval_s = self._interval_s()
        # Sooner, by as much as the deepest one looks older; but few where prefixes are long.
        if age_s > max(min(1.0, interval_s), interval_s / 2, interval_s - num_there / 1000):
            return True
        # Where nothing is there the files of this use are gone, and with its time would go again; or two
        # requests compute them at once.
        return not use.of_stored if num_there else age_s > _AT_ONCE_S


def _put(known: dict[_K, _V], key: _K, value: _V) -> None:
    known.pop(key, None)
    known[key] = value
    if len(known) > _MAX_KEYS:
        del known[next(iter(known))]
