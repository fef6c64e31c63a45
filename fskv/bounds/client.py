"""An engine's share of a root's bounds: may it store now, and which chunks were pruned.

A maintenance process does the work (fskv.bounds.maintenance). The client starts it and reads the root's state
from its pipe. An engine stores first, and the leader prunes for it. The engine pauses 2 % above a bound, or
when half of `keep_free` is gone. Without news of the root, after a hang or a death of the process, the engine
stores a little more and then nothing. It goes on loading.

Every call returns at once. One thread: the scheduler's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

import msgpack

from fskv.bounds.eviction_news import entries
from fskv.bounds.limits import GUARD_PART, UNSEEN_PART, Limits, RootState
from fskv.bounds.process import MaintenanceProcess, let_go, started_beside
from fskv.bounds.shared_files import parsed
from fskv.observe.state_log import StateLog
from fskv.root.process_id import unique_name

_LATE_S = 8.0  # a leader tells every 5 s at least, and the process a second later
_SILENT_S = 20.0  # without a new sequence for so long nobody may be counting
_HUNG_S = 60.0  # and the process that tells of none is killed after so much more
_START_S = 10.0  # an interpreter and its imports, on a machine that is busy or slow
_FIRST_WORD_S = 5.0
_RESTART_S = 10.0
_SELDOMER = 8  # so many times longer for each that was killed and is still there, but
_SELDOMEST_S = 3600.0  # at most: somebody may have mounted something else in the place
_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0  # after ENOSPC; twice as long each time it is met again
_READ_NBYTES = 1 << 16
_MAX_FRAME = 64 << 20
_TRAFFIC_S = 3.0  # between two messages about uses and loads
_SIGHTS = 400  # of one message, which must go whole into the pipe
_MAX_MESSAGES = 8  # of sights, at once


class Capacity:
    """One engine's share of a root's bounds."""

    def __init__(
        self,
        root: str,
        namespace: str,
        tenant: str | None,
        limits: Limits,
        *,
        dir_mode: int | None = None,
        file_mode: int | None = None,
        quiet: bool = False,
        health_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace` is "<arch>/<model>@<digest16>" of an opened root.

        `quiet`: the maintenance process logs faults alone. The caller waits for room then, so pauses for
        pruning are not logged. `health_file` is the engine's: how it ended is written there, if it could not
        do that itself.
        """
        self._options = ["--quiet"] if quiet else []
        self._quiet = quiet
        self._hello = {
            "root": root,
            "namespace": namespace,
            "tenant": tenant,
            "limits": asdict(limits),
            "dir_mode": dir_mode,
            "file_mode": file_mode,
            "health_file": health_file,
            "engine": unique_name(),
        }
        self._clock = clock
        self._process: MaintenanceProcess | None = None
        self._starting: Future[MaintenanceProcess] | None = None
        self._killed: list[MaintenanceProcess] = []  # and may be kept by a mount that hangs
        self._unpacker = msgpack.Unpacker()
        self._heard_at = 0.0  # when a message was sent that we have read
        self._sequence_at = 0.0  # when the last one was sent that had a new sequence
        self._unseen_since: int | None = None  # what was stored when there was none for too long
        self._polled_at = self._listens_since = 0.0
        self._has_spoken = False  # the present process, or none has been restarted
        self._said: dict[str, Any] = {}
        self._pending = 0  # bytes of stores that are under way
        self._written = 0  # bytes on disk, since the present process was started
        self._refused = ""  # why the last store was
        self._removed: list[tuple[bytes, int]] = []
        self._loaded = 0  # bytes, since the start
        self._others_sights: list[bytes] = []
        self._traffic_at = 0.0
        self._is_silent = False  # at the last poll
        self._full = 0
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._written_before_full = -1
        self.state = RootState()
        self.num_restarts = 0
        self._last_start = float("-inf")
        self._said_paused = False
        self._log = StateLog(clock, root=root)

    def start(self) -> None:
        """Start the process, and give it a moment, or the first chunks would not be stored.

        That is `_FIRST_WORD_S` from when it runs. Where it cannot be started, `poll` tries again later.
        """
        removed, runs = self.poll(), False
        end = self._clock() + _START_S
        while self._starting or (self._process and self._process.running and not self.state.known):
            if (now := self._clock()) >= end:
                break
            if not runs and self.pid is not None:
                end, runs = now + _FIRST_WORD_S, True
            time.sleep(0.01)
            removed += self.poll()
        self._removed = removed + self._removed

    def _start(self) -> None:
        """Begin to start a process, unless the last one was begun a short while ago.

        Those that were killed hang for good where another mount has taken the root's place.
        """
        for process in [each for each in self._killed if not each.running]:
            process.close()
            self._killed.remove(process)
        pause_s = min(_RESTART_S * _SELDOMER ** len(self._killed), _SELDOMEST_S)
        if self._clock() - self._last_start < pause_s:
            return
        self._close_process()
        self.num_restarts += self._last_start > float("-inf")
        self._last_start = self._clock()
        self._starting = started_beside(lambda: MaintenanceProcess(self._options))

    def _begin(self, made: Future[MaintenanceProcess]) -> None:
        if (error := made.exception()) is not None:
            reason = f"no maintenance process, so nothing is stored: {error}"
            self._log.say("maintenance_gone", logging.WARNING, reason=reason)
            return
        self._process = made.result()
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_FRAME)
        # A new process counts from here on, and tells what the last one had not.
        state, told = self.state, min(self._written, self.state.counted)
        self._written -= told
        if self._unseen_since is not None:
            self._unseen_since -= told
        self.state = replace(state, counted=0, seen_written=state.seen_written - told)
        self._said = {}
        self._heard_at = self._clock()
        self._traffic_at = 0.0  # what was told before is not of late
        self._has_spoken = not self.num_restarts
        self._is_silent = False
        self._process.send(self._hello)

    def take(self, nbytes: int) -> bool:
        """Ask whether so many more bytes may be written now, and count them as under way if so."""
        if self.paused:
            return False
        refusal = self._refusal(nbytes)
        if refusal:
            self._hear()  # an idle engine has not listened
            refusal = self._refusal(nbytes)
        if refusal != self._refused and not self._quiet:
            self._refused = refusal
            if refusal and self.state.known:
                free = self.state.free
                self._log.say("stores_paused", logging.WARNING, free_bytes=free, reason=refusal)
            elif not refusal:
                self._log.say("stores_resumed")
        if refusal:
            return False
        self._pending += nbytes
        return True

    def _refusal(self, nbytes: int) -> str:
        """Return why so many more bytes are not to be written now; "": they may be."""
        state, stored = self.state, self._written + self._pending
        if not state.known:
            return "nobody has counted the root yet"
        unseen_s = self._clock() - self._sequence_at
        # While nobody adds up what all write, each may take its part of what is left.
        part = max(1, state.writers) if unseen_s > _LATE_S else 1
        for kind, (limit, left) in state.bounds.items():
            room = (left + limit // GUARD_PART) // part
            if kind != "free" and stored + nbytes - state.counted > room:
                return f"2 % above the bound of {limit} bytes: pruning is late, or nothing is left"
        free = state.free - (stored + nbytes - state.seen_written)
        if state.usage.kept_free and free < state.usage.kept_free // 2:
            return "less than half of keep_free is left: make room, or lower keep_free"
        if unseen_s <= _SILENT_S:
            self._unseen_since = None
            return ""
        if self._unseen_since is None:
            self._unseen_since = stored
        limits = [limit for limit, _ in state.bounds.values()]
        if not limits or stored + nbytes - self._unseen_since <= min(limits) // UNSEEN_PART:
            return ""
        return f"nobody has counted the root for {_SILENT_S:.0f} s: does it hang?"

    def move(self, namespace: str) -> None:
        """Make another namespace the engine's; the process hears of it now, or with the next step."""
        self._hello["namespace"] = namespace
        self._hear()  # what was said of the last one
        self._removed, self._others_sights = [], []
        self._report()

    def settle(self, taken: int, written: int, loaded: int = 0) -> None:
        """Of `taken` bytes that a store took `written` are on disk now; and so many were `loaded`."""
        self._pending = max(0, self._pending - taken)
        self._written += written
        self._loaded += loaded

    def report_use(
        self,
        used: int,
        hits: tuple[float, float],
        take_sights: Callable[[int], bytes],
        *,
        at_once: bool = False,
    ) -> list[bytes]:
        """Tell the process what requests use, every few seconds; returns the sights of other engines.

        `used` is in bytes, since the start. `take_sights` gives so many new names at most, packed.
        """
        now = self._clock()
        if self._process is not None and (at_once or now - self._traffic_at > _TRAFFIC_S):
            self._traffic_at = now
            first, second = (int(1000 * each) for each in hits)
            message = {"loaded": self._loaded, "used": used}
            message |= {"first_hits": first, "second_hits": second}
            for _ in range(_MAX_MESSAGES):
                sights = take_sights(_SIGHTS)
                if not self._process.send({**message, "sights": sights}) or not sights:
                    break
        heard, self._others_sights = self._others_sights, []
        return heard

    def no_space(self) -> None:
        """A store found the disk full: store nothing for a while, and have something pruned."""
        now = self._clock()
        if now < self._paused_until:
            return  # one of those that were under way
        again = self._written == self._written_before_full
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s) if again else _PAUSE_S
        self._written_before_full = self._written
        self._paused_until = now + self._pause_s
        self._full += 1
        self._said_paused = True
        reason = f"the disk is full: nothing is stored for {self._pause_s:.0f} s"
        self._log.say("stores_paused", logging.WARNING, for_s=f"{self._pause_s:.0f}", reason=reason)

    @property
    def pid(self) -> int | None:
        """The process id of the maintenance process."""
        return None if self._process is None else self._process.pid

    @property
    def up(self) -> bool:
        """Return whether that process runs, and was not silent for too long when it was last listened to.

        One that was started again is up when it has said something: where the root is gone it never does.
        """
        process = self._process
        alive = process is not None and process.running and self._has_spoken
        return alive and not self._is_silent

    @property
    def paused(self) -> bool:
        """Say whether stores pause because the disk was full."""
        return self._clock() < self._paused_until

    def poll(self) -> list[tuple[bytes, int]]:
        """Talk to the process, every step; returns the chunks pruned since: (XXH3-128 of the key, group)."""
        now = self._clock()
        if self._said_paused and not self.paused:
            self._said_paused = False
            self._log.say("stores_resumed")
        if self._process is None or not self._process.running:
            if self._starting is None:
                self._start()
            elif self._starting.done():
                made, self._starting = self._starting, None
                self._begin(made)
            return []
        self._hear()
        if self._process is None:
            return []
        if now - self._polled_at > _SILENT_S:
            self._listens_since = now  # an idle engine: what it has not read is no silence
        self._polled_at = now
        silent_s = now - max(self._heard_at, self._listens_since)
        if silent_s > _SILENT_S + _HUNG_S:
            self._kill_process()  # a later poll starts another one
            return []
        was_silent, self._is_silent = self._is_silent, silent_s > _SILENT_S
        if self._is_silent and not was_silent:
            reason = f"no word for {_SILENT_S:.0f} s, stores end soon: does the root hang?"
            self._log.say("maintenance_silent", logging.WARNING, reason=reason)
        self._report()
        removed, self._removed = self._removed, []
        return removed

    def _report(self) -> None:
        """Tell the process the engine's namespace and sums; an unsent report goes with the next step."""
        namespace = self._hello["namespace"]
        message = {"written": self._written, "full": self._full, "namespace": namespace}
        if self._process is not None and message != self._said and self._process.send(message):
            self._said = message

    def close(self) -> None:
        """Let the process end by itself; it is not waited for, since it may hang."""
        if self._starting is not None:
            self._starting.add_done_callback(let_go)
        self._report()
        self._close_process()
        for process in self._killed:
            process.close()

    def _close_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _kill_process(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._killed.append(self._process)
        self._process = None
        if (number := len(self._killed)) > 1:
            reason = f"{number} maintenance processes were killed and do not end: the root hangs"
            self._log.say("maintenance_gone", logging.WARNING, reason=reason)

    def _hear(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(BlockingIOError):
            while received := self._process.receive(_READ_NBYTES):
                try:
                    self._unpacker.feed(received)
                    for message in self._unpacker:
                        self._take_message(message)
                except Exception as error:  # a warning that some import prints to stdout, say
                    reason = f"it says what it should not and is started again: {error}"
                    self._log.say("maintenance_gone", logging.WARNING, reason=reason)
                    self._kill_process()
                    return

    def _take_message(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            assert self._process is not None
            self._process.introduce(message["pid"])
            if self.num_restarts:
                self._log.say(
                    "maintenance_restarted",
                    logging.WARNING,
                    pid=self.pid,
                    restarts=self.num_restarts,
                )
            return
        self._has_spoken = True
        # When it was said, and not when it is read: an idle engine has left it in the pipe.
        self._heard_at = self._clock() - (time.monotonic() - message.pop("at"))
        if "removed" in message:
            self._removed += entries(message["removed"])
        elif "sights" in message:
            self._others_sights.append(message["sights"])
        elif message:
            state = parsed(RootState, message)
            if state.usage.sequence != self.state.usage.sequence or not state.usage.sequence:
                self._sequence_at = self._heard_at
            self.state = state
