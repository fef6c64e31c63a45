"""Whether what was removed to make room shows as free: what a trash or a snapshot keeps goes for nothing.

MooseFS keeps removed files for a day by default, JuiceFS too; snapshots of ZFS, btrfs and CephFS keep them as
long as they stand. Where statvfs does not show half of what was removed, more is removed after half a minute,
since some show it that late, and then after twice as long each time, an hour at most. Meanwhile nothing can
be stored, and loads go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fskv.bounds.quota import Claim
from fskv.observe.state_log import StateLog
from fskv.root.filesystem import Space

# What was removed may show in statvfs only after so long (btrfs: its next commit).
USUAL_S = 30.0
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Removed:
    """What was removed last for one reason, and was not seen to be free yet."""

    nbytes: int  # in all, since such a removal was last seen
    unused: int  # bytes of the file system, before
    enough: int  # so many bytes that are free since, or were written
    written: Mapping[str, int]  # claim -> what its engine had written before
    wait_s: float
    until: float

    def shows(self, space: Space, claims: Iterable[Claim]) -> bool:
        """By what engines wrote alone as well: a quota may be full on a disk that others fill and empty."""
        wrote = sum(max(0, c.written - self.written.get(c.name, 0)) for c in claims)
        return max(wrote, space.unused_nbytes + wrote - self.unused) >= self.enough


class RoomFreed:
    """See the module docstring. One for each process that prunes.

    A reason is "keep_free" or "full"; `claims` are what engines say of themselves at that time or before.
    """

    def __init__(self, root: str) -> None:
        self._log = StateLog(root=root)
        self._removed: dict[str, _Removed] = {}

    def look(self, space: Space, claims: Iterable[Claim]) -> None:
        """See what shows now. To be called often: others may take the room again."""
        claims = list(claims)
        self._removed = {
            reason: removed
            for reason, removed in self._removed.items()
            if not removed.shows(space, claims)
        }

    def forget(self, reason: str) -> None:
        """There is room: nothing is awaited for that any more."""
        self._removed.pop(reason, None)

    def is_awaited(self, reason: str) -> bool:
        """Return whether nothing is to be removed for that yet."""
        removed = self._removed.get(reason)
        return removed is not None and time.monotonic() < removed.until

    def removed(
        self, reason: str, nbytes: int, before: Space, after: Space, claims: Iterable[Claim]
    ) -> None:
        """So many bytes were removed; `before` and `after` that."""
        if nbytes <= 0:
            return
        claims = list(claims)
        last = self._removed.get(reason)
        wait_s = USUAL_S if last is None else min(_LONGEST_S, 2 * last.wait_s)
        total = nbytes + (last.nbytes if last is not None else 0)
        self._removed[reason] = _Removed(
            total,
            before.unused_nbytes,
            nbytes // 2,  # others may write meanwhile
            {claim.name: claim.written for claim in claims},
            wait_s,
            time.monotonic() + wait_s,
        )
        self.look(after, claims)
        if last is not None and last.wait_s == USUAL_S and reason in self._removed:
            self._log.say(
                "room_not_freed",
                logging.WARNING,
                bytes=total,
                free_bytes=after.free_nbytes,
                next_in_s=round(wait_s),
                reason=f"removed for {reason}, and not free: is there a trash, or a snapshot?",
            )
