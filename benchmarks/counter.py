"""A thread that does nothing but run Python: what it loses is what others took from the interpreter.

The kernel says where its time went: on a CPU, waiting for a CPU (schedstat), or, since it never sleeps
by itself, waiting for the interpreter.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Reading:
    """Sums since the thread's start, or, as a difference, of one stretch of time."""

    wall_s: float
    count: int
    on_cpu_s: float
    waited_for_cpu_s: float

    def since(self, earlier: Reading) -> Reading:
        return Reading(
            self.wall_s - earlier.wall_s,
            self.count - earlier.count,
            self.on_cpu_s - earlier.on_cpu_s,
            self.waited_for_cpu_s - earlier.waited_for_cpu_s,
        )

    @property
    def per_second(self) -> float:
        return self.count / self.wall_s

    @property
    def without_cpu(self) -> float:
        """Share of the time in which the thread could run, but others had the CPUs."""
        return self.waited_for_cpu_s / self.wall_s

    @property
    def without_interpreter(self) -> float:
        """Share of the time in which the thread slept, waiting for the interpreter."""
        return max(0.0, 1 - (self.on_cpu_s + self.waited_for_cpu_s) / self.wall_s)


class Counter:
    """Counts between `go` and `pause`; both are called by the one thread that owns it."""

    def __init__(self) -> None:
        self._going = threading.Event()
        self._paused = threading.Event()
        self._count = 0  # written by the counting thread only
        self._thread = threading.Thread(target=self._run, name="counter", daemon=True)
        self._thread.start()
        self._clock = time.pthread_getcpuclockid(self._thread.ident or 0)

    def go(self) -> None:
        self._paused.clear()
        self._going.set()

    def pause(self) -> None:
        self._going.clear()
        self._paused.wait()

    def read(self) -> Reading:
        with open(f"/proc/self/task/{self._thread.native_id}/schedstat") as file:
            waited_ns = int(file.read().split()[1])
        return Reading(
            time.perf_counter(), self._count, time.clock_gettime(self._clock), waited_ns / 1e9
        )

    def _run(self) -> None:
        going = self._going
        while True:
            going.wait()
            while going.is_set():
                n = 0
                while n < _BATCH:
                    n += 1
                self._count += n
            self._paused.set()
