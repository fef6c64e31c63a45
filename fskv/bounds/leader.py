"""The leader of a root: counts, prunes and cleans it for all engines.

A maintenance process (fskv.bounds.maintenance) makes a leader when it gets the lease, and drops it with the
lease. At each look the leader adds the reports of heartbeats and publishes the usage. One piece of work at a
time runs beside the looks: a walk, which corrects the sums, or a prune. Worker threads walk and remove;
between two batches the leader checks its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fskv.bounds.admission import at_first_sight
from fskv.bounds.count import UNTOLD_S, Count
from fskv.bounds.evict import Need, Pruned, cutoff_ns, evict, orphaned
from fskv.bounds.eviction_news import EvictionNews
from fskv.bounds.lease import TTL_S, Lease
from fskv.bounds.limits import (
    Heartbeat,
    Scope,
    Traffic,
    Usage,
    inodes_short,
    scopes,
    smallest,
    unused_limit_s,
)
from fskv.bounds.shared_files import SharedFiles, shortened
from fskv.bounds.sights import SightsLog
from fskv.observe.state_log import StateLog
from fskv.root.filesystem import Space
from fskv.root.process_id import provably_dead
from fskv.root.remove import Fate
from fskv.types import MAX_COUNT, MAX_TOUCH_INTERVAL_S

logger = logging.getLogger(__name__)

SILENT_S = 4 * TTL_S  # a heartbeat that has not changed for so long is of nobody
_FRESH_S = TTL_S / 3  # and of a living engine it changes in less than that
_WALK_S = 30.0  # between two walks, or
_WALK_PART = 10  # so many times as long as the last one took
_LOOK_S, _FAST_LOOK_S = 1.0, 0.25
_FAST_S = 60.0  # of writing: what holds less is looked at more often
_PUBLISH_S = 5.0  # at least so often, or engines think that nobody counts
_FADE = 0.6  # of the fastest growth: what is left of it a second later
_NEW_BEATS = 16  # of a heartbeat that is older than that to us others have told
_MAX_KNOWN = 10_000  # heartbeats
_FASTEST = 32 << 30  # bytes a second of one engine
_PEAK_FADE = 0.98  # and of what looks are set by: bursts come again
_SNAPSHOT_S = 300.0
_ORPHANS_S = 30.0
_FULL_SHARE = 0.03  # of everything: what goes when a disk is full without any bound being reached
_FULL_LEAST = 64 << 20
_FUTILE_S = 5.0
_EMPTY_NS = 86_400 * 1_000_000_000  # a namespace without a chunk or an engine goes then
_DEAD_S = 600.0  # and a private one without an engine, with its chunks
_STUCK_S = 600.0  # files that could not be removed are tried again
_AWAITED_S, _LONGEST_S = 30.0, 3600.0
_USE_HALF_LIFE_S = 600.0  # of what an engine has used, in its share
_HOUR_MS = 3_600_000
_STALE_MS = 2 * 3_600_000


class Heard(NamedTuple):
    """The leader's last knowledge of a heartbeat, by the leader's own clock."""

    beat: int
    at: float
    has_changed: bool  # since it was first seen: so somebody lives


class RoomAwaited:
    """Checks that removed files show as free space: a trash or a snapshot may keep them.

    MooseFS and JuiceFS keep removed files for a day by default; btrfs shows them after its next commit. Where
    statvfs does not show half of what went, the next prune for room waits half a minute, and then twice as
    long each time, an hour at most.
    """

    def __init__(self, root: str) -> None:
        self._log = StateLog(root=root)
        self._wait_s = 0.0
        self._until = float("-inf")
        self._unused = self._enough = 0

    def is_awaited(self, unused_nbytes: int) -> bool:
        """Return whether nothing is to be removed yet. `unused_nbytes`: and what was written meanwhile."""
        if self._wait_s and unused_nbytes - self._unused >= self._enough:
            self._wait_s = 0.0  # it shows
        return bool(self._wait_s) and time.monotonic() < self._until

    def removed(self, nbytes: int, before: int, after: int) -> None:
        """So many bytes were removed; as `is_awaited` is told, before and after that."""
        if nbytes <= 0:
            return
        if after - before >= nbytes // 2:
            self._wait_s = 0.0
            return
        if self._wait_s:
            reason = "what was removed is not free: is there a trash, or a snapshot?"
            self._log.say("room_not_freed", logging.WARNING, bytes=nbytes, reason=reason)
        self._wait_s = min(_LONGEST_S, 2 * self._wait_s) or _AWAITED_S
        self._until = time.monotonic() + self._wait_s
        self._unused, self._enough = before, nbytes // 2


class Leader:
    """The holder of the lease, in one term of it."""

    def __init__(
        self,
        root: str,
        files: SharedFiles,
        news: EvictionNews,
        sights: SightsLog,
        lease: Lease,
        file_mode: int,
    ) -> None:
        self._root = root
        self._files = files
        self._news = news
        self._sights = sights
        self._lease = lease
        self.term = lease.term
        self._file_mode = file_mode
        self._log = StateLog(root=root)
        last = files.usage()
        # The sums of the last leader stand until a walk is over.
        self._usage = replace(last or Usage(), pruned_files=0, pruned_nbytes=0, orphans=0)
        self._known = last is not None
        self._published: Usage | None = None
        self._count = Count(root, files, lease, self._usage.namespaces)
        self._counted = dict(self._usage.counted)  # heartbeat -> its `written` in the sums
        self._loaded: dict[str, int] = {}  # heartbeat -> its `loaded` in the hour
        self._used: dict[str, tuple[int, float]] = {}  # heartbeat -> its `used`, and of late
        self._total_written = 0
        self._peak = 0.0  # the fastest growth of the last minutes
        self._beats: list[Heartbeat] = []  # of all who live
        self._heard: dict[str, Heard] = {}  # by the heartbeat's name
        # Private namespace -> for how long no living heartbeat has named it.
        self._unnamed_s: dict[str, float] = {}
        self._looked_at = self._published_at = float("-inf")
        self._walk_at = self._snapshot_at = self._orphans_at = float("-inf")
        self._full: dict[str, int] = {}  # heartbeat -> its `full` that was served
        self._stuck: set[str] = set()  # paths that cannot be removed
        self._stuck_at = time.monotonic()
        self._awaited = RoomAwaited(root)
        self._futile_until = 0.0  # nothing was left to remove: no need to look again and again

    @property
    def is_leader(self) -> bool:
        """Return whether the lease is held, and was without a break since this leader began."""
        return self._lease.held and self._lease.term == self.term

    # --- looks ------------------------------------------------------------------------------

    def look(self, beats: Sequence[Heartbeat], space: Space) -> Usage | None:
        """Add the reports of heartbeats, and publish; returns the usage, None before the first walk of all.

        Raises OSError.
        """
        now = time.monotonic()
        beats = beats[:_MAX_KNOWN]
        is_first = self._looked_at == float("-inf")
        last_heard = self._heard
        self._heard = {
            beat.name: known
            if (known := self._heard.get(beat.name)) is not None and known.beat == beat.beat
            else Heard(beat.beat, now, has_changed=known is not None)
            for beat in beats
        }
        passed_s = 0.0 if is_first else max(now - self._looked_at, 1e-3)
        rate = 0.0
        for beat in beats:
            # One that is new to us and not to others has its part in what the last leader has told.
            is_known = is_first or beat.beat > _NEW_BEATS
            last = last_heard.get(beat.name)
            since_s = max(passed_s, now - (last.at if last is not None else self._looked_at))
            more = self._add(beat, beat.written if is_known else 0, since_s)
            rate += more / since_s if since_s else 0.0
        dead = {b.name for b in beats if provably_dead(b.name)}
        dead |= {name for name, heard in self._heard.items() if now - heard.at > SILENT_S}
        for name in dead:  # who was only frozen publishes again
            self._files.withdraw(name)
        self._beats = [beat for beat in beats if beat.name not in dead]
        # Between two looks that lie far apart we saw nothing: that is no silence of others.
        self._unnamed_s = {
            name: self._unnamed_s.get(name, 0.0) + min(passed_s, TTL_S)
            for name in self._count.private - self._claimed
        }
        # A heartbeat that is missed at a look comes back: it must not count again.
        for table in (self._counted, self._full, self._loaded):
            missed = [name for name in table if name not in self._heard]
            for name in missed[: max(0, len(table) - _MAX_KNOWN)]:
                del table[name]
        for beat in self._beats:  # what was full before we led says so again if it still is
            self._full.setdefault(beat.name, beat.full)
        self._looked_at = now
        self._note_use(passed_s, space)
        faded = int(self._usage.growth * _FADE**passed_s)
        self._peak = max(rate, self._peak * _PEAK_FADE**passed_s)
        self._publish(space, max(int(rate), faded))
        return self._usage if self._known else None

    @property
    def _claimed(self) -> set[str]:
        return {beat.namespace for beat in self._beats if beat.namespace is not None}

    def dead(self, unnamed_s: float = SILENT_S) -> list[str]:
        """Return private namespaces without a living heartbeat for so long: nobody can use them again."""
        return [name for name in self._count.ours if self._unnamed_s.get(name, 0.0) > unnamed_s]

    def _add(self, beat: Heartbeat, unknown: int, passed_s: float) -> int:
        """Add the bytes that an engine has written since its last heartbeat; returns their number.

        More than any disk can take in that time is no number to prune for: a walk tells.
        """
        more = max(0, beat.written - self._counted.get(beat.name, unknown))
        more = more if more < _FASTEST * max(1.0, passed_s) else 0
        self._total_written += more
        self._counted[beat.name] = beat.written
        loaded = max(0, beat.loaded - self._loaded.get(beat.name, beat.loaded))
        self._loaded[beat.name] = beat.loaded
        self._count_traffic(more, loaded)
        if beat.namespace is not None:
            self._count.report(beat.namespace, more)
        return more

    def _count_traffic(self, stored: int, loaded: int) -> None:
        """Add to the hour; what it came to is said when it is over."""
        hour, now_ms = self._usage.hour, time.time_ns() // 1_000_000
        if not 0 <= now_ms - hour.since_ms < _HOUR_MS:
            is_stale = now_ms - hour.since_ms > _STALE_MS  # nobody has led since
            self._usage = replace(self._usage, last_hour=Traffic() if is_stale else hour)
            hour = Traffic(now_ms)
        stored, loaded = min(MAX_COUNT, hour.stored + stored), min(MAX_COUNT, hour.loaded + loaded)
        self._usage = replace(self._usage, hour=Traffic(hour.since_ms, stored, loaded))

    def _note_use(self, passed_s: float, space: Space) -> None:
        """Find what part each engine has in the recent use, and whether chunks are stored at first sight."""
        kept = 0.5 ** (passed_s / _USE_HALF_LIFE_S)
        is_first = not self._used  # of a new leader: what they used in their lives stands for it
        self._used = {
            beat.name: (beat.used, recent * kept + max(0, beat.used - last))
            for beat in self._beats
            for last, recent in [
                self._used.get(beat.name, (beat.used, float(beat.used * is_first)))
            ]
        }
        total = sum(recent for _, recent in self._used.values())
        voters = [beat for beat in self._beats if self._used[beat.name][1] > total / 1000]
        hits = [(beat.first_hits, beat.second_hits) for beat in voters]
        was = self._usage.first_sight
        if not any(map(any, hits)):  # nothing is measured; after a larger bound, say, for ever
            was |= all(scope.used < scope.limit // 2 for scope in scopes(self._usage, space))
        self._usage = replace(
            self._usage,
            first_sight=at_first_sight(was, hits),
            first_hits=min(MAX_COUNT, sum(first for first, _ in hits)),
            second_hits=min(MAX_COUNT, sum(second for _, second in hits)),
            shares={beat.name: int(1000 * self._used[beat.name][1] / total) for beat in voters},
        )

    def _publish(self, space: Space, growth: int) -> None:
        tenants = {b.namespace: b.tenant for b in self._beats if b.namespace and b.tenant}
        tenants = {**tenants, **self._count.tenants}
        max_nbytes, kept, of_tenants = smallest(self._beats, tenants.values(), space)
        claimed = self._claimed
        counted = {n: at for n, at in self._count.nbytes.items() if at != (0, 0) or n in claimed}
        least = min([n for n in (max_nbytes, *of_tenants.values()) if n is not None], default=None)
        if kept:
            least = min(least or MAX_COUNT, space.total_nbytes - kept)
        is_fast = least is not None and self._peak * _FAST_S > least
        usage = replace(
            self._usage,
            namespaces=counted,
            others=(0, 0) if self._walk_at > float("-inf") else self._usage.others,
            tenants={name: tenants[name] for name in counted if name in tenants},
            counted={beat.name: self._counted[beat.name] for beat in self._beats},
            growth=growth,
            look_s=_FAST_LOOK_S if is_fast else _LOOK_S,
            max_nbytes=max_nbytes,
            kept_free=kept,
            tenant_limits=of_tenants,
            unremovable=len(self._stuck),
        )
        self._usage = usage
        is_late = self._looked_at - self._published_at > _PUBLISH_S
        if self._known and (is_late or usage != self._published):
            self._usage = self._published = replace(
                usage, sequence=(usage.sequence + 1) % MAX_COUNT
            )
            # An engine compares with its own namespace and with those of its tenant.
            storing = {beat.tenant for beat in self._beats if beat.tenant is not None}
            needed = {n for n in counted if n in claimed or tenants.get(n) in storing}
            self._files.publish_usage(shortened(self._usage, needed))
            self._published_at = self._looked_at

    # --- work -------------------------------------------------------------------------------

    def due(self, space: Space) -> bool:
        """Return whether there is work: a walk, a bound that is near, a full disk."""
        if self._must_walk() or self._now_full():
            return True
        if time.monotonic() < self._futile_until:
            return False
        limits = [beat.limits for beat in self._beats]
        return bool(inodes_short(limits, space)) or self._next_scope(space, ()) is not None

    def _must_walk(self) -> bool:
        return time.monotonic() >= self._walk_at

    def _now_full(self) -> list[Heartbeat]:
        return [beat for beat in self._beats if beat.full > self._full.get(beat.name, beat.full)]

    def _next_scope(self, space: Space, done: Sequence[Scope]) -> Scope | None:
        """Return a bound that something must go for; not one of a kind and name that are done."""
        over = {(scope.kind, scope.name) for scope in done}
        usage = replace(self._usage, namespaces=self._count.nbytes)
        for scope in scopes(usage, space):
            if scope.kind == "free" and self._awaited.is_awaited(self._unused(space)):
                continue
            if (scope.kind, scope.name) not in over and scope.excess(usage):
                return scope
        return None

    def _unused(self, space: Space) -> int:
        """Return the two values that `RoomAwaited` compares: the free space, and the bytes that engines
        wrote.
        """
        return space.unused_nbytes + self._total_written

    async def work(self, space: Space) -> None:
        """Walk, prune and clean if due. Raises OSError when the root does not let us."""
        walked = self._must_walk() or self._count.is_stale
        if walked:
            await self._walk()
            space = Space.of(self._root)
        if self.is_leader:
            await self._prune(space)
        if walked and self.is_leader:
            await self._prune_unused()
            before_ns, dead = self._lease.now_ns() - _EMPTY_NS, self.dead(_DEAD_S)
            await self._free(dead, Need(MAX_COUNT, before_ns=MAX_COUNT))
            remove = self._count.remove_namespaces
            self._count.forget(await asyncio.to_thread(remove, before_ns, self._claimed, dead))
        now = time.monotonic()
        if not self.is_leader:
            return
        if now - self._orphans_at > _ORPHANS_S:
            self._orphans_at = now
            self._clean()
        if now - self._snapshot_at > _SNAPSHOT_S:
            self._snapshot_at = now
            self.save_snapshots()

    async def _walk(self) -> None:
        started, late_nbytes = time.monotonic(), int(UNTOLD_S * self._usage.growth)
        alive = [
            name
            for name, heard in self._heard.items()
            if heard.has_changed and started - heard.at < _FRESH_S
        ]
        if await self._count.walk(alive, late_nbytes, lambda: self.is_leader):
            self._known = True
            self._usage = replace(self._usage, at_ms=time.time_ns() // 1_000_000)
            now = time.monotonic()
            self._walk_at = now + max(_WALK_S, _WALK_PART * (now - started))

    # --- what goes --------------------------------------------------------------------------

    async def _prune(self, space: Space) -> None:
        if time.monotonic() - self._stuck_at > _STUCK_S:
            self._stuck_at = time.monotonic()
            self._stuck.clear()
        done: list[Scope] = []
        # A prune for one bound helps the wider ones: look again after each.
        while (scope := self._next_scope(space, done)) is not None and self.is_leader:
            done.append(scope)
            excess = scope.excess(replace(self._usage, namespaces=self._count.nbytes))
            if scope.kind == "free":
                space = await self._make_room(excess)
            else:
                await self._free(self._members(scope), Need(excess))
                space = Space.of(self._root)
        short = inodes_short((beat.limits for beat in self._beats), space)
        if short and not await asyncio.to_thread(self._count.remove_empty, None):
            await self._free(self._count.ours, Need(num_files=short))
        full = self._now_full()
        if full and not self._awaited.is_awaited(self._unused(space)):
            amount = max(int(_FULL_SHARE * self._usage.nbytes), _FULL_LEAST)
            await self._make_room(amount, "a store found the disk full")
        # Also while what was removed is awaited: who finds it full then says so again.
        self._full |= {beat.name: beat.full for beat in full}

    async def _make_room(self, nbytes: int, reason: str = "") -> Space:
        """Remove so many bytes of everything for lack of room; returns the free space afterwards.

        It is told of with a `reason`, or where less than `keep_free` was left.
        """
        space = Space.of(self._root)
        if not reason and space.free_nbytes < self._usage.kept_free:
            reason = "less than keep_free was left"
        files, ours = self._usage.pruned_files, self._count.total_nbytes
        before = self._unused(space)
        freed = await self._free(self._count.ours, Need(nbytes))
        after = Space.of(self._root)
        self._awaited.removed(freed, before, self._unused(after))
        if freed and reason:
            in_use = space.total_nbytes - space.free_nbytes
            self._log.say(
                "pruned_for_room",
                logging.WARNING,
                files=self._usage.pruned_files - files,
                bytes=freed,
                free_bytes=space.free_nbytes,
                keep_free_bytes=self._usage.kept_free,
                others_bytes=max(0, in_use - ours),
                reason=reason,
            )
        return after

    async def _prune_unused(self) -> None:
        """Remove chunks that were unused for longer than the `unused_s` of any watcher."""
        unused_s = unused_limit_s(beat.limits for beat in self._beats)
        if unused_s is None:
            return
        before_ns = cutoff_ns(self._lease.now_ns(), unused_s)
        await self._free(self._count.ours, Need(MAX_COUNT, before_ns=before_ns))

    def _members(self, scope: Scope) -> list[str]:
        if scope.kind == "root":
            return self._count.ours
        return [name for name in self._count.ours if self._count.tenants.get(name) == scope.name]

    async def _free(self, members: list[str], need: Need) -> int:
        """Remove chunks of these namespaces, and tell everybody; returns bytes.

        Those of dead namespaces go first, then the least recently used.
        """
        known, dead = self._count.catalogues, {*self.dead()}
        pruned = await evict(
            [known[name] for name in members if name not in dead],
            need,
            self._root,
            may_go_on=self._still_held,
            stuck=self._stuck,
            told=self._note,
            first=[known[name] for name in members if name in dead],
        )
        freed = pruned.nbytes + pruned.vanished_nbytes
        if need.before_ns is None:
            if pruned.last_use_ns:
                self._learn_age(pruned.last_use_ns)
            if not (freed or pruned.num_files):
                self._futile_until = time.monotonic() + _FUTILE_S
        return freed

    def _learn_age(self, last_use_ns: int) -> None:
        """Set the touch interval to a tenth of the age of the last pruned files: a coarser one would spoil
        their order.
        """
        if not (now_ns := self._lease.now_ns()):
            return  # nobody knows what time it is
        age_s = (now_ns - last_use_ns) // 1_000_000_000
        interval_s = min(max(1, age_s // 10), MAX_TOUCH_INTERVAL_S)
        self._usage = replace(self._usage, touch_interval_s=interval_s)

    def _still_held(self) -> bool:
        with contextlib.suppress(OSError):
            self._lease.renew()
        return self.is_leader

    def _note(self, pruned: Pruned) -> None:
        """Subtract removed chunks and announce them; raises OSError if the root was away then."""
        for path, nbytes in pruned.forgotten.items():
            self._count.removed(path[len(self._root) + 1 :], nbytes)
        for path, error in pruned.failures.items():
            if not self._stuck:
                logger.warning("fskv: %s cannot be removed and stays: %s", path, error.strerror)
            self._stuck.add(path)
        for path, chunks in pruned.removed.items():
            name = path[len(self._root) + 1 :]
            with contextlib.suppress(OSError):
                self._news.publish(name.rpartition("@")[2], chunks)
        self._usage = replace(
            self._usage,
            pruned_files=self._usage.pruned_files + pruned.num_files,
            pruned_nbytes=min(MAX_COUNT, self._usage.pruned_nbytes + pruned.nbytes),
        )
        if pruned.away is not None:
            raise pruned.away

    def _clean(self) -> None:
        """Remove the parts of dead writers, and old news."""
        now_ns = self._lease.now_ns()
        catalogues = [self._count.catalogues[name] for name in self._count.ours]
        removed, told = 0, False
        for found in orphaned(catalogues, now_ns, self._root):
            removed += found.fate is Fate.GOES
            if found.fate is Fate.FAILED and found.what and not told:  # one for a round
                told = True
                logger.warning("fskv: %s cannot be removed: %s", found.name, found.reason)
        self._files.remove_orphans(now_ns)
        with contextlib.suppress(OSError):
            self._news.remove_old(now_ns)
        with contextlib.suppress(OSError):
            self._sights.remove_old(now_ns)
        if removed:
            logger.info("fskv: removed %d parts of writers that are gone", removed)
            self._usage = replace(self._usage, orphans=self._usage.orphans + removed)

    def save_snapshots(self) -> None:
        """Write the snapshots that are out of date; a failed write is logged."""
        self._count.save_snapshots(self._file_mode)
