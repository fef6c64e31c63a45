"""The process that keeps a root within its bounds: `python -m fskv.maintenance`, a child of each engine.

It is a process of its own so that neither its work nor a mount that hangs under it can touch the engine. It
does three things: it claims bytes for its engine (fskv.claims); it reports what was pruned, by whomever; and
if it holds the lease (fskv.lease) it counts, prunes and cleans for all. A process without the lease reads a
few small files a second and nothing else.

Asynchronous: one task for the engine's messages and at most one for the holder's work, which walks and
removes in worker threads. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from fskv.claims import (
    CLAIMS_DIR,
    Book,
    Claim,
    Limits,
    Scope,
    Space,
    Usage,
    grant,
    inodes_short,
    overdrawn,
    scopes,
)
from fskv.config import Share
from fskv.index.snapshot import Catalogue
from fskv.lease import SHARED_DIR, TTL_S, Lease
from fskv.process import provably_dead, unique_name
from fskv.prune import Pruned, execute, plan
from fskv.removed import ENTRY_NBYTES, RemovedLog
from fskv.root import MANIFEST_FILE, TMP_DIR, make_directory

logger = logging.getLogger(__name__)

_LOW = 0.98  # of a bound: what a prune leaves
_TRIGGER = 0.005  # of a bound: with less headroom than that a prune begins
_COUNT_ALL_S = 60.0  # how often namespaces are counted that nobody claims to write to
_SNAPSHOT_S = 300.0
_ORPHANS_S = 30.0
_GRACE_S = 3600.0  # a part of a process about which nothing can be proved is given up after this
_DEAD_CLAIM_S = 4 * TTL_S
_FULL_SHARE = 0.03  # of everything: what goes when a disk is full without any bound being reached
_FULL_LEAST = 64 << 20
_LEAST_ROOM = 4 << 20  # for the lease, the claims and a snapshot
_IDLE_S = 1.0
_REMOVED_NBYTES = ENTRY_NBYTES * 2048  # of one message
_FUTILE_S = 5.0
_STALE_S = 10.0  # a usage that was read longer ago is no base for a grant
# How long a dead engine's claim stays once it is counted: longer than anybody computes with an older usage,
# and than an engine whose maintenance process died needs to start another one.
_WITHDRAW_S = 20.0
_STUCK_S = 600.0  # files that could not be removed are tried again
_FREEING_S = (
    30.0  # what was removed may show in statvfs only after so long (btrfs: its next commit)
)
_MAX_UNLISTABLE = 40  # shards of 4096 that are left out of a count
_MAX_NEWS_NBYTES = 4 << 20
_NAMESPACE = re.compile(r".+@[0-9a-f]{16}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine says of itself and of its stores; all counts since its start."""

    used: int = 0  # of what it was granted: on disk, or on the way there
    written: int = 0
    returned: int = 0
    wanted: int = 0
    full: int = 0


