"""Copies chunk files from one root to another: checked in memory between the read and the write.

Threads look, read and write; a file that is there already costs a look at its header on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from fskv.errors import ChunkError, RootError
from fskv.namespace import Identity
from fskv.transports.chunk_fd import open_chunk_fd

from ..root_view import ChunkFile, Namespace
from .candidate import exactly, read_head
from .destination import Destination
from .pipeline import in_order
from .selection import Found, load, weigh
from .sink import Sink
from .tally import Fate, Outcome, Tally


@dataclass(frozen=True, slots=True)
class _Copy:
    """One namespace's way; its `run` is for the threads."""

    identity: Identity
    destination: Destination
    sink: Sink

    def run(self, file: ChunkFile) -> Outcome:
        name = f"{file.namespace.id}/{file.relative}"
        if self.destination.exhausted is not None:
            return Outcome(name, Fate.NO_ROOM)
        if self._is_there(file):
            return Outcome(name, Fate.THERE, weigh(file))
        loaded = load(file, self.identity)
        if isinstance(loaded, Outcome):
            return loaded
        return self.destination.store(self.sink, name, loaded)

    def _is_there(self, file: ChunkFile) -> bool:
        """Compare the headers on both sides; whatever is wrong is found by the whole look that follows."""
        try:
            with open_chunk_fd(file.path) as (fd, info):
                nbytes = info.st_size
                head = read_head(lambda n: exactly(fd, n), file.relative, nbytes, self.identity)
            return self.sink.has(head)
        except (OSError, ChunkError):
            return False


def copy(
    found: Found,
    destination: Destination,
    tally: Tally,
    *,
    num_threads: int,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Copy what was found, one namespace after the other."""
    for one in found.spaces:
        assert one.identity is not None
        try:
            sink = destination.open(one.identity)
        except RootError as error:
            _refuse(one, error, tally)
            continue
        work = _Copy(one.identity, destination, sink).run
        with closing(in_order(found.files(one), work, weigh, num_threads=num_threads)) as results:
            for outcome in results:
                tally.add(outcome)
                advance(outcome.nbytes)
        if destination.exhausted is not None:
            return


def _refuse(one: Namespace, error: RootError, tally: Tally) -> None:
    tally.files[Fate.FAILED] += 1
    tally.complain("failed", one.id, str(error))
