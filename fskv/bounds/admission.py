"""Admission: which chunks are worth a write, those seen once or those seen twice.

Most chunks are never read again. A root with little room keeps more of what will be read if a chunk is stored
at its second sight. A root with much room then only fills more slowly. So `Duel` measures both on a sample of
the chunks: two caches of names alone, as large as the sample's part of the room. One admits at first sight,
the other at second sight, and the one with more hits decides. No chunk is given up for the measurement. A
write that is spared counts for a little, so chunks that nobody reads again end to be written.

A name is eight bytes of a key, the same on every engine. It stands for the chunks of all groups that end at
one token: they are admitted together. Nothing here reads a clock or a file, and one thread calls. With its
limits the memory is at most 100 MiB: 262,144 names of sights, and two caches of 65,536 names with sights of
their own.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

NAME_NBYTES = 8
Mode = Literal["auto", "all", "reused"]

_SIGHTS = 3  # so many times the room is remembered at least, twice as much at most
_MOST_SIGHTS = 1 << 17  # of a generation
_MOST_NEW = 1 << 16  # sights that others were not told of
_SAMPLE = 8  # one name of so many, or
_LEAST_ROOM = 256  # more of them, where the sample's cache would be smaller
_MOST_ROOM = 1 << 15  # fewer, where it would be larger
_HALF_LIFE = 2  # of a hit, in uses of the sample: so many times the room of its cache
_LEAD = 1.02  # by which the other one must be better
_SPARED = 0.01  # what a write that is not made is worth, in hits

_TWICE = object()


def name_of(key: bytes) -> int:
    """Return the name of a chunk from its key, whose bytes are those of a hash."""
    return int.from_bytes(key[:NAME_NBYTES].ljust(NAME_NBYTES, b"\0"), "little")


class Sights:
    """The names that were seen, once or more: two generations, of which the older one goes as a whole.

    So the chunks of one prefix are remembered, and forgotten, together.
    """

    def __init__(self, capacity: int) -> None:
        self._young: dict[int, Hashable] = {}  # name -> its only viewer, or _TWICE
        self._old: dict[int, Hashable] = {}
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Set how many names a generation has."""
        self._capacity = max(1, min(capacity, _MOST_SIGHTS))

    def is_first(self, name: int) -> bool:
        """Return whether nobody has seen a name."""
        return name not in self._young and name not in self._old

    def see(self, name: int, viewer: Hashable) -> bool:
        """Note that `viewer` sees a name; return whether it is the second sight, or a later one."""
        known = self._young.get(name)
        if known is None:
            old = self._old.get(name)
            self._young[name] = known = viewer if old is None or old == viewer else _TWICE
            if len(self._young) >= self._capacity:
                self._old, self._young = self._young, {}
        elif known is not _TWICE and known != viewer:
            self._young[name] = known = _TWICE
        return known is _TWICE


class Cache:
    """A least recently used cache of names; with `sights` it admits a name at its second sight."""

    def __init__(self, room: int, sights: Sights | None) -> None:
        self.room, self._sights = room, sights
        self.num_admitted = 0
        self._names: OrderedDict[int, None] = OrderedDict()

    def use(self, name: int, viewer: Hashable) -> bool:
        """Return whether the name is there; admit it if not."""
        if name in self._names:
            self._names.move_to_end(name)
            return True
        if self._sights is None or self._sights.see(name, viewer):
            self.num_admitted += 1
            self._names[name] = None
            while len(self._names) > self.room:
                self._names.popitem(last=False)
        return False