class Maintainer:
    """One process's part in keeping a root within its bounds."""

    def __init__(
        self,
        root: str,
        claim: Claim | None,
        send: Callable[[dict[str, Any]], bool] = lambda _: True,
        *,
        dir_mode: int = 0o700,
        file_mode: int = 0o600,
        grace_s: float = _GRACE_S,
        lease_ttl_s: float = TTL_S,
    ) -> None:
        """`claim` is the engine's, None where there is none.

        `send` passes a message to the engine; it returns False if the engine does not listen.
        """
        self._root = root
        self._shared = f"{root}/{SHARED_DIR}"
        self._claim = claim
        self._send = send
        self._dir_mode = dir_mode
        self._file_mode = file_mode
        self._grace_s = grace_s
        self._engine = Engine()
        self._granted = 0  # in all, returned ones included
        self._published: Claim | None = None
        self._published_at = 0.0
        self._book = Book(self._shared, file_mode)
        self._lease = Lease(self._shared, ttl_s=lease_ttl_s, file_mode=file_mode)
        self._log = RemovedLog(self._shared, file_mode)
        self._work: asyncio.Task[None] | None = None
        self._holder: Holder | None = None
        self._work_after = 0.0  # the last one failed: not at once again
        self._complaint = ""
        self._reported: dict[str, Any] = {}
        self._reported_at = 0.0
        self._started = False
        self._room_made_at = float("-inf")
        self._news = b""  # entries of removed chunks that were not sent yet

    def start(self) -> None:
        """Make what is shared; raises OSError."""
        for path in (self._shared, f"{self._shared}/{CLAIMS_DIR}", self._log.directory):
            make_directory(path, self._dir_mode)
        self._log.skip_old()
        self._started = True

    def hear(self, engine: Engine) -> None:
        """Take what the engine said last."""
        self._engine = engine

    def step(self) -> bool:
        """Do what is due; returns whether something is going on, so that the next step should come soon.

        Raises OSError when the root does not let us; the next step tries again.
        """
        if not self._started:
            self.start()
        self._publish()
        self._lease.renew()
        read_at = time.monotonic()
        usage = self._holder.usage if self._holder is not None and self._holder.in_office else None
        usage = usage or self._book.usage()  # before the claims, see Claim
        claims = self._book.claims()
        space = Space.of(self._root)
        busy = self._hold(claims, space) if self._lease.held else self._let_go()
        granted = self._claim_more(claims, usage, space, read_at)
        return self._report(usage, space) or granted or busy

    async def make_room(self) -> None:
        """Remove a little of our own namespace: the disk is so full that not even a lease can be written.

        Without the lease, since two who do this at once only remove more than was needed.
        """
        if self._claim is None or time.monotonic() - self._room_made_at < _FUTILE_S:
            return
        self._room_made_at = time.monotonic()
        catalogue = Catalogue(f"{self._root}/{self._claim.namespace}")
        await catalogue.refresh(0)
        await execute(plan([catalogue], _LEAST_ROOM, 8), lambda: True)

    def _complain(self, error: BaseException) -> None:
        """Log an error, but not the same one again and again."""
        if repr(error) != self._complaint:
            self._complaint = repr(error)
            logger.warning("maintenance of %s: %s", self._root, error)

    @property
    def work(self) -> asyncio.Task[None] | None:
        """The holder's work that is under way."""
        return self._work

    async def close(self) -> None:
        """End: what was granted and not used is nobody's any more. Raises OSError."""
        if self._work is not None:
            self._work.cancel()
        if self._holder is not None:
            self._holder.save_snapshots()
        self._lease.release()
        if self._claim is not None:
            engine = self._engine
            self._book.publish(
                replace(
                    self._claim,
                    granted=max(engine.used, engine.written),
                    written=engine.written,
                    closed=True,
                )
            )

    # --- the engine's claim -----------------------------------------------------------------

    def _publish(self) -> None:
        """Write our claim if it has changed, and now and then to show that we live."""
        if self._claim is None:
            return
        engine = self._engine
        claim = replace(
            self._claim,
            # After a restart of this process the engine uses what was granted by the last one.
            granted=max(self._granted - engine.returned, engine.used),
            written=engine.written,
            wanted=engine.wanted,
            full=engine.full,
            beat=self._claim.beat,
        )
        due = time.monotonic() - self._published_at > TTL_S / 4
        if claim != self._published or due:
            if due:
                claim = replace(claim, beat=claim.beat + 1)
            self._book.publish(claim)
            self._claim = self._published = claim
            self._published_at = time.monotonic()

    def _claim_more(
        self, claims: list[Claim], usage: Usage | None, space: Space, read_at: float
    ) -> bool:
        if self._claim is None or self._published is None:
            return False
        mine, engine = self._published, self._engine
        bounds = scopes(claims, usage or Usage(), space)
        if usage is None and any(scope.kind != "free" for scope in bounds):
            return False  # nobody knows yet how much there is
        if not any(claim.name == mine.name for claim in claims):
            bounds = scopes([*claims, mine], usage or Usage(), space)
            self._published = None  # somebody thought us dead: publish again
        amount = grant(mine, bounds, sum(not claim.closed for claim in claims))
        left = mine.granted - engine.used
        if amount <= 0 or not (left < amount // 2 or left < engine.wanted):
            return False
        self._granted += amount
        self._publish()  # before the engine may use it
        if (
            overdrawn(mine, self._book.claims(), usage or Usage(), Space.of(self._root))
            or time.monotonic() - read_at > _STALE_S
            or not self._send({"grant": amount})
        ):
            self._granted -= amount
            self._publish()
            return False
        return True

    def _report(self, usage: Usage | None, space: Space) -> bool:
        """Tell the engine what has changed, or at least that we live; returns whether anything has."""
        if self._claim is None:
            return False
        ours = self._claim.namespace.rpartition("@")[2]
        self._news = (self._news + self._log.take_new(ours))[-_MAX_NEWS_NBYTES:]
        while self._news and self._send({"removed": self._news[:_REMOVED_NBYTES]}):
            self._news = self._news[_REMOVED_NBYTES:]
        usage = usage or Usage()
        report: dict[str, Any] = {
            "nbytes": usage.nbytes,
            "files": usage.num_files,
            "free": space.free_nbytes,
            "pruned_files": usage.pruned_files,
            "pruned_nbytes": usage.pruned_nbytes,
            "orphans": usage.orphans,
            "unremovable": usage.unremovable,
            "holder": self._lease.held,
        }
        changed = any(report[name] != self._reported.get(name) for name in report if name != "free")
        if changed or time.monotonic() - self._reported_at > _IDLE_S:
            self._send(report)  # not heard: the next one says the same
            self._reported, self._reported_at = report, time.monotonic()
        return changed or bool(self._news)

    # --- the holder's work ------------------------------------------------------------------

    def _hold(self, claims: list[Claim], space: Space) -> bool:
        """Start the holder's next piece of work, if one is due and none is under way."""
        if self._holder is not None and not self._holder.in_office:
            return (
                self._let_go()
            )  # the lease was lost and taken again: others were the holder between
        if self._holder is None:
            self._holder = Holder(
                self._root, self._book, self._log, self._lease, self._file_mode, self._grace_s
            )
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            if (error := work.exception()) is not None:
                self._complain(error)
                self._work_after = time.monotonic() + _FUTILE_S
        if (
            self._work is None
            and time.monotonic() > self._work_after
            and self._holder.due(claims, space)
        ):
            self._work = asyncio.ensure_future(self._holder.work(claims, space))
        return self._work is not None

    def _let_go(self) -> bool:
        """Somebody else holds the lease: what we know of the root gets old."""
        if self._work is None or self._work.done():
            if self._work is not None and (error := self._work.exception()) is not None:
                self._complain(error)
            self._work = self._holder = None
        return False


class Holder:
    """What the holder of the lease knows and does. Ends with the lease."""

    def __init__(
        self, root: str, book: Book, log: RemovedLog, lease: Lease, file_mode: int, grace_s: float
    ) -> None:
        self._root = root
        self._book = book
        self._log = log
        self._lease = lease
        self._term = lease.term
        self._file_mode = file_mode
        self._grace_s = grace_s
        self.usage: Usage | None = None
        self._catalogues: dict[str, Catalogue] = {}  # by "<arch>/<model>@<digest16>"
        self._tenants: dict[str, str] = {}
        self._counted_all_at = self._snapshot_at = self._orphans_at = float("-inf")
        self._beats: dict[str, tuple[int, float]] = {}  # claim -> its last beat, since when
        self._counted: dict[str, int] = {}  # claim -> its `written` before the last count
        self._full: dict[str, int] = {}  # claim -> its `full` that was served
        self._counted_dead: dict[str, float] = {}  # claim of a dead engine -> counted since when
        self._unlistable: dict[str, set[int]] = {}  # namespace -> shards
        self._stuck: set[str] = set()  # paths that cannot be removed
        self._stuck_at = time.monotonic()
        self._freeing: tuple[float, int] = (0.0, 0)  # until when; free bytes that are to be seen
        self._futile_until = 0.0  # nothing was left to remove: no need to look again and again
        self._unsaved: set[str] = set()  # namespaces whose snapshot is old

    @property
    def in_office(self) -> bool:
        """Whether the lease is held, and was without a break since this holder began."""
        return self._lease.held and self._lease.term == self._term

    def due(self, claims: list[Claim], space: Space) -> bool:
        """Whether there is work: the first count, a bound that is near, a full disk, or time has passed."""
        if self.usage is None or time.monotonic() - self._counted_all_at > _COUNT_ALL_S:
            return True
        for claim in claims:
            # What was full before we held the lease is not ours to serve: it says so again if it still is.
            if claim.full > self._full.setdefault(claim.name, claim.full):
                return True
        if self._to_withdraw():
            return True
        if time.monotonic() < self._futile_until:
            return False
        if inodes_short(claims, space):
            return True
        return any(self._is_near(scope, claims, space) for scope in self._bounds(claims, space))

    async def work(self, claims: list[Claim], space: Space) -> None:
        """Count, prune what is beyond the bounds, and clean. Raises OSError when the root does not let us."""
        every = self.usage is None or time.monotonic() - self._counted_all_at > _COUNT_ALL_S
        self._find_namespaces(claims, every=every)
        dead = self._dead(claims)
        known = await self._count(claims, every=every)
        if not self.in_office:
            return  # others have counted since, and taken away claims that this count lacks
        counted = {c.name: c.written for c in claims if c.namespace in known}
        self._counted |= counted
        now = time.monotonic()
        self._counted_dead = {
            name: self._counted_dead.get(name, now)
            for name in dead
            if name in self._counted_dead or name in counted or name in self._lost(claims)
        }
        self._publish(claims)
        await self._prune(claims, inodes_short(claims, space))
        if not self.in_office:
            return
        self._publish(claims)
        for name in self._to_withdraw():  # what they wrote is in every usage that anybody uses
            self._book.withdraw(name)
            del self._counted_dead[name]
        if every:
            self._counted_all_at = time.monotonic()
        if time.monotonic() - self._orphans_at > _ORPHANS_S:
            self._orphans_at = time.monotonic()
            self._remove_orphans()
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
            if c.namespace not in self._catalogues
            and not os.path.lexists(f"{self._root}/{c.namespace}")
        }

    def _find_namespaces(self, claims: list[Claim], *, every: bool) -> None:
        # Those that engines write to count at once, and where an operator has put a link in their place.
        found = {
            c.namespace
            for c in claims
            if c.namespace not in self._catalogues
            and os.path.exists(f"{self._root}/{c.namespace}/{MANIFEST_FILE}")
        }
        if every:
            linked = {name for name in self._catalogues if os.path.islink(f"{self._root}/{name}")}
            found |= linked & {c.namespace for c in claims}
            found |= self._all_namespaces()
            for gone in self._catalogues.keys() - found:
                del self._catalogues[gone]
        for name in found - self._catalogues.keys():
            path = f"{self._root}/{name}"
            self._catalogues[name] = Catalogue.load(path)
            tenant = _tenant_of(f"{path}/{MANIFEST_FILE}")
            if tenant is not None:
                self._tenants[name] = tenant

    def _all_namespaces(self) -> set[str]:
        found = set()
        with os.scandir(self._root) as arches:
            for arch in arches:
                if arch.name.startswith(".") or not arch.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError), os.scandir(arch.path) as models:
                    for model in models:
                        if _NAMESPACE.fullmatch(model.name) and model.is_dir(follow_symlinks=False):
                            found.add(f"{arch.name}/{model.name}")
        return found

    def _dead(self, claims: list[Claim]) -> set[str]:
        """Return the claims of engines that are gone, or that have not been heard of for so long."""
        now = time.monotonic()
        dead = set()
        for claim in claims:
            beat, since = self._beats.get(claim.name, (-1, now))
            if claim.beat != beat:
                self._beats[claim.name] = (claim.beat, now)
            elif now - since > _DEAD_CLAIM_S:
                dead.add(claim.name)
            if claim.closed or provably_dead(claim.name):
                dead.add(claim.name)
        names = {claim.name for claim in claims}
        self._beats = {name: seen for name, seen in self._beats.items() if name in names}
        self._full = {name: full for name, full in self._full.items() if name in names}
        self._counted = {name: n for name, n in self._counted.items() if name in names}
        return dead

    async def _count(self, claims: list[Claim], *, every: bool) -> set[str]:
        """Bring catalogues up to date; returns those namespaces whose every file is in the count."""
        known = set()
        writing = {claim.namespace for claim in claims}
        now_ns = self._lease.now_ns()
        for name, catalogue in self._catalogues.items():
            if not every and name not in writing:
                continue
            before = catalogue.num_files
            try:
                failed = await catalogue.refresh(now_ns)
            except OSError as error:
                logger.warning("%s cannot be counted: %s", catalogue.namespace, error)
                continue
            # A directory that cannot be listed twice in a row is left out: if it kept all else from being
            # counted, what is granted would grow without end, and everything would be pruned for it.
            unlistable = {shard.idx for shard in failed}
            if unlistable <= self._unlistable.get(name, set()) and len(failed) <= _MAX_UNLISTABLE:
                known.add(name)
            news, self._unlistable[name] = (
                unlistable - self._unlistable.get(name, set()),
                unlistable,
            )
            for shard in failed[: 1 if news else 0]:
                logger.warning(
                    "%s: %d directories cannot be listed: %s", name, len(failed), shard.error
                )
            if catalogue.num_files != before:
                self._unsaved.add(name)
        return known

    def _nbytes(self) -> dict[str, tuple[int, int]]:
        return {name: (c.nbytes, c.num_files) for name, c in sorted(self._catalogues.items())}

    def _bounds(self, claims: list[Claim], space: Space) -> list[Scope]:
        """Return the bounds with what is known at this moment; the widest last."""
        usage = replace(self.usage or Usage(), namespaces=self._nbytes())
        kinds = ("namespace", "tenant", "root", "free")
        return sorted(scopes(claims, usage, space), key=lambda scope: kinds.index(scope.kind))

    def _is_near(self, scope: Scope, claims: list[Claim], space: Space) -> bool:
        until, free_nbytes = self._freeing
        if scope.kind == "free" and time.monotonic() < until and space.free_nbytes < free_nbytes:
            return False  # what was removed does not show yet
        if scope.kind == "free":
            self._freeing = (0.0, 0)
        return _near(scope, claims)

    def _publish(self, claims: list[Claim]) -> None:
        last = self.usage or Usage()
        self.usage = replace(
            last,
            namespaces=self._nbytes(),
            tenants={
                name: self._tenants[name] for name in self._catalogues if name in self._tenants
            },
            counted={c.name: self._counted[c.name] for c in claims if c.name in self._counted},
            at_ms=time.time_ns() // 1_000_000,
            unremovable=len(self._stuck),
        )
        self._book.publish_usage(self.usage)

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
                    if (scope.kind, scope.name) not in done and self._is_near(scope, claims, space)
                ),
                None,
            )
            if scope is None:
                break
            done.add((scope.kind, scope.name))
            freed = await self._free(self._members(scope), _excess(scope, claims), 0)
            if scope.kind == "free":
                # Writers may have used what they were granted meanwhile.
                target = space.free_nbytes + freed // 2 - scope.outstanding
                if Space.of(self._root).free_nbytes < target:
                    self._freeing = (time.monotonic() + _FREEING_S, target)
        if num_inodes:
            await self._free(list(self._catalogues), 0, num_inodes)
        full = [claim for claim in claims if claim.full > self._full.get(claim.name, 0)]
        if full:
            everything = self.usage.nbytes if self.usage else 0
            amount = max(int(_FULL_SHARE * everything), _FULL_LEAST, *(8 * c.wanted for c in full))
            await self._free(list(self._catalogues), amount, 0)
            self._full |= {claim.name: claim.full for claim in full}

    def _members(self, scope: Scope) -> list[str]:
        if scope.kind == "namespace":
            return [name for name in self._catalogues if name == scope.name]
        if scope.kind == "tenant":
            return [name for name in self._catalogues if self._tenants.get(name) == scope.name]
        return list(self._catalogues)

    async def _free(self, members: list[str], nbytes: int, num_files: int) -> int:
        """Remove least recently used chunks of these namespaces, and tell everybody; returns bytes."""
        catalogues = [self._catalogues[name] for name in members]
        left_nbytes, left_files = nbytes, num_files
        while (left_nbytes > 0 or left_files > 0) and self.in_office:
            chosen = plan(catalogues, left_nbytes, left_files, self._stuck)
            if not chosen.candidates:
                break
            pruned = await execute(chosen, self._still_held)
            self._note(pruned)
            freed = pruned.nbytes + pruned.vanished_nbytes
            if not freed and not pruned.used_meanwhile and not pruned.failures:
                break
            left_nbytes -= freed
            left_files -= pruned.num_files
        if left_nbytes == nbytes and left_files == num_files:
            self._futile_until = time.monotonic() + _FUTILE_S
        return nbytes - left_nbytes

    def _still_held(self) -> bool:
        with contextlib.suppress(OSError):
            self._lease.renew()
        return self.in_office

    def _note(self, pruned: Pruned) -> None:
        for path, error in pruned.failures.items():
            if not self._stuck:
                logger.warning("%s cannot be removed and stays: %s", path, error.strerror)
            self._stuck.add(path)
        for path, chunks in pruned.removed.items():
            name = path[len(self._root) + 1 :]
            self._unsaved.add(name)
            with contextlib.suppress(OSError):
                self._log.publish(name.rpartition("@")[2], chunks)
        if self.usage is not None:
            self.usage = replace(
                self.usage,
                pruned_files=self.usage.pruned_files + pruned.num_files,
                pruned_nbytes=self.usage.pruned_nbytes + pruned.nbytes,
            )

    def _remove_orphans(self) -> None:
        """Remove the parts of writers that are gone, and of those that nobody can have waited for so long."""
        now_ns = self._lease.now_ns()
        removed = 0
        for catalogue in self._catalogues.values():
            for shard, parts in list(catalogue.parts.items()):
                left = [
                    part
                    for part in parts
                    if not self._remove_orphan(part.path, part.mtime_ns, now_ns)
                ]
                removed += len(parts) - len(left)
                if left:
                    catalogue.parts[shard] = left
                else:
                    del catalogue.parts[shard]
            with (
                contextlib.suppress(OSError),
                os.scandir(f"{catalogue.namespace}/{TMP_DIR}") as entries,
            ):
                for entry in entries:
                    if entry.name.endswith(".part") and entry.is_file(follow_symlinks=False):
                        mtime_ns = entry.stat(follow_symlinks=False).st_mtime_ns
                        removed += self._remove_orphan(entry.path, mtime_ns, now_ns)
        self._book.remove_orphans()
        self._log.remove_old()
        if removed and self.usage is not None:
            logger.info("removed %d parts of writers that are gone", removed)
            self.usage = replace(self.usage, orphans=self.usage.orphans + removed)

    def _remove_orphan(self, path: str, mtime_ns: int, now_ns: int) -> bool:
        name = os.path.basename(path).removesuffix(".part")
        if not provably_dead(name) and now_ns - mtime_ns < self._grace_s * 1e9:
            return False
        try:
            # Remembered from the listing: it may have grown since.
            if not provably_dead(name):
                mtime_ns = os.lstat(path).st_mtime_ns
                if now_ns - mtime_ns < self._grace_s * 1e9:
                    return False
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path, error)
            return False
        return True

    def save_snapshots(self) -> None:
        """Write the snapshots that are older than what we know; what cannot be written is logged."""
        for name in sorted(self._unsaved):
            catalogue = self._catalogues.get(name)
            if catalogue is None:
                continue
            try:
                catalogue.save(self._file_mode)
            except OSError as error:
                logger.warning("%s cannot be written: %s", catalogue.path, error)
        self._unsaved.clear()


