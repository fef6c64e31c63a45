"""Moving bytes: KV pages <-> staging slots <-> chunk files.

A transport owns the slots and is the only code that reads or writes chunk bytes. It knows nothing
about keys, headers or checks: that is the store's. Everything goes through slots that fskv owns,
because a read that lands in live KV pages cannot be abandoned at its deadline: the engine would hand
the pages to another request and the late bytes would corrupt it.

`HostTransport` stages in page-aligned host memory (pinned when the KV tensors are on a CUDA device) and
reads and writes with preadv/pwritev, O_DIRECT where a write probe succeeds. It is the only one yet; the
`Transport` Protocol is where GPUDirect Storage will enter. Called on the threads of `jobs`; a slot belongs to
one thread at a time, which `SlotPool` enforces.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import stat as stat_module
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fskv import chunk_file
from fskv.errors import (
    ChunkCorrupt,
    ChunkIOError,
    ChunkStale,
    ConfigError,
    NoSpace,
    RootError,
    chunk_error_from_os,
)
from fskv.span_plan import Span
from fskv.threads import START_UP_S, call_with_deadline

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# O_NOFOLLOW and O_NONBLOCK: a symlink or a fifo under a chunk's name must neither be followed nor hang.
_OPEN_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPEN_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Slot:
    """A staging buffer of one chunk file: header, then payload. uint8, 4096-aligned."""

    __slots__ = ("array", "index", "tensor", "view")

    def __init__(self, index: int, nbytes: int, tensor: Any = None) -> None:
        self.index = index
        self.tensor = tensor  # the same memory as a pinned torch tensor, when there is CUDA
        if tensor is None:
            # mmap and not numpy: torch and numpy allocations are only 64-byte aligned (io.md)
            self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        else:
            self.array = tensor.numpy()
        self.view = self.array.data


class OpenChunk(Protocol):
    """An open chunk file; `nbytes` is its length when it was opened."""

    nbytes: int
    mtime: float

    def read_into(self, slot: Slot, slot_offset: int, file_offset: int, nbytes: int) -> None:
        """Read exactly `nbytes` (4096-aligned offsets and length); raises ChunkCorrupt when short."""

    def touch(self) -> None:
        """Set the mtime, our "last used", to now."""

    def same_file(self, path: str) -> bool:
        """Whether `path` still names this very file."""


class Transport(Protocol):
    """What the store and the jobs need from an I/O layer; see the module docstring."""

    slot_nbytes: int
    description: str

    def new_slot(self, index: int) -> Slot: ...

    def gather(self, spans: Sequence[Span], slot: Slot, base: int, ready: Any) -> None:
        """Copy KV pages into the slot at `base`; returns when the pages are no longer read.

        `ready` is an event of the stream that produced the pages, or None when they are complete.
        """

    def scatter(self, slot: Slot, base: int, spans: Sequence[Span], ready: Any) -> None:
        """Copy from the slot at `base` into KV pages; returns when the pages are complete.

        `ready` is an event of the stream that used the pages before (vLLM may still be zeroing them).
        """

    def open(self, path: str) -> contextlib.AbstractContextManager[OpenChunk]:
        """Open a chunk file for reading; raises a ChunkError."""

    def write_part(self, path: str, slot: Slot, nbytes: int) -> None:
        """Create `path` exclusively with the slot's first `nbytes`; raises a ChunkError, leaving no file."""


class SlotPool:
    """The slots of one worker, made on first use, never more than `num_slots`."""

    def __init__(self, transport: Transport, num_slots: int) -> None:
        self._transport = transport
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._num_made = 0
        self._num_used = 0

    @property
    def num_used(self) -> int:
        return self._num_used

    def take(self, keep_free: int = 0) -> Slot | None:
        """Return a slot, or None when that would leave fewer than `keep_free`, or without memory.

        Never waits.
        """
        with self._lock:
            if self._num_slots - self._num_used <= keep_free:
                return None
            self._num_used += 1
            if self._free:
                return self._free.pop()
            index = self._num_made
            self._num_made += 1
        try:
            return self._transport.new_slot(index)
        except (MemoryError, OSError, RuntimeError) as error:  # also what pinning says
            logger.warning("no memory for staging slot %d: %s", index, error)
            with self._lock:
                self._num_used -= 1
            return None

    def give_back(self, slot: Slot) -> None:
        """Return a slot whose I/O is over; a hung thread keeps its slot until then (parked)."""
        with self._lock:
            self._num_used -= 1
            self._free.append(slot)


