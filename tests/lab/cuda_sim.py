"""A CUDA device without a GPU: the simulated driver of native/cuda_sim.c.

`Sim` is the driver; `Gpu` one of its devices, as an engine uses it. `cuda_torch` puts torch on it. KV tensors
are torch's own, on addresses that the host may not touch: who looks into one without the driver is named.

What this shows: order, contexts, lifetimes, bounds, bytes, calls. What it does not: speed, and whether a real
driver agrees with the simulation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from native_build import build

_NON_BLOCKING = 1
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2

# The parts of a device that may be busy.
MULTIPROCESSORS, COPIES_IN, COPIES_OUT, PINNING = range(4)

# kvikio's own streams are of this kind; fskv's are looked at where there is no kvikio.
OF_KVIKIO = "cuStreamCreate: a stream that waits for the default stream"


class SimError(RuntimeError):
    """What torch would raise."""


class Sim:
    """The library, loaded once in a process; its state is the process's."""

    def __init__(self, path):
        self.path = path
        self.lib = lib = ctypes.CDLL(path)
        lib.sim_reset.argtypes = [ctypes.c_uint, ctypes.c_double]
        lib.sim_misuses.restype = ctypes.c_char_p
        lib.sim_open_address.argtypes = [ctypes.c_uint64]
        lib.sim_open_address.restype = ctypes.c_uint64
        lib.sim_limit.argtypes = [ctypes.c_int, ctypes.c_size_t]
        for name in ("sim_calls", "sim_live", "sim_registered"):
            getattr(lib, name).restype = ctypes.c_size_t

    def call(self, name, *arguments):
        """Call an entry point of the driver; raises SimError."""
        if code := getattr(self.lib, name)(*arguments):
            raise SimError(f"CUDA error: {name} answers {code}")

    def reset(self, seed=0, late_s=0.0):
        """Forget what was noted. What is launched runs up to `late_s` later; 0: at once, on its thread."""
        self.lib.sim_reset(seed + 1, late_s)

    @property
    def misuses(self):
        return self.lib.sim_misuses().decode().splitlines()

    def fail(self, name, code, after=0):
        """Let a call answer `code`, once: the next of this name, or the one `after` as many."""
        self.lib.sim_fail(name.encode(), after, code)

    def lose(self, device, code=700):
        """Let all calls fail from now on, as after an illegal address."""
        self.lib.sim_lose(device, code)

    def limit(self, device, nbytes):
        """Let no more than so much be allocated beyond what is."""
        self.lib.sim_limit(device, nbytes)

    def calls(self, name):
        return self.lib.sim_calls(name.encode())

    def contexts(self, device):
        return self.lib.sim_contexts(device)

    def live(self, device):
        return self.lib.sim_live(device)

    @property
    def registered(self):
        return self.lib.sim_registered()

    @property
    def spinning(self):
        """Waits that keep a CPU busy."""
        return self.lib.sim_spinning()

    @property
    def busy(self):
        return bool(self.lib.sim_busy())

    def open_address(self, address):
        return self.lib.sim_open_address(address)


@functools.cache
def simulation():
    """Build and load the driver; skips the test where there is no C compiler.

    Whoever opens libcuda.so.1 in this process from now on gets it, kvikio too.
    """
    directory = Path(tempfile.gettempdir()) / f"fskv-tests-{os.getuid()}"
    name = "libcuda.so.1"
    return Sim(build("cuda_sim", directory, f"-Wl,-soname,{name}", file_name=name))


class SimTensor(torch.Tensor):
    """A tensor that says it is on the device; views of it are plain tensors on its addresses."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    @property
    def device(self):
        return self.sim_device


class SimEvent:
    """An event of a stream, as torch.cuda.Event(blocking=True) is one. Until it is recorded it has fired."""

    def __init__(self, gpu, stream=None, *, blocking=True):
        self._gpu = gpu
        self._event = ctypes.c_void_p()
        flags = _DISABLE_TIMING | (_BLOCKING_SYNC if blocking else 0)
        with gpu.current():
            gpu.sim.call("cuEventCreate", ctypes.byref(self._event), flags)
        self.handle = self._event
        if stream is not None:
            self.record_on(stream)

    def record_on(self, stream):
        with self._gpu.current():
            self._gpu.sim.call("cuEventRecord", self._event, stream)

    def query(self):
        with self._gpu.current():
            code = self._gpu.sim.lib.cuEventQuery(self._event)
        if code not in (0, 600):
            raise SimError(f"CUDA error: cuEventQuery answers {code}")
        return code == 0

    def synchronize(self):
        with self._gpu.current():
            self._gpu.sim.call("cuEventSynchronize", self._event)


class Gpu:
    """A device as an engine uses it: tensors, a stream, kernels that write to pages."""

    def __init__(self, sim, index=0):
        self.sim, self.index = sim, index
        device = ctypes.c_int()
        sim.call("cuInit", 0)
        sim.call("cuDeviceGet", ctypes.byref(device), index)
        self.context = ctypes.c_void_p()
        sim.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.stream = self.new_stream()
        self._calls = []  # callbacks must outlive their call

    @contextlib.contextmanager
    def current(self):
        self.sim.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self.sim.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def new_stream(self):
        stream = ctypes.c_void_p()
        with self.current():
            self.sim.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def allocate(self, nbytes):
        address = ctypes.c_uint64()
        with self.current():
            self.sim.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address):
        with self.current():
            self.sim.call("cuMemFree_v2", ctypes.c_uint64(address))

    def flat(self, nbytes):
        """Return uint8 (nbytes,) on the device."""
        return self._tensor(self.allocate(nbytes), nbytes)

    @staticmethod
    def _tensor(address, nbytes):
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def tensor(self, num_blocks, page, stride=None):
        """Return an engine's KV tensor: int8 (num_blocks, page), a block every `stride` bytes."""
        stride = stride or page
        return self.rows(self.flat((num_blocks - 1) * stride + page), (num_blocks, page), stride)

    def rows(self, flat, shape, stride, offset=0):
        """Return an engine's KV tensor in memory of the device."""
        view = torch.as_strided(flat.view(torch.int8), shape, (stride, 1), offset)
        made = torch.Tensor._make_subclass(SimTensor, view)
        made.sim_device = torch.device("cuda", self.index)
        return made

    def opened(self, tensor):
        """Return the tensor's memory where a test may look at it and change it, of the same shape."""
        num_blocks, page = tensor.shape
        stride = tensor.stride(0)
        nbytes = (num_blocks - 1) * stride + page
        address = self.sim.open_address(tensor.data_ptr())
        flat = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
        return np.lib.stride_tricks.as_strided(flat, (num_blocks, page), (stride, 1))

    @contextlib.contextmanager
    def occupied(self, *parts, left=0):
        """Let somebody else hold these parts of the device meanwhile, all but `left` units of each.

        By default these are all that a kernel or a copy needs.
        """
        parts = parts or (MULTIPROCESSORS, COPIES_IN, COPIES_OUT)
        for part in parts:
            self.sim.lib.sim_leave(self.index, part, left)
        try:
            yield
        finally:
            for part in parts:
                self.sim.lib.sim_leave(self.index, part, 1 << 30)

    # --- the engine's stream ---

    def launch(self, call, stream=None):
        """Launch a call of the host's: a kernel that takes as long as it does."""
        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: call())
        self._calls.append(kept)
        with self.current():
            self.sim.call("cuLaunchHostFunc", stream or self.stream, kept, None)

    def event(self):
        return SimEvent(self, self.stream)

    def synchronize(self):
        self.event().synchronize()
