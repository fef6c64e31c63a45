"""The output for people and programs: results on stdout, everything else on stderr.

`Console`s are made when something is printed, so that a command that prints JSON does not import rich.
Names from a disk may hold anything: `show` makes them printable; they are never taken for markup.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from fskv.errors import ConfigError
from fskv.sizes import parse_size

from .exits import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")
_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|h|d|w)", re.ASCII)
_AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MAX_AGE_S = 100 * 366 * 86400
_NAMESPACE = re.compile(r"^(.+)(@[0-9a-f]{16})(?=$| \()")
_FEW = 70  # columns that a listing with tenants needs
_BESIDE = 60  # columns of a terminal, for what stands beside a name


# --- where it goes ----------------------------------------------------------------------


def say(sentence: str) -> None:
    """Print a hint, a warning or an error to stderr; printable, never markup."""
    print(show(sentence), file=sys.stderr, flush=True)


def emit(kind: str, **fields: Any) -> None:
    """Print one JSON line. Times are RFC 3339 texts (`rfc3339`), sizes integers of bytes.

    ValueError for a number that JSON does not have.
    """
    print(json.dumps({"type": kind, **fields}, allow_nan=False), flush=kind == "summary")


def tell(kind: str, text: str, *, as_json: bool, **fields: Any) -> None:
    """Print a result: a JSON line of these fields, or a text."""
    if as_json:
        emit(kind, **fields)
    else:
        print(show(text))


def tell_failure(path: str, reason: str, *, as_json: bool) -> None:
    """Say that something cannot be removed."""
    if as_json:
        emit("failure", path=path, reason=reason)
    else:
        say(f"{path}: cannot be removed: {reason}")


def print_table(table: Table) -> None:
    """Print a table to stdout, as wide as the terminal; without a terminal as wide as its content."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(table)
        return
    # Nobody folds the lines of a file: one line for a row, nothing is cut.
    console = Console(width=100_000, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def new_table(*columns: str) -> Table:
    """Return an empty table; a column of numbers begins with `>`."""
    from rich import box
    from rich.table import Table

    tty, narrow = sys.stdout.isatty(), is_narrow()
    # Two cells between columns and nothing around them: 80 columns are few for names of models.
    table = Table(
        box=box.SIMPLE_HEAD if tty else None,
        padding=(0, 1, 0, 0) if tty else (0, 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for name in columns:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            digest = 17 if "@" in name else None
            # With a least width alone rich cuts the last column of a narrow terminal.
            width = digest if narrow else None
            table.add_column(name, overflow="fold", min_width=digest, width=width)
    return table


def plain(text: str) -> Text:
    """Return a cell of a table that shows `text` as it is: brackets in it are no markup."""
    from rich.text import Text

    shown = show(text)
    if len(shown) > columns() - _BESIDE:  # the digest of a namespace stays whole
        shown = _NAMESPACE.sub(r"\1\n\2", shown)
    return Text(shown)


@contextlib.contextmanager
def progress(*, rate: bool = False) -> Iterator[Progress]:
    """Draw progress on stderr while it is a terminal, otherwise nothing. `rate`: the total is in bytes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    counted = DownloadColumn(binary_units=True) if rate else MofNCompleteColumn()
    drawn = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        counted,
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
        transient=True,
        # Where only stderr is a terminal, results must not come out there.
        redirect_stdout=sys.stdout.isatty(),
        disable=not sys.stderr.isatty(),
    )
    with drawn:
        yield drawn


@contextlib.contextmanager
def walk_progress(what: str, num_namespaces: int) -> Iterator[Callable[[int, int], None]]:
    """Draw the progress of a walk: yields the function that takes the numbers of namespace and shard."""
    from fskv.index.scan import NUM_SHARDS

    with progress() as drawn:
        task = drawn.add_task(what, total=NUM_SHARDS * num_namespaces)
        yield lambda number, shard: drawn.update(task, completed=number * NUM_SHARDS + shard)


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, *, yes: bool) -> bool:
    """Ask on the terminal; True without asking with `yes`. Raises UsageError where nobody can be asked."""
    if yes:
        return True
    if not can_ask():
        raise UsageError("nothing was done: there is no terminal to ask on; give --yes to go on")
    print(f"{show(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# --- how it is written ------------------------------------------------------------------


def show(text: str) -> str:
    """Return a text that cannot move the cursor, change colours or reverse its own direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def many(number: int, noun: str, nouns: str = "") -> str:
    """Write `1 file`, `2 files`, `1,234 files`."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def iec(nbytes: float) -> str:
    """Write bytes with an IEC unit and three digits: `512 B`, `1.50 KiB`, `12.3 MiB`, `456 GiB`."""
    value, unit = nbytes, "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, bigger
    if unit == "B":
        return f"{int(value)} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def share(part: float | None, whole: float = 1) -> str:
    """Write a share in per cent; a dash if it is unknown."""
    return f"{100 * part / whole:.1f} %" if whole and part is not None else "-"


def ago(mtime_ns: int | None, now_ns: int | None = None) -> str:
    """Write how long ago a time was: `42 s ago`, `3 h ago`; a dash for none."""
    if mtime_ns is None:
        return "-"
    seconds = ((time.time_ns() if now_ns is None else now_ns) - mtime_ns) / 1e9
    return "in the future" if seconds < -60 else f"{duration(max(0.0, seconds))} ago"


def last_use(mtime_ns: int | None, now_ns: int | None = None) -> str:
    """Write how long ago a chunk was used: a load sets its time only after `touch_interval_s`."""
    from fskv.types import MAX_TOUCH_INTERVAL_S

    now_ns = time.time_ns() if now_ns is None else now_ns
    if mtime_ns is not None and 0 <= now_ns - mtime_ns < MAX_TOUCH_INTERVAL_S * 10**9:
        return f"< {duration(MAX_TOUCH_INTERVAL_S)} ago"
    return ago(mtime_ns, now_ns)


def duration(seconds: float) -> str:
    for unit, size in (("y", 365 * 86400), ("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit}"
    return f"{seconds:.0f} s"


def rfc3339(ns: int | None) -> str | None:
    """Write a time as RFC 3339 in UTC, to the millisecond; None where there is none or it is no date."""
    if ns is None:
        return None
    try:
        text = datetime.fromtimestamp(ns // 1_000_000 / 1000, UTC).isoformat(
            timespec="milliseconds"
        )
    except (ValueError, OverflowError, OSError):
        return None
    return text.replace("+00:00", "Z")


def size_option(option: str, text: str) -> int:
    """Read bytes, as a number or with a unit; raises UsageError."""
    return parsed(parse_size, option, text)


def parsed(parse: Callable[[str, Any], T], option: str, text: str) -> T:
    """Read a size by a function of `fskv.sizes`; raises UsageError."""
    try:
        # More digits than any size has are no number for Python either.
        is_number = text.isascii() and text.isdecimal() and len(text) < 30
        return parse(option, int(text) if is_number else text)
    except ConfigError as error:
        raise UsageError(str(error).removeprefix("option ")) from None


def age_option(option: str, text: str) -> float:
    """Read a duration such as 90s, 12h, 30d in seconds; raises UsageError."""
    match = _AGE.fullmatch(text.strip())
    seconds = float(match[1]) * _AGE_UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= _MAX_AGE_S:
        raise UsageError(f"{option}: found {text!r}, expected a duration such as 90s, 12h, 30d, 4w")
    return seconds


def columns() -> int:
    """Return the width of the terminal; a huge number where stdout is no terminal."""
    if not sys.stdout.isatty():
        return 1 << 20
    return shutil.get_terminal_size((80, 0)).columns


def is_narrow() -> bool:
    """Return whether stdout is too narrow for a listing with tenants."""
    return columns() < _FEW


def fill(text: str, indent: int = 0) -> str:
    """Break a text into lines that fit the terminal; names and values stay whole."""
    return textwrap.fill(
        show(text),
        min(columns(), 100 if columns() >= 100 else 78),
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
