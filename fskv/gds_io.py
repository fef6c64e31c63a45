"""Transport through GPUDirect Storage: kvikio between chunk files and slots in device memory.

A chunk is gathered, hashed, written, read, checked and scattered without its bytes being looked at by the
CPU; whether they also bypass host memory is cuFile's decision (see `evidence`). Optional: `kvikio` is
imported when a GdsTransport is made. Called on the I/O threads of a JobRunner.

kvikio's blocking calls are used and not its futures: they run on our own thread, without the GIL, with
buffer and file held by this very frame until they return. A future runs on kvikio's pool, one thread by
default: reads would queue behind each other, a read that hangs would take the thread for ever, and at exit
the pool waits for it (seen with kvikio 26.10: a read that hung for 8 s kept the process for 8 s).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fskv.data_path.transports.chunk_fd import ChunkFd, open_chunk_fd, open_part
from fskv.data_path.transports.cuda import CudaBuffer, CudaDevice
from fskv.data_path.transports.protocol import Native, OpenChunk
from fskv.errors import (
    ChunkCorrupt,
    ChunkError,
    ChunkIOError,
    NoSpace,
    chunk_error_from_os,
)
from fskv.format.spans import SpanTable
from fskv.native import _native
from fskv.root.filesystem import Space, block_nbytes

_OLDEST = (25, 10)


def refuse_old(version: str) -> None:
    """Raise ImportError for a kvikio that holds the interpreter during a read, as long as a disk hangs."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        raise ImportError(
            f"found kvikio {version}, expected 25.10 or newer: older ones hold the interpreter during a read"
        )


class GdsSlot:
    """A staging buffer in device memory. `num_io` and `registered` change under the transport's lock."""

    __slots__ = ("buffer", "index", "num_io", "registered")

    def __init__(self, index: int, buffer: CudaBuffer) -> None:
        self.index = index
        self.buffer = buffer
        self.num_io = 0  # kvikio calls that use the buffer now; more than 0 for long: parked
        self.registered = False


class _GdsChunk(ChunkFd):
    def __init__(
        self, transport: GdsTransport, file: Any, fd: int, path: str, info: os.stat_result
    ) -> None:
        super().__init__(fd, path, info)
        self._transport = transport
        self._file = file

    def read_into(self, slot: GdsSlot, slot_offset: int, file_offset: int, nbytes: int) -> None:
        stop = file_offset + nbytes
        with _kvikio_errors(self.fd, self.path, read_to=stop):
            got = self._transport.transfer(
                self._file.raw_read, slot, slot_offset, file_offset, nbytes
            )
        if got != nbytes:
            _refuse_short_read(self.fd, self.path, file_offset + got, stop)


