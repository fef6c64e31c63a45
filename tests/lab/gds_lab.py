"""GDS without a GPU: the real kvikio on host memory that a stub of libcuda calls device memory.

What runs is kvikio's own compat path, with its bounce buffers, on real files. What is not shown: cuFile, a
GPU, its ordering, the kernels. The device is a stand-in too: its copies are numpy's.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_stub import build_stub, load_stub
from native_build import build

from fskv.format import chunk_file
from fskv.format.integrity import xxh3_rows
from fskv.gds_io import GdsSlot, GdsTransport
from fskv.native import _native
from fskv.transports.cuda import Driver, flat_bytes

_ARENA_NBYTES = 256 << 20  # address space; only what is used becomes memory


def needs_kvikio():
    """Skip where the real kvikio cannot be run on the stub."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: pip install 'fskv[gds]'")
    import torch

    if torch.cuda.is_available():
        pytest.skip("the stub would stand beside a real libcuda; test_gpu.py has a GPU's tests")


@functools.cache
def stub():
    """Load the stub as the libcuda of this process. Skips where it or kvikio cannot be had."""
    needs_kvikio()
    directory = Path(tempfile.gettempdir()) / f"fskv-tests-{os.getuid()}"
    return load_stub(build_stub(functools.partial(_build_in, directory)))


def _build_in(directory, name, *flags, **options):
    return build(name, directory, *flags, **options)


@functools.cache
def _arena():
    """Return the one range of "device memory" of this process."""
    array = np.frombuffer(mmap.mmap(-1, _ARENA_NBYTES), np.uint8)
    stub().declare_device(array.ctypes.data, array.nbytes)
    return SimpleNamespace(array=array, used=0, free={}, lock=threading.Lock())


class _Piece:
    """A buffer as kvikio sees it; its end is noted, so that a test can ask who lives."""

    def __init__(self, device, nbytes):
        self._device = device
        arena = _arena()
        size = chunk_file.align(nbytes) + 2 * chunk_file.ALIGNMENT  # with a gap to the next one
        with arena.lock:
            spare = arena.free.setdefault(size, [])
            if spare:
                at = spare.pop()
            else:
                at, arena.used = arena.used, arena.used + size
                assert arena.used <= _ARENA_NBYTES
        self._spare, self._at = spare, at
        self.array = arena.array[at : at + nbytes]
        self.array[:] = 0xEE
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.array.ctypes.data, False),
            "version": 2,
        }
        device.num_alive += 1

    def __del__(self):
        self._device.num_alive -= 1
        self._spare.append(self._at)


class StubDevice:
    """The device of `GdsTransport`, in host memory."""

    def __init__(self, tensors):
        stub()
        _arena()
        self.kernels_missing = None
        self.num_alive = 0  # buffers
        self.pages = _native.Pages([flat_bytes(tensor).numpy() for tensor in tensors])
        self._driver = Driver(0)

    def compile_kernels(self):
        pass

    def enter_thread(self):
        pass

    def new_buffer(self, nbytes):
        # As where cuMemAlloc is not page-aligned: the buffer begins inside its allocation.
        piece = _Piece(self, nbytes + chunk_file.ALIGNMENT)
        offset = -(piece.array.ctypes.data + 1) % chunk_file.ALIGNMENT + 1
        return SimpleNamespace(
            piece=piece, offset=offset, array=piece.array[offset : offset + nbytes]
        )

    def io_buffer(self, buffer):
        return buffer.piece, buffer.offset

    def io_context(self):
        return self._driver.current()

    def address(self, buffer):
        return buffer.array

    def fill_zero(self, buffer, start, stop):
        buffer.array[start:stop] = 0

    def put(self, buffer, data):
        buffer.array[: len(data)] = np.frombuffer(data, np.uint8)

    def take(self, buffer, nbytes):
        return buffer.array[:nbytes].tobytes()

    def row_digests(self, buffer, start, stop):
        return xxh3_rows(buffer.array[start:stop].data)


class LabSlot(GdsSlot):
    """A slot that tests can look into, as into a HostSlot."""

    __slots__ = ()

    @property
    def array(self):
        return self.buffer.array

    @property
    def view(self):
        return self.buffer.array.data


class LabTransport(GdsTransport):
    def new_slot(self, index):
        slot = super().new_slot(index)
        slot.__class__ = LabSlot
        return slot


def make_transport(
    tensors, slot_nbytes, *, probe_dir, direct_io="auto", file_mode=0o600, fsync=False
):
    """Make a GdsTransport, called like HostTransport."""
    device = StubDevice(tensors)
    return LabTransport(
        device,
        device.pages,
        slot_nbytes,
        direct_io=direct_io != "off",
        file_mode=file_mode,
        fsync=fsync,
    )


class Kvikio:
    """The real kvikio module behind a transport: notes registrations; tests put calls of their own in."""

    def __init__(self, transport):
        self._real = transport._kvikio
        self.registered = []  # of (event, id of the allocation)
        self.read = self.write = None  # called as (file, buffer, size, file_offset, buffer_offset)
        transport._kvikio = self

    def memory_register(self, buffer):
        self.registered.append(("register", id(buffer)))
        self._real.memory_register(buffer)

    def memory_deregister(self, buffer):
        self.registered.append(("deregister", id(buffer)))
        self._real.memory_deregister(buffer)

    def CuFile(self, path, flags):
        return _File(self, self._real.CuFile(path, flags))


class _File:
    def __init__(self, kvikio, real):
        self._kvikio = kvikio
        self.real = real

    def raw_read(self, *args):
        return (self._kvikio.read or type(self.real).raw_read)(self.real, *args)

    def raw_write(self, *args):
        return (self._kvikio.write or type(self.real).raw_write)(self.real, *args)

    def close(self):
        self.real.close()
