"""The root that a transfer writes to: its namespaces one after the other, each with a heartbeat of its own.

`store` is for the transfer's threads, everything else for its main thread, which hands them their work: a
namespace is closed when the last file for it is done.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from fskv.errors import ChunkError, RootError
from fskv.namespace import Identity
from fskv.root.root import Root
from fskv.sizes import Share

from .allowance import PATIENCE_S, Allowance
from .candidate import Candidate, Head
from .sink import Sink
from .tally import Fate, Outcome


@dataclass(frozen=True, slots=True)
class Options:
    """How to write."""

    keep_free: int | Share
    read_back: bool = False
    num_threads: int = 4
    patience_s: float = PATIENCE_S


class Destination:
    """A context manager: leaving it removes what is half written and takes the heartbeat away."""

    def __init__(self, root: Root, options: Options) -> None:
        """A root that is not writable is only compared with."""
        self._root = root
        self._options = options
        self._sink: Sink | None = None
        self._allowance: Allowance | None = None
        self._open = ExitStack()  # the sink and its allowance
        self._idle = threading.Condition()
        self._pending = 0  # files handed out and not done; guarded by _idle
        self._pruned = 0
        self._exhausted: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @property
    def exhausted(self) -> str | None:
        """Why the root takes no more; None while it does."""
        now = self._allowance.exhausted if self._allowance else None
        return self._exhausted or now

    @property
    def pruned(self) -> int:
        """How many files of the same namespaces were pruned meanwhile, by anybody."""
        return self._pruned + (self._allowance.pruned if self._allowance else 0)

    def open(self, identity: Identity) -> Sink:
        """Return what takes files of that namespace; raises RootError and what is below it."""
        if self._sink is None or self._sink.identity.digest != identity.digest:
            with self._idle:
                self._idle.wait_for(lambda: not self._pending)
            self._close()
            if self._root.writable:
                self._root.open_namespace(identity)  # compared, before anything is stored in it
                self._allowance = Allowance(
                    self._root.path, identity, self._options.keep_free, self._options.patience_s
                )
                self._open.callback(self._allowance.close)
            read_back = self._options.read_back
            self._sink = Sink(self._root, identity, self._allowance, read_back=read_back)
            self._open.callback(self._sink.close)
        return self._sink

    def look(self, identity: Identity, name: str, head: Head) -> Sink | Outcome:
        """Return the sink for a file that is not there yet, or the outcome where nothing is to be done."""
        try:
            sink = self.open(identity)
            if sink.has(head):
                return Outcome(name, Fate.THERE, head.file_nbytes)
        except (RootError, ChunkError) as error:
            return Outcome(name, Fate.FAILED, head.file_nbytes, str(error))
        return sink

    def expect(self) -> None:
        """A thread will store a file in what is open now, and call `forget` then."""
        with self._idle:
            self._pending += 1

    def store(self, sink: Sink, name: str, candidate: Candidate) -> Outcome:
        """Publish a checked file, where the root is writable."""
        if not self._root.writable:
            return Outcome(name, Fate.STORED, candidate.head.file_nbytes)  # it would be
        return sink.store(name, candidate)

    def forget(self) -> None:
        """What was expected is done, one way or another."""
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()

    def _close(self) -> None:
        self._pruned, self._exhausted = self.pruned, self.exhausted
        self._sink = self._allowance = None
        self._open.close()
