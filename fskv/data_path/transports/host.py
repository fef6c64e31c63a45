"""Transport through host memory: preadv and pwritev on page-aligned slots, pinned where the KV is on CUDA.

O_DIRECT where a write probe succeeds, the page cache otherwise or by option. Called on the I/O threads of
a JobRunner; copies from and to a CUDA device are in `fskv.data_path.transports.cuda_native`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.data_path.transports.arena import Arena
from fskv.data_path.transports.chunk_fd import (
    OPEN_PART,
    OPEN_READ,
    ChunkFd,
    open_chunk_fd,
    open_part,
    unlink_quietly,
)
from fskv.data_path.transports.cuda import CudaDevice, flat_bytes
from fskv.data_path.transports.cuda_native import NativeCuda
from fskv.data_path.transports.protocol import Native, OpenChunk
from fskv.errors import (
    ChunkCorrupt,
    ConfigError,
    NoSpace,
    RootError,
    chunk_error_from_os,
)
from fskv.format import chunk_file
from fskv.format.integrity import xxh3_rows
from fskv.format.spans import SpanTable
from fskv.native import _native

if TYPE_CHECKING:
    import torch

# Errors of file systems that cannot replace a file, or rename one.
_NO_RENAME = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EINVAL,
    errno.EEXIST,
    errno.EXDEV,
)


class HostSlot:
    """A staging buffer in host memory: header, then payload. uint8, 4096-aligned."""

    __slots__ = ("array", "index", "view")

    def __init__(self, index: int, array: npt.NDArray[np.uint8]) -> None:
        self.index = index
        self.array = array
        self.view = array.data


class _HostChunk(ChunkFd):
    def read_into(self, slot: HostSlot, slot_offset: int, file_offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(
                    self.fd,
                    [slot.view[slot_offset + done : slot_offset + nbytes]],
                    file_offset + done,
                )
            except OSError as error:
                raise chunk_error_from_os(error, self.path) from error
            if got == 0:
                raise ChunkCorrupt(
                    f"{self.path}: ends at byte {file_offset + done}, "
                    f"expected {file_offset + nbytes}"
                )
            done += got


class HostTransport:
    """Moves chunks through slots in host memory; docs/architecture.md, "Staging"."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | memoryview],
        slot_nbytes: int,
        *,
        probe_dir: str,
        probe_file: str | None = None,
        direct_io: str,
        file_mode: int = 0o600,
        fsync: bool = False,
        cuda: CudaDevice | None = None,
        num_slots: int | None = None,
        num_threads: int = 8,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """`tensors` are the engine's KV tensors, int8 (num_blocks, page), CPU or CUDA, possibly strided.

        A memoryview of writable bytes does for a contiguous one on the CPU, where there is no torch.
        `cuda` is their device, if there is one and somebody has made it. For a device, memory for `num_slots`
        slots is registered now and touched on `cpus` first; None: for a few whenever some are needed.
        `num_threads` copy at once.

        Writes probe files into `probe_dir`, or reads `probe_file` where nothing may be written. Raises
        RootError where no file can be renamed over another, and ConfigError when direct_io is "on" and the
        file system refuses it, or a device says no.
        """
        self.slot_nbytes = slot_nbytes
        self._file_mode = file_mode
        self._fsync = fsync
        if cuda is None and tensors and getattr(tensors[0], "is_cuda", False):
            cuda = CudaDevice(tensors)
        self._cuda = cuda
        self._outside = None
        if cuda is not None:
            self._outside = NativeCuda(
                cuda, slot_nbytes, num_slots, num_lanes=num_threads, cpus=cpus
            )
            self._arena, self._pages = self._outside.arena, self._outside.pages
        else:
            self._arena = Arena(slot_nbytes)
            self._pages = _native.Pages([_host_bytes(tensor) for tensor in tensors])
        what = "write" if probe_file is None else "read"
        self._direct = call_with_deadline(
            lambda: self._look_at(probe_dir, probe_file, wanted=direct_io != "off"),
            START_UP_S,
            f"option 'root': {probe_file or probe_dir} did not take a {what}",
        )
        if direct_io == "on" and not self._direct:
            raise ConfigError(
                f"option 'direct_io': found \"on\", but a direct {what} in the root fails; "
                'expected "auto" or "off" on this file system'
            )
        self.native = Native(
            pages=self._pages,
            on_device=cuda is not None,
            open_flags=os.O_DIRECT if self._direct else 0,
            fsync=fsync,
            file_mode=file_mode,
        )
        self.description = (
            f"host staging ({'pinned' if self._cuda else 'pageable'}), "
            f"{'O_DIRECT' if self._direct else 'buffered'}"
        )

    def _look_at(self, probe_dir: str, probe_file: str | None, *, wanted: bool) -> bool:
        """Return whether O_DIRECT is wanted and works, with the memory of a slot."""
        if probe_file is None:
            _refuse_without_rename(probe_dir, self._file_mode)
        if not wanted:
            return False
        memory = self._arena.take()
        page = memory[: chunk_file.ALIGNMENT].data
        if probe_file is None:
            works = _direct_io_works(probe_dir, self._file_mode, page)
        else:
            works = _direct_read_works(probe_file, page)
        self._arena.give_back(memory)  # not where the probe hangs
        return works

    def enter_thread(self) -> None:
        if self._cuda:
            self._cuda.enter_thread()

    def new_slot(self, index: int) -> HostSlot:
        return HostSlot(index, self._arena.take())

    def gather(self, table: SpanTable, slot: HostSlot, base: int) -> None:
        _native.copy_spans(self._pages, table, slot.array, base, True)

    def scatter(self, slot: HostSlot, base: int, table: SpanTable) -> None:
        _native.copy_spans(self._pages, table, slot.array, base, False)

    def fill_zero(self, slot: HostSlot, start: int, stop: int) -> None:
        slot.array[start:stop] = 0

    def put_header(self, slot: HostSlot, header: bytes) -> None:
        slot.view[: len(header)] = header

    def take_header(self, slot: HostSlot, nbytes: int) -> memoryview:
        return slot.view[:nbytes]

    def row_digests(self, slot: HostSlot, start: int, stop: int) -> bytes:
        return xxh3_rows(slot.view[start:stop])

    def close(self) -> None:
        if self._outside:
            self._outside.close()

    @contextlib.contextmanager
    def open(self, path: str, dir_fd: int | None = None) -> Iterator[OpenChunk[HostSlot]]:
        with open_chunk_fd(path, os.O_DIRECT if self._direct else 0, dir_fd) as (fd, info):
            yield _HostChunk(fd, path, info)

    def write_part(self, path: str, slot: HostSlot, nbytes: int, dir_fd: int | None = None) -> None:
        with open_part(path, self._file_mode, os.O_DIRECT if self._direct else 0, dir_fd) as fd:
            done = 0
            while done < nbytes:
                wrote = os.pwritev(fd, [slot.view[done:nbytes]], done)
                if wrote == 0 or (self._direct and wrote % chunk_file.ALIGNMENT):
                    # a full file system may take a part of a write before it says ENOSPC
                    raise NoSpace(f"{path}: short write at byte {done + wrote} of {nbytes}")
                done += wrote
            if self._fsync:
                os.fsync(fd)


