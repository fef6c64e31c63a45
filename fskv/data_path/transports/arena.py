"""Host memory for staging slots: on huge pages where the kernel gives them, a few slots at a time."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from fskv.data_path.transports.numa import pin_thread
from fskv.format import chunk_file

_HUGE = 2 << 20
_AT_ONCE = 32 << 20
_PINNING_THREADS = 8


class Arena:
    """Memory for slots, one after the other: a slot is not a multiple of 2 MiB.

    O_DIRECT pins every page of a buffer for each transfer: reads that ran at 1.2 GB/s on 4 KiB pages ran at
    3.2 on 2 MiB pages.
    """

    def __init__(
        self,
        slot_nbytes: int,
        num_slots: int | None = None,
        pin: Callable[[memoryview], object] | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """With `num_slots` all slots are made now, and no others later.

        Each piece of memory is handed to `pin` first, several at once. To pin memory is to touch it, and it
        belongs to the node of the CPU that touches it first, one of `cpus`. Raises OSError without memory,
        and what `pin` raises.
        """
        self._slot_nbytes = chunk_file.align(slot_nbytes)
        self._pin = pin
        self._at_once = max(1, _AT_ONCE // self._slot_nbytes)
        self._bounded = num_slots is not None
        self._lock = threading.Lock()
        self._free: list[npt.NDArray[np.uint8]] = []
        if num_slots:
            sizes = [self._at_once] * (num_slots // self._at_once) + [num_slots % self._at_once]
            with ThreadPoolExecutor(_PINNING_THREADS, "fskv-pin", pin_thread, (cpus,)) as pool:
                for slots in pool.map(self._more, filter(None, sizes)):
                    self._free += slots
        self._free.reverse()

    def take(self) -> npt.NDArray[np.uint8]:
        """Return a slot's memory, 4096-aligned and zero; raises OSError or MemoryError without memory."""
        with self._lock:
            if not self._free:
                if self._bounded:
                    raise MemoryError("all staging slots are taken")
                self._free = self._more(self._at_once)[::-1]
            return self._free.pop()

    def give_back(self, memory: npt.NDArray[np.uint8]) -> None:
        """Give a slot back that `take` returned; it need not be zero again."""
        with self._lock:
            self._free.append(memory)

    def _more(self, num_slots: int) -> list[npt.NDArray[np.uint8]]:
        nbytes = num_slots * self._slot_nbytes
        # Private: shared anonymous memory is a tmpfs file, without huge pages by default.
        memory = mmap.mmap(-1, nbytes + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork during a direct read could leave the bytes in the child's copy of a page (open(2), NOTES),
        # and engines fork: to compile kernels, for one.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a kernel that does not know it
                memory.madvise(advice)
        array = np.frombuffer(memory, np.uint8)
        start = -array.ctypes.data % _HUGE
        if self._pin is not None:
            self._pin(array[start : start + nbytes].data)
        return [
            array[at : at + self._slot_nbytes]
            for at in range(start, start + nbytes, self._slot_nbytes)
        ]