def _room(scope: Scope, claims: list[Claim]) -> int:
    """Return the headroom below which engines would have to wait."""
    alive = [claim for claim in claims if not claim.closed]
    waited_for = 2 * len(alive) * max((claim.wanted for claim in alive), default=0)
    return min(max(int(scope.limit * _TRIGGER), waited_for), scope.limit // 2)


def _near(scope: Scope, claims: list[Claim]) -> bool:
    return scope.headroom < _room(scope, claims)


def _excess(scope: Scope, claims: list[Claim]) -> int:
    """Return how many bytes are to go, so that the low mark is reached and all may go on."""
    return max(
        0, int(scope.limit * (1 - _LOW)) - scope.headroom, 2 * _room(scope, claims) - scope.headroom
    )


def _tenant_of(path: str) -> str | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(path, "rb") as file:
            tenant = json.loads(file.read(16 << 20)).get("tenant")
        return tenant if isinstance(tenant, str) else None
    return None


# --- the process ------------------------------------------------------------------------------


def claim_from(options: dict[str, Any]) -> Claim:
    """Return a new engine's claim from what the engine sent at first."""
    limits = dict(options["limits"])
    keep = limits["keep_free"]
    limits["keep_free"] = Share(keep["percent"]) if isinstance(keep, dict) else keep
    return Claim(unique_name(), options["namespace"], options["tenant"], Limits(**limits))


async def serve() -> None:
    """Maintain the root that the first message names, until the engine closes our standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    unpacker = msgpack.Unpacker()
    maintainer: Maintainer | None = None
    interval_s, pause_s, complaint = _IDLE_S, 0.0, ""
    reading = asyncio.ensure_future(reader.read(1 << 16))
    while True:
        # However often the engine speaks: at most a third of a core, and few requests to a server.
        await asyncio.sleep(pause_s)
        waited_for: set[asyncio.Future[Any]] = {reading}
        if maintainer is not None and maintainer.work is not None:
            waited_for.add(maintainer.work)
        await asyncio.wait(waited_for, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            received = reading.result()
            if not received:
                break
            unpacker.feed(received)
            reading = asyncio.ensure_future(reader.read(1 << 16))
            for message in unpacker:
                if maintainer is None:
                    maintainer = _begin(message)
                else:
                    maintainer.hear(Engine(**message))
        if maintainer is None:
            continue
        started = time.monotonic()
        try:
            busy = maintainer.step()
            complaint = ""
        except BrokenPipeError:
            break
        except OSError as error:
            busy = False
            if str(error) != complaint:
                complaint = str(error)
                logger.warning("maintenance: %s", error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(OSError):
                    await maintainer.make_room()
        pause_s = max(0.01, 2 * (time.monotonic() - started))
        interval_s = pause_s if busy else min(_IDLE_S, 1.5 * interval_s)
    if maintainer is not None:
        await maintainer.close()


def _begin(options: dict[str, Any]) -> Maintainer:
    return Maintainer(
        options["root"],
        claim_from(options),
        Outbox(1).send,
        dir_mode=options["dir_mode"],
        file_mode=options["file_mode"],
    )


class Outbox:
    """Messages for the engine. One that does not read must not stop us: the lease and the claim go on."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""  # of a message that did not fit

    def send(self, message: dict[str, Any]) -> bool:
        """Send it, or at least its beginning; False: the pipe is full, and the message is dropped."""
        return self._flush() and self._write(msgpack.packb(message))

    def _flush(self) -> bool:
        return not self._rest or (self._write(self._rest) and not self._rest)

    def _write(self, data: bytes) -> bool:
        try:
            self._rest = data[os.write(self._fd, data) :]
        except BlockingIOError:
            return False
        return True


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="fskv: %(message)s")
    with contextlib.suppress(OSError):
        os.nice(5)
    code = 0
    try:
        asyncio.run(serve())
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception:
        logger.exception("maintenance ended")
        code = 1
    os._exit(code)  # a worker thread may hang with its mount: nobody waits for it


if __name__ == "__main__":
    main()
