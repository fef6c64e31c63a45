"""What takes part in a bench: does its operations once a round, and says how fast each was.

A contestant that fails once is out: its rows carry the error and no rate, and the others go on. What it
wrote in a round it removes at the end of that round, so that a bench needs room for one round's bytes only.
Called on the main thread.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fskv.errors import FskvError

from .row import SCHEMA, Row, Spread

CLOSE_S = 10.0  # how long an interrupted bench waits for transfers that have begun


class RoundError(Exception):
    """A contestant could not do its round; one sentence."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A size that contestants are compared at: `num_chunks` chunks a round, on `threads` threads."""

    chunk_nbytes: int
    threads: int
    num_chunks: int

    @property
    def nbytes(self) -> int:
        return self.num_chunks * self.chunk_nbytes

    def gb_per_s(self, seconds: float, num_chunks: int | None = None) -> float:
        chunks = self.num_chunks if num_chunks is None else num_chunks
        return chunks * self.chunk_nbytes / seconds / 1e9


class Contestant(ABC):
    """See the module docstring."""

    def __init__(
        self,
        path: str,
        cell: Cell,
        page_nbytes: int,
        ops: Iterable[str],
        *,
        verifies: bool,
    ) -> None:
        """`verifies`: each rate that `measure` returns is of bytes (or answers) that were compared."""
        self.path = path
        self.cell = cell
        self.page_nbytes = page_nbytes
        self.error: str | None = None
        self._verifies = verifies
        self._rates: dict[str, list[float]] = {op: [] for op in ops}

    def take_part(self, *, keep: bool) -> None:
        """Do one round; `keep` is False for the warm-up, whose rates are not counted."""
        if self.error is not None:
            return
        try:
            rates = self.measure()
        except (RoundError, FskvError, OSError, MemoryError) as error:
            self.error = str(error) or type(error).__name__
            return
        finally:
            self.remove_files()
        for op, rate in rates.items() if keep else ():
            self._rates[op].append(rate)

    def rows(self) -> list[Row]:
        rows = []
        for op, rates in self._rates.items():
            spread = Spread.of(rates) if self.error is None else None
            is_lookup = op.startswith("lookup")
            rows.append(
                Row(
                    schema=SCHEMA,
                    op=op,
                    path=self.path,
                    chunk_nbytes=self.cell.chunk_nbytes,
                    page_nbytes=self.page_nbytes,
                    threads=self.cell.threads,
                    num_chunks=self.num_chunks(op),
                    rounds=len(rates) if spread else 0,
                    gb_per_s=None if is_lookup else spread,
                    keys_per_s=spread if is_lookup else None,
                    verified=self._verifies and spread is not None,
                    ratio_to_fs_io_c=None,
                    ratio_to_fio=None,
                    error=self.error,
                )
            )
        return rows

    def num_chunks(self, op: str) -> int:
        """How many chunks, or keys, one round of `op` moves."""
        return self.cell.num_chunks

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Do every operation once; return GB/s (lookups: keys/s). Raises RoundError, FskvError or OSError."""

    def remove_files(self) -> None:  # noqa: B027  lookups leave their files for the next round
        """Remove what this round wrote."""

    def close(self) -> None:  # noqa: B027  not everybody has threads
        """Stop what runs in the background; waits at most CLOSE_S."""


def drop_from_page_cache(paths: Sequence[str]) -> None:
    """Make the next buffered read of these files a cold one, as far as this machine's memory goes."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # DONTNEED passes over dirty pages
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def remove_all(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
