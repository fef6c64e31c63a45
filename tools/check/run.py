"""One pass over the chunk files of namespaces: judged on many threads, told in the order of a walk.

The thread that iterates over `Run.events` lists the directories and hands out batches of names; the others
judge them. In memory are the batches that are under way, and nothing of a file that was judged.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from fskv.errors import chunk_error_from_os
from fskv.index.scan import file_name, shard_path
from fskv.namespace import parse_chunk_file
from fskv.root.beneath import opened
from fskv.root.key_file import KeySet
from fskv.root.remove import Fate, Outcome, Place

from ..root_view import FileOf, Namespace, Unlistable
from .expect import expected_of
from .judge import Finding, Reader, Verdict, finding_of, judge

_BATCH_FILES = 32
_BATCH_NBYTES = 64 << 20
_AHEAD = 4  # batches for each thread
# A thread that comes back from a read waits for the interpreter, behind whoever computes: at most this long.
# With Python's 5 ms the same reads ran at 0.77 of a plain read's rate, with this at 0.87 (2 busy cores).
_SWITCH_S = 0.0005
_UNREAD = (Finding.VANISHED, Finding.UNREADABLE)
REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Bad(FileOf):
    """A file with a finding."""

    finding: Finding
    reason: str
    info: os.stat_result | None  # of the file that was judged; None: it could not be opened

    @property
    def nbytes(self) -> int | None:
        """The length of the file; None if nobody could open the file."""
        return self.info.st_size if self.info else None

    @property
    def is_sure(self) -> bool:
        """True if the file may be removed: it is corrupt, or stale beside a sound manifest."""
        is_stale = self.finding is Finding.STALE and self.namespace.identity is not None
        return self.info is not None and (self.finding is Finding.CORRUPT or is_stale)

    def remove(self) -> Outcome:
        """Remove the very file that was judged. Raises OSError where the root is away.

        A file that was written, touched or replaced since has another time of change, and stays.
        """
        judged = self.info

        def is_same(_: str, now: os.stat_result) -> str:
            return REMOVED if judged and _version(now) == _version(judged) else Fate.STAYS

        with Place(self.namespace.root, self.directory) as place:
            return place.remove(self.name, is_same)


def _version(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunk files of one directory, to be judged by one thread."""

    space_idx: int
    shard: int
    names: list[str]


_Judged = tuple[Counter[str], list[Bad]]


class Run:
    """One pass over the files; callers may read `tally` between events and afterwards.

    It has the findings, and the counts by their names in `verify --json`.
    """

    def __init__(
        self,
        spaces: Sequence[Namespace],
        *,
        rows: bool = False,
        threads: int = 8,
        keys: KeySet | None = None,
    ) -> None:
        """With `rows` the run reads and checks the payload too, an encrypted one with its `keys`."""
        self._keys = keys
        self._spaces = spaces
        self._rows = rows
        self._threads = threads
        self._own = threading.local()
        self._stop = False
        self.tally = Counter[str]()
        self.seconds = 0.0

    def events(self) -> Generator[Bad | Unlistable | tuple[int, int]]:
        """Yield the findings, and the progress (namespace, directory). Close the generator to stop."""
        started, switch_s = time.monotonic(), sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        pool = ThreadPoolExecutor(self._threads, "fskv-verify")
        under_way: deque[tuple[_Batch, Future[_Judged]]] = deque()
        try:
            for batch in self._walk():
                if isinstance(batch, Unlistable):
                    self.tally["unlistable"] += 1
                    yield batch
                    continue
                under_way.append((batch, pool.submit(self._judge, batch)))
                if len(under_way) > _AHEAD * self._threads:
                    yield from self._told(*under_way.popleft())
            while under_way:
                yield from self._told(*under_way.popleft())
        finally:
            self._stop = True
            pool.shutdown(wait=False, cancel_futures=True)  # nobody waits for a disk that hangs
            sys.setswitchinterval(switch_s)
            self.seconds = time.monotonic() - started

    def _walk(self) -> Iterator[_Batch | Unlistable]:
        for space_idx, space in enumerate(self._spaces):
            for shard in space.walk():
                if isinstance(shard, Unlistable):
                    yield shard
                    continue
                self.tally["foreign"] += shard.num_foreign
                names, nbytes = [], 0
                for record in shard.records:
                    names.append(file_name(record))
                    nbytes += int(record["nbytes"])
                    if len(names) == _BATCH_FILES or nbytes >= _BATCH_NBYTES:
                        yield _Batch(space_idx, shard.idx, names)
                        names, nbytes = [], 0
                if names:
                    yield _Batch(space_idx, shard.idx, names)

    def _told(
        self, batch: _Batch, judged: Future[_Judged]
    ) -> Iterator[Bad | Unlistable | tuple[int, int]]:
        tally, bad = judged.result()
        self.tally.update(tally)
        yield from bad
        yield batch.space_idx, batch.shard

    # --- on a thread of the pool -------------------------------------------------------------

    def _judge(self, batch: _Batch) -> _Judged:
        space = self._spaces[batch.space_idx]
        expected = expected_of(space.identity, space.digest16, self._keys)
        directory = shard_path(space.path, batch.shard)
        if not hasattr(self._own, "reader"):
            self._own.reader = Reader()
        reader, tally, bad = self._own.reader, Counter[str](), []
        with contextlib.ExitStack() as closing:
            dir_fd, failure = -1, None
            try:
                dir_fd = closing.enter_context(opened(space.root, directory))
            except OSError as error:  # it is gone, or another thing now
                failure = Verdict(*finding_of(chunk_error_from_os(error, directory)))
            for name in batch.names:
                if self._stop:
                    break
                chunk = parse_chunk_file(name)
                found = failure or judge(
                    reader, name, dir_fd=dir_fd, chunk=chunk, expected=expected, rows=self._rows
                )
                tally["files"] += 1
                tally["nbytes_read"] += found.nbytes_read
                tally[found.finding] += 1
                if self._rows and found.finding not in _UNREAD:
                    is_closed = found.is_encrypted and expected.keys is None
                    tally["data_files"] += not is_closed
                    tally["encrypted"] += is_closed
                if found.bad:
                    bad.append(Bad(space, name, found.finding, found.reason, found.info))
        return tally, bad
