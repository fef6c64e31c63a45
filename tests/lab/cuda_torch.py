"""Tensors of a CUDA device without a GPU: as much of torch.cuda as test_gpu.py and `fskv bench` call.

`DeviceTensor` lies in the simulated driver's memory, which the host may not touch. What changes it is
launched on the thread's current stream and runs late; what is asked of it waits for that stream. Triton does
not run here: `LEFT_OUT` says what cannot be shown.
"""

from __future__ import annotations

import contextlib
import ctypes
import time

import torch
from cuda_sim import SimEvent, on_simulation
from torch._C import DisableTorchFunctionSubclass as Plain

from fskv.format.integrity import xxh3_rows
from fskv.transports import kernels

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


class _CudaTorch:
    """Put in front of cuda_sim's `_Torch`: tensors, the current stream, the device's own calls."""

    def __init__(self, simulated):
        self.simulated, self.sim = simulated, simulated.sim
        self.gpu = simulated.gpu("cuda:0")
        self.errors, self.dead = [], []
        self.reals = {
            name: getattr(torch, name) for name in ("zeros", "ones", "tensor", "as_tensor")
        }
        self.plain_empty, self.plain_copy = torch.empty, torch.Tensor.copy_
        DeviceTensor.torch_of = self

    # --- memory ---

    def wrap(self, address, shape, dtype, owner=None):
        """Return a tensor on the device's memory, which lives as long as any view of it."""
        nbytes = max(1, shape.numel() * dtype.itemsize)
        memory = type("Memory", (ctypes.c_uint8 * nbytes,), {}).from_address(address)
        memory.owner = owner
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return (
            flat[: shape.numel() * dtype.itemsize].view(dtype).view(shape).as_subclass(DeviceTensor)
        )

    def new(self, shape, dtype):
        if not self.sim.busy:  # torch's allocator gives memory again in the order of the streams
            while self.dead:
                self.gpu.free(self.dead.pop())
        address = self.gpu.allocate(max(1, shape.numel() * dtype.itemsize))
        return self.wrap(address, shape, dtype, _Owner(self.dead, address))

    def to_device(self, tensor):
        made = self.new(tensor.shape, tensor.dtype)
        with Plain():
            self.simulated.real_copy(_opened(made), tensor)
        return made

    def factory(self, name):
        real = self.reals[name]

        def made(*args, **options):
            if torch.device(options.get("device") or "cpu").type != "cuda":
                return real(*args, **options)
            del options["device"]
            if name == "tensor":
                return real(*args, **options)  # an index: the host's does
            if name == "as_tensor":
                of = args[0].__cuda_array_interface__
                return self.wrap(of["data"][0], torch.Size(of["shape"]), torch.uint8, args[0])
            return self.to_device(real(*args, **options))

        return made

    def empty(self, *shape, **options):
        if torch.device(options.get("device") or "cpu").type != "cuda":
            return self.plain_empty(*shape, **options)
        meta = self.simulated.real_empty(*shape, **{**options, "device": "meta"})
        return self.new(meta.shape, meta.dtype)

    def copy_(self, target, source, non_blocking=False):
        if (
            not non_blocking
            and isinstance(target, DeviceTensor)
            and not isinstance(source, DeviceTensor)
        ):
            # From memory of any kind: over when it returns.
            self.launch_call(lambda: self.simulated.real_copy(_opened(target), source))
            self.current_stream().synchronize()
            return target
        return self.plain_copy(target, source, non_blocking)

    # --- streams ---

    def current_stream(self, device=None):
        return getattr(self.simulated.local, "stream", None) or _Current(self, self.gpu.stream)

    def launch_call(self, call):
        def run():
            try:
                with Plain():
                    call()
            except BaseException as error:
                self.errors.append(repr(error))

        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: run())
        self.gpu._calls.append(kept)
        with self.gpu.current():
            self.sim.call("cuLaunchHostFunc", self.current_stream().handle, kept, None)

    def synchronize(self, device=None):
        while self.sim.busy:
            time.sleep(0.0005)

    def row_digests(self, buffer):
        self.current_stream().synchronize()
        digests = xxh3_rows(_opened(buffer).numpy().data)
        return torch.frombuffer(bytearray(digests), dtype=torch.int64)


class _Owner:
    def __init__(self, dead, address):
        self.dead, self.address = dead, address

    def __del__(self):
        self.dead.append(self.address)


class _Current:
    """A stream of the engine's."""

    def __init__(self, cuda, handle):
        self.cuda, self.gpu, self.handle = cuda, cuda.gpu, handle

    def record_event(self):
        return SimEvent(self.gpu, self.handle)

    def synchronize(self):
        self.record_event().synchronize()

    def wait_event(self, event):
        with self.gpu.current():
            self.gpu.sim.call("cuStreamWaitEvent", self.handle, event.handle, 0)


def tensors_on_simulation(patch, sim):
    """Put torch.cuda's tensors on the simulated driver as well; `patch` has pytest's `setattr`."""
    cuda = _CudaTorch(on_simulation(patch, sim))
    for name in cuda.reals:
        patch.setattr(torch, name, cuda.factory(name))
    patch.setattr(torch, "empty", cuda.empty)
    patch.setattr(
        torch.Tensor,
        "copy_",
        lambda target, source, non_blocking=False: cuda.copy_(target, source, non_blocking),
    )
    patch.setattr(kernels, "row_digests", cuda.row_digests)
    patch.setattr(kernels, "digest_bytes", lambda digests: bytes(digests.numpy().tobytes()))
    for name, call in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": cuda.current_stream,
        "synchronize": cuda.synchronize,
        "Stream": lambda device=None: _Current(cuda, cuda.gpu.new_stream()),
        "mem_get_info": lambda device=None: ((1 << 36) - sim.live(0), 1 << 36),
        "_sleep": lambda cycles: cuda.launch_call(lambda: time.sleep(cycles / _CYCLES_PER_S)),
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        patch.setattr(torch.cuda, name, call)
    return cuda
