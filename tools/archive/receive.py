"""Reads an archive into a root, and believes nothing in it.

Only the names that docs/archive.md describes are looked at; each file is checked as a whole, in memory,
before it is written (tools.transfer.sink). What does not belong there is reported and passed over. A good
file that is there stays, so the same import again goes on where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from fskv.errors import ChunkCorrupt, ChunkStale
from fskv.namespace import Identity

from ..transfer.candidate import Candidate, check_rows, read_head
from ..transfer.destination import Destination
from ..transfer.pipeline import in_order
from ..transfer.sink import Sink
from ..transfer.tally import Fate, Outcome, Tally
from . import layout
from .layout import TRAILER, ArchiveError, Contents
from .tar import Member, TarReader

_MAX_NAMESPACES = 1000


@dataclass(frozen=True, slots=True)
class _Job:
    """A chunk whose header is good and whose rows are to be checked."""

    name: str
    candidate: Candidate
    sink: Sink


class Receiver:
    """One import."""

    def __init__(self, destination: Destination, tally: Tally) -> None:
        self._destination = destination
        self._tally = tally
        self._identities: dict[str, Identity] = {}
        self.contents = Contents()
        self.problem: str | None = None  # why the archive as a whole is not as it was written

    def receive(self, read: Callable[[int], bytes], num_threads: int) -> None:
        """Store what is good of the stream; `problem` says then whether it was whole."""
        self.problem = f"it ends without {TRAILER}: not all of it is here"
        results = in_order(
            self._entries(TarReader(read)), self._store, _weigh, num_threads=num_threads
        )
        with closing(results):
            for outcome in results:
                self._tally.add(outcome)

    # --- the stream, in the caller's thread -----------------------------------------------

    def _entries(self, reader: TarReader) -> Iterator[_Job | Outcome]:
        try:
            for member in reader:
                if member.name == TRAILER and member.is_file:
                    self._take_trailer(member)
                    self._see_the_end(reader)
                    return
                entry = self._entry(member)
                if entry is not None:
                    yield entry
                if self._destination.exhausted is not None:
                    self.problem = None  # it was not read to its end
                    return
        except ArchiveError as error:
            self.problem = str(error)

    def _take_trailer(self, member: Member) -> None:
        if member.nbytes > layout.MAX_TRAILER_NBYTES:
            self.problem = f"its last member, {TRAILER}, has {member.nbytes} bytes"
        else:
            self.problem = self.contents.differs(member.read(member.nbytes))

    def _see_the_end(self, reader: TarReader) -> None:
        for _ in reader:
            self.problem = f"something follows {TRAILER}, which is the last member"
            return

    def _entry(self, member: Member) -> _Job | Outcome | None:
        """Return what is to be done about a member, None for nothing; what is strange is reported."""
        if not member.is_file:
            self._leave_out(member, f"{member.what}, expected a plain file")
        elif (id_ := layout.namespace_of_manifest(member.name)) is not None:
            self._take_manifest(member, id_)
        elif (parts := layout.split_chunk(member.name)) is not None:
            return self._take_chunk(member, *parts)
        else:
            self._leave_out(member, "not the name of a file of fskv's")
        return None

    def _leave_out(self, member: Member, why: str) -> None:
        self._tally.other += 1
        self._tally.complain("other", member.name, why)
        member.refuse()

    def _take_manifest(self, member: Member, id_: str) -> None:
        if member.nbytes > layout.MAX_MANIFEST_NBYTES or len(self._identities) >= _MAX_NAMESPACES:
            self._leave_out(member, f"{member.nbytes} bytes, or too many namespaces")
            return
        content = member.read(member.nbytes)
        try:
            self._identities[id_] = layout.read_manifest(member.name, content)
        except ValueError as error:
            self._leave_out(member, str(error))
        else:
            self.contents.add_manifest(member.name, content)

    def _take_chunk(self, member: Member, id_: str, name: str) -> _Job | Outcome | None:
        identity = self._identities.get(id_)
        if identity is None:
            self._leave_out(member, "comes without the namespace.json of its namespace")
            return None
        try:
            head = read_head(member.read, name, member.nbytes, identity)
        except (ChunkCorrupt, ChunkStale) as error:
            return Outcome(member.name, Fate.BAD, member.nbytes, str(error))
        self.contents.add_file(member.name, member.nbytes, member.mtime_ns, head.raw)
        found = self._destination.look(identity, member.name, head)
        if isinstance(found, Outcome):
            return found
        payload = member.read(head.header.payload_nbytes)
        self._destination.expect()
        return _Job(member.name, Candidate(head, payload, member.mtime_ns), found)

    # --- the threads ----------------------------------------------------------------------

    def _store(self, entry: _Job | Outcome) -> Outcome:
        if isinstance(entry, Outcome):
            return entry
        try:
            check_rows(entry.candidate.head.header, entry.candidate.payload)
            return self._destination.store(entry.sink, entry.name, entry.candidate)
        except ChunkCorrupt as error:
            return Outcome(entry.name, Fate.BAD, entry.candidate.head.file_nbytes, str(error))
        finally:
            self._destination.forget()


def _weigh(entry: _Job | Outcome) -> int:
    return 0 if isinstance(entry, Outcome) else entry.candidate.head.file_nbytes
