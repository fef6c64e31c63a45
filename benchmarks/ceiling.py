"""What a checked load can reach at most: threads that only read, and such that check and copy what they read.

Each thread reads whole files one after another by `os.preadv`; the digests are those of fskv's rows, the copy
is a memcpy. There is no queue, no planner and no page: what these threads lose beside those that only read is
lost by whoever checks and copies on this machine. The ways take turns.

    python -m benchmarks.ceiling --dir DIR --direct-io on [--threads 8] [--chunk-kib 2048] [--json] ...
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.options import parser, positive, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import BenchmarkError, work_directory
from fskv.native import _native
from fskv.transports.arena import Arena

Memory: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# -> whether rows are checked, and whether what was read is copied
_WAYS = {
    "read": (False, False),
    "read and check": (True, False),
    "read and copy": (False, True),
    "read, check and copy": (True, True),
}


class Files:
    """Files of random bytes, which nothing else reads."""

    def __init__(self, directory: str, num_files: int, nbytes: int, *, direct_io: bool) -> None:
        self._flags = os.O_RDONLY | (os.O_DIRECT if direct_io else 0)
        self.nbytes = nbytes
        self._arena = Arena(nbytes)  # on huge pages, as fskv's slots are
        self._memory: list[tuple[Memory, Memory]] = []  # of each thread: where to read, and to copy
        content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._digests = _native.row_digests(content)
        self.paths = [f"{directory}/{number}" for number in range(num_files)]
        for path in self.paths:
            with open(path, "wb") as file:
                content.tofile(file)
                os.fsync(file.fileno())

    def read(self, threads: int, *, check: bool, copy: bool) -> float:
        """Read all once; return GB/s."""
        left, lock = iter(self.paths), threading.Lock()
        bad: list[str] = []

        def work(slot: Memory, page: Memory) -> None:
            ready.wait()
            while True:
                with lock:
                    path = next(left, None)
                if path is None:
                    return
                try:
                    self._read_one(path, slot)
                except OSError as error:
                    bad.append(str(error))
                    return
                if check and _native.row_digests(slot) != self._digests:
                    bad.append(f"{path} has other bytes")
                if copy:
                    np.copyto(page, slot)

        ready = threading.Barrier(threads + 1)
        try:
            while len(self._memory) < threads:
                two = self._arena.take(), self._arena.take()
                self._memory.append((two[0][: self.nbytes], two[1][: self.nbytes]))
            workers = [
                threading.Thread(target=work, args=two, daemon=True)
                for two in self._memory[:threads]
            ]
            for worker in workers:
                worker.start()
        except (MemoryError, OSError, RuntimeError) as error:
            raise BenchmarkError(f"{threads} threads of {2 * self.nbytes} bytes: {error}") from None
        ready.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - start
        if bad:
            raise BenchmarkError(bad[0])
        return len(self.paths) * self.nbytes / seconds / 1e9

    def _read_one(self, path: str, slot: Memory) -> None:
        fd = os.open(path, self._flags)
        try:
            if os.preadv(fd, [slot], 0) != self.nbytes:  # type: ignore[list-item]
                raise OSError(f"{path} was read in part")
        finally:
            os.close(fd)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, in turns, and return the facts."""
    nbytes = options.chunk_kib << 10
    num_files = (options.total_mib << 20) // nbytes
    if num_files < options.threads:
        raise BenchmarkError(
            f"--total-mib: {num_files} files for {options.threads} threads; expected one each"
        )
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    with work_directory(options.dir) as directory:
        files = Files(directory, num_files, nbytes, direct_io=options.direct_io != "off")
        for number in range(options.rounds + 1):
            for way in sorted(_WAYS, reverse=bool(number % 2)):
                check, copy = _WAYS[way]
                rate = files.read(options.threads, check=check, copy=copy)
                if number:  # the first one warms up
                    rates[way].append(rate)
    say(f"{options.rounds} rounds of {num_files} files")
    alone = rates["read"]
    return {
        "settings": settings(options),
        "gb_per_s": {way: spread(values) for way, values in rates.items()},
        "by_reading": {
            way: spread([a / b for a, b in zip(values, alone, strict=True)])
            for way, values in rates.items()
        },
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [way, show(rates), show(facts["by_reading"][way])]
        for way, rates in facts["gb_per_s"].items()
    ]
    title = (
        f"{options.threads} threads and files of {options.chunk_kib} KiB, O_DIRECT {options.direct_io}. "
        f"Median [min - max] of {options.rounds} rounds."
    )
    columns = ("", "GB/s", "by reading alone")
    publish("ceiling", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("ceiling", __doc__)
    made.add_argument("--chunk-kib", type=positive, default=2048, help="(2048)")
    made.add_argument("--total-mib", type=positive, default=512, help="of a round (512)")
    made.add_argument("--rounds", type=positive, default=9, help="(9)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("ceiling", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
