"""torch.cuda without a GPU, on the simulated driver: as much as fskv, test_gpu.py and `fskv bench` call.

`DeviceTensor` lies in the simulated driver's memory, which the host may not touch. What changes it is
launched on the thread's current stream and runs late; what is asked of it waits for that stream. Triton does
not run here: `LEFT_OUT` says what cannot be shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import time
import weakref
from typing import ClassVar

import numpy as np
import torch
from cuda_sim import Gpu, SimEvent
from torch._C import DisableTorchFunctionSubclass as Plain

from fskv.data_path.transports import cuda, kernels
from fskv.data_path.transports.host import HostTransport
from fskv.format.integrity import xxh3_rows

LEFT_OUT = {
    "test_the_kernels_run_here": "Triton's kernels need a GPU; those of the simulation are the host's",
}
_CYCLES_PER_S = 1.5e9
# What looks at no byte of a tensor.
_VIEWS = {
    *("__get__", "view", "as_strided", "stride", "data_ptr", "numel", "size", "dim", "__len__"),
    *("is_contiguous", "element_size", "storage_offset", "__getitem__", "narrow", "__hash__"),
}


class DeviceTensor(torch.Tensor):
    is_cuda = True
    torch_of = None  # the _Torch

    @property
    def device(self):
        return torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        with Plain():
            if name in _VIEWS:
                found = func(*args, **kwargs)
                return found.as_subclass(cls) if isinstance(found, torch.Tensor) else found
            opened = [_opened(a) for a in args]
            if (name.endswith("_") and not name.startswith("__")) or name in (
                "__setitem__",
                "__ixor__",
            ):
                cls.torch_of.launch_call(lambda: func(*opened, **kwargs))
                return args[0]
            cls.torch_of.current_stream().synchronize()
            found = func(*opened, **kwargs)
            if name == "clone":
                return cls.torch_of.to_device(found)
            return found.clone() if name == "cpu" else found


def _opened(value):
    """Return a tensor of the device where the streams' threads see it; anything else as it is."""
    if not isinstance(value, DeviceTensor):
        return value
    with Plain():
        at = DeviceTensor.torch_of.sim.open_address(value.data_ptr())
        nbytes = value.element_size() * (
            1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        )
        if 0 in value.shape:
            return torch.empty(value.shape, dtype=value.dtype)
        flat = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(at), dtype=value.dtype)
        return torch.as_strided(flat, value.shape, value.stride())


def moved_to_device(tensors):
    """Return tensors of the device; the given ones, of int8 rows, show its memory from now on."""
    found = []
    for tensor in tensors:
        num_rows, nbytes = tensor.shape
        whole = torch.as_strided(tensor, (num_rows, tensor.stride(0)), tensor.stride())
        whole = DeviceTensor.torch_of.to_device(whole)
        tensor.set_(_opened(whole)[:, :nbytes])
        found.append(whole[:, :nbytes])
    return found


