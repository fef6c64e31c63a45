"""An engine's share of a root's bounds: what it may still write, and what was pruned.

The work is done by a process of its own (fskv.bounds.maintenance), which this starts and talks to over
pipes: it grants bytes, this hands them out to stores. Everything here returns at once. If the process is
silent, because the root hangs or it has died, nothing more is handed out: the engine goes on loading and
stores nothing until it is back.

One thread: the scheduler's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import msgpack

from fskv.bounds.eviction_news import entries
from fskv.bounds.process import MaintenanceProcess, Starting
from fskv.bounds.quota import Limits
from fskv.bounds.status import RootState
from fskv.observe.state_log import StateLog

_SILENT_S = 20.0  # without a word for so long: what was granted may be thought to be ours no more
_HUNG_S = 60.0
_BURST_HALF_LIFE_S = 60.0
_BURST_S = 5.0  # what is asked for in a longer wait for a grant is not wanted at hand
_START_S = 10.0  # an interpreter and its imports, on a machine that is busy or slow
_FIRST_WORD_S = 5.0
_RESTART_S = 10.0
_MAX_KILLED = 3  # and still there, each with its 40 MiB: from here on they are seldom
_SELDOM_S = 600.0  # after the last one; for each further one twice as long, but
_SELDOMEST_S = 3600.0  # at most: somebody may have mounted something else in the place
_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0  # after ENOSPC; twice as long each time it is met again
_READ_NBYTES = 1 << 16
_MAX_FRAME = 64 << 20


class Capacity:
    """See the module docstring."""

    def __init__(
        self,
        root: str,
        namespace: str,
        tenant: str | None,
        limits: Limits,
        *,
        dir_mode: int | None = None,
        file_mode: int | None = None,
        at_hand: int = 0,
        patient: bool = False,
        quiet: bool = False,
        touch_interval_s: float = 0.0,
        health_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace` is "<arch>/<model>@<digest16>" of an opened root.

        A caller that is `patient` asks again for what it was refused. An engine does not: its chunk is lost.
        So there as much is kept at hand as was lately asked for between two grants, and at least `at_hand`.
        `quiet`: the maintenance process says on stderr only what is wrong, not what it has done.
        `touch_interval_s` is the option of whoever loads chunks; 0: nobody here does. `health_file` is the
        engine's: how it ended is written there, if it could not do that itself.
        """
        self._patient = patient
        self._at_hand = at_hand
        self._options = ["--quiet"] if quiet else []
        self._hello = {
            "root": root,
            "namespace": namespace,
            "tenant": tenant,
            "limits": asdict(limits),
            "dir_mode": dir_mode,
            "file_mode": file_mode,
            "touch_interval_s": math.ceil(touch_interval_s),
            "health_file": health_file,
        }
        self._clock = clock
        self._process: MaintenanceProcess | None = None
        self._starting: Starting | None = None  # again: see poll
        self._killed: list[MaintenanceProcess] = []  # and may be kept by a mount that hangs
        self._unpacker = msgpack.Unpacker()
        self._next_start = 0.0
        self._heard_at = 0.0
        self._has_spoken = False  # the present process, or none has been restarted
        self._said: dict[str, int] = {}
        self._allowed = 0  # bytes that may be used in all, by the present process
        self._used = 0
        self._written = 0
        self._returned = 0
        self._asked = 0  # since the last poll, or for as long as a grant is waited for
        self._asked_since = 0.0
        self._was_granted = False  # since then
        self._burst = 0.0
        self._burst_at = 0.0
        self._removed: list[tuple[bytes, int]] = []
        self._silent_polls_since = 0.0  # 0: not silent at the last poll
        self._full = 0
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._written_before_full = -1
        self.state = RootState()
        self.num_restarts = 0
        self._started = False
        self._last_start = 0.0
        self._said_paused = False
        self._log = StateLog(clock, root=root)

    def start(self) -> None:
        """Start the maintenance process; where that fails it is tried again later, and nothing is stored.

        For the start of an engine: it waits until the program is loaded.
        """
        if self._may_start():
            try:
                self._begin(MaintenanceProcess(self._options))
            except OSError as error:
                self._begin(error)

    def _may_start(self) -> bool:
        now = self._clock()
        self._next_start = now + _RESTART_S
        self._close_process()
        if self._too_many_hang(now):
            return False
        self._last_start = now
        self.num_restarts += self._started
        self._started = True
        return True

    def _begin(self, made: MaintenanceProcess | OSError) -> None:
        if isinstance(made, OSError):
            reason = f"no maintenance process, so nothing is stored: {made}"
            self._log.say("maintenance_gone", logging.WARNING, reason=reason)
            return
        self._process = made
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_FRAME)
        # A new process knows nothing of what the last one granted: only what is on its way is carried over.
        self._used -= self._written
        self._written = self._returned = 0
        self._allowed = 0
        self._said = {}
        self._heard_at = self._clock()
        self._has_spoken = not self.num_restarts
        self._silent_polls_since = 0.0
        self._process.send(self._hello)

    def wait_for_first_word(self, room_nbytes: int = 0) -> None:
        """At start-up only: give the process a moment, or the first chunks would not be stored.

        That is `_FIRST_WORD_S` from when it runs. Where less than `room_nbytes` may still be written, it is
        given that moment to count as well: whether pruning makes room is not known before.
        """
        end, runs = self._clock() + _START_S, False
        while self._process is not None and (now := self._clock()) < end:
            if not self._process.running:
                return  # `poll` starts another one later
            if not runs and self.pid is not None:
                end, runs = now + _FIRST_WORD_S, True
            state = self.state
            is_told = not room_nbytes or state != RootState()
            has_room = not state.kept_free or state.free - state.kept_free >= room_nbytes
            if self._allowed and is_told and (has_room or state.counted_at_ms):
                return
            time.sleep(0.01)
            news = self.poll()  # the very list that was `_removed`
            self._removed = news + self._removed

    def take(self, nbytes: int) -> bool:
        """Ask whether so many more bytes may be written now. False: not now, and more is asked for."""
        if self.paused:
            return False
        self._asked = nbytes if self._patient else self._asked + nbytes
        if self._used + nbytes > self._allowed or self._silent:
            self._hear()  # an idle engine has not listened
            if self._used + nbytes > self._allowed or self._silent:
                return False
        self._used += nbytes
        return True

    @property
    def _silent(self) -> bool:
        """Whether there was no word for so long that others may think us dead."""
        return self._clock() - self._heard_at > _SILENT_S

    def _return_unused(self) -> None:
        self._returned += max(0, self._allowed - self._used)
        self._allowed = min(self._allowed, self._used)

    def settle(self, taken: int, written: int) -> None:
        """A store has ended: of `taken` bytes that it took `written` are on disk now."""
        self._used += written - taken
        self._written += written

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
        """Of the maintenance process."""
        return None if self._process is None else self._process.pid

    @property
    def up(self) -> bool:
        """Whether that process runs, and was not silent for too long when it was last listened to.

        One that was started again is up when it has said something: where the root is gone it never does.
        """
        process = self._process
        alive = process is not None and process.running and self._has_spoken
        return alive and not self._silent_polls_since

    @property
    def paused(self) -> bool:
        """Whether stores pause because the disk was full."""
        return self._clock() < self._paused_until

    def poll(self) -> list[tuple[bytes, int]]:
        """Talk to the process, every step; returns what was pruned since: (XXH3-128 of the key, group)."""
        now = self._clock()
        if self._said_paused and not self.paused:
            self._said_paused = False
            self._log.say("stores_resumed")
        if self._process is None or not self._process.running:
            self._allowed = 0
            if self._starting is not None and (made := self._starting.made) is not None:
                self._starting = None
                self._begin(made)
            elif self._starting is None and now >= self._next_start and self._may_start():
                self._starting = Starting(lambda: MaintenanceProcess(self._options))
            return []
        self._hear()
        if self._process is None:
            return []
        if self._silent:
            self._return_unused()
            if not self._silent_polls_since:
                self._silent_polls_since = now
                reason = f"no word for {_SILENT_S:.0f} s, nothing is stored: does the root hang, is it gone?"
                self._log.say("maintenance_silent", logging.WARNING, reason=reason)
            if now - self._silent_polls_since > _HUNG_S:
                self._kill_process()  # the next poll starts another one
                return []
        else:
            self._silent_polls_since = 0.0
        self._report(self._wanted(now))
        removed, self._removed = self._removed, []
        return removed

    def _report(self, wanted: int) -> bool:
        """Tell the process where we are; False if it cannot be told now."""
        message = {
            "used": max(0, self._used),
            "written": self._written,
            "returned": self._returned,
            "wanted": wanted,
            "full": self._full,
        }
        if self._process is None:
            return False
        if message != self._said and self._process.send(message):
            self._said = message
        return message == self._said

    def _wanted(self, now: float) -> int:
        """Return what was asked for before a grant came, lately; rounded up, so that it seldom changes."""
        self._burst *= 0.5 ** ((now - self._burst_at) / _BURST_HALF_LIFE_S)
        self._burst_at = now
        self._burst = max(self._burst, self._asked, self._at_hand)
        wanted = 1 << (int(self._burst) - 1).bit_length() if self._burst >= 1 else 0
        waits = not self._patient and not self._was_granted and self._allowed - self._used < wanted
        if not waits or now - self._asked_since > _BURST_S:
            self._asked, self._asked_since, self._was_granted = 0, now, False
        return wanted

    def close(self) -> None:
        """Let the process end by itself; it is not waited for, since it may hang."""
        if self._starting is not None:
            self._starting.give_up()
        self._close_process(exact=self._report(0))
        for process in self._killed:
            process.close()

    def _close_process(self, *, exact: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close(exact=exact)

    def _kill_process(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._killed.append(self._process)
        self._process = None

    def _too_many_hang(self, now: float) -> bool:
        """Whether so many that were killed are still there that one more would only hang as well.

        Now and then one is tried all the same: they hang for good where another mount has taken the place.
        """
        for process in [each for each in self._killed if not each.running]:
            process.close()
            self._killed.remove(process)
        more = len(self._killed) - _MAX_KILLED
        if more < 0 or now - self._last_start > min(_SELDOM_S * 2.0**more, _SELDOMEST_S):
            return False
        reason = (
            f"{len(self._killed)} maintenance processes were killed and do not end: the root hangs"
        )
        self._log.say("maintenance_gone", logging.WARNING, reason=reason)
        return True

    def _hear(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(BlockingIOError):
            while received := self._process.hear(_READ_NBYTES):
                try:
                    self._unpacker.feed(received)
                    for message in self._unpacker:
                        self._take_message(message)
                except Exception as error:  # a warning that some import prints to stdout, say
                    reason = f"it says what it should not and is started again: {error}"
                    self._log.say("maintenance_gone", logging.WARNING, reason=reason)
                    self._kill_process()
                    self._allowed = 0
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
        if "alive" in message:
            # When it was said, and not when it is read: an idle engine has left it in the pipe.
            self._heard_at = self._clock() - (time.monotonic() - message["alive"])
        elif "revoke" in message:
            # It was away for so long that others may have been given the rest. It learns from us how
            # much that was: it cannot know what was used meanwhile.
            self._return_unused()
        elif "grant" in message:
            self._allowed += message["grant"]
            self._was_granted = True
        elif "removed" in message:
            self._removed += entries(message["removed"])
        else:
            self.state = replace(self.state, **message)
