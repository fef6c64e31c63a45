"""Probes of the root's file system: writing, clocks, O_DIRECT, and a published file.

fskv needs exclusive create and rename. It can do without the rest, at a price that the finding names.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator

from fskv.format import chunk_file

from ..neighbours import NO_ROOM, new_file
from ..terminal import iec
from .finding import Finding, Subject, hint, ok, problem, warning

_ODD_NS = 1_600_000_001_123_456_789


def write(subject: Subject) -> Iterator[Finding]:
    try:
        with new_file(subject.path) as (path, fd):
            os.write(fd, bytes(65536))
            os.fsync(fd)
            yield ok("write", "a file can be created and written")
            yield from _times(path)
    except OSError as error:
        advice = 'fix owner, mode or mount; only engines with "store": false can use it as it is'
        if error.errno in NO_ROOM:
            advice = "make room: `fskv prune`, or a larger quota"
        yield problem("write", f"no file can be written: {error.strerror}", advice)


def _times(path: str) -> Iterator[Finding]:
    os.utime(path)
    before, found, after = time.time(), os.stat(path).st_mtime, time.time()
    skew_s = found - after if found > after else found - before if found < before - 2 else 0.0
    if abs(skew_s) > 30:
        text = (
            f"the file system's clock is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}"
        )
        yield warning("clock", text, "set the clocks (NTP): ages are wrong by that much")
    else:
        yield ok("clock", "the file system's clock agrees with this machine's")
    os.utime(path, ns=(_ODD_NS, _ODD_NS))
    mtime_ns = os.stat(path).st_mtime_ns
    if abs(mtime_ns - _ODD_NS) >= 2_000_000_000:
        advice = "least recently used cannot be told; use another file system"
        yield problem("mtime", "cannot be set", advice)
    elif mtime_ns % 1_000_000_000 == 0:
        advice = "files that were used within two seconds of each other are pruned in any order"
        yield hint("mtime", "is kept to whole seconds", advice)
    else:
        yield ok("mtime", "is kept to a part of a second")


def direct_io(subject: Subject) -> Iterator[Finding]:
    """Write and read with O_DIRECT: open() accepting the flag proves nothing."""
    page = mmap.mmap(-1, chunk_file.ALIGNMENT)
    try:
        with new_file(subject.path, os.O_DIRECT) as (_, fd):
            works = os.pwritev(fd, [page], 0) == os.preadv(fd, [page], 0) == chunk_file.ALIGNMENT
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        works = False
    if works:
        yield ok("O_DIRECT", "works, for writing and reading")
    else:
        advice = "the page cache is used: KV takes memory of the machine, and GDS cannot work"
        yield hint("O_DIRECT", "is refused", advice)


def round_trip(subject: Subject) -> Iterator[Finding]:
    """Publish a file of 1 MiB over another one, as the store and the lease do, and read it again."""
    content = os.urandom(1 << 20)
    with new_file(subject.path) as (final, _), new_file(subject.path) as (part, fd):
        start = time.perf_counter()
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.rename(part, final)
        stored = time.perf_counter()
        with open(final, "rb") as file:
            read = file.read()
        loaded = time.perf_counter()
        replaced = not os.path.lexists(part)
    if not replaced or read != content:
        advice = "the file system loses or changes bytes: do not use it"
        yield problem("round trip", "other bytes were read than written", advice)
        return
    took = f"stored in {1000 * (stored - start):.1f} ms (fsync)"
    took += f", loaded in {1000 * (loaded - stored):.1f} ms"
    yield ok("round trip", f"{iec(len(content))} {took}, every byte compared")
