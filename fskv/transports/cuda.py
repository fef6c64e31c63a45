"""What the transports do on a CUDA device: memory for slots, streams, copies between pages and slots.

It opens no file. Each copy runs on the calling thread's own stream, after the event it was given, and is
over when the call returns, also when it raises: pages and slots may be used again at once. Never a wait for
the whole device, nor for a stream of the engine's. Any thread; a buffer belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fskv.format.chunk_file import ALIGNMENT
from fskv.format.integrity import xxh3_rows
from fskv.plan.spans import SpanTable
from fskv.transports import kernels
from fskv.transports.protocol import Ready

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Device memory that host staging may use so that a chunk crosses PCIe in one copy instead of one per span.
# One buffer is in use for about a millisecond a chunk, so four serve more I/O threads than that; beyond
# it, and for chunks that are larger than a quarter, spans are copied one by one as without it.
_BOUNCE_BUFFERS, _BOUNCE_NBYTES = 4, 64 << 20
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

        Returns the mode of before.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return mode.value

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Relax this thread meanwhile."""
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
    """A slot's device memory: `tensor` is uint8 and 4096-aligned, in an allocation of its own."""

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

    def __init__(self, tensors: Sequence[torch.Tensor], slot_nbytes: int) -> None:
        """`tensors` are int8 (num_blocks, page), possibly strided, on one device.

        Compiles and tries the kernels (seconds, the first time on a machine).
        """
        self.device = tensors[0].device
        self._slot_nbytes = slot_nbytes
        self._flat = [flat_bytes(t) for t in tensors]
        self._local = threading.local()
        self._driver: Driver | None = None
        self._free_streams: list[Any] = []  # of threads that ended; list.pop and append are atomic
        self.kernels_missing: str | None = kernels.available(self.device)
        self._tables = None if self.kernels_missing else kernels.FlatTensors(self._flat)
        self._bounce: list[torch.Tensor] = []  # those not in use; list.pop and append are atomic
        self._num_bounce = 0

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Address and bytes of each tensor."""
        return [(tensor.data_ptr(), tensor.numel()) for tensor in self._flat]

    # --- buffers ----------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Make this device the calling thread's, which is fskv's own, and let it spoil no capture for good.

        The device of a new thread is GPU 0, which is another rank's.
        """
        import torch

        torch.cuda.set_device(self.device)
        # What waits for the engine's events waits in torch, which relaxes nothing.
        with contextlib.suppress(OSError):  # no libcuda, so no capture
            self._open_driver().relax()

    def new_buffer(self, nbytes: int) -> CudaBuffer:
        """Allocate a slot's memory; raises RuntimeError or OSError."""
        return CudaBuffer(self._open_driver(), self.device, nbytes)

    def _open_driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(self.device.index or 0)
        return self._driver

    def io_buffer(self, buffer: CudaBuffer) -> tuple[Any, int]:
        """Return what kvikio takes for the buffer, and where the buffer begins in it."""
        return buffer.allocation, buffer.offset

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
        """Return xxh3_rows of the buffer's bytes.

        Through the host where kernels are missing, or their eighth of the bytes is not free on the device.
        """
        import torch

        with self._stream() as stream:
            part = buffer.tensor[start:stop]
            if self.kernels_missing is None:
                with contextlib.suppress(torch.cuda.OutOfMemoryError):
                    return kernels.digest_bytes(kernels.row_digests(part))
            host = self._host_memory()[: stop - start]
            host.copy_(part, non_blocking=True)
            stream.synchronize()
            return xxh3_rows(host.numpy().data)

    def _host_memory(self) -> torch.Tensor:
        """Return the thread's pinned memory to check a slot in, made on first use."""
        import torch

        found: torch.Tensor | None = getattr(self._local, "host", None)
        if found is None:
            found = torch.empty(self._slot_nbytes, dtype=torch.uint8, pin_memory=True)
            self._local.host = found
        return found

    # --- pages ------------------------------------------------------------------------------

    def gather(self, table: SpanTable, buffer: CudaBuffer, base: int, ready: Ready | None) -> None:
        """Copy pages into a buffer on the device; see Transport.gather."""
        with self._stream(ready):
            self._copy(table, buffer.tensor, base, to_slot=True)

    def scatter(self, buffer: CudaBuffer, base: int, table: SpanTable, ready: Ready | None) -> None:
        """Copy from a buffer on the device into pages; see Transport.scatter."""
        with self._stream(ready):
            self._copy(table, buffer.tensor, base, to_slot=False)

    def gather_to_host(
        self, table: SpanTable, pinned: torch.Tensor, base: int, ready: Ready | None
    ) -> None:
        """Copy pages into a pinned tensor of slot size."""
        with self._stream(ready), self._bounce_buffer(table) as bounce:
            if bounce is None:
                self._copy(table, pinned, base, to_slot=True)
                return
            self._copy(table, bounce, base, to_slot=True)
            start, stop = _bounds(table, base)
            pinned[start:stop].copy_(bounce[start:stop], non_blocking=True)

    def scatter_from_host(
        self, pinned: torch.Tensor, base: int, table: SpanTable, ready: Ready | None
    ) -> None:
        """Copy from a pinned tensor of slot size into pages."""
        with self._stream(ready), self._bounce_buffer(table) as bounce:
            if bounce is None:
                self._copy(table, pinned, base, to_slot=False)
                return
            start, stop = _bounds(table, base)
            bounce[start:stop].copy_(pinned[start:stop], non_blocking=True)
            self._copy(table, bounce, base, to_slot=False)

    def make_bounce_buffers(self) -> None:
        """Allow gather_to_host and scatter_from_host one copy a chunk, where there is memory for it."""
        import torch

        if self._tables is None or self._bounce:
            return
        for _ in range(min(_BOUNCE_BUFFERS, _BOUNCE_NBYTES // self._slot_nbytes)):
            try:
                buffer = torch.empty(self._slot_nbytes, dtype=torch.uint8, device=self.device)
            except RuntimeError as error:  # the engine has taken all of the device
                logger.warning(
                    "fskv: spans are copied one by one: %s", str(error).partition("\n")[0]
                )
                return
            self._bounce.append(buffer)
            self._num_bounce = len(self._bounce)

    def drop_bounce_buffers(self) -> None:
        """Give their memory back; copies from now on go span by span."""
        self._num_bounce = 0
        self._bounce.clear()

    @contextlib.contextmanager
    def _bounce_buffer(self, table: SpanTable) -> Iterator[torch.Tensor | None]:
        """Yield a bounce buffer, or None: none free, or holes between spans, which it must not fill."""
        buffer = None
        if self._bounce and len(table) > 1:
            start, stop = _bounds(table, 0)
            if stop - start == int(table[:, 3].sum()):
                with contextlib.suppress(IndexError):  # another thread was faster
                    buffer = self._bounce.pop()
        try:
            yield buffer
        finally:
            if buffer is not None:
                self._wait()
                if len(self._bounce) < self._num_bounce:  # not dropped meanwhile
                    self._bounce.append(buffer)

    def _copy(self, table: SpanTable, slot: torch.Tensor, base: int, *, to_slot: bool) -> None:
        if self._tables is not None and self._on_device(slot):
            import torch

            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # one by one needs none
                kernels.copy_spans(table, self._tables, slot, base, to_slot=to_slot)
                return
        for tensor_idx, offset, place, nbytes in table.tolist():
            at = base + place
            in_slot = slot[at : at + nbytes]
            in_pages = self._flat[tensor_idx][offset : offset + nbytes]
            if to_slot:
                in_slot.copy_(in_pages, non_blocking=True)
            else:
                in_pages.copy_(in_slot, non_blocking=True)

    @staticmethod
    def _on_device(tensor: torch.Tensor) -> bool:
        return bool(tensor.is_cuda)

    @contextlib.contextmanager
    def _stream(self, ready: Ready | None = None) -> Iterator[Any]:
        """Yield the thread's own stream, after `ready`; what runs on it is over afterwards, come what may."""
        import torch

        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = self._new_stream()
        relaxed = self._driver.relaxed() if self._driver else contextlib.nullcontext()
        if ready is not None:
            stream.wait_event(ready)
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

    def _wait(self) -> None:
        self._local.stream.synchronize()


def _bounds(table: SpanTable, base: int) -> tuple[int, int]:
    """Return where in the slot the first span begins and the last one ends."""
    start, stop = table[:, 2].min(), (table[:, 2] + table[:, 3]).max()
    return base + int(start), base + int(stop)


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
