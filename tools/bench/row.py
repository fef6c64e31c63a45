"""What a bench reports: one frozen row per operation, and how rows relate to the peers' rows.

Pure: no file, no clock, no torch. docs/benchmarks.md, "The rows of --json", describes every field of `Row`;
`tests/tools/test_bench.py` holds the two together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

SCHEMA = 1  # raised when a field changes its meaning or goes; new fields do not raise it

FS_IO_C = "fs_io_C"
FIO = "fio"
O_DIRECT = "O_DIRECT"
BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum over the rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of the rounds' values; None of none."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of one contestant at one size. Exactly one of the rates, or `error`, is set."""

    schema: int
    op: str
    path: str
    chunk_nbytes: int
    page_nbytes: int
    threads: int
    num_chunks: int
    rounds: int
    gb_per_s: Spread | None
    keys_per_s: Spread | None
    verified: bool
    ratio_to_fs_io_c: float | None
    ratio_to_fio: float | None
    error: str | None

    @property
    def rate(self) -> Spread | None:
        return self.gb_per_s or self.keys_per_s

    @property
    def is_peer(self) -> bool:
        return self.contestant in (FS_IO_C, FIO, "os.path.exists")

    @property
    def contestant(self) -> str:
        """The path without its mode: `host`, `fs_io_C`, ..."""
        return self.path.removesuffix(O_DIRECT).removesuffix(BUFFERED).strip()

    @property
    def mode(self) -> str:
        """`O_DIRECT`, `buffered`, or nothing for lookups."""
        return next((mode for mode in (O_DIRECT, BUFFERED) if self.path.endswith(mode)), "")


def ratio(own: Spread | None, other: Spread | None) -> float | None:
    """Divide two medians; None where one of them is missing."""
    if own is None or other is None or other.median <= 0:
        return None
    return own.median / other.median


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Fill in the ratios of fskv's rows: to the peer's row of the same operation, size, threads and mode.

    The page size does not matter: the peers move whole chunks only.
    """
    peers = {_cell(row, row.contestant): row for row in rows if row.is_peer}
    found = []
    for row in rows:
        if not row.is_peer:
            to_fs_io_c, to_fio = (
                ratio(row.rate, peer.rate) if (peer := peers.get(_cell(row, name))) else None
                for name in (FS_IO_C, FIO)
            )
            found.append(replace(row, ratio_to_fs_io_c=to_fs_io_c, ratio_to_fio=to_fio))
        else:
            found.append(row)
    return found


def _cell(row: Row, contestant: str) -> tuple[str, str, str, int, int]:
    return contestant, row.op, row.mode, row.chunk_nbytes, row.threads
