"""What everything else is divided by: copies across the bus, the disk into registered memory, fskv's copy.

The slots are those of fskv's path in C. What was moved is compared; other bytes are an error. GB are 10^9.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.busy import need_gpu
from benchmarks.options import parser, positive, positive_float
from benchmarks.report import command
from benchmarks.rig import BenchmarkError
from fskv.data_path.transports.arena import Arena
from fskv.data_path.transports.cuda import CudaDevice, Driver
from fskv.data_path.transports.cuda_native import NativeCuda
from fskv.native import _native

CHUNK, PAGE = 2 << 20, 64 << 10
Slots = list[npt.NDArray[np.uint8]]


class Bus(Driver):
    """Plain copies between registered memory and the device, on a stream."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(0)
        self._stream = ctypes.c_void_p(self.new_stream())
        self._there = self.allocate(num_slots * CHUNK)

    def copy(self, slots: Slots, *, to_device: bool) -> None:
        """Launch a copy of each slot; return when all are over."""
        with self.current():
            for number, slot in enumerate(slots):
                here = ctypes.c_void_p(slot.ctypes.data)
                there = ctypes.c_uint64(self._there + number * CHUNK)
                name, ends = ("HtoD", (there, here)) if to_device else ("DtoH", (here, there))
                self._call(f"cuMemcpy{name}Async_v2", *ends, ctypes.c_size_t(CHUNK), self._stream)
            self._call("cuStreamSynchronize", self._stream)


class Disk:
    """A file that is read and written with O_DIRECT, a chunk at a time."""

    def __init__(self, directory: str, num_chunks: int) -> None:
        self._fd = os.open(
            os.path.join(directory, "ceilings"), os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600
        )
        self._num = num_chunks

    def move(self, slots: Slots, *, write: bool) -> None:
        """Each slot is a thread's, which moves every len(slots)th chunk of the file."""
        call = os.pwritev if write else os.preadv

        def run(number: int) -> None:
            for chunk in range(number, self._num, len(slots)):
                if call(self._fd, [slots[number].data], chunk * CHUNK) != CHUNK:
                    raise BenchmarkError("the disk moved less than a chunk")

        with ThreadPoolExecutor(len(slots)) as pool:
            list(pool.map(run, range(len(slots))))


def rate(nbytes: int, call: Callable[[], object], seconds: float) -> float:
    """Repeat a call for so long; return GB/s."""
    call()
    begin, num = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds or not num:
        call()
        num += 1
    return num * nbytes / passed / 1e9


def _all(pool: ThreadPoolExecutor, run: Callable[[int], None], num: int) -> None:
    list(pool.map(run, range(num)))


def _equal(found: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8], what: str) -> None:
    if not np.array_equal(found, wanted):
        raise BenchmarkError(f"{what}: other bytes than were sent")


def measure(directory: str, num: int, num_chunks: int, seconds: float) -> dict[str, float]:
    import torch

    num_pages = num * CHUNK // PAGE
    tensor = torch.zeros((num_pages, PAGE), dtype=torch.int8, device="cuda")
    device = CudaDevice([tensor])
    native = NativeCuda(device, CHUNK, num, num_lanes=num)
    slots = [native.arena.take() for _ in range(num)]
    random = np.random.default_rng(1)
    wanted = [np.frombuffer(random.bytes(CHUNK), np.uint8) for _ in range(num)]
    for slot, bytes_ in zip(slots, wanted, strict=True):
        slot[:] = bytes_
    found = {}
    bus = Bus(num)
    for way, to_device in (("to the device", True), ("from the device", False)):
        gb_per_s = rate(num * CHUNK, partial(bus.copy, slots, to_device=to_device), seconds)
        found[f"copies of 2 MiB {way}, GB/s"] = gb_per_s
    _equal(slots[-1], wanted[-1], "a copy to the device and back")
    order = random.permutation(num_pages).reshape(num, -1)
    places = np.arange(CHUNK // PAGE) * PAGE
    tables = [
        np.stack([places * 0, pages * PAGE, places, places * 0 + PAGE], axis=1).astype(np.int64)
        for pages in order
    ]
    for threads in [n for n in (1, 4, 16) if n <= num]:
        for way, to_slot in (("scatter", False), ("gather", True)):

            def run(number: int, to_slot: bool = to_slot) -> None:
                _native.copy_spans(native.pages, tables[number], slots[number], 0, to_slot)

            with ThreadPoolExecutor(threads) as pool:
                gb_per_s = rate(num * CHUNK, partial(_all, pool, run, num), seconds)
            found[f"{way} of 2 MiB, {threads} threads, GB/s"] = gb_per_s
    _equal(slots[-1], wanted[-1], "a scatter and a gather")
    disk, plain = Disk(directory, num_chunks), Arena(CHUNK)
    others = [plain.take() for _ in range(num)]
    nbytes = num_chunks * CHUNK
    for threads in [n for n in (1, 4, 16) if n <= num]:
        for memory, some in (("registered", slots[:threads]), ("plain", others[:threads])):
            for way in ("write", "read"):
                move = partial(disk.move, some, write=way == "write")
                gb_per_s = rate(nbytes, move, seconds)
                found[f"{way}, O_DIRECT, {memory} memory, {threads} threads, GB/s"] = gb_per_s
    native.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("gpu.ceilings", __doc__)
    made.add_argument("--mib", type=positive, default=1024, help="of the file (1024)")
    made.add_argument("--slots", type=positive, default=16, help="(16)")
    made.add_argument("--seconds", type=positive_float, default=1.0, help="of each figure (1)")
    options = made.parse_args(arguments)
    need_gpu()

    def run() -> int:
        chunks = max(1, (options.mib << 20) // CHUNK)
        print(json.dumps(measure(options.dir, options.slots, chunks, options.seconds)))
        return 0

    return command("gpu.ceilings", run)


if __name__ == "__main__":
    sys.exit(main())
