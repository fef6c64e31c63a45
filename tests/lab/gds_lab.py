"""GDS without a GPU: the real kvikio and the product's CudaDevice, over the simulated driver (cuda_sim.py).

What runs is kvikio's own compat path, with its bounce buffers, on real files. What is not shown: cuFile, a
GPU, its ordering, the kernels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_sim import simulation
from cuda_torch import moved_to_device, on_simulation

from fskv.data_path.transports.cuda import CudaDevice
from fskv.data_path.transports.cuda_native import NativeCuda
from fskv.gds_io import GdsSlot, GdsTransport


def needs_kvikio():
    """Skip where the real kvikio cannot be run on the simulated driver."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: pip install 'fskv[gds]'")
    if torch.cuda.is_available():
        pytest.skip(
            "the simulation would stand beside a real libcuda; test_gpu.py has a GPU's tests"
        )


def simulated(patch):
    """Put torch.cuda on the simulated driver, which kvikio finds as well; returns the driver."""
    needs_kvikio()
    sim = simulation()
    sim.reset()
    on_simulation(patch, sim)
    return sim


@functools.cache
def simulated_for_good():
    """For a child process."""
    return simulated(SimpleNamespace(setattr=setattr))


def make_device(tensors):
    """Move host tensors to the device; they show its memory from now on, from beside."""
    return CudaDevice(moved_to_device(tensors))


class LabSlot(GdsSlot):
    """A slot that tests can look into, as into a HostSlot."""

    __slots__ = ()

    @property
    def array(self):
        tensor = self.buffer.tensor
        at = simulation().open_address(tensor.data_ptr())
        return np.frombuffer((ctypes.c_uint8 * tensor.numel()).from_address(at), np.uint8)

    @property
    def view(self):
        return self.array.data


class LabTransport(GdsTransport):
    def new_slot(self, index):
        slot = super().new_slot(index)
        slot.__class__ = LabSlot
        return slot


def make_transport(
    tensors, slot_nbytes, *, probe_dir, direct_io="auto", file_mode=0o600, fsync=False
):
    """Make a GdsTransport, called like HostTransport."""
    device = make_device(tensors)
    copies = NativeCuda(device, slot_nbytes, None, num_lanes=2, slots_on_device=True)
    return LabTransport(
        device,
        copies.pages,
        slot_nbytes,
        direct_io=direct_io != "off",
        file_mode=file_mode,
        fsync=fsync,
    )


class Kvikio:
    """The real kvikio module behind a transport: notes registrations; tests put calls of their own in.

    `alive` are the allocations of slots, as long as each lives.
    """

    def __init__(self, transport):
        self._real = transport._kvikio
        self.alive = weakref.WeakSet()
        self._new_buffer = transport._device.new_buffer
        transport._device.new_buffer = self._noted_buffer
        self.registered = []  # of (event, id of the allocation)
        self.read = self.write = None  # called as (file, buffer, size, file_offset, buffer_offset)
        transport._kvikio = self

    def _noted_buffer(self, nbytes):
        buffer = self._new_buffer(nbytes)
        self.alive.add(buffer.allocation)
        return buffer

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
