"""What the root's file system does, tried out: O_DIRECT, rename, links, locks, times, names.

fskv needs exclusive create and rename. The rest it can do without, at a price that the finding names.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator

from fskv.errors import ChunkCorrupt, ChunkError
from fskv.format import chunk_file
from fskv.format.chunk_file import ChunkHeader, FileLayout
from fskv.format.integrity import xxh3_rows
from fskv.root.files import NO_LINKS, RegularFile
from fskv.root.root import PART_PREFIX
from fskv.transports.chunk_fd import open_chunk_fd

from ..terminal import duration, iec
from .finding import Finding, Subject, hint, ok, problem, warning

_ODD_NS = 1_600_000_001_123_456_789
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write(subject: Subject) -> Iterator[Finding]:
    """Exclusive create, and what follows from a file that was written."""
    root = subject.path
    try:
        with subject.scratch.file(root) as (path, fd):
            yield ok("write", "a file can be created and written")
            os.write(fd, bytes(65536))
            os.fsync(fd)
            yield from _blocks(os.fstat(fd))
            yield from _times(path)
            yield from _listed(root, path)
            yield from _case(path)
    except OSError as error:
        if error.errno in _DENIED:
            yield problem(
                "write",
                f"no file can be created: {error.strerror}",
                'engines of this user cannot use the root, but with "store": false; fix owner, mode or mount',
            )
        elif error.errno in _FULL:
            yield problem(
                "write",
                f"no file can be written: {error.strerror}",
                "make room: `fskv prune`, or a larger quota",
            )
        else:
            raise


def _blocks(info: os.stat_result) -> Iterator[Finding]:
    if info.st_blocks == 0:
        yield hint(
            "st_blocks", "0 for a written file", "bounds count lengths instead of bytes on disk"
        )
    elif info.st_blocks * 512 < info.st_size:
        yield ok("st_blocks", "less than the length: compressed, deduplicated or counted late")
    else:
        yield ok("st_blocks", "bytes on disk are counted")


def _times(path: str) -> Iterator[Finding]:
    os.utime(path)
    before, found, after = time.time(), os.stat(path).st_mtime, time.time()
    skew_s = found - after if found > after else found - before if found < before - 2 else 0.0
    text = f"the file system's clock is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}"
    if abs(skew_s) > 86400:
        yield problem(
            "clock", text, "set the clocks (NTP): what seems to be of the future is pruned first"
        )
    elif abs(skew_s) > 30:
        yield warning(
            "clock", text, "set the clocks (NTP): ages that the tools show are wrong by that"
        )
    else:
        yield ok("clock", "the file system's clock agrees with this machine's")
    os.utime(path, ns=(_ODD_NS, _ODD_NS))
    mtime_ns = os.stat(path).st_mtime_ns
    if mtime_ns == _ODD_NS:
        yield ok("mtime", "kept to the nanosecond")
    elif abs(mtime_ns - _ODD_NS) < 2_000_000_000:
        if mtime_ns % 1_000_000_000:
            yield ok("mtime", "kept to the microsecond or so")
        else:
            yield hint(
                "mtime",
                f"kept to {1 + (mtime_ns != _ODD_NS // 10**9 * 10**9)} s",
                "what was used within that time of each other is pruned in any order",
            )
    else:
        yield problem(
            "mtime", "cannot be set", "least recently used cannot be told; use another file system"
        )


def _listed(root: str, path: str) -> Iterator[Finding]:
    with os.scandir(root) as entries:
        seen = any(entry.name == os.path.basename(path) for entry in entries)
    if seen:
        yield ok("readdir", "a new file is listed at once")
    else:
        yield warning(
            "readdir", "a new file is not listed", "counts and prunes come late; look at the mount"
        )


def _case(path: str) -> Iterator[Finding]:
    folder, _, name = path.rpartition("/")
    if os.path.lexists(f"{folder}/{PART_PREFIX}{name.removeprefix(PART_PREFIX).swapcase()}"):
        yield hint(
            "names", "upper and lower case are the same", "works: chunk names are in lower case"
        )
    else:
        yield ok("names", "upper and lower case differ")
    most = os.pathconf(folder, "PC_NAME_MAX")
    if most < 160:
        yield problem(
            "names", f"at most {most} bytes long", "a namespace's name may have 137; use another"
        )
    else:
        yield ok("names", f"up to {most} bytes long")


def direct_io(subject: Subject) -> Iterator[Finding]:
    """As fskv.transports tries it: open() accepting the flag proves nothing."""
    page = mmap.mmap(-1, chunk_file.ALIGNMENT)
    try:
        with subject.scratch.file(subject.path, os.O_DIRECT) as (_, fd):
            took = os.pwritev(fd, [page], 0) == chunk_file.ALIGNMENT
            took = took and os.preadv(fd, [page], 0) == chunk_file.ALIGNMENT
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            took = False
        elif error.errno in (*_DENIED, *_FULL):
            return  # `write` has said it
        else:
            raise
    if took:
        yield ok("O_DIRECT", "works, for writing and reading")
    else:
        yield hint(
            "O_DIRECT",
            "refused",
            "the page cache is used: KV takes memory of the machine; GDS cannot work",
        )


def rename_and_links(subject: Subject) -> Iterator[Finding]:
    """Publish as the store and the lease do, with a reader of the old file."""
    root, scratch = subject.path, subject.scratch
    try:
        with scratch.file(root) as (old, old_fd), scratch.file(root) as (new, new_fd):
            os.write(old_fd, b"old")
            os.write(new_fd, b"new")
            inode = os.stat(new).st_ino
            os.rename(new, old)
            if os.path.lexists(new) or os.stat(old).st_ino != inode:
                yield problem("rename", "did not replace the file whole", "use another file system")
            elif (read := _read_replaced(old_fd)) is None:
                advice = "works: a load whose file is pruned meanwhile is a recompute"
                yield hint("rename", "readers of a replaced file get an error", advice)
            elif read != b"old":
                yield warning(
                    "rename", "readers of a replaced file see the new one", "loads may fail a check"
                )
            else:
                yield ok("rename", "replaces a file whole, and readers of the old one keep it")
        with scratch.file(root) as (one, _), scratch.name(root) as other:
            try:
                os.link(one, other)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                yield hint(
                    "link",
                    "there are no hard links",
                    "works: rename is used; two nodes may take the lease at once and prune a little too much",
                )
                return
            try:
                os.link(one, other)
            except FileExistsError:
                yield ok("link", "hard links work and are exclusive")
            else:
                yield problem(
                    "link", "a link replaced another", "two would hold the lease; use another"
                )
    except OSError as error:
        if error.errno not in (*_DENIED, *_FULL):
            raise


def _read_replaced(fd: int) -> bytes | None:
    try:
        return os.pread(fd, 3, 0)
    except OSError:  # ESTALE on NFS, ENOENT on some FUSE file systems
        return None


def locks(subject: Subject) -> Iterator[Finding]:
    """None is taken by fskv; but whoever looks here wants to know."""
    try:
        with subject.scratch.file(subject.path) as (_, fd):
            missing = []
            for name, lock in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
                try:
                    lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    lock(fd, fcntl.LOCK_UN)
                except OSError:
                    missing.append(name)
    except OSError as error:
        if error.errno in (*_DENIED, *_FULL):
            return
        raise
    text = f"{' and '.join(missing)} do not work" if missing else "flock and fcntl work"
    yield ok("locks", f"{text}; fskv needs none")


def round_trip(subject: Subject) -> Iterator[Finding]:
    """Store a chunk file of 1 MiB and load it again, every row checked, without an engine."""
    layout = FileLayout(1, ((1 << 20) - chunk_file.ALIGNMENT,), bytes(16))
    payload = os.urandom(layout.payload_nbytes)
    header = ChunkHeader(
        key_hash=os.urandom(32),
        group_idx=0,
        rank=0,
        namespace_digest=bytes(32),
        layout_digest=layout.digest,
        num_blocks=1,
        page_nbytes=layout.page_nbytes,
        first_block=0,
        payload_nbytes=layout.payload_nbytes,
        row_digests=xxh3_rows(memoryview(payload)),
        creator="fskv/doctor",
        written_at_ms=int(time.time() * 1000),
    )
    content = chunk_file.encode_header(header, layout.header_nbytes) + payload
    try:
        stored_s, loaded_s = _store_and_load(subject, content, header)
    except ChunkError as error:
        yield problem(
            "round trip", str(error), "the file system loses or changes bytes: do not use it"
        )
    except OSError as error:
        if error.errno not in (*_DENIED, *_FULL):
            raise
    else:
        text = f"{iec(len(content))} stored in {_ms(stored_s)} (fsync), loaded in {_ms(loaded_s)}"
        yield ok("round trip", f"{text}, every row checked")


def _store_and_load(subject: Subject, content: bytes, header: ChunkHeader) -> tuple[float, float]:
    with subject.scratch.name(subject.path) as final:
        start = time.perf_counter()
        with subject.scratch.file(subject.path) as (part, fd):
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.rename(part, final)
        stored = time.perf_counter()
        with open_chunk_fd(final) as (fd, info):
            read = RegularFile(fd, info).read(info.st_size)
        found = chunk_file.parse_header(read)
        payload = memoryview(read)[found.header_nbytes :]
        chunk_file.check_rows(payload, 0, found.row_digests)
        if (found.key_hash, found.row_digests) != (header.key_hash, header.row_digests):
            raise ChunkCorrupt("another chunk was read than written")
        return stored - start, time.perf_counter() - stored


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 2 else duration(seconds)
