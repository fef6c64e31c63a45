"""A bench's rows for people: a table, and a sentence for each contestant that failed."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from .row import Row, Spread

_COLUMNS = ("op", "path", "chunk", "page", "T", "median \\[min - max]", "/fs_io_C", "/fio")


def table(rows: Sequence[Row]) -> Table:
    """Lay out the rows that have a rate; the columns of ratios only where there is one."""
    ratios = [
        any(row.ratio_to_fs_io_c is not None for row in rows),
        any(row.ratio_to_fio is not None for row in rows),
    ]
    shown = Table(
        title="GB/s (10^9 bytes), lookups 1000 keys/s; chunk and page in KiB, T threads",
        caption="host: verified bytes only. fs_io_C and fio verify nothing." * any(ratios),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    columns = [
        *_COLUMNS[:6],
        *(name for name, there in zip(_COLUMNS[6:], ratios, strict=True) if there),
    ]
    for name in columns:
        shown.add_column(name, justify="left" if name in ("op", "path") else "right", no_wrap=True)
    for row in sorted(rows, key=_order):
        if row.rate is None:
            continue
        cells = [row.op, row.path, row.chunk_nbytes >> 10, row.page_nbytes >> 10, row.threads]
        shares = (row.ratio_to_fs_io_c, row.ratio_to_fio)
        shown.add_row(
            *map(str, cells),
            _keys(row.keys_per_s) if row.keys_per_s else _gb(row.gb_per_s),
            *(_share(share) for share, there in zip(shares, ratios, strict=True) if there),
        )
    return shown


def errors(rows: Sequence[Row]) -> list[str]:
    """Return one sentence per contestant that failed."""
    return list(
        dict.fromkeys(
            f"{row.path}, {row.chunk_nbytes >> 10} KiB chunks, {row.page_nbytes >> 10} KiB pages, "
            f"{row.threads} threads: {row.error}"
            for row in rows
            if row.error
        )
    )


def _order(row: Row) -> tuple[bool, int, int, str, bool]:
    return bool(row.keys_per_s), row.chunk_nbytes, row.threads, row.op, row.is_peer


def _gb(rate: Spread | None) -> str:
    return f"{rate.median:.2f} [{rate.min:.2f} - {rate.max:.2f}]" if rate else ""


def _keys(rate: Spread) -> str:
    median, least, most = (value / 1000 for value in (rate.median, rate.min, rate.max))
    return f"{median:,.0f}k [{least:,.0f}k - {most:,.0f}k]"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"