class _HostChunk:
    def __init__(self, fd: int, path: str, info: os.stat_result) -> None:
        self._fd = fd
        self._path = path
        self._info = info
        self.nbytes = info.st_size
        self.mtime = info.st_mtime

    def read_into(self, slot: Slot, slot_offset: int, file_offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(
                    self._fd,
                    [slot.view[slot_offset + done : slot_offset + nbytes]],
                    file_offset + done,
                )
            except OSError as error:
                raise chunk_error_from_os(error, self._path) from error
            if got == 0:
                raise ChunkCorrupt(
                    f"{self._path}: ends at byte {file_offset + done}, "
                    f"expected {file_offset + nbytes}"
                )
            done += got

    def touch(self) -> None:
        # Not our file, or a read-only mount: then the mtime stays old and the chunk goes earlier.
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def same_file(self, path: str) -> bool:
        try:
            now = os.stat(path, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self._info.st_dev, self._info.st_ino)


class HostTransport:
    """Transport through host memory. Sources: docs/architecture.md, "Staging"."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        slot_nbytes: int,
        *,
        probe_dir: str,
        direct_io: str,
        file_mode: int = 0o600,
        fsync: bool = False,
    ) -> None:
        """`tensors` are the engine's KV tensors, int8 (num_blocks, page), CPU or CUDA, possibly strided.

        Writes one probe file into `probe_dir` when direct_io is not "off". Raises ConfigError when
        direct_io is "on" and the file system refuses it.
        """
        self.slot_nbytes = slot_nbytes
        self._file_mode = file_mode
        self._fsync = fsync
        self._direct = direct_io != "off" and call_with_deadline(
            lambda: _direct_io_works(probe_dir, file_mode),
            START_UP_S,
            f"option 'root': {probe_dir} did not take a write",
        )
        if direct_io == "on" and not self._direct:
            raise ConfigError(
                "option 'direct_io': found \"on\", but a direct write in the root fails; "
                'expected "auto" or "off" on this file system'
            )
        self._cuda = bool(tensors) and tensors[0].is_cuda
        self._flat: list[Any] = [_flat_bytes(t) for t in tensors]
        if not self._cuda:
            self._flat = [flat.numpy() for flat in self._flat]
        self._local = threading.local()
        self._device = tensors[0].device if self._cuda else None
        self.description = (
            f"host staging ({'pinned' if self._cuda else 'pageable'}), "
            f"{'O_DIRECT' if self._direct else 'buffered'}"
        )

    def new_slot(self, index: int) -> Slot:
        if not self._cuda:
            return Slot(index, self.slot_nbytes)
        import torch

        # One page more than needed: the pinned allocator promises no 4096-alignment.
        raw = torch.empty(self.slot_nbytes + 4096, dtype=torch.uint8, pin_memory=True)
        start = -raw.data_ptr() % 4096
        return Slot(index, self.slot_nbytes, raw[start : start + self.slot_nbytes])

    def gather(self, spans: Sequence[Span], slot: Slot, base: int, ready: Any) -> None:
        if self._cuda:
            with self._stream(ready) as stream:
                for span in spans:
                    at = base + span.payload_offset
                    slot.tensor[at : at + span.nbytes].copy_(
                        self._flat[span.tensor_idx][
                            span.tensor_offset : span.tensor_offset + span.nbytes
                        ],
                        non_blocking=True,
                    )
                stream.synchronize()
            return
        array = slot.array
        for span in spans:
            at = base + span.payload_offset
            array[at : at + span.nbytes] = self._flat[span.tensor_idx][
                span.tensor_offset : span.tensor_offset + span.nbytes
            ]

    def scatter(self, slot: Slot, base: int, spans: Sequence[Span], ready: Any) -> None:
        if self._cuda:
            with self._stream(ready) as stream:
                for span in spans:
                    at = base + span.payload_offset
                    self._flat[span.tensor_idx][
                        span.tensor_offset : span.tensor_offset + span.nbytes
                    ].copy_(slot.tensor[at : at + span.nbytes], non_blocking=True)
                stream.synchronize()
            return
        array = slot.array
        for span in spans:
            at = base + span.payload_offset
            self._flat[span.tensor_idx][span.tensor_offset : span.tensor_offset + span.nbytes] = (
                array[at : at + span.nbytes]
            )

    @contextlib.contextmanager
    def _stream(self, ready: Any) -> Iterator[Any]:
        """Yield the thread's own CUDA stream, after `ready`; never a device-wide wait."""
        import torch

        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self._device)
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield stream

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[OpenChunk]:
        try:
            fd = os.open(path, _OPEN_READ | (os.O_DIRECT if self._direct else 0))
        except OSError as error:
            if error.errno == errno.EINVAL:  # what O_DIRECT says to a directory or a fifo
                raise ChunkStale(f"{path}: cannot be opened as a chunk file") from error
            raise chunk_error_from_os(error, path) from error
        try:
            try:
                info = os.fstat(fd)
            except OSError as error:
                raise chunk_error_from_os(error, path) from error
            if not stat_module.S_ISREG(info.st_mode):
                raise ChunkStale(f"{path}: not a regular file")
            yield _HostChunk(fd, path, info)
        finally:
            os.close(fd)

    def write_part(self, path: str, slot: Slot, nbytes: int) -> None:
        flags = _OPEN_WRITE | (os.O_DIRECT if self._direct else 0)
        try:
            fd = os.open(path, flags, self._file_mode)
        except OSError as error:
            raise chunk_error_from_os(error, path) from error
        try:
            try:
                done = 0
                while done < nbytes:
                    wrote = os.pwritev(fd, [slot.view[done:nbytes]], done)
                    if wrote == 0 or (self._direct and wrote % chunk_file.ALIGNMENT):
                        # a full file system may take a part of a write before it says ENOSPC
                        raise NoSpace(f"{path}: short write at byte {done + wrote} of {nbytes}")
                    done += wrote
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except ChunkIOError:
            _unlink_quietly(path)
            raise
        except OSError as error:
            _unlink_quietly(path)
            raise chunk_error_from_os(error, path) from error


