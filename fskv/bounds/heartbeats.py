"""Which engines are heard of, and whether all clocks that stamp the root agree: by claims that are rewritten.

An NFS server stamps by its own clock. On CephFS, GlusterFS and others each node stamps by its own, and the
mtime of a directory is the latest stamp that any node gave it: what a node writes whose clock is behind
changes no mtime, and its claim looks old. Where a claim that was just rewritten has another time than now,
mtimes tell nothing, for as long as that claim is there and until one that it has is right again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable

from fskv.bounds.lease import TTL_S, Lease
from fskv.bounds.ledger import Ledger
from fskv.bounds.quota import Claim
from fskv.observe.state_log import StateLog

SILENT_S = 4 * TTL_S
_OFF_NS = 5 * 1_000_000_000
# How much clocks may differ and not be noticed: `_OFF_NS`, and the time between two looks at the claims.
UNNOTICED_NS = 2 * _OFF_NS


class Heartbeats:
    """What the holder of the lease hears, by its own monotonic clock. May hang with the root."""

    def __init__(self, root: str, book: Ledger, lease: Lease) -> None:
        self._log = StateLog(root=root)
        self._ledger = book
        self._lease = lease
        self._heard: dict[str, tuple[int, float]] = {}  # claim -> its last beat, since when
        self._read_at: float | None = None
        self._off: set[str] = set()  # claims whose last mtime was not that of their writing

    @property
    def clocks_differ(self) -> bool:
        """Whether mtimes tell nothing."""
        return bool(self._off)

    def watch(self, claims: Iterable[Claim], read_at: float) -> bool:
        """Take claims that were read since `read_at`; returns whether clocks are found to differ by now."""
        now, last_read_at, self._read_at = time.monotonic(), self._read_at, read_at
        heard, rewritten = {}, []
        for claim in claims:
            known = self._heard.get(claim.name)
            if known is not None and known[0] == claim.beat:
                heard[claim.name] = known
                continue
            heard[claim.name] = (claim.beat, now)
            # When one that appears was written is not known, but for the first that an engine writes.
            if known is not None or claim.beat == 1:
                rewritten.append(claim)
        self._heard = heard
        before, self._off = self._off, self._off & heard.keys()
        if rewritten and last_read_at is not None:
            with contextlib.suppress(OSError):
                self._compare(rewritten, last_read_at)
        return bool(self._off) and not before

    def _compare(self, rewritten: list[Claim], since: float) -> None:
        """Look at the mtimes of claims that were written since then."""
        found = self._ledger.published_ns(rewritten)
        latest_ns = self._lease.now_ns()
        if not latest_ns:
            return
        earliest_ns = latest_ns - int((time.monotonic() - since) * 1e9)
        off_ns = {name: _outside(at_ns, earliest_ns, latest_ns) for name, at_ns in found.items()}
        off = {name for name, ns in off_ns.items() if abs(ns) > _OFF_NS}
        if off and not self._off:
            first = min(off)
            self._log.say(
                "clocks_differ",
                logging.WARNING,
                claim=first,
                off_s=round(off_ns[first] / 1e9),
                reason="nodes stamp by their own clocks, so every directory is listed at each count",
            )
        self._off = (self._off - found.keys()) | off

    def silent(self, claims: Iterable[Claim]) -> set[str]:
        """Return the claims of engines that have not been heard of for long. Raises OSError.

        By the times of claims too, where they tell: whoever is silent for an hour is gone, and not only a
        minute after we began to listen.
        """
        claims, now = list(claims), time.monotonic()
        since = {claim.name: self._heard.get(claim.name, (0, now))[1] for claim in claims}
        found = {name for name, at in since.items() if now - at > SILENT_S}
        if not self._off:
            before_ns = self._lease.now_ns() - int(SILENT_S * 1e9)
            published = self._ledger.published_ns(claims)
            found |= {name for name, at_ns in published.items() if at_ns < before_ns}
        return found


def _outside(at_ns: int, earliest_ns: int, latest_ns: int) -> int:
    """Return by how much a time is outside of these two."""
    return max(0, at_ns - latest_ns) + min(0, at_ns - earliest_ns)
