"""Memory, open files and threads of a worker while 10,000 store jobs, then 10,000 load jobs flood it.

A child process submits one-chunk jobs as fast as it can, and now and then calls `wait`, which gathers what is
queued into staging slots, faster than they can be written. The parent watches the child from outside,
through /proc. The budget is what was configured: `staging_bytes`, plus what this file
states below. Exit code 1: a bound did not hold, or a load failed. `--break-bound` gives the worker slots
without end, and must exit with 1.

    python -m benchmarks.flood [--json] [--jobs 10000] [--break-bound] ...
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.child import Child
from benchmarks.options import add_pages, parser, positive, settings
from benchmarks.report import judged, publish
from benchmarks.rig import (
    PATIENCE_S,
    BenchmarkError,
    Rig,
    Shape,
    patient_config,
    work_directory,
)
from benchmarks.usage import Watch, begin_high_water
from fskv.config import MIB, StoreConfig
from fskv.data_path.runner import COPIES_AT_ONCE
from fskv.types import FileId, Status

# Beside the slots: thread stacks, directory entries, the allocator's slack.
FIXED_NBYTES = 24 * MIB
# A job that is not done has its plan, which is the number of each block, and the job itself.
BLOCK_NBYTES = 64
JOB_NBYTES = 4096
FILES_PER_THREAD = 2  # the chunk file, and a directory while it is made
NUM_FILES_KEPT = 256  # of what was stored; loads read these again and again
WAIT_EVERY = 512  # store jobs: as many as the queue takes


def configured(directory: str, options: argparse.Namespace) -> StoreConfig:
    return patient_config(directory, options, staging_nbytes=options.staging_mib * MIB)


# --- the child ------------------------------------------------------------------------------


class Flood:
    """Submits the jobs and counts how their chunks ended."""

    def __init__(self, directory: str, options: argparse.Namespace) -> None:
        shape = Shape(options.chunk_kib << 10, options.page_kib << 10, options.layers, 64)
        config = configured(directory, options)
        self.rig = Rig(directory, shape, config)
        self._shape = shape
        self._num_jobs = options.jobs
        self._stored: list[FileId] = []
        self.ended = {False: Counter[str](), True: Counter[str]()}  # by is_load
        self.num_failed_jobs = 0
        self.max_slots = 0

    def run(self, *, is_load: bool) -> None:
        """Submit all jobs of one direction, then wait until every chunk has ended."""
        runner = self.rig.runner
        first = self._num_jobs if is_load else 0
        # Planned ahead, so that nothing slows the flood. A job keeps its plan until it is done.
        jobs = [
            (job_id, self._requests(self._chunk(job_id, is_load=is_load), is_load=is_load))
            for job_id in range(first, first + self._num_jobs)
        ]
        jobs.reverse()
        while jobs:
            job_id, requests = jobs.pop()
            if is_load:
                runner.submit_load(job_id, requests, None)
            else:
                runner.submit_store(job_id, requests, None)
            del requests
            if not is_load and job_id % WAIT_EVERY == WAIT_EVERY - 1:
                runner.wait(range(job_id - WAIT_EVERY + 1, job_id + 1))
                self.max_slots = max(self.max_slots, runner.num_slots_used)
        end = time.monotonic() + PATIENCE_S
        while sum(self.ended[is_load].values()) < self._num_jobs:
            self._collect()
            if time.monotonic() > end:
                raise BenchmarkError(f"the jobs have not ended in {PATIENCE_S:g} s")
            time.sleep(0.001)
        if not self._stored:
            raise BenchmarkError("no chunk was stored, so nothing can be loaded")

    def check(self) -> int:
        """Compare the pages of every place that a kept chunk was loaded into; return the bytes."""
        return self.rig.compare(sorted({self._place(chunk) for chunk in self._stored}))

    def _requests(self, chunk: FileId, *, is_load: bool) -> Any:
        return self.rig.requests([(chunk, self._place(chunk))], is_load=is_load)

    def _chunk(self, job_id: int, *, is_load: bool) -> FileId:
        if is_load:
            return self._stored[job_id % len(self._stored)]
        return FileId(b"%032d" % job_id, 0)

    def _place(self, chunk: FileId) -> int:
        return int(chunk.key_hash) % self._shape.num_places

    def _collect(self) -> None:
        self.max_slots = max(self.max_slots, self.rig.runner.num_slots_used)
        self.num_failed_jobs += sum(result.failed for result in self.rig.runner.poll())
        for outcome in self.rig.runner.take_outcomes():
            self.ended[outcome.is_load][outcome.status.value] += 1
            if outcome.is_load or outcome.status is not Status.OK:
                continue
            if len(self._stored) < NUM_FILES_KEPT:
                self._stored.append(outcome.file)
            else:
                self.rig.remove(outcome.file)


def flood(connection: Connection, directory: str, options: argparse.Namespace) -> None:
    """Be the child: say "ready", wait for the word, flood, tell what became of the jobs."""
    if options.break_bound:
        _break_bound()
    work = Flood(directory, options)
    begin_high_water()
    connection.send("ready")
    for is_load in (False, True):
        connection.recv()
        start = time.monotonic()
        work.run(is_load=is_load)
        seconds = time.monotonic() - start
        connection.send(("load" if is_load else "store", seconds, dict(work.ended[is_load])))
    connection.recv()
    connection.send((work.num_failed_jobs, work.check(), work.max_slots, work.rig.staging_nbytes))
    connection.recv()


def _break_bound() -> None:
    """The negative control: a runner that has slots without end."""
    rig: Any = importlib.import_module("benchmarks.rig")
    bounded = rig.JobRunner
    rig.JobRunner = lambda *args, **options: bounded(*args, **{**options, "num_slots": 1 << 30})


# --- the parent -----------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the child under watch and return the facts."""
    with (
        work_directory(options.dir) as directory,
        Child("the flooded process", flood, directory, options) as child,
    ):
        child.hear()
        watch = Watch(child.pid)
        phases = {}
        for _ in range(2):
            child.say("go")
            name, seconds, ended = child.hear(2 * PATIENCE_S, watch.sample)
            phases[name] = {"seconds": round(seconds, 2), "ended": ended}
        before, peak = watch.before, watch.peak()  # checking uses memory of its own
        child.say("go")
        num_failed, nbytes_compared, max_slots, staging_nbytes = child.hear()
    config = configured(options.dir, options)
    blocks = options.chunk_kib // (options.page_kib * options.layers)
    plans = options.jobs * (blocks * BLOCK_NBYTES + JOB_NBYTES)
    found = {
        "memory": peak.rss_nbytes - before.rss_nbytes,
        "staging": staging_nbytes,
        "open files": peak.open_files - before.open_files,
        "threads": peak.threads - before.threads,
    }
    bounds = {
        "memory": config.staging_bytes + plans + FIXED_NBYTES,
        "staging": config.staging_bytes,
        "open files": FILES_PER_THREAD * options.threads,
        "threads": options.threads + COPIES_AT_ONCE,  # wait() has its own for its copies
    }
    loaded = phases["load"]["ended"].get(Status.OK.value, 0)
    exceeded = [name for name, bound in bounds.items() if found[name] > bound]
    return {
        "settings": settings(options),
        "found": found,
        "bounds": bounds,
        "budget_parts": {
            "staging_bytes": config.staging_bytes,
            "plans_of_all_jobs": plans,
            "fixed": FIXED_NBYTES,
        },
        "exceeded": exceeded,
        "phases": phases,
        "failed_loads": num_failed,
        "max_slots_used": max_slots,
        "bytes_compared": nbytes_compared,
        "samples": watch.num_samples,
        "good": not exceeded and not num_failed and loaded == options.jobs,
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for name, bound in facts["bounds"].items():
        in_mib = name in ("memory", "staging")
        found, limit = (
            f"{value / MIB:.1f} MiB" if in_mib else str(value)
            for value in (facts["found"][name], bound)
        )
        rows.append([name, found, limit, "EXCEEDED" if name in facts["exceeded"] else "holds"])
    parts = ", ".join(f"{name} {n / MIB:.0f} MiB" for name, n in facts["budget_parts"].items())
    ended = "; ".join(f"{n}s in {p['seconds']} s: {p['ended']}" for n, p in facts["phases"].items())
    title = (
        f"{options.jobs} store jobs, then {options.jobs} load jobs, of one {options.chunk_kib} KiB chunk. "
        f"Increase over the idle process.\nMemory's bound: {parts}.\n{ended}"
    )
    columns = ("", "peak", "bound", "")
    publish("flood", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("flood", __doc__)
    add_pages(made)
    add = made.add_argument
    add("--jobs", type=positive, default=10_000, help="of each direction (10000)")
    add("--staging-mib", type=positive, default=256, help="the option staging_bytes (256)")
    add("--break-bound", action="store_true", help="negative control: no bound on staging slots")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("flood", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
