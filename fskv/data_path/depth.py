"""The number of chunks that a worker has at the disk at once, from the mount's answer time.

An I/O thread has one chunk in hand. It waits for the mount's answer and then moves bytes. The longer the
answer takes beside the bytes, the more threads should wait at once. docs/benchmarks.md, "How many threads".
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Iterator

from fskv.config import LEAST_AUTO_THREADS, MOST_AUTO_THREADS
from fskv.data_path.transports.chunk_fd import OPEN_PART, OPEN_READ, unlink_quietly
from fskv.format.chunk_file import ALIGNMENT

_LOOKS = 5
_DISK_S = 0.0005  # a disk of the machine answers before that: eight threads are enough for it
_BYTES_PER_S = 1e9  # of one thread: moved, and checked


def wanted_threads(answer_s: float | None, file_nbytes: int) -> int:
    """Return the best number of I/O threads for a mount's answer time and this size of chunk files."""
    beside = max(0.0, (answer_s or 0.0) - _DISK_S) * _BYTES_PER_S / file_nbytes
    return min(MOST_AUTO_THREADS, round(LEAST_AUTO_THREADS * (1 + beside)))


def measure_answer_s(
    directory: str, file_mode: int, *, direct: bool, probe_file: str | None = None
) -> float | None:
    """Return the seconds that opening a file and reading its first page takes; None where that fails.

    The shortest of a few looks, since a busy moment is not the mount's. The page cache is asked only where
    the file system has no way past it. May hang with the mount.

    A direct read has the page written before: only without one is the file synced, which may wait for all
    that others have written. With `probe_file`, which is there, nothing is written.
    """
    path = probe_file or os.path.join(directory, f"probe-{secrets.token_hex(8)}.part")
    page = mmap.mmap(-1, ALIGNMENT)
    try:
        if probe_file is None:
            with _opened(path, OPEN_PART, file_mode) as fd:
                os.write(fd, page)
        if direct:
            with contextlib.suppress(OSError):  # no O_DIRECT here
                return min(_look_s(path, page, os.O_DIRECT) for _ in range(_LOOKS))
        if probe_file is None:
            with _opened(path, OPEN_READ) as fd:
                os.fsync(fd)  # or the page stays in the cache
        return min(_look_s(path, page, 0) for _ in range(_LOOKS))
    except OSError:
        return None  # no room now, or a root that is only read
    finally:
        if probe_file is None:
            unlink_quietly(path)


@contextlib.contextmanager
def _opened(path: str, flags: int, mode: int = 0) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def _look_s(path: str, page: mmap.mmap, flags: int) -> float:
    began = time.perf_counter()
    with _opened(path, OPEN_READ | flags) as fd:
        if not flags:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(fd, [page], 0)
    return time.perf_counter() - began
