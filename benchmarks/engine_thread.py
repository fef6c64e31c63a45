"""What a chunk costs the engine's own thread: CPU time to plan it, to submit it, and to take its end over.

All three are Python and hold the interpreter; what I/O threads do does not. Jobs come one after another, and
each is polled as often as an engine steps. A poll that finds nothing is of the step and not of a chunk: it is
said apart. No bytes are compared here: the benchmark `interpreter` does that.

    python -m benchmarks.engine_thread [--pages host|cuda] [--rounds 7] [--json] ...
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.options import add_jobs, add_pages, parser, positive, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import PATIENCE_S, BenchmarkError, Rig, Shape, patient_config, work_directory
from benchmarks.simulated import add_device, device_of
from fskv.config import MAX_QUEUED_CHUNKS
from fskv.types import FileId, Status

_STEPS = ("plan", "submit", "ends")
_COLUMNS = (*_STEPS, "together", "idle poll")
_STEP_S = 0.005


class _Clock:
    """CPU time of this thread, by what it was spent on."""

    def __init__(self) -> None:
        self.spent_ns = dict.fromkeys(_STEPS, 0)
        self.idle_polls_ns: list[int] = []
        self._before_ns = 0

    def start(self) -> None:
        self._before_ns = time.thread_time_ns()

    def lap(self, step: str) -> None:
        now = time.thread_time_ns()
        self.spent_ns[step] += now - self._before_ns
        self._before_ns = now

    def lap_of_poll(self, *, idle: bool) -> None:
        if idle:
            self.idle_polls_ns.append(time.thread_time_ns() - self._before_ns)
        else:
            self.lap("ends")


class Jobs:
    """Jobs of a rig, one at a time."""

    def __init__(self, rig: Rig, num_chunks: int) -> None:
        self._rig, self._num_chunks = rig, num_chunks
        self._num_jobs = 0

    def run(self, files: Sequence[FileId], *, is_load: bool) -> dict[str, float]:
        """Store or load all files; return microseconds a chunk."""
        clock = _Clock()
        for at in range(0, len(files), self._num_chunks):
            self._job(files[at : at + self._num_chunks], clock, is_load=is_load)
        spent = {step: ns / 1e3 / len(files) for step, ns in clock.spent_ns.items()}
        spent["together"] = sum(spent.values())
        if clock.idle_polls_ns:
            spent["idle poll"] = statistics.median(clock.idle_polls_ns) / 1e3
        return spent

    def _job(self, files: Sequence[FileId], clock: _Clock, *, is_load: bool) -> None:
        runner, self._num_jobs = self._rig.runner, self._num_jobs + 1
        chunks = [(file, place) for place, file in enumerate(files)]
        ready = self._rig.ready()
        clock.start()
        moves = self._rig.requests(chunks, is_load=is_load)
        clock.lap("plan")
        (runner.submit_load if is_load else runner.submit_store)(self._num_jobs, moves, ready)
        clock.lap("submit")
        num_open, end = len(files), time.monotonic() + PATIENCE_S
        while num_open:
            if time.monotonic() > end:
                raise BenchmarkError(f"{num_open} chunks have not ended in {PATIENCE_S:g} s")
            time.sleep(_STEP_S)
            clock.start()
            results = runner.poll()
            outcomes = runner.take_outcomes()
            clock.lap_of_poll(idle=not results and not outcomes)
            if bad := [outcome for outcome in outcomes if outcome.status is not Status.OK]:
                raise BenchmarkError(f"a chunk ended as {bad[0].status.value}")
            num_open -= len(outcomes)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds and return the facts."""
    shape = Shape(
        options.chunk_kib << 10, options.page_kib << 10, options.layers, options.job_chunks
    )
    device = device_of(options.pages)
    found: dict[str, dict[str, list[float]]] = {
        direction: {column: [] for column in _COLUMNS} for direction in ("store", "load")
    }
    with work_directory(options.dir) as directory:
        config = patient_config(directory, options)
        if options.job_chunks > MAX_QUEUED_CHUNKS:
            raise BenchmarkError(
                f"--job-chunks: found {options.job_chunks}, expected at most {MAX_QUEUED_CHUNKS}: "
                "what no queue takes is skipped"
            )
        rig = Rig(directory, shape, config, device=device)
        jobs = Jobs(rig, options.job_chunks)
        for number in range(options.rounds + 1):
            files = [
                FileId(b"%016d%016d" % (number, i), 0)
                for i in range(options.jobs * options.job_chunks)
            ]
            for direction, columns in found.items():
                spent = jobs.run(files, is_load=direction == "load")
                if number:  # the first round makes slots, threads and directories
                    for column, value in spent.items():
                        columns[column].append(value)
            for file in files:
                rig.remove(file)
            if device is not None:
                device.check()
        rig.close()
    say(f"{options.rounds} rounds of {options.jobs} jobs")
    us = {
        direction: {column: spread(values, 1) for column, values in columns.items() if values}
        for direction, columns in found.items()
    }
    return {"settings": settings(options), "us_per_chunk": us}


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [
            direction,
            *(show(columns[column], 1) if column in columns else "-" for column in _COLUMNS),
        ]
        for direction, columns in facts["us_per_chunk"].items()
    ]
    title = (
        f"The engine's thread, us of CPU a chunk of {options.chunk_kib} KiB, {options.job_chunks} a job; "
        f"pages: {options.pages}. Last column: us a poll.\nMedian [min - max] of {options.rounds} rounds."
    )
    publish("engine_thread", facts, (title, ("", *_COLUMNS), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("engine_thread", __doc__)
    add_pages(made)
    add_jobs(made)
    add_device(made)
    made.add_argument("--jobs", type=positive, default=8, help="of a round, each way (8)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("engine_thread", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