def _unlink_quietly(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int8 (num_blocks, page) tensor's memory, first to last byte, as uint8 (n,)."""
    import torch

    num_blocks, page = tensor.shape
    if tensor.dtype != torch.int8 or tensor.stride(1) != 1:
        raise ValueError(
            f"KV tensor is {tensor.dtype} with strides {tensor.stride()}, expected int8 bytes"
        )
    nbytes = (num_blocks - 1) * tensor.stride(0) + page
    flat: torch.Tensor = torch.as_strided(tensor, (nbytes,), (1,)).view(torch.uint8)
    return flat


def _direct_io_works(directory: str, file_mode: int) -> bool:
    """Write one aligned page with O_DIRECT: open() accepting the flag proves nothing (LMCache#4364).

    Raises RootError when the directory cannot be written at all.
    """
    path = os.path.join(directory, f"probe-{secrets.token_hex(8)}.part")
    page = mmap.mmap(-1, chunk_file.ALIGNMENT)
    try:
        fd = os.open(path, _OPEN_WRITE | os.O_DIRECT, file_mode)
        try:
            return os.pwritev(fd, [page], 0) == chunk_file.ALIGNMENT
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return False
        if error.errno == errno.ENOSPC:
            return True  # the file system took the flag; room may come back
        raise RootError(f"{directory}: cannot be written: {error.strerror}") from error
    finally:
        _unlink_quietly(path)
