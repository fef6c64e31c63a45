"""Copies between a CUDA device's KV pages and staging slots by `fskv._native`, tried on known bytes first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fskv.data_path.transports import cuda
from fskv.data_path.transports.arena import Arena
from fskv.data_path.transports.cuda import CudaDevice
from fskv.errors import ConfigError
from fskv.native import _native

logger = logging.getLogger(__name__)

# A kernel starts when a multiprocessor is free, and a prefill may keep them busy for a millisecond. So there
# are as many lanes as there may be threads, in so much device memory.
_LANES_NBYTES = 64 << 20
_TRIAL_NBYTES = 256 << 10


class NativeCuda:
    """Copies between a device's pages and slots in registered host memory. Any thread may call it."""

    def __init__(
        self,
        device: CudaDevice,
        slot_nbytes: int,
        num_slots: int | None,
        *,
        num_lanes: int,
        cpus: frozenset[int] | None = None,
        slots_on_device: bool = False,
    ) -> None:
        """Registers memory for `num_slots` slots now, or for a few more whenever some are needed if None.

        It is touched on `cpus` first. With `slots_on_device` it is for the trial alone.
        Raises ConfigError where the driver says no, copies wrongly or has no memory.
        """
        lanes = max(1, min(num_lanes, _LANES_NBYTES // slot_nbytes))
        bounce_nbytes = slot_nbytes if slot_nbytes <= _LANES_NBYTES and not slots_on_device else 0
        try:
            self._device = _native.Device(
                cuda.LIBCUDA, device.device.index or 0, bounce_nbytes, lanes
            )
            try:
                self.pages = _native.Pages(device.memory, self._device)
                if slots_on_device:  # one for the trial
                    slot_nbytes, num_slots = min(slot_nbytes, _TRIAL_NBYTES), 1
                self.arena = Arena(slot_nbytes, num_slots, self._device.register, cpus)
                self._try(slot_nbytes, slots_on_device)
            except BaseException:
                self._device.close()
                raise
        except (RuntimeError, OSError, MemoryError) as error:
            raise ConfigError(
                f"KV on {device.device} cannot be copied to host memory: {error or 'no memory'}"
            ) from error
        if not self._device.uses_kernel:
            logger.warning(
                "fskv: spans are copied one by one: no copy kernel, or no GPU memory for its buffers"
            )

    def close(self) -> None:
        """Free memory on the device, and release the slots' registration. Waits for copies only."""
        self._device.close()

    def _try(self, slot_nbytes: int, slots_on_device: bool) -> None:
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
            there: list[int] = []
            for _ in range(3):
                try:
                    there.append(self._device.allocate(2 * half))
                except RuntimeError as error:  # the engine has taken all of it
                    logger.warning("fskv: copies are not tried at the start: %s", error)
                    return
                stack.callback(self._device.release, there[-1])
            pages = _native.Pages([(address, half) for address in there], self._device)
            wanted = _random(2 * half, seed=1)
            slot[: 2 * half] = wanted
            _native.copy_spans(pages, both, slot, 0, False)
            slot[: 2 * half] = _random(2 * half, seed=2)
            self._apply(spans, wanted, slot, half)
            # Where slots are on the device, by way of one of these.
            staged = (there[2], 2 * half) if slots_on_device else slot
            whole = np.array([(2, 0, 0, half)], np.int64)
            if slots_on_device:
                _native.copy_spans(pages, whole, slot, 0, False)
            _native.copy_spans(pages, some, staged, 0, False)
            slot[:] = 0x55
            _native.copy_spans(pages, both, slot, 0, True)
            if not np.array_equal(slot[: 2 * half], wanted) or (slot[2 * half :] != 0x55).any():
                raise RuntimeError("a copy on the device gives other bytes")
            slot[:] = 0x55
            if slots_on_device:
                _native.copy_spans(pages, whole, slot, 0, False)
            _native.copy_spans(pages, some, staged, 0, True)
            if slots_on_device:
                _native.copy_spans(pages, whole, slot, 0, True)
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


def _random(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()