def _host_bytes(tensor: torch.Tensor | memoryview) -> npt.NDArray[np.uint8]:
    if isinstance(tensor, memoryview):
        return np.frombuffer(tensor, np.uint8)
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"KV on a device of type {tensor.device.type!r}: fskv knows CUDA devices and KV in host memory"
        )
    flat: npt.NDArray[np.uint8] = flat_bytes(tensor).numpy()
    return flat


def _refuse_without_rename(directory: str, file_mode: int) -> None:
    """Raise RootError where stores can publish nothing.

    Mounts of object stores take a new file, and neither rename nor overwrite it.
    """
    paths = [os.path.join(directory, f"probe-{secrets.token_hex(8)}.part") for _ in range(2)]
    try:
        for path in paths:
            os.close(os.open(path, OPEN_PART, file_mode))
        try:
            os.rename(*paths)
        except OSError as error:
            if error.errno not in _NO_RENAME:
                raise
            raise RootError(
                f"option 'root': {directory}: a file cannot be renamed over another ({error.strerror}); "
                "expected a file system that can replace files"
            ) from error
    except OSError:
        pass  # no room now, a root that is only read, an ill disk: not for good
    finally:
        for path in paths:
            unlink_quietly(path)


def _direct_read_works(path: str, page: memoryview) -> bool:
    """Return whether O_DIRECT reads the beginning of a file into `page`; False for a missing file."""
    try:
        fd = os.open(path, OPEN_READ | os.O_DIRECT)
        try:
            return os.preadv(fd, [page], 0) > 0
        finally:
            os.close(fd)
    except OSError:
        return False


def _direct_io_works(directory: str, file_mode: int, page: memoryview) -> bool:
    """Write `page`, aligned memory of a slot, with O_DIRECT.

    That open() accepts the flag proves nothing (LMCache#4364). Raises RootError when the directory cannot be
    written at all.
    """
    path = os.path.join(directory, f"probe-{secrets.token_hex(8)}.part")
    try:
        fd = os.open(path, OPEN_PART | os.O_DIRECT, file_mode)
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
        unlink_quietly(path)
