"""How much of its rate a pure-Python loop keeps while fskv moves chunks in the same process.

The main thread is an engine's worker: it plans, submits and polls jobs at a rate. A second thread counts.
Idle and loaded phases alternate, and a loaded rate is compared with the idle ones before and after it.
Cores and memory are shared too, so every phase is repeated as a control: the same traffic, at the rate
that was reached, in a process with an interpreter of its own. What is lost then is not the interpreter's.

    python -m benchmarks.interpreter [--json] [--rate 1000] [--rounds 7] ...

Files go to /dev/shm, so that no disk is the limit. Loads are compared with what was stored.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.child import Child
from benchmarks.counter import Counter, Reading
from benchmarks.options import add_pages, add_traffic, parser, positive_float, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import (
    BenchmarkError,
    Moved,
    Rig,
    Shape,
    Traffic,
    patient_config,
    work_directory,
)
from benchmarks.simulated import add_device, device_of

PROMISE = 0.95
DIRECTIONS = ("store", "load")
_WARM_UP = 1000.0  # chunks a second


@dataclass(slots=True)
class Cell:
    """The rounds of one direction, in this process or, as the control, in another one."""

    kept: list[float] = field(default_factory=list)  # loaded rate / idle rate
    chunks_per_s: list[float] = field(default_factory=list)
    # Shares of the time, less those of idle phases.
    without_interpreter: list[float] = field(default_factory=list)
    without_cpu: list[float] = field(default_factory=list)
    caller_us: list[float] = field(default_factory=list)  # CPU of the submitting thread, per chunk
    others_us: list[float] = field(default_factory=list)  # CPU of all I/O threads, per chunk
    in_python: list[float] = field(default_factory=list)  # times that a chunk was handed to Python

    def facts(self) -> dict[str, Any]:
        """Return the spreads, with the interpreter's microseconds per chunk computed two ways."""
        rates = list(zip(self.kept, self.without_interpreter, self.chunks_per_s, strict=True))
        facts: dict[str, Any] = {
            "kept": spread(self.kept),
            "chunks_per_s": spread(self.chunks_per_s, 1),
            "without_interpreter": spread(self.without_interpreter),
            "without_cpu": spread(self.without_cpu),
            "lost_us_per_chunk": spread([(1 - kept) / rate * 1e6 for kept, _, rate in rates], 1),
            "held_us_per_chunk": spread([held / rate * 1e6 for _, held, rate in rates], 1),
        }
        if self.caller_us:
            facts["caller_us_per_chunk"] = spread(self.caller_us, 1)
            facts["io_cpu_us_per_chunk"] = spread(self.others_us, 1)
            facts["in_python_per_chunk"] = spread(self.in_python, 2)
        return facts


class Side:
    """Traffic on a rig of its own: in this process, or served to it by another one."""

    def __init__(
        self,
        directory: str,
        options: argparse.Namespace,
        *,
        key_file: str | None = None,
        keep: int | None = None,
    ) -> None:
        """Beyond `keep` files the oldest is removed."""
        shape = Shape(
            options.chunk_kib << 10, options.page_kib << 10, options.layers, options.places
        )
        config = patient_config(directory, options, key_file=key_file)
        self._device = device_of(options.pages)
        rig = Rig(directory, shape, config, device=self._device)
        step_s = options.step_ms / 1e3
        self._traffic = Traffic(rig, job_chunks=options.job_chunks, step_s=step_s, keep=keep)
        self._rig = rig
        self.num_in_python = 0
        self._count_in_python()
        self.start("store")
        self.move("store", 0.2, _WARM_UP)  # slots, threads and directories exist afterwards
        self.finish("store")

    def _count_in_python(self) -> None:
        pool = self._rig.runner._pool  # noqa: SLF001
        handle = pool._handle  # noqa: SLF001

        def counted(task: Any, context: Any) -> None:
            self.num_in_python += 1  # threads may lose one of many
            handle(task, context)

        pool._handle = counted  # noqa: SLF001

    def start(self, direction: str) -> None:
        """Make ready for a phase, outside of what is measured."""
        if direction == "store":
            self._traffic.remove_files()
        else:
            self._traffic.begin_loads()

    def move(self, direction: str, seconds: float, rate: float) -> Moved:
        return self._traffic.run(
            is_load=direction == "load", rate=rate, until=lambda passed: passed >= seconds
        )

    def finish(self, direction: str) -> int:
        """Wait for what is open; return the bytes that were compared."""
        self._traffic.drain()
        if self._device:
            self._device.check()
        return self._traffic.check() if direction == "load" else 0

    def close(self) -> None:
        self._rig.close()


