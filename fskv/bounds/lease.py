"""The lease of a root: its one holder, the leader, counts and prunes for all.

A lease protects no data. Two holders at once, after a partition or a stopped process, remove more than needed
and harm nothing else. A holder stops when it finds another's file in the place of its own. No two clocks are
compared: a holder is dead when its process provably is, or when the heartbeat in its file has not changed for
`ttl_s` of the observer's own clock.

The file appears by link(), which is exclusive on every shared file system that was measured. It holds the
holder's name, its start, and a heartbeat that the holder rewrites in place. Every call touches the disk and
may hang, so only the maintenance process (fskv.bounds.maintenance) calls.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fskv.bounds.shared_files import parsed
from fskv.root.beneath import opened
from fskv.root.files import UnfitFileError, publishing, regular_file
from fskv.root.process_id import HOST, TOKEN, provably_dead, unique_name

SHARED_DIR = ".fskv-maintenance"
LEASE_FILE = "lease.json"
TTL_S = 15.0
MAX_LEASE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The content of the lease's file."""

    holder: str
    host: str
    pid: int
    boot: str  # fskv.root.process_id.TOKEN
    since_ms: int
    beat: int

    @classmethod
    def parse(cls, content: bytes) -> LeaseState | None:
        """Parse the content of a lease's file; None where that is no lease."""
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            return parsed(cls, json.loads(content))
        return None


class Lease:
    """One process's view of a root's lease."""

    def __init__(
        self,
        directory: str,
        *,
        ttl_s: float = TTL_S,
        file_mode: int = 0o600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` is the root's SHARED_DIR, which exists."""
        self._directory = directory
        self._root = os.path.dirname(directory)
        self._ttl_s = ttl_s
        self._file_mode = file_mode
        self._clock = clock
        self._name = unique_name()
        self.term = 0  # how often it was taken: work that was begun in an earlier term is void
        self._mine: LeaseState | None = None
        self._beaten_at = 0.0
        self._observed: tuple[LeaseState | None, float] = (None, 0.0)  # unchanged since

    @property
    def held(self) -> bool:
        """Return whether this process may act as the holder now: its last heartbeat is young enough."""
        return self._mine is not None and self._clock() - self._beaten_at < self._ttl_s

    def renew(self) -> bool:
        """Keep the lease, or take it if it is free or its holder is dead; returns `held`. Raises OSError."""
        with self._opened() as fd:
            if self._mine is not None:
                self._beat(fd)
            if self._mine is None:
                self._try_to_take(fd)
        return self.held

    def release(self) -> None:
        """Give the lease back, if it is still ours."""
        mine, self._mine = self._mine, None
        with contextlib.suppress(OSError), self._opened() as fd:
            found = _read(LEASE_FILE, fd)
            if mine is not None and found is not None and found.holder == mine.holder:
                os.unlink(LEASE_FILE, dir_fd=fd)

    def now_ns(self) -> int:
        """Return the time by the clock that stamps files here: the server's, or on CephFS this node's."""
        try:
            with self._opened() as fd:
                os.utime(LEASE_FILE, dir_fd=fd, follow_symlinks=False)
                return os.stat(LEASE_FILE, dir_fd=fd, follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        """Yield the directory, which is no link: everything here is done to names in it."""
        return opened(self._root, self._directory, os.O_PATH)

    def _beat(self, directory: int) -> None:
        mine = self._mine
        assert mine is not None
        now = self._clock()
        if now - self._beaten_at < self._ttl_s / 4:
            return
        found = _read(LEASE_FILE, directory)
        if found is None or found.holder != mine.holder:
            self._mine = None  # taken over: we were thought dead
            return
        mine = LeaseState(**{**asdict(mine), "beat": mine.beat + 1})
        # Through no link: somebody may have put one there since we looked.
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(LEASE_FILE, flags, dir_fd=directory)
        with os.fdopen(fd, "wb", buffering=0) as file:
            file.write(_encoded(mine))
        self._mine, self._beaten_at = mine, now

    def _try_to_take(self, directory: int) -> None:
        found = _read(LEASE_FILE, directory)
        if found is not None:
            # Ours after all, where link() was done and the answer lost.
            if found.holder != self._name and not self._is_dead(found):
                return
            try:
                os.unlink(LEASE_FILE, dir_fd=directory)  # perhaps of one who was faster: see above
            except FileNotFoundError:
                pass
            except IsADirectoryError:  # not ours to remove
                aside = f"{LEASE_FILE}.foreign-{unique_name()}"
                os.rename(LEASE_FILE, aside, src_dir_fd=directory, dst_dir_fd=directory)
        mine = LeaseState(self._name, HOST, os.getpid(), TOKEN, int(time.time() * 1000), 0)
        now = self._clock()
        try:
            with publishing(LEASE_FILE, self._file_mode, dir_fd=directory, exclusive=True) as file:
                file.write(_encoded(mine))
        except FileExistsError:
            return  # somebody was faster
        self._mine, self._beaten_at = mine, now
        self.term += 1

    def _is_dead(self, found: LeaseState) -> bool:
        if provably_dead(found.holder):
            return True
        seen, since = self._observed
        now = self._clock()
        if found != seen:
            self._observed = (found, now)
            return False
        return now - since > self._ttl_s


def read_lease(name: str, directory: int | None = None) -> tuple[LeaseState | None, float]:
    """Return the lease in a file, None if there is none, and the file's mtime in s. Raises OSError."""
    try:
        with regular_file(name, dir_fd=directory) as file:
            return LeaseState.parse(file.read(MAX_LEASE_NBYTES)), file.info.st_mtime
    except UnfitFileError:
        return None, 0.0


def _read(name: str, directory: int) -> LeaseState | None:
    """Return a file's content, None if it is absent; an unreadable file counts as a dead holder's."""
    nobody = LeaseState("", "", 0, "", 0, 0)
    try:
        return read_lease(name, directory)[0] or nobody
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES, errno.ENXIO):
            return nobody  # a symbolic link, somebody's file, a socket
        raise


def _encoded(state: LeaseState) -> bytes:
    # Of constant length: a heartbeat rewrites the file in place.
    return json.dumps(asdict(state)).encode().ljust(1024) + b"\n"