class GdsTransport:
    """Moves chunks between files and slots on the GPU by kvikio; docs/architecture.md, "Staging"."""

    def __init__(
        self,
        device: CudaDevice,
        pages: _native.Pages,
        slot_nbytes: int,
        *,
        direct_io: bool,
        file_mode: int = 0o600,
        fsync: bool = False,
    ) -> None:
        """`pages` are the engine's KV pages, on `device`.

        Raises ImportError or OSError without kvikio or what it needs, and for one that is too old.

        `direct_io` is what kvikio does where it cannot use GDS and reads and writes itself; it holds for
        the process. `compat_mode` stays AUTO: with OFF and no driver cuFile 1.19 spins for ever.
        """
        import kvikio
        import kvikio.defaults

        refuse_old(str(getattr(kvikio, "__version__", "unknown")))
        self._kvikio = kvikio
        with contextlib.suppress(KeyError):  # kvikio before 25.12 has no such choice
            kvikio.defaults.set(
                {
                    "auto_direct_io_read": direct_io,
                    "auto_direct_io_write": direct_io,
                }
            )
        self.slot_nbytes = slot_nbytes
        self.description = "GDS staging"
        self.native = Native(pages=None, on_device=True)
        self._device = device
        self._pages = pages
        self._file_mode = file_mode
        self._fsync = fsync
        self._lock = threading.Lock()
        self._slots: list[GdsSlot] = []  # guarded by _lock, as is _closed
        self._closed = False

    # --- slots ------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        self._device.enter_thread()

    def new_slot(self, index: int) -> GdsSlot:
        """Raises RuntimeError or OSError without memory, or when cuFile cannot register it."""
        slot = GdsSlot(index, self._device.new_buffer(self.slot_nbytes))
        with self._device.io_context():
            self._kvikio.memory_register(slot.buffer.allocation)
        with self._lock:
            slot.registered = True
            self._slots.append(slot)
            late = self._closed
        if late:
            self._deregister(slot)
            raise RuntimeError("the transport is closed")
        return slot

    def gather(self, table: SpanTable, slot: GdsSlot, base: int) -> None:
        _native.copy_spans(self._pages, table, self._device.address(slot.buffer), base, True)

    def scatter(self, slot: GdsSlot, base: int, table: SpanTable) -> None:
        _native.copy_spans(self._pages, table, self._device.address(slot.buffer), base, False)

    def fill_zero(self, slot: GdsSlot, start: int, stop: int) -> None:
        self._device.fill_zero(slot.buffer, start, stop)

    def put_header(self, slot: GdsSlot, header: bytes) -> None:
        self._device.put(slot.buffer, header)

    def take_header(self, slot: GdsSlot, nbytes: int) -> bytes:
        return self._device.take(slot.buffer, nbytes)

    def row_digests(self, slot: GdsSlot, start: int, stop: int) -> bytes:
        try:
            return self._device.row_digests(slot.buffer, start, stop)
        except RuntimeError as error:  # no memory on the device, for one
            raise ChunkIOError(f"rows cannot be checked on the GPU: {error}", errno.EIO) from error

    def close(self) -> None:
        """Deregister the slots, and refuse new I/O; a slot under I/O follows when that I/O is over."""
        with self._lock:
            self._closed = True
            idle = [slot for slot in self._slots if not slot.num_io]
        for slot in idle:
            self._deregister(slot)

    def drop_slot(self, slot: GdsSlot) -> None:
        """Give up an unused slot; its memory is freed with the last reference."""
        self._deregister(slot)
        with self._lock:
            self._slots.remove(slot)

    def _deregister(self, slot: GdsSlot) -> None:
        """Deregister a slot once, before its memory is freed and never under a transfer."""
        with self._lock:
            if not slot.registered:
                return
            slot.registered = False
        with contextlib.suppress(*FAILURES), self._device.io_context():
            self._kvikio.memory_deregister(slot.buffer.allocation)

    # --- files ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open(self, path: str, dir_fd: int | None = None) -> Iterator[OpenChunk[GdsSlot]]:
        with (
            open_chunk_fd(path, dir_fd=dir_fd) as (fd, info),
            self._cufile(fd, path, "r") as file,
        ):
            yield _GdsChunk(self, file, fd, path, info)

    def write_part(self, path: str, slot: GdsSlot, nbytes: int, dir_fd: int | None = None) -> None:
        with open_part(path, self._file_mode, dir_fd=dir_fd) as fd:
            with (
                self._cufile(fd, path, "r+") as file,
                _kvikio_errors(fd, path, written=nbytes),
            ):
                wrote = self.transfer(file.raw_write, slot, 0, 0, nbytes)
            if wrote != nbytes:
                raise NoSpace(f"{path}: short write of {wrote} bytes, expected {nbytes}")
            if self._fsync:
                os.fsync(fd)

    @contextlib.contextmanager
    def _cufile(self, fd: int, path: str, flags: str) -> Iterator[Any]:
        """Yield kvikio's handle of the file that is open as `fd`.

        Through /proc, so that it is this file and no other of its name: kvikio opens by path only, would
        follow a symbolic link, and cannot create exclusively. It opens twice, with and without O_DIRECT.
        """
        with _kvikio_errors(fd, path):
            file = self._kvikio.CuFile(f"/proc/self/fd/{fd}", flags)
        try:
            yield file
        finally:
            file.close()

    def transfer(
        self, call: Callable[..., int], slot: GdsSlot, at: int, file_offset: int, nbytes: int
    ) -> int:
        """Make one blocking kvikio call on the slot's bytes from `at` and return the bytes it moved."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            slot.num_io += 1
        buffer = slot.buffer
        try:
            with self._device.io_context():
                while True:
                    try:
                        return int(call(buffer.allocation, nbytes, file_offset, buffer.offset + at))
                    except RuntimeError as error:
                        # kvikio 26.10 does not try again by itself.
                        if not str(error).endswith(os.strerror(errno.EINTR)):
                            raise
        finally:
            with self._lock:
                slot.num_io -= 1
                late = self._closed and not slot.num_io
            if late:
                self._deregister(slot)


# --- errors -----------------------------------------------------------------------------------

# Errors that kvikio lets through: C++ exceptions arrive as RuntimeError, without an errno.
FAILURES = (RuntimeError, OSError, MemoryError)

# "POSIX error on pwrite: No space left on device": the C library's own words end the message. EPERM is not
# among them: kvikio 26.10 says "Operation not permitted" for EBADF.
_ERRNO_OF_WORDS = {
    os.strerror(number): number
    for number in (
        *(errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ELOOP),
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.EINVAL, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.EISDIR),
    )
}


def chunk_error_from_kvikio(
    error: BaseException,
    fd: int,
    path: str,
    *,
    read_to: int | None = None,
    written: int | None = None,
) -> ChunkError:
    """Translate an exception of kvikio about `fd` into the class that callers handle.

    By its words where they are an errno's, else by a look at the file: after a read that should have
    reached byte `read_to`, at its length; after a write of `written` bytes, at the room.
    """
    text = str(error).strip() or type(error).__name__
    number = getattr(error, "errno", None)
    if number is None:
        number = next((n for words, n in _ERRNO_OF_WORDS.items() if text.endswith(words)), None)
    if number is not None:
        return _as_os_error(OSError(number, os.strerror(number)), path)
    try:
        if read_to is not None and os.fstat(fd).st_size < read_to:
            return ChunkCorrupt(f"{path}: {text}")
        if written is not None and _is_full(fd, written):
            return NoSpace(f"{path}: {text}", errno.ENOSPC)
    except OSError as os_error:
        return _as_os_error(os_error, path)
    return ChunkIOError(f"{path}: {text}", errno.EIO)


@contextlib.contextmanager
def _kvikio_errors(
    fd: int, path: str, *, read_to: int | None = None, written: int | None = None
) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        found = chunk_error_from_kvikio(error, fd, path, read_to=read_to, written=written)
        raise found from (found.__cause__ or error)


def _as_os_error(error: OSError, path: str) -> ChunkError:
    found = chunk_error_from_os(error, path)
    found.__cause__ = error  # the store looks there for ESTALE
    return found


def _is_full(fd: int, nbytes: int) -> bool:
    """Return whether the file system has no room for the rest of `nbytes`; the file is removed after this."""
    room = Space.of(fd)
    missing = nbytes - block_nbytes(os.fstat(fd))
    return room.total_nbytes > 0 and room.free_nbytes < missing


def _refuse_short_read(fd: int, path: str, reached: int, expected: int) -> None:
    """Raise: a short file is corrupt and will be discarded, a short read of a whole one is an I/O error."""
    try:
        nbytes = os.fstat(fd).st_size
    except OSError as error:
        raise chunk_error_from_os(error, path) from error
    if nbytes < expected:
        raise ChunkCorrupt(f"{path}: ends at byte {nbytes}, expected {expected}")
    raise ChunkIOError(f"{path}: a read ended at byte {reached}, expected {expected}", errno.EIO)
