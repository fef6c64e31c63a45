"""Whether a count of the holder's is one: what cannot be listed, and what directories do not tell.

A claim is counted with what its engine wrote before the count. That must hold neither where somebody writes
unseen, or the bound breaks; nor fail for ever, or what is granted grows and everything is pruned for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.ledger import CLAIMS_DIR, Ledger
from fskv.bounds.quota import Claim
from fskv.index.scan import Shard, dir_mtime_ns
from fskv.root.filesystem import clamp_mtime

logger = logging.getLogger(__name__)

# Shards of 4096 that are left out of a count although names come and go in them.
_MAX_UNLISTABLE = 40
_MTIME_LAG_NS = 10 * 1_000_000_000  # of a directory behind the files in it


class CountChecks:
    """What is remembered from one count to the next. May hang with the root."""

    def __init__(self, root: str, book: Ledger) -> None:
        self._directory = f"{root}/{SHARED_DIR}/{CLAIMS_DIR}"
        self._ledger = book
        self._unlistable: dict[str, dict[int, int]] = {}  # namespace -> shards, their mtimes
        self._complained = False

    def mtimes_tell(self, claims: Iterable[Claim], now_ns: int) -> bool:
        """Return whether a directory gets a new mtime when a name comes: not so on s3fs and some others.

        Claims are renamed into their directory every few seconds.
        """
        newest_ns = clamp_mtime(max(self._ledger.published_ns(claims).values(), default=0), now_ns)
        last_ns = dir_mtime_ns(self._directory)  # 0, unknown: such directories are always listed
        told = not last_ns or newest_ns - last_ns < _MTIME_LAG_NS
        if not told and not self._complained:
            self._complained = True
            logger.warning(
                "fskv: %s: directories keep their mtime when files come, so each is listed at every count",
                self._directory,
            )
        return told

    def is_whole(self, namespace: str, failed: Sequence[Shard]) -> bool:
        """Return whether all that is written in a namespace was seen, but for what stands still.

        `failed` are the directories that this count could not list. If the last one could not either, they
        are taken as constant, however many, where their mtimes are. In a few of them somebody may write all
        the same.
        """
        before = self._unlistable.get(namespace, {})
        now = {shard.idx: shard.outside_mtime_ns for shard in failed}
        self._unlistable[namespace] = now
        news = now.keys() - before.keys()
        if news:
            logger.warning(
                "fskv: %s: %d directories cannot be listed: %s",
                namespace,
                len(failed),
                failed[0].error,
            )
        moving = [idx for idx, at in now.items() if not at or before.get(idx) != at]
        return not news and len(moving) <= _MAX_UNLISTABLE
