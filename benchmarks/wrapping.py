"""Wraps methods of fskv inside a benchmark's process: to make them hang, to time them."""

from __future__ import annotations

import time
from typing import Any

Times = list[tuple[float, float]]  # microseconds of the calling thread: wall, CPU


class Hang:
    """While `on`, calls that would touch the root do not return, as on a dead mount."""

    def __init__(self) -> None:
        self.on = False

    def wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            while self.on:
                time.sleep(0.01)
            return original(*args)

        setattr(owner, name, call)


def time_calls(owner: Any, name: str, times: Times) -> None:
    """Note what every call of a method costs its thread, the two clocks included (about 1 us)."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return original(*args)
        finally:
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            times.append((wall / 1e3, cpu / 1e3))

    setattr(owner, name, call)