class _Torch:
    """What stands for torch.cuda: tensors, streams, the device's own calls."""

    dead: ClassVar = []  # addresses that nobody refers to any more, also of a test before

    def __init__(self, sim):
        self.sim, self.gpus, self.local = sim, {}, threading.local()
        self.errors = []
        self.real_copy = torch.Tensor.copy_

    def gpu(self, device):
        index = torch.device(device).index or 0
        if index not in self.gpus:
            self.gpus[index] = Gpu(self.sim, index)
        return self.gpus[index]

    @property
    def here(self):
        """The device of the calling thread."""
        return getattr(self.local, "gpu", None) or self.gpu("cuda")

    def set_device(self, device):
        self.local.gpu = self.gpu(device)
        self.sim.call("cuCtxSetCurrent", self.local.gpu.context)

    # --- memory ---

    def wrap(self, address, shape, dtype, owner):
        """Return a tensor on the device's memory, which lives as long as any view of it."""
        nbytes = max(1, shape.numel() * dtype.itemsize)
        memory = type("Memory", (ctypes.c_uint8 * nbytes,), {}).from_address(address)
        memory.owner = owner
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return (
            flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape).as_subclass(DeviceTensor)
        )

    def to_device(self, tensor):
        if not self.sim.busy:  # torch's allocator gives memory again in the order of the streams
            while self.dead:
                self.here.free(self.dead.pop())
        address = self.here.allocate(max(1, tensor.numel() * tensor.dtype.itemsize))
        made = self.wrap(address, tensor.shape, tensor.dtype, _Owner(address))
        with Plain():
            self.real_copy(_opened(made), tensor)
        return made

    def factory(self, real):
        def made(*args, **options):
            if options.pop("pin_memory", False):
                return self.pinned(args[0])
            if torch.device(options.get("device") or "cpu").type != "cuda":
                return real(*args, **options)
            del options["device"]
            if real.__name__ == "tensor":
                return real(*args, **options)  # an index: the host's does
            if real.__name__ == "as_tensor":
                of = args[0].__cuda_array_interface__
                return self.wrap(of["data"][0], torch.Size(of["shape"]), torch.uint8, args[0])
            return self.to_device(real(*args, **options))

        return made

    def pinned(self, nbytes):
        """Registered memory; not any more once nobody refers to it, on whatever thread that is noticed."""
        memory, driver = mmap.mmap(-1, nbytes), cuda.Driver(self.here.index)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        place = ctypes.c_void_p(tensor.data_ptr())
        with self.here.current():
            self.sim.call("cuMemHostRegister_v2", place, ctypes.c_size_t(nbytes), 1)

        def release():
            # A test may have lost the device, or capture a graph.
            with contextlib.suppress(RuntimeError), driver.current():
                self.sim.lib.cuMemHostUnregister(place)

        weakref.finalize(memory, release)
        return tensor

    def copy_(self, target, source, non_blocking=False):
        to_device, from_device = (self.sim.open_address(t.data_ptr()) for t in (target, source))
        if not to_device and not from_device:
            return self.real_copy(target, source, non_blocking)
        if not non_blocking and not from_device:
            # From memory of any kind: over when it returns.
            self.launch_call(lambda: self.real_copy(_opened(target), source))
            self.current_stream().synchronize()
            return target
        stream = getattr(self.local, "stream", None)
        self.sim.call(
            f"cuMemcpy{'D' if from_device else 'H'}to{'D' if to_device else 'H'}Async_v2",
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_uint64(source.data_ptr()),
            ctypes.c_size_t(target.numel()),
            stream and stream.handle,
        )
        return target

    def row_digests(self, buffer):
        self.current_stream().synchronize()
        digests = xxh3_rows(_opened(buffer).numpy().data)
        return torch.frombuffer(bytearray(digests), dtype=torch.int64)

    # --- streams ---

    def external_stream(self, address, device):
        return _Stream(self.gpu(device), ctypes.c_void_p(address))

    def new_stream(self, device=None):
        return _Stream(self.here, self.here.new_stream())

    @contextlib.contextmanager
    def stream(self, stream):
        before = getattr(self.local, "stream", None)
        self.local.stream = stream
        with stream.gpu.current():
            try:
                yield
            finally:
                self.local.stream = before

    def current_stream(self, device=None):
        """That of an engine's thread is one of its own, and not the default stream."""
        return getattr(self.local, "stream", None) or _Stream(self.here, self.here.stream)

    def launch_call(self, call):
        def run():
            try:
                with Plain():
                    call()
            except BaseException as error:
                self.errors.append(repr(error))

        self.here.launch(run, self.current_stream().handle)

    def synchronize(self, device=None):
        while self.sim.busy:
            time.sleep(0.0005)


class _Owner:
    def __init__(self, address):
        self.address = address

    def __del__(self):
        _Torch.dead.append(self.address)


class _Stream:
    def __init__(self, gpu, handle):
        self.gpu, self.handle = gpu, handle

    def record_event(self):
        return SimEvent(self.gpu, self.handle)

    def synchronize(self):
        with self.gpu.current():
            self.gpu.sim.call("cuStreamSynchronize", self.handle)


class _Event(SimEvent):
    """torch.cuda.Event."""

    def __init__(self, simulated, *, blocking=False):
        self._simulated = simulated
        super().__init__(simulated.current_stream().gpu, blocking=blocking)

    def record(self, stream=None):
        self.record_on((stream or self._simulated.current_stream()).handle)


def on_simulation(patch, sim):
    """Put torch.cuda, and so fskv, on the simulated driver; `patch` has pytest's `setattr`."""
    made = DeviceTensor.torch_of = _Torch(sim)
    patch.setattr(cuda, "LIBCUDA", sim.path)
    for real in (torch.empty, torch.zeros, torch.ones, torch.tensor, torch.as_tensor):
        patch.setattr(torch, real.__name__, made.factory(real))
    patch.setattr(
        torch.Tensor,
        "copy_",
        lambda target, source, non_blocking=False: made.copy_(target, source, non_blocking),
    )
    patch.setattr(kernels, "available", lambda _: None)
    patch.setattr(kernels, "row_digests", made.row_digests)
    patch.setattr(kernels, "digest_bytes", lambda digests: bytes(digests.numpy().tobytes()))
    for name, call in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": made.set_device,
        "Event": functools.partial(_Event, made),
        "Stream": made.new_stream,
        "ExternalStream": made.external_stream,
        "stream": made.stream,
        "current_stream": made.current_stream,
        "synchronize": made.synchronize,
        "mem_get_info": lambda device=None: ((1 << 36) - sim.live(0), 1 << 36),
        "_sleep": lambda cycles: made.launch_call(lambda: time.sleep(cycles / _CYCLES_PER_S)),
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, call)
    return made


def device_world(make_world, gpu, *, num_slots=40, **options):
    """Make a World whose pages are on a device; `world.tensors` are for looking at them from beside."""
    closed = []

    def make_transport(tensors, nbytes, **given):
        closed.extend(gpu.tensor(*t.shape, t.stride(0)) for t in tensors)
        return HostTransport(closed, nbytes, num_slots=num_slots, **given)

    world = make_world(native=True, make_transport=make_transport, **options)
    world.tensors = [torch.from_numpy(gpu.opened(t).view(np.int8)) for t in closed]
    return world
