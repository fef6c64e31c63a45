"""The CUDA device of the engine's KV pages: its context, and for GPUDirect Storage memory for slots.

It opens no file. Work on the device runs on the calling thread's own stream and is over when the call returns
or raises. It never waits for the whole device, nor for a stream of the engine. Any thread; a buffer belongs
to one thread at a time. `cuda_native` copies between pages and slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fskv.data_path.transports import kernels
from fskv.errors import ConfigError
from fskv.format.chunk_file import ALIGNMENT

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
LIBCUDA = "libcuda.so.1"


class Driver:
    """The few calls of libcuda that torch does not offer: memory outside its allocator, a current context.

    torch's allocator cuts several tensors out of one allocation, and cuFile registers whole allocations: a
    slot of torch's would register its neighbours, and the second slot in a segment could not be registered.
    """

    def __init__(self, device_idx: int) -> None:
        """Raises OSError without libcuda, RuntimeError when the device does not answer."""
        self._lib = ctypes.CDLL(LIBCUDA)
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_idx))
        # The primary context is the one that torch uses. Kept for the life of the process.
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answers CUDA error {code}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread: kvikio's blocking calls take the one that is."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            with self.relaxed():
                yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def relax(self) -> int:
        """Let no wait or allocation of this thread spoil a graph that the engine captures, from now on.

        Returns the thread's mode before this call.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return mode.value

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Call `relax` for this thread, and restore its mode at the end of the block."""
        mode = ctypes.c_int(self.relax())
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def new_stream(self) -> int:
        """Return a stream that waits for no other, the legacy default stream included."""
        stream = ctypes.c_void_p()
        with self.current():
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
        return stream.value or 0

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        with self.current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        with self.current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))


class _Allocation:
    """Device memory that torch and kvikio can look into; freed with the last reference to it."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self.address = driver.allocate(nbytes)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        # At exit the context may be gone, and the memory with it.
        with contextlib.suppress(Exception):
            self._driver.free(self.address)


class _OwnStream:
    """A thread's stream, not one of torch's 32, which the engine takes its own from.

    When the thread ends another one may have it. It is never destroyed: torch remembers for pinned and for
    device memory on which streams it was used, and asks them when the memory is freed.
    """

    def __init__(self, device: torch.device, driver: Driver, free: list[Any]) -> None:
        import torch

        self._free = free
        try:
            self.stream = free.pop()
        except IndexError:
            self.stream = torch.cuda.ExternalStream(driver.new_stream(), device=device)

    def __del__(self) -> None:
        if hasattr(self, "stream"):
            self._free.append(self.stream)


class CudaBuffer:
    """A slot's device memory: `tensor` is uint8 and 4096-aligned, at `offset` of an allocation of its own.

    kvikio takes the allocation.
    """

    __slots__ = ("allocation", "offset", "tensor")

    def __init__(self, driver: Driver, device: torch.device, nbytes: int) -> None:
        import torch

        # One page more than needed: cuMemAlloc promises 256-alignment only.
        self.allocation = _Allocation(driver, nbytes + ALIGNMENT)
        self.offset = -self.allocation.address % ALIGNMENT
        whole = torch.as_tensor(self.allocation, device=device)  # keeps the allocation alive
        self.tensor: torch.Tensor = whole[self.offset : self.offset + nbytes]


class CudaDevice:
    """The device that holds the engine's KV tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors` are int8 (num_blocks, page), possibly strided, on one device.

        Raises ConfigError for a device that is no GPU of NVIDIA's.
        """
        import torch

        self.device = tensors[0].device
        if torch.version.hip is not None:
            raise ConfigError(
                f"KV on {self.device} of ROCm: fskv knows CUDA devices and KV in host memory"
            )
        self._flat = [flat_bytes(t) for t in tensors]
        self._local = threading.local()
        self._driver: Driver | None = None
        self._free_streams: list[Any] = []  # of threads that ended; list.pop and append are atomic

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Address and length in bytes of each KV tensor."""
        return [(tensor.data_ptr(), tensor.numel()) for tensor in self._flat]

    # --- buffers ----------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Make this device the calling thread's, which is fskv's own, and let it spoil no capture for good.

        The device of a new thread is GPU 0, which is another rank's.
        """
        import torch

        torch.cuda.set_device(self.device)
        # Waits for the engine's events are in torch, which relaxes nothing.
        with contextlib.suppress(OSError):  # no libcuda, so no capture
            self._open_driver().relax()

    def new_buffer(self, nbytes: int) -> CudaBuffer:
        """Allocate a slot's memory; raises RuntimeError or OSError."""
        return CudaBuffer(self._open_driver(), self.device, nbytes)

    def _open_driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self.device.index or 0)
        return self._driver

    def address(self, buffer: CudaBuffer) -> tuple[int, int]:
        """Return a buffer's address on the device and its length in bytes."""
        return buffer.allocation.address + buffer.offset, buffer.tensor.numel()

    def io_context(self) -> contextlib.AbstractContextManager[None]:
        """Enter around kvikio's calls with a buffer."""
        assert self._driver is not None, "a buffer was made before"
        return self._driver.current()

    def fill_zero(self, buffer: CudaBuffer, start: int, stop: int) -> None:
        if start < stop:
            with self._stream():
                buffer.tensor[start:stop].zero_()

    def put(self, buffer: CudaBuffer, data: bytes) -> None:
        """Copy `data` to the buffer's beginning."""
        import torch

        with self._stream():
            buffer.tensor[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def take(self, buffer: CudaBuffer, nbytes: int) -> bytes:
        """Return the buffer's first `nbytes`."""
        with self._stream():
            return bytes(buffer.tensor[:nbytes].cpu().numpy().data)

    def row_digests(self, buffer: CudaBuffer, start: int, stop: int) -> bytes:
        """Return xxh3_rows of the buffer's bytes; needs an eighth of them on the device, or RuntimeError."""
        with self._stream():
            return kernels.digest_bytes(kernels.row_digests(buffer.tensor[start:stop]))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[Any]:
        """Yield the thread's own stream; its work is over afterwards, also after an exception."""
        import torch

        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = self._new_stream()
        relaxed = self._driver.relaxed() if self._driver else contextlib.nullcontext()
        with relaxed, torch.cuda.stream(stream):
            try:
                yield stream
            finally:
                stream.synchronize()

    def _new_stream(self) -> Any:
        import torch

        try:
            driver = self._open_driver()
            own = self._local.own = _OwnStream(self.device, driver, self._free_streams)
        except (OSError, RuntimeError) as error:
            logger.warning("fskv: a stream of torch's is used, perhaps the engine's: %s", error)
            return torch.cuda.Stream(self.device)
        return own.stream


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
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
