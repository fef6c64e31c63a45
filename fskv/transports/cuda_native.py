"""The chunk path of `fskv._native` on a CUDA device: opened, tried on known bytes, or one sentence why not.

`CudaDevice` does the same with torch, for each chunk in the interpreter: it is the reference, and takes over
where the driver says no.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fskv.plan.spans import SpanTable
from fskv.transports import cuda, kernels
from fskv.transports.arena import Arena
from fskv.transports.cuda import CudaDevice
from fskv.transports.protocol import Ready

try:
    from fskv import _native
except ImportError:  # built without a C compiler, or for another interpreter
    _native = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Copies at once, and the device memory for them: a copy takes a tenth of what a disk needs for a chunk.
_NUM_LANES, _LANES_NBYTES = 4, 64 << 20
_TRIAL_NBYTES = 256 << 10

if TYPE_CHECKING:
    from collections.abc import Sequence


class NativeCuda:
    """Copies between the pages of a device and slots of registered host memory. Any thread."""

    def __init__(self, device: CudaDevice, slot_nbytes: int, num_slots: int | None) -> None:
        """Registers memory for `num_slots` slots now, or for a few more whenever some are needed if None.

        Raises RuntimeError where the driver says no or copies wrongly, OSError without memory.
        """
        self._complained = False
        compiled = None
        if device.kernels_missing is None:
            try:
                compiled = kernels.compiled_copy(device.device)
            except Exception as error:  # of any Triton
                logger.warning("fskv: the driver copies the spans, and no kernel: %s", error)
        lanes = max(1, min(_NUM_LANES, _LANES_NBYTES // slot_nbytes))
        place = (cuda.LIBCUDA, device.device.index or 0)
        if compiled is None or slot_nbytes > _LANES_NBYTES:
            self._device = _native.Device(*place, slot_nbytes, _NUM_LANES)
        else:
            self._device = _native.Device(
                *place,
                slot_nbytes,
                lanes,
                compiled.cubin,
                compiled.name,
                compiled.num_threads,
                compiled.shared_nbytes,
                compiled.num_scratch,
                compiled.piece_nbytes,
            )
        try:
            self.pages = _native.Pages(device.memory, self._device)
            self.arena = Arena(slot_nbytes, num_slots, self._device.register)
            self._try(slot_nbytes)
        except BaseException:
            self._device.close()
            raise

    def copy(
        self,
        table: SpanTable,
        slot: npt.NDArray[np.uint8],
        base: int,
        ready: Ready | None,
        *,
        to_slot: bool,
    ) -> bool:
        """Copy all spans, after `ready`; False: the driver says no, and nothing of it runs any more.

        ValueError for a span that is not inside its tensor and the slot.
        """
        if ready is not None:
            ready.synchronize()
        try:
            _native.copy_spans(self.pages, table, slot, base, to_slot)
        except RuntimeError as error:
            if not self._complained:
                logger.warning("fskv: chunks are copied in Python where this fails: %s", error)
            self._complained = True
            return False
        return True

    def close(self) -> None:
        """Give back what is on the device, and release the slots' registration. Waits for copies only."""
        self._device.close()

    def _try(self, slot_nbytes: int) -> None:
        """Copy known bytes to and fro, of any alignment; raises RuntimeError where others come back."""
        half = min(slot_nbytes, _TRIAL_NBYTES) // 2
        unit = half // 4
        spans = [
            (1, 3, 0, unit + 1),
            (0, 16, unit + 1, 2 * unit),
            (0, 2 * unit + 23, 3 * unit + 1, unit - 23),
        ]
        both = np.array([(0, 0, 0, half), (1, 0, half, half)], np.int64)
        some = np.array(spans, np.int64)
        slot = self.arena.take()
        with contextlib.ExitStack() as stack:
            stack.callback(self.arena.give_back, slot)
            there = [self._device.allocate(half) for _ in range(2)]
            for address in there:
                stack.callback(self._device.release, address)
            pages = _native.Pages([(address, half) for address in there], self._device)
            wanted = _random(2 * half, seed=1)
            slot[: 2 * half] = wanted
            _native.copy_spans(pages, both, slot, 0, False)
            slot[: 2 * half] = _random(2 * half, seed=2)
            self._apply(spans, wanted, slot, half)
            _native.copy_spans(pages, some, slot, 0, False)
            slot[:] = 0x55
            _native.copy_spans(pages, both, slot, 0, True)
            if not np.array_equal(slot[: 2 * half], wanted) or (slot[2 * half :] != 0x55).any():
                raise RuntimeError("a copy on the device gives other bytes")
            slot[:] = 0x55
            _native.copy_spans(pages, some, slot, 0, True)
            stop = 4 * unit - 22
            for tensor, offset, place, nbytes in spans:
                at = tensor * half + offset
                if not np.array_equal(slot[place : place + nbytes], wanted[at : at + nbytes]):
                    raise RuntimeError("a copy from the device gives other bytes")
            if (slot[stop:] != 0x55).any():
                raise RuntimeError("a copy from the device goes too far")
            slot[:] = 0

    @staticmethod
    def _apply(
        spans: Sequence[tuple[int, int, int, int]],
        pages: npt.NDArray[np.uint8],
        slot: npt.NDArray[np.uint8],
        half: int,
    ) -> None:
        for tensor, offset, place, nbytes in spans:
            at = tensor * half + offset
            pages[at : at + nbytes] = slot[place : place + nbytes]


def open_native(device: CudaDevice, slot_nbytes: int, num_slots: int | None) -> NativeCuda | None:
    """Return the path outside the interpreter, or None after one sentence in the log. Never raises."""
    if _native is None:
        return None
    try:
        return NativeCuda(device, slot_nbytes, num_slots)
    # No libcuda, another one than ours, no memory: the engine has its own path.
    except Exception as error:
        logger.warning("fskv: chunks are copied in Python: %s", str(error).partition("\n")[0])
        return None


def _random(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()
