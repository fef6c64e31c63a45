"""The maintenance process of an engine, which keeps a root within its bounds: `python -m fskv.maintenance`.

A process of its own keeps its work, and a hung mount, away from the engine. It publishes the engine's
heartbeat. It tells the engine the state of the root, and the pruned chunks. With the lease
(fskv.bounds.lease) it counts, prunes and cleans for all. Without the lease it reads one small file a second.

Asynchronous: the leader's work is at most one task, which walks and removes in worker threads.
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
from dataclasses import asdict, dataclass, replace
from typing import Any

from fskv.bounds.evict import Need, Pruned, evict
from fskv.bounds.eviction_news import ENTRY_NBYTES, EvictionNews
from fskv.bounds.leader import Leader, RoomAwaited
from fskv.bounds.lease import SHARED_DIR, TTL_S, Lease
from fskv.bounds.limits import Heartbeat, Limits, RootState, Usage, root_state
from fskv.bounds.shared_files import SharedFiles
from fskv.bounds.sights import SightsLog
from fskv.index.snapshot import Catalogue
from fskv.observe.state_log import StateLog, described
from fskv.root.beneath import make_directory, move_aside
from fskv.root.filesystem import Space
from fskv.root.manifests import all_namespaces, namespaces_of_ours
from fskv.root.process_id import unique_name
from fskv.root.root import FORMAT_FILE, usual_modes

logger = logging.getLogger(__name__)

LOOK_S = 1.0
_SOON_S = 0.1  # while an engine that starts waits for the first count
_ALIVE_S = 5.0
_NEWS_S = 3.0
_REMOVED_NBYTES = ENTRY_NBYTES * 2048  # of one message
_MAX_NEWS_NBYTES = 4 << 20
_MAX_SIGHTS_NBYTES = 1 << 20
_AFTER_FAILURE_S = 5.0
_LATE_S = 300.0  # a million files, cold, on a slow server, take less
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
_GONE = (errno.ENOENT, *_NO_DIRECTORY)
_LEAST_ROOM = 4 << 20  # for the lease, the heartbeats and a snapshot


@dataclass(frozen=True, slots=True)
class Seen:
    """The findings of a step."""

    usage: Usage | None
    heartbeats: list[Heartbeat]  # where we lead; else our own
    space: Space
    holder: bool  # whether it is us who count and prune


class Maintainer:
    """One process's part in keeping a root within its bounds."""

    def __init__(
        self,
        root: str,
        heartbeat: Heartbeat,
        send: Callable[[dict[str, Any]], bool] = lambda _: True,
        is_heard: Callable[[], bool] = lambda: True,
        *,
        dir_mode: int | None = None,
        file_mode: int | None = None,
        engine: str = "",
    ) -> None:
        """`heartbeat` is the engine's first one; without a namespace it is a watcher's, which only declares
        limits.

        `send` passes a message to the engine; it returns False if the engine does not listen. `is_heard`
        returns False once the engine is gone. Modes that are not given are those of the root. `engine` is the
        engine's own name, which outlives this process.
        """
        usual = usual_modes(root)
        self._root = root
        self._shared = f"{root}/{SHARED_DIR}"
        self._heartbeat = heartbeat
        self._send = send
        self._is_heard = is_heard
        self._dir_mode = usual[0] if dir_mode is None else dir_mode
        self._file_mode = usual[1] if file_mode is None else file_mode
        self._published: Heartbeat | None = None
        self._beat_at = float("-inf")
        self._files = SharedFiles(self._shared, self._file_mode)
        self._lease = Lease(self._shared, file_mode=self._file_mode)
        self._eviction_news = EvictionNews(self._shared, self._file_mode)
        digest16 = (heartbeat.namespace or "").rpartition("@")[2]
        self._sights = SightsLog(self._shared, digest16, engine or unique_name(), self._file_mode)
        self.work: asyncio.Task[None] | None = None  # the leader's, that is under way
        self._leader: Leader | None = None
        self._late_at = 0.0  # when a piece of work is told of that does not end
        self._work_after = 0.0  # the last one failed: not at once again
        self._complaint = ""
        self._told: RootState | None = None
        self._told_at = self._news_at = float("-inf")
        self._bounds_said: dict[str, int] = {}
        self._skipped: AbstractSet[str] = set()  # shared files that were told of
        self._said_lease = False
        self._states = StateLog(root=root)
        self._started = False
        self._room_made_at = float("-inf")
        self._awaited = RoomAwaited(root)
        self._news = b""  # entries of removed chunks that were not sent yet
        self._new_sights = b""  # of the engine, that others were not told of
        self._others_sights = b""  # that the engine was not told of
        self._failure = ""  # of the last `try_step`
        self.seen: Seen | None = None  # by the last step that got so far

    def start(self) -> None:
        """Make the shared directories; raises OSError. A root that is gone stays gone."""
        os.stat(f"{self._root}/{FORMAT_FILE}")
        for path in (self._shared, self._eviction_news.directory, self._sights.directory):
            self._make(path)
        with contextlib.suppress(OSError):
            self._eviction_news.skip_old()
        self._published = None
        self._started = True

    def _make(self, path: str) -> None:
        """Make a directory; another entry of that name is moved aside, and never removed."""
        try:
            make_directory(path, self._dir_mode, self._root)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            aside = f"{path}.foreign-{unique_name()}"
            if move_aside(path, os.path.basename(aside), self._root):
                logger.warning("fskv: %s was no directory, it is now %s", path, aside)
            make_directory(path, self._dir_mode, self._root)

    def receive(self, *, sights: bytes = b"", **counts: Any) -> None:
        """Take what the engine said last: fields of its heartbeat, and the names that it saw first."""
        last, self._heartbeat = self._heartbeat, replace(self._heartbeat, **counts)
        if (namespace := self._heartbeat.namespace) is not None and namespace != last.namespace:
            self._sights.move(namespace.rpartition("@")[2])
            self._news = self._new_sights = self._others_sights = b""
        self._new_sights = (self._new_sights + sights)[-_MAX_SIGHTS_NBYTES:]

    def step(self) -> float:
        """Do one step of work; returns the seconds until the next step.

        Raises OSError when the root does not let us; the next step tries again.
        """
        if not self._started:
            self.start()
        self._publish()
        if self._is_busy_for_another_term():
            self._lease.release()  # or nobody would lead until that work ends
        else:
            self._lease.renew()
        if self._lease.held != self._said_lease:
            self._said_lease = self._lease.held
            self._states.say("lease_taken" if self._said_lease else "lease_lost", pid=os.getpid())
        space = Space.of(self._root)
        beats = [self._heartbeat]
        if self._lease.held:
            beats = self._files.heartbeats()
            usage = self._lead(beats, space)
        else:
            self._let_go()
            usage = self._files.usage()
        self.seen = Seen(usage, beats, space, self._lease.held)
        self._say_skipped()
        self._report(usage, space)
        if usage is None:
            return _SOON_S
        return min(LOOK_S, max(_SOON_S, usage.look_s))

    def _say_skipped(self) -> None:
        skipped = self._files.skipped
        for path in skipped.keys() - self._skipped:
            self._states.say("file_left_out", logging.WARNING, path=path, reason=skipped[path])
        self._skipped = skipped.keys()

    async def try_step(self) -> float:
        """Do a step; a failure is logged, and tried again with the next one.

        Whatever the root holds, a step is all that it costs. Raises BrokenPipeError: the engine is gone. Its
        root may have gone with it, and nobody is to be told.
        """
        try:
            pause_s = self.step()
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
            return LOOK_S
        self._failure = ""
        return pause_s

    async def make_room(self) -> None:
        """Remove a little of our own namespace: the disk is so full that not even a lease can be written.

        It needs no lease: two processes that do this at once remove only too much. A watcher, which has no
        namespace, takes it from all.
        """
        if time.monotonic() - self._room_made_at < _AFTER_FAILURE_S:
            return
        self._room_made_at = time.monotonic()
        before = Space.of(self._root).unused_nbytes
        if self._awaited.is_awaited(before):
            return
        mine = self._heartbeat.namespace
        names = all_namespaces(self._root) if mine is None else {mine}
        dead = set() if self._leader is None else {*self._leader.dead()}
        # With the snapshot: a walk of everything may take longer than our engine waits for a word.
        ours = namespaces_of_ours(self._root, names | dead)
        known = {name: Catalogue.load(f"{self._root}/{name}") for name in ours}
        for catalogue in known.values():
            with contextlib.suppress(OSError):
                await catalogue.refresh(self._lease.now_ns())
            catalogue.remove_empty(self._root, None)
        removed: list[Pruned] = []
        pruned = await evict(
            [known[name] for name in ours if name not in dead],
            Need(_LEAST_ROOM, 8),
            self._root,
            told=removed.append,
            first=[known[name] for name in ours if name in dead],
        )
        self._states.say(
            "pruned_for_room",
            logging.WARNING,
            files=pruned.num_files,
            bytes=pruned.nbytes,
            reason="the disk is full: no lease can be written",
        )
        self._awaited.removed(pruned.nbytes, before, Space.of(self._root).unused_nbytes)
        for step in removed:
            for path, chunks in step.removed.items():
                self._eviction_news.publish(path.rpartition("@")[2], chunks)
        if pruned.away is not None:
            raise pruned.away

    def _complain(self, error: BaseException) -> None:
        """Log an error, but not the same one again and again."""
        if repr(error) != self._complaint:
            self._complaint = repr(error)
            logger.warning("fskv: maintenance of %s: %s", self._root, described(error))

    def close(self) -> None:
        """End: the last bytes are told, and the heartbeat goes. Raises OSError.

        Of an engine that does not lead it stays, without limits, until the leader has added what it tells.
        """
        if self.work is not None:
            self.work.cancel()
        told, last = self._published, self._heartbeat
        is_news = told is not None and (told.written, told.loaded) != (last.written, last.loaded)
        if is_news:
            self._heartbeat = replace(self._heartbeat, limits=Limits())
            self._publish()
        if is_news and self._leader is not None and self._leader.is_leader:
            self._leader.look(self._files.heartbeats(), Space.of(self._root))
            is_news = False
        if not is_news:
            self._files.withdraw(self._heartbeat.name)
        if self._leader is not None:
            self._leader.save_snapshots()
        with contextlib.suppress(OSError):
            self._tell_sights()
        self._sights.close()
        self._lease.release()

    # --- the engine -------------------------------------------------------------------------

    def _publish(self) -> None:
        """Write our heartbeat if it has changed, and now and then to show that we live."""
        due = time.monotonic() - self._beat_at > TTL_S / 4
        if due or self._heartbeat != self._published:
            self._heartbeat = replace(self._heartbeat, beat=self._heartbeat.beat + 1)
            self._files.publish(self._heartbeat)
            self._published, self._beat_at = self._heartbeat, time.monotonic()

    def _tell_sights(self) -> None:
        """Tell other engines what ours has seen. Raises OSError, and then it is lost."""
        sights, self._new_sights = self._new_sights, b""
        if sights:
            self._sights.publish(sights)

    def _report(self, usage: Usage | None, space: Space) -> None:
        """Tell the engine each change, or at least that this process lives."""
        namespace, now = self._heartbeat.namespace, time.monotonic()
        if namespace is None:
            return
        if now - self._news_at > _NEWS_S:
            self._news_at = now
            try:
                news = self._eviction_news.take_new(namespace.rpartition("@")[2])
                self._news = (self._news + news)[-_MAX_NEWS_NBYTES:]
                self._tell_sights()
                self._others_sights = self._others_sights or self._sights.take_new()
            except OSError as error:
                self._started = error.errno not in _GONE  # made again by the next step
                self._complain(error)
        if self._others_sights and self._send({"at": now, "sights": self._others_sights}):
            self._others_sights = b""
        while self._news and self._send({"at": now, "removed": self._news[:_REMOVED_NBYTES]}):
            self._news = self._news[_REMOVED_NBYTES:]
        state = root_state(usage, space, self._heartbeat, holder=self._lease.held)
        for kind, (limit, _) in state.bounds.items():
            said = self._bounds_said.get(kind, -1)
            # The size of some file systems moves a little.
            slack = limit // 100 if kind == "free" else 0
            if said < 0 or abs(limit - said) > slack:
                self._bounds_said[kind] = limit
                self._states.say("bound_in_force", bound=kind, limit_bytes=limit)
        if (state != self._told or now - self._told_at > _ALIVE_S) and self._send(
            {"at": now, **asdict(state)}
        ):
            self._told, self._told_at = state, now

    # --- the leader -------------------------------------------------------------------------

    def _lead(self, beats: list[Heartbeat], space: Space) -> Usage | None:
        """Look as the leader, and start the next piece of work if one is due and none is under way."""
        if self._leader is not None and not self._leader.is_leader:
            # The lease was lost and taken again: others led between.
            self._let_go()
            if self._leader is not None:
                return self._files.usage()
        if self._leader is None:
            self._leader = Leader(
                *(self._root, self._files, self._eviction_news, self._sights),
                *(self._lease, self._file_mode),
            )
        usage = self._leader.look(beats, space)
        if self.work is not None and self.work.done():
            work, self.work = self.work, None
            if (error := work.exception()) is not None:
                self._complain(error)
                self._work_after = time.monotonic() + _AFTER_FAILURE_S
        now = time.monotonic()
        if self.work is None and now > self._work_after and self._leader.due(space):
            self.work = asyncio.ensure_future(self._leader.work(space))
            self._late_at = now + _LATE_S
        if self.work is not None and now > self._late_at:
            self._late_at = float("inf")
            reason = "a directory of it does not answer: nothing is counted or pruned meanwhile"
            self._states.say("count_late", logging.WARNING, after_s=f"{_LATE_S:.0f}", reason=reason)
        return usage

    def _is_busy_for_another_term(self) -> bool:
        """Return whether work goes on that was begun before the lease was lost and taken again."""
        busy = self.work is not None and not self.work.done()
        return busy and self._leader is not None and self._leader.term != self._lease.term

    def _let_go(self) -> None:
        """Give up leadership: another process holds the lease, so our knowledge of the root gets old."""
        if self.work is None or self.work.done():
            if self.work is not None and (error := self.work.exception()) is not None:
                self._complain(error)
            self.work = self._leader = None