class Duel:
    """Two caches over a sample of the names, and what they hit: at first sight, at second sight."""

    def __init__(self, room: int) -> None:
        """`room` is how many names the root can hold for this engine."""
        self._one_of = 0
        self.resize(room)

    def resize(self, room: int) -> None:
        """Set the room; the caches begin again where the sample does not fit it any more."""
        of_sample = room // self._one_of if self._one_of else 0
        if not _LEAST_ROOM // 2 <= of_sample <= 2 * _MOST_ROOM:
            one_of = max(1, min(_SAMPLE, room // _LEAST_ROOM), room // _MOST_ROOM)
            of_sample = max(1, room // one_of)
            if one_of != self._one_of:
                self._one_of = one_of
                self._sights = Sights(1)
                self._first, self._second = Cache(0, None), Cache(0, self._sights)
                self._hits = (0.0, 0.0)  # older ones count less
        self._first.room = self._second.room = of_sample
        self._sights.resize(_SIGHTS * of_sample)

    @property
    def hits(self) -> tuple[float, float]:
        """What both have hit of late; zeros while all that was used finds room.

        The latter has a little for each write that the former makes and it does not.
        """
        is_full = self._first.num_admitted > self._first.room
        return self._hits if is_full else (0.0, 0.0)

    def use(self, names: Sequence[int], viewer: Hashable) -> None:
        """A request uses these chunks, the last of which is the deepest: it counts as the oldest."""
        sample = [name for name in reversed(names) if (name >> 40) % self._one_of == 0]
        if sample:
            before = self._first.num_admitted - self._second.num_admitted
            first = sum(self._first.use(name, viewer) for name in sample)
            second = sum(self._second.use(name, viewer) for name in sample)
            spared = self._first.num_admitted - self._second.num_admitted - before
            kept = 0.5 ** (len(sample) / (_HALF_LIFE * self._first.room))
            worth = second + _SPARED * spared
            self._hits = self._hits[0] * kept + first, max(0.0, self._hits[1] * kept + worth)


def at_first_sight(was: bool, hits: Iterable[tuple[float, float]]) -> bool:
    """Return whether chunks are stored at first sight, by the duels of all engines. `was`: until now."""
    first = second = 0.0
    for each in hits:
        first, second = first + each[0], second + each[1]
    return first * _LEAD >= second if was else first > second * _LEAD


class Admission:
    """Decides for one engine which chunks are stored: all of them, or those that were seen before.

    With `auto` the mode is the root's: `first_sight`, as its leader says it.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.first_sight = True  # of `auto`, in force on the root
        self.num_used = 0  # names, since the start
        self.num_seen_again = 0
        self._sights = Sights(_MOST_SIGHTS)
        self._duel: Duel | None = None  # while no room is known everything is stored
        self._new: dict[int, None] = {}  # sights that others were not told of, the oldest first
        self._num_heard = 0

    @property
    def hits(self) -> tuple[float, float]:
        """The recent hits of the duel, at first sight and at second sight."""
        return (0.0, 0.0) if self._duel is None else self._duel.hits

    @property
    def stores_all(self) -> bool:
        """Whether a chunk is stored at its first sight now."""
        return self.mode == "all" or (
            self.mode == "auto" and (self._duel is None or self.first_sight)
        )

    def resize(self, room: int | None, share: int = 1000) -> None:
        """Set how many names the root can hold, and the engine's share of that, in thousandths.

        Sights are those of all engines. `room` None: there is no bound.
        """
        self._sights.resize(_MOST_SIGHTS if room is None else _SIGHTS * room)
        room = None if room is None else room * share // 1000
        if room is None or self.mode != "auto":
            self._duel = None
        elif self._duel is None:
            self._duel = Duel(room)
        else:
            self._duel.resize(room)

    def use(self, names: Sequence[int], viewer: Hashable) -> None:
        """A request uses these chunks, each once: those that are there, and those that it computes."""
        self.num_used += len(names)
        if self._duel is not None:
            self._duel.use(names, viewer)

    def admits(self, name: int, viewer: Hashable) -> bool:
        """Return whether a chunk that a request has computed is worth a write.

        `viewer` is the request: the same one does not count twice.
        """
        if self.mode == "all":
            return True
        if self._sights.is_first(name):
            self._new[name] = None
            if len(self._new) > _MOST_NEW:
                del self._new[next(iter(self._new))]
        again = self._sights.see(name, viewer)
        self.num_seen_again += again
        return again or self.stores_all

    def receive(self, packed: bytes) -> None:
        """Take the sights of other engines, and of those before this one."""
        if self.mode == "all":
            return
        self._num_heard += 1
        for (name,) in struct.iter_unpack("<Q", packed[: len(packed) // 8 * 8]):
            self._sights.see(name, self._num_heard)  # no request is called so

    def take_new(self, most: int) -> bytes:
        """Return the oldest sights that others were not told of, at most so many."""
        names = [name for name, _ in zip(self._new, range(most), strict=False)]
        for name in names:
            del self._new[name]
        return struct.pack(f"<{len(names)}Q", *names)
