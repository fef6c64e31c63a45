"""Keeps a root within its bounds, in a process of its own for each engine: `python -m fskv.maintenance`.

It is a process of its own so that neither its work nor a mount that hangs under it can touch the engine. It
does three things: it claims bytes for its engine (fskv.bounds.quota); it reports what was pruned, by
whomever; and if it holds the lease (fskv.bounds.lease) it counts, prunes and cleans for all. A process
without the lease reads a few small files a second and nothing else.

Asynchronous: the holder's work is at most one task, which walks and removes in worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from fskv.bounds.evict import execute, plan
from fskv.bounds.eviction_news import ENTRY_NBYTES, EvictionNews
from fskv.bounds.leader import Leader
from fskv.bounds.lease import SHARED_DIR, TTL_S, Lease
from fskv.bounds.ledger import CLAIMS_DIR, Ledger
from fskv.bounds.quota import (
    Claim,
    Usage,
    grant,
    num_writers,
    overdrawn,
    scopes,
    too_much,
)
from fskv.bounds.room_freed import RoomFreed
from fskv.bounds.room_made import RoomMade
from fskv.bounds.status import BoundsSaid, RootState, changes, root_state
from fskv.index.snapshot import Catalogue
from fskv.observe.state_log import StateLog, described
from fskv.root.beneath import make_directory, move_aside
from fskv.root.filesystem import Space
from fskv.root.manifests import all_namespaces, namespaces_of_ours
from fskv.root.process_id import GRACE_S, unique_name
from fskv.root.root import FORMAT_FILE, usual_modes

logger = logging.getLogger(__name__)

IDLE_S = 1.0  # at most, between two steps
_ALIVE_S = 5.0
_MINOR_S = 20.0  # an engine that is idle for hours does not read: this much fits into the pipe
_AWAY_S = 12.0  # less than the silence (bounds.client) after which an engine stores nothing, less _ALIVE_S
_REMOVED_NBYTES = ENTRY_NBYTES * 2048  # of one message
_STALE_S = 10.0  # a usage that was read longer ago is no base for a grant
_MAX_NEWS_NBYTES = 4 << 20
_AFTER_FAILURE_S = 5.0
_LATE_S = 300.0  # a million files, cold, on a slow server, take less
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
_GONE = (errno.ENOENT, *_NO_DIRECTORY)
_LEAST_ROOM = 4 << 20  # for the lease, the claims and a snapshot


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine says of itself and of its stores; all counts since its start."""

    used: int = 0  # of what it was granted: on disk, or on the way there
    written: int = 0
    returned: int = 0
    wanted: int = 0
    full: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a step has found."""

    usage: Usage | None
    claims: list[Claim]
    space: Space
    holder: bool  # whether it is us who count and prune


class Maintainer:
    """One process's part in keeping a root within its bounds."""

    def __init__(
        self,
        root: str,
        claim: Claim | None,
        send: Callable[[dict[str, Any]], bool] = lambda _: True,
        is_heard: Callable[[], bool] = lambda: True,
        *,
        dir_mode: int | None = None,
        file_mode: int | None = None,
        grace_s: float = GRACE_S,
        lease_ttl_s: float = TTL_S,
    ) -> None:
        """`claim` is the engine's; without a namespace that of one who only declares limits; or None.

        `send` passes a message to the engine; it returns False if the engine does not listen. `is_heard`
        returns False once the engine is gone. Modes that are not given are those of the root.
        """
        usual = usual_modes(root)
        dir_mode = usual[0] if dir_mode is None else dir_mode
        file_mode = usual[1] if file_mode is None else file_mode
        self._root = root
        self._shared = f"{root}/{SHARED_DIR}"
        self._claim = claim
        self._send = send
        self._is_heard = is_heard
        self._dir_mode = dir_mode
        self._file_mode = file_mode
        self._grace_s = grace_s
        self._engine = Engine()
        self._granted = 0  # in all, returned ones included
        self._published: Claim | None = None
        self._beat_at = 0.0
        self._ledger = Ledger(self._shared, file_mode)
        self._lease = Lease(self._shared, ttl_s=lease_ttl_s, file_mode=file_mode)
        self._eviction_news = EvictionNews(self._shared, file_mode)
        self._work: asyncio.Task[None] | None = None
        self._leader: Leader | None = None
        self._late_at = 0.0  # when a piece of work is told of that does not end
        self._work_after = 0.0  # the last one failed: not at once again
        self._complaint = ""
        self._reported: RootState | None = None
        self._reported_at = float("-inf")
        self._bounds = BoundsSaid()
        self._left_out: AbstractSet[str] = set()  # files of the book that were told of
        self._said_lease = False
        self._states = StateLog(root=root)
        self._room_made = RoomMade(root)
        self._room_freed = RoomFreed(root)
        self._alive_at = float("-inf")
        self._stepped_at = time.monotonic()
        self._must_revoke = False
        self._started = False
        self._room_made_at = float("-inf")
        self._news = b""  # entries of removed chunks that were not sent yet
        self._failure = ""  # of the last `try_step`
        self.seen: Seen | None = None  # by the last step that got so far

    def start(self) -> None:
        """Make what is shared; raises OSError. Nothing is made in the place of a root that is gone."""
        os.stat(f"{self._root}/{FORMAT_FILE}")
        for path in (self._shared, f"{self._shared}/{CLAIMS_DIR}", self._eviction_news.directory):
            self._make(path)
        with contextlib.suppress(OSError):
            self._eviction_news.skip_old()
        self._started = True

    def _make(self, path: str) -> None:
        """Make a directory; what stands there and is none is moved aside, and never removed."""
        try:
            make_directory(path, self._dir_mode, self._root)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            aside = f"{path}.foreign-{unique_name()}"
            if move_aside(path, os.path.basename(aside), self._root):
                logger.warning("fskv: %s was no directory, it is now %s", path, aside)
            make_directory(path, self._dir_mode, self._root)

    def hear(self, engine: Engine) -> None:
        """Take what the engine said last."""
        self._engine = engine

    def step(self) -> bool:
        """Do what is due; returns whether something is going on, so that the next step should come soon.

        Raises OSError when the root does not let us; the next step tries again.
        """
        if not self._started:
            self.start()
        self._revoke_if_late()
        self._publish()
        self._lease.renew()
        if self._lease.held != self._said_lease:
            self._said_lease = self._lease.held
            self._states.say("lease_taken" if self._said_lease else "lease_lost", pid=os.getpid())
        read_at = time.monotonic()
        usage = self._leader.usage if self._leader is not None and self._leader.in_office else None
        usage = usage or self._ledger.usage()  # before the claims, see Claim
        claims = self._ledger.claims()
        space = Space.of(self._root)
        self.seen = Seen(usage, claims, space, self._lease.held)
        if self._leader is not None:
            self._leader.watch(claims, read_at)
        self._say_left_out()
        # One after the other: none of them keeps the next ones from being done.
        works: list[Callable[[], bool]] = [
            lambda: self._hold(claims, space) if self._lease.held else self._let_go(),
            lambda: self._claim_more(claims, usage, space, read_at),
            lambda: self._report(claims, usage, space),
        ]
        busy, failures = False, list[Exception]()
        for work in works:
            try:
                busy = work() or busy
            except OSError:
                raise
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return busy

    def _say_left_out(self) -> None:
        left_out = self._ledger.left_out
        for path in left_out.keys() - self._left_out:
            self._states.say("file_left_out", logging.WARNING, path=path, reason=left_out[path])
        self._left_out = left_out.keys()

    def _revoke_if_late(self) -> None:
        """Have what is not used returned, if we were away for so long that others may have been given it.

        Stopped, or kept waiting by the root. Our claim covers it until the engine has said how much it was:
        what we heard last may be old, and an engine that has not read this yet may go on to use it.
        """
        now = time.monotonic()
        if now - self._stepped_at > _AWAY_S:
            self._must_revoke = True
        self._stepped_at = now
        if self._must_revoke and self._send({"revoke": True}):
            self._must_revoke = False

    async def try_step(self) -> bool:
        """Do a step; what does not let us is logged, and tried again with the next one.

        Whatever the root holds, a step is all that it costs. Raises BrokenPipeError: the engine is gone. Its
        root may have gone with it, and nobody is to be told.
        """
        try:
            busy = self.step()
        except BrokenPipeError:
            raise
        except Exception as error:
            if not self._is_heard():
                raise BrokenPipeError(errno.EPIPE, "the engine is gone") from error
            number = error.errno if isinstance(error, OSError) else None
            if f"{type(error)} {number}" != self._failure:  # names in it differ each time
                self._failure = f"{type(error)} {number}"
                logger.warning("fskv: maintenance of %s: %s", self._root, described(error))
            if number in _GONE:
                self._started = False  # what is shared is gone: make it again
            if number in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(Exception):
                    await self.make_room()
            return False
        self._failure = ""
        return busy

    async def make_room(self) -> None:
        """Remove a little of our own namespace: the disk is so full that not even a lease can be written.

        Without the lease, since two who do this at once only remove more than was needed. Who has no
        namespace takes it from all.
        """
        if self._claim is None or time.monotonic() - self._room_made_at < _AFTER_FAILURE_S:
            return
        self._room_made_at = time.monotonic()
        space = Space.of(self._root)
        self._room_freed.look(space, ())
        if self._room_freed.is_awaited("full"):
            return
        mine = self._claim.namespace
        names = all_namespaces(self._root) if mine is None else {mine}
        # With the snapshot: a walk of everything may take longer than our engine waits for a word.
        ours = namespaces_of_ours(self._root, names)
        catalogues = [Catalogue.load(f"{self._root}/{name}") for name in ours]
        for catalogue in catalogues:
            with contextlib.suppress(OSError):
                await catalogue.refresh(self._lease.now_ns())
        pruned = await execute(plan(catalogues, _LEAST_ROOM, 8), lambda: True, self._root)
        usage = Usage({"": (sum(each.nbytes for each in catalogues), 0)})
        done = replace(usage, pruned_files=pruned.num_files, pruned_nbytes=pruned.nbytes)
        self._room_made.full(usage, done, space, "the disk is full: no lease can be written")
        after = Space.of(self._root)
        self._room_freed.removed("full", pruned.nbytes, space, after, ())
        for path, chunks in pruned.removed.items():
            self._eviction_news.publish(path.rpartition("@")[2], chunks)
        if pruned.away is not None:
            raise pruned.away

    def _complain(self, error: BaseException) -> None:
        """Log an error, but not the same one again and again."""
        if repr(error) != self._complaint:
            self._complaint = repr(error)
            logger.warning("fskv: maintenance of %s: %s", self._root, described(error))

    @property
    def work(self) -> asyncio.Task[None] | None:
        """The holder's work that is under way."""
        return self._work

    async def close(self, *, died: bool = False, exact: bool = True) -> None:
        """End: what was granted and not used is nobody's any more. Raises OSError.

        `exact`: the engine has said how much it used. Else its claim keeps all that it was granted. If it
        `died`, the claim stays that of a dead process.
        """
        if self._work is not None:
            self._work.cancel()
        if self._claim is not None and self._claim.namespace is None:
            self._ledger.withdraw(self._claim.name)  # nothing was written that somebody must count
        elif self._claim is not None and not died:
            engine = self._engine
            self._ledger.publish(
                replace(
                    self._claim,
                    granted=max(
                        0 if exact else self._granted - engine.returned, engine.used, engine.written
                    ),
                    written=engine.written,
                    closed=True,
                )
            )
        if self._leader is not None:
            self._leader.save_snapshots()
        self._lease.release()

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
        due = time.monotonic() - self._beat_at > TTL_S / 4
        if claim != self._published or due:
            if due:
                claim = replace(claim, beat=claim.beat + 1)
                self._beat_at = time.monotonic()
            self._ledger.publish(claim)
            self._claim = self._published = claim
            self._room_freed.forget("full")  # it found room

    def _claim_more(
        self, claims: list[Claim], usage: Usage | None, space: Space, read_at: float
    ) -> bool:
        if self._claim is None or self._published is None:
            return False
        mine, engine = self._published, self._engine
        if mine.namespace is None:
            if not any(claim.name == mine.name for claim in claims):
                self._published = None  # somebody thought us dead: publish again
            return False
        bounds = scopes(claims, usage or Usage(), space)
        if usage is None and any(scope.kind != "free" for scope in bounds):
            return False  # nobody knows yet how much there is
        if not any(claim.name == mine.name for claim in claims):
            bounds = scopes([*claims, mine], usage or Usage(), space)
            # Somebody thought us dead, and may have granted to others what we had: publish again, and have
            # what is not used returned. Our own clock need not show it: a suspended machine's stands still.
            self._published = None
            self._must_revoke = True
        left = mine.granted - engine.used
        if too_much(left, mine, bounds):
            self._must_revoke = True
        amount = grant(mine, left, bounds, num_writers(claims))
        if amount <= 0 or self._must_revoke:
            return False
        self._granted += amount
        given = False
        try:
            self._publish()  # before the engine may use it
            given = (
                not overdrawn(mine, self._ledger.claims(), usage or Usage(), Space.of(self._root))
                and time.monotonic() - read_at <= _STALE_S
                and self._send({"grant": amount})
            )
        finally:  # whatever kept it from being given: the engine does not have it
            self._granted -= 0 if given else amount
        if not given:
            self._publish()
        return given

    def _report(self, claims: list[Claim], usage: Usage | None, space: Space) -> bool:
        """Tell the engine what has changed, or at least that we live; returns whether anything has."""
        if self._claim is None or self._claim.namespace is None:
            return False
        ours = self._claim.namespace.rpartition("@")[2]
        try:
            self._news = (self._news + self._eviction_news.take_new(ours))[-_MAX_NEWS_NBYTES:]
        except OSError as error:  # news are no condition for a grant
            self._started = error.errno not in _GONE  # made again by the next step
            self._complain(error)
        while self._news and self._send({"removed": self._news[:_REMOVED_NBYTES]}):
            self._news = self._news[_REMOVED_NBYTES:]
        state = root_state(usage or Usage(), claims, space, self._claim, holder=self._lease.held)
        for kind, limit in self._bounds.news(state):
            self._states.say("bound_in_force", bound=kind, limit_bytes=limit)
        report, changed = changes(state, self._reported, space.total_nbytes)
        now = time.monotonic()
        # What moves all the time is told now and then, and keeps nobody busy.
        due = now - self._reported_at > _MINOR_S
        if report and (changed or due) and self._send(report):
            self._reported, self._reported_at = state, now
        if now - self._alive_at > _ALIVE_S and not self._must_revoke:
            # Short, because an engine that is idle for hours does not read. Its clock is ours.
            self._send({"alive": now})
            self._alive_at = now
        return changed or bool(self._news)

    # --- the holder's work ------------------------------------------------------------------

    def _hold(self, claims: list[Claim], space: Space) -> bool:
        """Start the holder's next piece of work, if one is due and none is under way."""
        if self._leader is not None and not self._leader.in_office:
            # The lease was lost and taken again: others were the holder between.
            return self._let_go()
        if self._leader is None:
            self._leader = Leader(
                *(self._root, self._ledger, self._eviction_news),
                *(self._lease, self._file_mode, self._grace_s),
            )
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            if (error := work.exception()) is not None:
                self._complain(error)
                self._work_after = time.monotonic() + _AFTER_FAILURE_S
        if (
            self._work is None
            and time.monotonic() > self._work_after
            and self._leader.due(claims, space)
        ):
            self._work = asyncio.ensure_future(self._leader.work(claims, space))
            self._late_at = time.monotonic() + _LATE_S
        if self._work is not None and time.monotonic() > self._late_at:
            self._late_at = float("inf")
            reason = "a directory of it does not answer: nothing is counted or pruned meanwhile"
            self._states.say("count_late", logging.WARNING, after_s=f"{_LATE_S:.0f}", reason=reason)
        return self._work is not None

    def _let_go(self) -> bool:
        """Somebody else holds the lease: what we know of the root gets old."""
        if self._work is None or self._work.done():
            if self._work is not None and (error := self._work.exception()) is not None:
                self._complain(error)
            self._work = self._leader = None
        return False


def pause_after(seconds: float) -> float:
    """Return how long to wait after a step that took so long.

    However often the engine speaks: at most a third of a core, and few requests to a server. But where the
    root hung for half a minute, an engine that is kept waiting for a minute more thinks that we do.
    """
    return min(IDLE_S, max(0.01, 2 * seconds))
