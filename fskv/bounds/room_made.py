"""Tells of what was pruned because a file system is full or nearly so, and how much of it is others'."""

from __future__ import annotations

import logging

from fskv.bounds.quota import Usage
from fskv.observe.state_log import StateLog
from fskv.root.filesystem import Space

_GREW = 0.01  # of the file system: what others took is told of again


class RoomMade:
    """See the module docstring. One for each process that prunes."""

    def __init__(self, root: str) -> None:
        self._log = StateLog(root=root)
        self._others_nbytes: int | None = None  # when last told of

    def near(
        self, before: Usage, after: Usage, space: Space, keep_nbytes: int, short_nbytes: int
    ) -> None:
        """Something went for `keep_free`: told of where others have grown, not of each round.

        `space` is of before; so many bytes more had to be free for nothing to go.
        """
        others, told = _others(before, space), self._others_nbytes
        if after.pruned_files == before.pruned_files:
            return
        if told is None or others > told + _GREW * space.total_nbytes:
            self._others_nbytes = others
            reason = "less than keep_free was left"
            if space.free_nbytes >= keep_nbytes:
                reason = "less was free than keep_free and what engines are about to store"
            needed = space.free_nbytes + short_nbytes
            self.full(before, after, space, reason, keep_nbytes, needed)

    def full(
        self,
        before: Usage,
        after: Usage,
        space: Space,
        reason: str = "a store found the disk full",
        keep_nbytes: int | None = None,
        needed_nbytes: int | None = None,
    ) -> None:
        """Something went because it could not be written, or for `reason`: so much had to be free."""
        files = after.pruned_files - before.pruned_files
        if files:
            self._log.say(
                "pruned_for_room",
                logging.WARNING,
                files=files,
                bytes=after.pruned_nbytes - before.pruned_nbytes,
                free_bytes=space.free_nbytes,
                keep_free_bytes=keep_nbytes,
                needed_bytes=needed_nbytes,
                others_bytes=_others(before, space),
                reason=reason,
            )


def _others(usage: Usage, space: Space) -> int:
    return max(0, space.total_nbytes - space.free_nbytes - usage.nbytes)