def serve(connection: Connection, directory: str, options: argparse.Namespace) -> None:
    """Be the control's process: move chunks as told until the connection ends."""
    side = Side(directory, options)
    connection.send("ready")
    while True:
        direction, seconds, rate = connection.recv()
        side.start(direction)
        connection.send("start")
        moved = side.move(direction, seconds, rate)
        connection.send(moved)
        side.finish(direction)
        connection.send("finished")


class Bench:
    """The phases of all rounds, and what they found."""

    def __init__(self, side: Side, control: Child, options: argparse.Namespace) -> None:
        self._side, self._control, self._options = side, control, options
        self._counter = Counter()
        self._seconds = options.seconds
        self.cells = {(d, where): Cell() for where in ("here", "control") for d in DIRECTIONS}
        self.idle: list[Reading] = []
        self.nbytes_compared = 0
        self._loaded: list[tuple[Cell, Reading, Moved, float | None]] = []

    def run(self) -> None:
        for number in range(self._options.rounds):
            rates = {}
            for direction in DIRECTIONS:
                self._idle()
                rates[direction] = self._here(direction)
            for direction in DIRECTIONS:
                self._idle()
                self._elsewhere(direction, rates[direction])
            say(f"round {number + 1} of {self._options.rounds}")
        self._idle()
        # Loaded phase i lies between the idle phases i and i + 1.
        for at, (cell, reading, moved, others_s) in enumerate(self._loaded):
            beside = self.idle[at : at + 2]
            cell.kept.append(reading.per_second / _mean(i.per_second for i in beside))
            cell.chunks_per_s.append(moved.num_chunks / moved.seconds)
            idle_share = _mean(i.without_interpreter for i in beside)
            cell.without_interpreter.append(reading.without_interpreter - idle_share)
            idle_share = _mean(i.without_cpu for i in beside)
            cell.without_cpu.append(reading.without_cpu - idle_share)
            if others_s is not None:
                cell.caller_us.append(moved.caller_s / moved.num_chunks * 1e6)
                cell.others_us.append(others_s / moved.num_chunks * 1e6)

    def _idle(self) -> None:
        """The worker's steps go on, with nothing to do."""
        self._counter.go()
        before = self._counter.read()
        self._side.move("store", self._seconds / 2, 0.0)
        self.idle.append(self._counter.read().since(before))
        self._counter.pause()

    def _here(self, direction: str) -> float:
        self._side.start(direction)
        num_before = self._side.num_in_python
        self._counter.go()
        before, cpu, own = self._counter.read(), time.process_time(), time.thread_time()
        moved = self._side.move(direction, self._seconds, self._options.rate)
        reading = self._counter.read().since(before)
        others_s = time.process_time() - cpu - (time.thread_time() - own) - reading.on_cpu_s
        self._counter.pause()
        num_in_python = self._side.num_in_python - num_before
        self.cells[direction, "here"].in_python.append(num_in_python / max(1, moved.num_chunks))
        self.nbytes_compared += self._side.finish(direction)
        self._keep(direction, "here", reading, moved, others_s)
        return moved.num_chunks / moved.seconds

    def _elsewhere(self, direction: str, rate: float) -> None:
        self._control.say((direction, self._seconds, rate))
        self._control.hear()
        self._counter.go()
        before = self._counter.read()
        self._side.move("store", self._seconds, 0.0)
        reading = self._counter.read().since(before)
        self._counter.pause()
        moved = self._control.hear()
        self._control.hear()
        self._keep(direction, "control", reading, moved, None)

    def _keep(
        self, direction: str, where: str, reading: Reading, moved: Moved, others_s: float | None
    ) -> None:
        if not moved.num_chunks:
            raise BenchmarkError(
                f"no {direction} ended within {moved.seconds:.2f} s; expected one at least "
                "(a longer --seconds may help)"
            )
        self._loaded.append((self.cells[direction, where], reading, moved, others_s))


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the facts."""
    needed = 2 * int(options.rate * options.seconds * 1.5 + 512) * (options.chunk_kib << 10)
    with work_directory(options.dir) as directory:
        room = os.statvfs(directory)
        if room.f_bavail * room.f_frsize < needed:
            raise BenchmarkError(
                f"--dir: {options.dir} has {room.f_bavail * room.f_frsize >> 20} MiB left, "
                f"expected {needed >> 20}; or lower --seconds or --rate"
            )
        with Child("the control's process", serve, directory, options) as control:
            side = Side(directory, options)
            control.hear()
            bench = Bench(side, control, options)
            bench.run()
            side.close()
    idle = spread([reading.per_second / 1e6 for reading in bench.idle])
    facts: dict[str, Any] = {
        "settings": settings(options),
        "switch_interval_s": sys.getswitchinterval(),
        "idle_million_per_s": idle,
        "bytes_compared": bench.nbytes_compared,
    }
    for direction in DIRECTIONS:
        here, there = bench.cells[direction, "here"], bench.cells[direction, "control"]
        ratios = [a / b for a, b in zip(here.kept, there.kept, strict=True)]
        facts[direction] = here.facts() | {
            "control": there.facts(),
            "kept_of_control": spread(ratios),
            "promise_kept": _keeps(here, options),
        }
    return facts


def _keeps(cell: Cell, options: argparse.Namespace) -> bool:
    """Whether the loop keeps its rate; on a simulated device, whether no chunk needs Python."""
    if options.pages != "host":
        return not any(cell.in_python)
    return (
        statistics.median(cell.kept) >= PROMISE
        and statistics.median(cell.chunks_per_s) >= PROMISE * options.rate
    )


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for direction in DIRECTIONS:
        here = facts[direction]
        for label, cell in ((direction, here), ("  elsewhere", here["control"])):
            row = [label, show(cell["kept"], 3), show(cell["chunks_per_s"], 0)]
            row += [f"{cell[key]['median']:.3f}" for key in ("without_interpreter", "without_cpu")]
            keys = ("lost_us", "held_us", "caller_us", "io_cpu_us", "in_python")
            found = [cell.get(f"{key}_per_chunk") for key in keys]
            rows.append(row + ["-" if f is None else f"{f['median']:.4g}" for f in found])
        rows.append(["  here / elsewhere", show(here["kept_of_control"], 3), *[""] * 8])
    title = (
        f"A counting loop beside {options.rate:g} chunks/s of {options.chunk_kib} KiB, here and in another "
        f"process. Median [min - max] of {options.rounds} rounds.\nIdle: "
        f"{show(facts['idle_million_per_s'], 1)} million/s. Loaded pages compared: "
        f"{facts['bytes_compared'] >> 20} MiB. Last columns: us per chunk; times that Python had it in hand."
    )
    columns = (
        *("", "rate kept", "chunks/s", "no interp.", "no CPU"),
        *("lost", "waited", "submitter", "I/O CPU", "in Python"),
    )
    publish("interpreter", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("interpreter", __doc__)
    add_pages(made)
    add_traffic(made)
    add_device(made)
    made.add_argument("--rate", type=positive_float, default=1000.0, help="chunks a second (1000)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("interpreter", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
