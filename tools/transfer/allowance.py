"""A transfer's share of a root's bounds: it has a heartbeat there, as an engine does.

So (docs/architecture.md, "Capacity") the bounds of all living engines hold for it. When one is met what was
used least recently is pruned, by whoever holds the lease, and the transfer waits for that; when there is no
room for `patience_s` it ends.

What the transfer itself is to keep free is no bound of the root's: it is in no heartbeat, so that nothing of
others is pruned for it.

Any number of threads; one talks to the maintenance process at a time.
"""

from __future__ import annotations

import threading
import time

from fskv import namespace
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits, inodes_short, kept_free
from fskv.errors import FskvError
from fskv.namespace import Identity
from fskv.root.filesystem import Space
from fskv.sizes import Share

PATIENCE_S = 30.0
_POLL_S = 0.02


class NoRoomError(FskvError):
    """The root has no room for more: its bounds, the disk, or a quota. The transfer ends."""


class Allowance:
    """See the module docstring."""

    def __init__(
        self,
        root: str,
        identity: Identity,
        keep_free: int | Share,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._capacity = Capacity(
            root,
            namespace.directory(identity),
            identity.tenant,
            Limits(),
            quiet=True,  # stderr is a person's terminal
        )
        self._root = root
        self._keep_free = keep_free
        self._taken = 0  # bytes that are being written; guarded by _lock
        self._patience_s = patience_s
        self._lock = threading.Lock()  # guards the capacity, which is for one thread
        self._stopped = threading.Event()
        self.exhausted: str | None = None  # why nothing more may be written; it stays so
        self.pruned = 0  # files of this namespace that were pruned meanwhile, by anybody
        self._capacity.start()

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes may be written. Raises NoRoomError when that takes too long."""
        end = time.monotonic() + self._patience_s
        while True:
            if self.exhausted is not None:
                raise NoRoomError(self.exhausted)
            with self._lock:
                leaves_enough = self._leaves_enough(nbytes)
                if leaves_enough and self._capacity.take(nbytes):
                    self._taken += nbytes
                    return
                self.pruned += len(self._capacity.poll())
            if self.exhausted is None and (time.monotonic() > end or self._stopped.is_set()):
                why = (
                    "the bounds of the root's engines leave none, and nothing could be pruned"
                    if leaves_enough
                    else "less than --keep-free would stay free, and nothing is pruned for that"
                )
                self.exhausted = f"no room for {nbytes} bytes within {self._patience_s:g} s: {why}"
                continue
            time.sleep(_POLL_S)

    def _leaves_enough(self, nbytes: int) -> bool:
        """Whether what must stay free does, once so many more bytes are written."""
        if not self._keep_free:
            return True
        space = Space.of(self._root)
        if inodes_short([Limits(keep_free=self._keep_free)], space):
            return False
        left = space.free_nbytes - self._taken - nbytes
        return not space.total_nbytes or left >= kept_free(self._keep_free, space)

    def settle(self, taken: int, written: int) -> None:
        """Of `taken` bytes `written` are on disk now."""
        with self._lock:
            self._taken -= taken
            self._capacity.settle(taken, written)
            self.pruned += len(self._capacity.poll())

    def close(self) -> None:
        """End the maintenance process; a thread that waits ends."""
        self._stopped.set()
        with self._lock:
            self._capacity.poll()
            self._capacity.close()
