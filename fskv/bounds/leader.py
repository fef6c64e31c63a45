"""What the holder of the lease does for all who share a root: it counts, prunes and cleans.

Made when a maintenance process (fskv.bounds.maintenance) gets the lease, and dropped when it loses it. One
piece of work at a time; walking and removing happen in worker threads, and between two batches the lease is
looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from fskv.bounds.count_checks import CountChecks
from fskv.bounds.evict import Pruned, cutoff_ns, execute, plan, remove_orphans
from fskv.bounds.eviction_news import EvictionNews
from fskv.bounds.heartbeats import UNNOTICED_NS, Heartbeats
from fskv.bounds.lease import SHARED_DIR, Lease
from fskv.bounds.ledger import Ledger, shortened
from fskv.bounds.quota import (
    Claim,
    Scope,
    Usage,
    excess,
    inodes_short,
    is_claimable,
    is_near,
    last_use_step_s,
    scopes,
    shortage,
    unused_limit_s,
    with_intervals_of,
    without_limits,
)
from fskv.bounds.room_freed import RoomFreed
from fskv.bounds.room_made import RoomMade
from fskv.index.scan import NUM_SHARDS
from fskv.index.snapshot import Catalogue
from fskv.root.beneath import opened
from fskv.root.filesystem import Space, counting_device
from fskv.root.manifests import Manifests, all_namespaces
from fskv.root.process_id import provably_dead, unique_name
from fskv.types import MAX_COUNT

logger = logging.getLogger(__name__)

_COUNT_ALL_S = 60.0  # how often namespaces are counted that nobody claims to write to
# Directories that are listed at such a count even if their mtime has not changed: all of them in 17 hours.
# A snapshot, which whoever writes to the root may have made up, is believed for no longer.
_LISTED_AGAIN = 4
_SNAPSHOT_S = 300.0
_ORPHANS_S = 30.0
_FULL_SHARE = 0.03  # of everything: what goes when a disk is full without any bound being reached
_FULL_LEAST = 64 << 20
_FULL_PART = 8  # and no more than an eighth of it, whatever engines want at hand
_FUTILE_S = 5.0
# How long a dead engine's claim stays once it is counted: longer than anybody computes with an older usage,
# and than an engine whose maintenance process died needs to start another one.
_WITHDRAW_S = 20.0
# How long a dead engine's claim stays where its namespace cannot be counted, and perhaps never can.
_GIVEN_UP_S = 60.0
_STUCK_S = 600.0  # files that could not be removed are tried again
_UNUSED_STEP = 1 << 30  # bytes of one plan


class Leader:
    """What the holder of the lease knows and does. Ends with the lease."""

    def __init__(
        self,
        root: str,
        book: Ledger,
        log: EvictionNews,
        lease: Lease,
        file_mode: int,
        grace_s: float,
    ) -> None:
        self._root = root
        self._ledger = book
        self._eviction_news = log
        self._lease = lease
        self._term = lease.term
        self._file_mode = file_mode
        self.usage: Usage | None = None
        self._catalogues: dict[str, Catalogue] = {}  # by "<arch>/<model>@<digest16>"
        # Of these: whether it is foreign, and the device on which what is foreign counts by its blocks.
        self._counted_as: dict[str, tuple[bool, int | None]] = {}
        # Of what turned foreign, or ours: who counts it now. Until he has, what was known is there.
        self._recounts: dict[str, Catalogue] = {}
        # What the last holder has counted, of namespaces that were not counted since; None: not read yet.
        self._inherited: dict[str, tuple[int, int]] | None = None
        self._device: int | None = None
        self._asked_device = False
        self._manifests = Manifests(root)
        self._counted_all_at = self._snapshot_at = self._orphans_at = float("-inf")
        self._again = time.time_ns() % NUM_SHARDS  # terms may be shorter than a round
        self._heartbeats = Heartbeats(root, book, lease)
        self._must_recount = False  # clocks were found to differ since the last count of all
        self._counted: dict[str, int] = {}  # claim -> its `written` before the last count
        self._full: dict[str, int] = {}  # claim -> its `full` that was served
        self._dead_since: dict[str, float] = {}  # claim of a dead engine -> when we saw that
        self._counted_dead: dict[str, float] = {}  # of these: counted, or given up, since when
        # Claims whose limits nothing is removed for. They still bound what is granted: whoever is only being
        # started again declares the same ones in a moment.
        self._gone: set[str] = set()
        self._checks = CountChecks(root, book)
        self._uncounted: dict[str, str] = {}  # namespace -> why, as it was told
        self._stuck: set[str] = set()  # paths that cannot be removed
        self._stuck_at = time.monotonic()
        self._room_freed = RoomFreed(root)
        self._futile_until = 0.0  # nothing was left to remove: no need to look again and again
        self._room_made = RoomMade(root)
        self._grace_s = grace_s
        self._unsaved: set[str] = set()  # namespaces whose snapshot is old

    @property
    def in_office(self) -> bool:
        """Whether the lease is held, and was without a break since this holder began."""
        return self._lease.held and self._lease.term == self._term

    def watch(self, claims: list[Claim], read_at: float) -> None:
        """Take what every step reads; claims were read since `read_at`."""
        self._must_recount = self._heartbeats.watch(claims, read_at) or self._must_recount

    def _must_count_all(self) -> bool:
        late = time.monotonic() - self._counted_all_at > _COUNT_ALL_S
        return self.usage is None or self._must_recount or late

    def due(self, claims: list[Claim], space: Space) -> bool:
        """Whether there is work: the first count, a bound that is near, a full disk, or time has passed."""
        self._room_freed.look(space, claims)
        if self._must_count_all():
            return True
        for claim in claims:
            # What was full before we held the lease is not ours to serve: it says so again if it still is.
            if claim.full > self._full.setdefault(claim.name, claim.full):
                return True
        if self._to_withdraw():
            return True
        if time.monotonic() < self._futile_until:
            return False
        claims = without_limits(claims, self._gone)
        if inodes_short(claims, space):
            return True
        return any(self._is_near(scope, claims) for scope in self._bounds(claims, space))

    async def work(self, claims: list[Claim], space: Space) -> None:
        """Count, prune what is beyond the bounds, and clean. Raises OSError when the root does not let us."""
        every, recounts = self._must_count_all(), self._must_recount
        if self._inherited is None:
            last = self._ledger.usage() or Usage()
            self._inherited = {n: at for n, at in last.namespaces.items() if is_claimable(n)}
        names = self._find_namespaces(claims, every=every)
        await asyncio.to_thread(self._judge, names)
        if every and not self._asked_device:
            await asyncio.to_thread(self._find_device)
        self._open_catalogues(names)
        self._gone = dead = self._dead(claims)
        known = await self._count(claims, every=every)
        if not self.in_office:
            return  # others have counted since, and taken away claims that this count lacks
        counted = {c.name: c.written for c in claims if c.namespace in known}
        self._counted |= counted
        now = time.monotonic()
        self._dead_since = {name: self._dead_since.get(name, now) for name in dead}
        given_up = {name for name, at in self._dead_since.items() if now - at > _GIVEN_UP_S}
        done = counted.keys() | self._counted_dead.keys() | self._lost(claims) | given_up
        self._counted_dead = {name: self._counted_dead.get(name, now) for name in dead & done}
        self._publish(claims)
        obeyed = without_limits(claims, self._gone)
        await self._prune(obeyed, inodes_short(obeyed, space))
        if every:
            await self._prune_unused(obeyed)
        if not self.in_office:
            return
        self._publish(claims)
        for name in self._to_withdraw():  # what they wrote is in every usage that anybody uses
            self._ledger.withdraw(name)
            del self._counted_dead[name]
        if every:
            self._counted_all_at = time.monotonic()
            self._must_recount &= not recounts
        if time.monotonic() - self._orphans_at > _ORPHANS_S:
            self._orphans_at = time.monotonic()
            self._clean()
        if time.monotonic() - self._snapshot_at > _SNAPSHOT_S:
            self._snapshot_at = time.monotonic()
            self.save_snapshots()

    def _to_withdraw(self) -> list[str]:
        now = time.monotonic()
        return [name for name, since in self._counted_dead.items() if now - since > _WITHDRAW_S]

    def _lost(self, claims: list[Claim]) -> set[str]:
        """Return the claims on namespaces that do not exist (any more): nothing is there to be counted."""
        return {
            c.name
            for c in claims
            if c.namespace is None
            or (c.namespace not in self._catalogues and not self._manifests.is_there(c.namespace))
        }

    def _find_namespaces(self, claims: list[Claim], *, every: bool) -> set[str]:
        """Find the namespaces that are to be counted; returns those whose manifests are to be judged."""
        # Those that engines write to count at once.
        claimed = {c.namespace for c in claims if c.namespace is not None}
        found = {name for name in claimed - self._catalogues.keys() if self._manifests.state(name)}
        if every:
            found |= all_namespaces(self._root)
            inherited = self._inherited or {}
            for gone in self._manifests.gone((self._catalogues.keys() | inherited) - found):
                for known in (self._catalogues, self._counted_as, self._recounts, inherited):
                    known.pop(gone, None)
                self._manifests.forget(gone)
            found |= inherited.keys()
        return found | (self._manifests.foreign & claimed)

    def _judge(self, names: set[str]) -> None:
        """Find out which of these are ours, and whose. In a worker thread: a manifest may be long."""
        for name in names:
            self._manifests.judge(name)

    def _find_device(self) -> None:
        """Learn, once in office, whether files count by their blocks here. In a worker thread."""
        with (
            contextlib.suppress(OSError),  # no room, perhaps: the next count asks again
            opened(self._root, f"{self._root}/{SHARED_DIR}", os.O_PATH) as fd,
        ):
            self._device = counting_device(fd, f"{unique_name()}.part")
            self._asked_device = True

    def _open_catalogues(self, names: set[str]) -> None:
        """Have a catalogue for each of these.

        What is foreign is walked: nothing is pruned there, so what a made-up snapshot says would stay.
        """
        for name in names:
            foreign = name in self._manifests.foreign
            kind = (foreign, self._device if foreign else None)
            if self._counted_as.get(name) != kind:
                path = f"{self._root}/{name}"
                counting = self._recounts if name in self._catalogues else self._catalogues
                counting[name] = Catalogue(path) if foreign else Catalogue.load(path)
                self._counted_as[name] = kind

    def _ours(self) -> list[str]:
        """Return the namespaces that are fskv's and counted so: what is foreign is never touched."""
        others = self._manifests.foreign | self._recounts.keys()
        return [name for name in self._catalogues if name not in others]

    def _dead(self, claims: list[Claim]) -> set[str]:
        """Return the claims of engines that are gone, or that have not been heard of for so long."""
        dead = self._heartbeats.silent(claims)
        dead |= {claim.name for claim in claims if claim.closed or provably_dead(claim.name)}
        names = {claim.name for claim in claims}
        self._full = {name: full for name, full in self._full.items() if name in names}
        self._counted = {name: n for name, n in self._counted.items() if name in names}
        return dead

    async def _count(self, claims: list[Claim], *, every: bool) -> set[str]:
        """Bring catalogues up to date; returns those namespaces whose every file is in the count."""
        known = set()
        writing = {claim.namespace for claim in claims}
        now_ns = self._lease.now_ns()
        relist = self._heartbeats.clocks_differ or not self._checks.mtimes_tell(claims, now_ns)
        now_ns = max(0, now_ns - UNNOTICED_NS)
        again = [(self._again + i) % NUM_SHARDS for i in range(_LISTED_AGAIN if every else 0)]
        self._again = (self._again + len(again)) % NUM_SHARDS
        for name, last in self._catalogues.items():
            if not every and name not in writing:
                continue
            catalogue = self._recounts.get(name, last)
            before = catalogue.num_files, catalogue.nbytes
            try:
                device = self._counted_as[name][1]
                failed = await catalogue.refresh(now_ns, every=relist, again=again, device=device)
            except Exception as error:  # it is one of many, and anything may be in it
                if str(error) != self._uncounted.get(name):
                    self._uncounted[name] = str(error)
                    logger.warning("fskv: %s cannot be counted: %s", catalogue.namespace, error)
                continue
            self._uncounted.pop(name, None)
            if self._recounts.pop(name, None) is not None:
                for shard in failed:
                    catalogue.take_over(last, shard.idx)
                self._catalogues[name] = catalogue
            if self._checks.is_whole(name, failed):
                known.add(name)
                (self._inherited or {}).pop(name, None)
            if (catalogue.num_files, catalogue.nbytes) != before:
                self._unsaved.add(name)
        return known

    def _nbytes(self) -> dict[str, tuple[int, int]]:
        found = {name: (c.nbytes, c.num_files) for name, c in self._catalogues.items()}
        for name, (nbytes, num_files) in (self._inherited or {}).items():
            own = found.get(name, (0, 0))
            found[name] = max(nbytes, own[0]), max(num_files, own[1])
        return found

    def _bounds(self, claims: list[Claim], space: Space) -> list[Scope]:
        """Return the bounds with what is known at this moment; the widest last."""
        usage = replace(self.usage or Usage(), namespaces=self._nbytes())
        kinds = ("namespace", "tenant", "root", "free")
        return sorted(scopes(claims, usage, space), key=lambda scope: kinds.index(scope.kind))

    def _is_near(self, scope: Scope, claims: list[Claim]) -> bool:
        if scope.kind == "free" and self._room_freed.is_awaited("keep_free"):
            return False
        return is_near(scope, claims)

    def _publish(self, claims: list[Claim]) -> None:
        last = self.usage or Usage(touch_intervals=self._known_intervals())
        at_ms = time.time_ns() // 1_000_000
        claimed = {c.namespace for c in claims if c.namespace is not None}
        found = sorted(self._nbytes().items())
        counted = {name: n for name, n in found if n != (0, 0) or name in claimed}
        tenants = self._manifests.tenants
        usage = replace(
            last,
            namespaces=counted,
            tenants={name: tenants[name] for name in counted if name in tenants},
            counted={c.name: self._counted[c.name] for c in claims if c.name in self._counted},
            at_ms=at_ms,
            touch_intervals=with_intervals_of(last.touch_intervals, claims, at_ms),
            unremovable=len(self._stuck),
        )
        # Whoever is granted something computes with his own namespace and with those of his tenant.
        writing = {tenants[name] for name in claimed & tenants.keys()}
        writing |= {c.tenant for c in claims if c.tenant is not None}
        needed = {name for name in counted if name in claimed or tenants.get(name) in writing}
        self._ledger.publish_usage(shortened(usage, needed))
        self.usage = usage  # what others can read as well

    def _known_intervals(self) -> Mapping[int, int]:
        """Return what earlier holders knew of engines that may be gone."""
        usage = self._ledger.usage()
        return {} if usage is None else usage.touch_intervals

    async def _prune(self, claims: list[Claim], num_inodes: int) -> None:
        if time.monotonic() - self._stuck_at > _STUCK_S:
            self._stuck_at = time.monotonic()
            self._stuck.clear()
        done: set[tuple[str, str | None]] = set()
        while True:  # what goes for one bound helps the wider ones: look again after each
            space = Space.of(self._root)
            scope = next(
                (
                    scope
                    for scope in self._bounds(claims, space)
                    if (scope.kind, scope.name) not in done and self._is_near(scope, claims)
                ),
                None,
            )
            if scope is None:
                break
            done.add((scope.kind, scope.name))
            before, short = self.usage or Usage(), shortage(scope, claims)
            freed = await self._free(self._members(scope), excess(scope, claims), 0)
            if scope.kind == "free":
                keep = space.total_nbytes - scope.limit
                self._room_made.near(before, self.usage or before, space, keep, short)
                after = Space.of(self._root)
                self._room_freed.removed("keep_free", freed, space, after, claims)
        if num_inodes:
            await self._free(self._ours(), 0, num_inodes)
        full = [claim for claim in claims if claim.full > self._full.get(claim.name, 0)]
        if full and not self._room_freed.is_awaited("full"):
            before, space = self.usage or Usage(), Space.of(self._root)
            wanted = min(8 * sum(c.wanted for c in full), before.nbytes // _FULL_PART)
            amount = max(int(_FULL_SHARE * before.nbytes), _FULL_LEAST, wanted)
            freed = await self._free(self._ours(), amount, 0)
            self._room_made.full(before, self.usage or before, space)
            self._room_freed.removed("full", freed, space, Space.of(self._root), claims)
        # Also while what was removed is awaited: who finds it full then says so again.
        self._full |= {claim.name: claim.full for claim in full}

    async def _prune_unused(self, claims: list[Claim]) -> None:
        """Remove what was not used for longer than anybody wants it to stay."""
        unused_s = unused_limit_s(claims)
        if unused_s is None:
            return
        now_ns = self._lease.now_ns()
        step_s = last_use_step_s(claims, self.usage, now_ns / 1e6 - unused_s * 1e3)
        before_ns = cutoff_ns(now_ns, unused_s, step_s)
        catalogues = [self._catalogues[name] for name in self._ours()]
        while self.in_office:
            chosen = await asyncio.to_thread(
                plan, catalogues, _UNUSED_STEP, 0, self._stuck, before_ns
            )
            if not chosen.candidates:
                break
            self._note(await execute(chosen, self._still_held, self._root))

    def _members(self, scope: Scope) -> list[str]:
        if scope.kind == "namespace":
            return [name for name in self._ours() if name == scope.name]
        if scope.kind == "tenant":
            return [
                name for name in self._ours() if self._manifests.tenants.get(name) == scope.name
            ]
        return self._ours()

    async def _free(self, members: list[str], nbytes: int, num_files: int) -> int:
        """Remove least recently used chunks of these namespaces, and tell everybody; returns bytes."""
        catalogues = [self._catalogues[name] for name in members]
        left_nbytes, left_files = nbytes, num_files
        while (left_nbytes > 0 or left_files > 0) and self.in_office:
            chosen = await asyncio.to_thread(plan, catalogues, left_nbytes, left_files, self._stuck)
            if not chosen.candidates:
                break
            before = {name: self._catalogues[name].nbytes for name in members}
            pruned = await execute(chosen, self._still_held, self._root)
            self._disinherit(before)
            self._note(pruned)
            freed = pruned.nbytes + pruned.vanished_nbytes
            if not freed and not pruned.used_meanwhile and not pruned.failures:
                break
            left_nbytes -= freed
            left_files -= pruned.num_files
        if left_nbytes == nbytes and left_files == num_files:
            self._futile_until = time.monotonic() + _FUTILE_S
        return nbytes - left_nbytes

    def _disinherit(self, before: Mapping[str, int]) -> None:
        """What was pruned is no more in what the last holder has counted either."""
        inherited = self._inherited or {}
        for name in before.keys() & inherited.keys():
            nbytes, num_files = inherited[name]
            gone = before[name] - self._catalogues[name].nbytes
            inherited[name] = max(0, nbytes - gone), num_files

    def _still_held(self) -> bool:
        with contextlib.suppress(OSError):
            self._lease.renew()
        return self.in_office

    def _note(self, pruned: Pruned) -> None:
        """Tell everybody what was removed; raises OSError where the root was away then."""
        for path, error in pruned.failures.items():
            if not self._stuck:
                logger.warning("fskv: %s cannot be removed and stays: %s", path, error.strerror)
            self._stuck.add(path)
        for path, chunks in pruned.removed.items():
            name = path[len(self._root) + 1 :]
            self._unsaved.add(name)
            with contextlib.suppress(OSError):
                self._eviction_news.publish(name.rpartition("@")[2], chunks)
        if self.usage is not None:
            self.usage = replace(
                self.usage,
                pruned_files=self.usage.pruned_files + pruned.num_files,
                pruned_nbytes=min(MAX_COUNT, self.usage.pruned_nbytes + pruned.nbytes),
            )
        if pruned.away is not None:
            raise pruned.away

    def _clean(self) -> None:
        """Remove what writers that are gone have left, and news that everybody has heard."""
        now_ns = self._lease.now_ns()
        catalogues = [self._catalogues[name] for name in self._ours()]
        removed = remove_orphans(catalogues, now_ns, self._grace_s, self._root)
        self._ledger.remove_orphans(now_ns)
        with contextlib.suppress(OSError):
            self._eviction_news.remove_old()
        if removed and self.usage is not None:
            logger.info("fskv: removed %d parts of writers that are gone", removed)
            self.usage = replace(self.usage, orphans=self.usage.orphans + removed)

    def save_snapshots(self) -> None:
        """Write the snapshots that are older than what we know; what cannot be written is logged."""
        for name in sorted(self._unsaved):
            catalogue = self._catalogues.get(name)
            if catalogue is None or name in self._manifests.foreign:
                continue
            try:
                catalogue.save(self._file_mode, self._root)
            except OSError as error:
                logger.warning("fskv: %s cannot be written: %s", catalogue.path, error)
        self._unsaved.clear()
