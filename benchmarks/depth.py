"""How many I/O threads a mount wants that answers late: rates by threads, where each call is delayed.

Files are on a real disk below DIR, past the page cache. In a child process each call that opens, reads,
writes or renames one of them waits first (faults/disk.py). Numbers of threads take turns. The last column is
what `io_threads` "auto" takes there. No bytes are compared: `fskv bench` does that.

    python -m benchmarks.depth --dir DIR [--delay-ms 2] [--chunk-kib 2048] [--threads 4,8,16,32] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import parser, positive, settings
from benchmarks.report import command, judged, publish, say, show, spread
from benchmarks.rig import (
    PATIENCE_S,
    BenchmarkError,
    Rig,
    Shape,
    patient_config,
    work_directory,
)
from faults.disk import DiskFaults
from fskv.config import StoreConfig
from fskv.data_path.depth import measure_answer_s, wanted_threads
from fskv.types import FileId, Status

_LAB = Path(__file__).resolve().parents[1] / "tests" / "lab"
_LAYERS = 16
_JOB_CHUNKS = 32
_PAGE_NBYTES = 32 << 10
_JOB_IDS = itertools.count()


def rules(delay_ms: int) -> list[str]:
    calls = ("open suffix=.kv", "open suffix=.part", "pread", "pwrite", "rename")
    return [f"{call} slow_ms={delay_ms}" for call in calls] if delay_ms else []


def move(rig: Rig, files: Sequence[FileId], *, is_load: bool) -> float:
    """Store or load all files; return GB/s."""
    start = time.perf_counter()
    for at in range(0, len(files), _JOB_CHUNKS):
        chunks = [(file, at + n) for n, file in enumerate(files[at : at + _JOB_CHUNKS])]
        moves = rig.requests(chunks, is_load=is_load)
        (rig.runner.submit_load if is_load else rig.runner.submit_store)(
            next(_JOB_IDS), moves, None
        )
    num_open = len(files)
    while num_open:
        if time.perf_counter() - start > PATIENCE_S:
            raise BenchmarkError(f"{num_open} chunks have not ended in {PATIENCE_S:g} s")
        time.sleep(0.001)
        rig.runner.poll()
        outcomes = rig.runner.take_outcomes()
        if bad := [outcome for outcome in outcomes if outcome.status is not Status.OK]:
            raise BenchmarkError(f"a chunk ended as {bad[0].status.value}")
        num_open -= len(outcomes)
    return len(files) * rig.shape.chunk_nbytes / (time.perf_counter() - start) / 1e9


def measure_here(options: argparse.Namespace) -> dict[str, Any]:
    """In the child whose calls are delayed."""
    nbytes = options.chunk_kib << 10
    number = (options.total_mib << 20) // nbytes
    shape = Shape(nbytes, min(_PAGE_NBYTES, nbytes // _LAYERS), _LAYERS, number)
    rigs = {}
    for threads in options.threads:
        config = patient_config(options.dir, io_threads=threads, direct_io="on")
        rigs[threads] = Rig(options.dir, shape, config)
    file_nbytes = rigs[options.threads[0]].file_layout.file_nbytes
    config = StoreConfig(root=options.dir)
    answer_s = measure_answer_s(options.dir, 0o600, direct=True)
    found: dict[str, dict[str, list[float]]] = {
        direction: {str(threads): [] for threads in rigs} for direction in ("store", "load")
    }
    for turn in range(options.rounds + 1):
        files = [FileId(b"%016d%016d" % (turn, n), 0) for n in range(number)]
        for threads in sorted(rigs, reverse=bool(turn % 2)):
            for direction, rates in found.items():
                rate = move(rigs[threads], files, is_load=direction == "load")
                if turn:  # the first one makes threads, slots and directories
                    rates[str(threads)].append(rate)
            for file in files:
                rigs[threads].remove(file)
    for rig in rigs.values():
        rig.close()
    return {
        "answer_ms": round((answer_s or 0.0) * 1e3, 2),
        "auto": config.num_io_threads(
            config.staging_bytes // file_nbytes, wanted_threads(answer_s, file_nbytes)
        ),
        "gb_per_s": {
            direction: {threads: spread(values) for threads, values in rates.items()}
            for direction, rates in found.items()
        },
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the child and return its facts."""
    sys.path.append(str(_LAB))
    from native_build import build  # type: ignore[import-not-found]

    with work_directory(options.dir) as own:
        directory, state = Path(own).resolve() / "disk", Path(own) / "state"
        directory.mkdir()
        faults = DiskFaults(str(build("disk", state)), directory, state)
        faults.set(*rules(options.delay_ms))
        words = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in _NUMBERS]
        words += [f"--threads={','.join(map(str, options.threads))}", f"--dir={directory}"]
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.depth", "--here", *words],
            env={**os.environ, **faults.env()},
            stdout=subprocess.PIPE,
            check=False,
        )
        if child.returncode or (options.delay_ms and not faults.fired()):
            raise BenchmarkError("the process whose calls are delayed has failed: see above")
    say(f"{options.rounds} rounds of {options.total_mib} MiB")
    facts: dict[str, Any] = json.loads(child.stdout)
    return {"settings": settings(options), **facts}


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [direction, *(show(rate) for rate in rates.values()), str(facts["auto"])]
        for direction, rates in facts["gb_per_s"].items()
    ]
    title = (
        f"Chunks of {options.chunk_kib} KiB, each call {options.delay_ms} ms late; GB/s. "
        f"A file opens and is read in {facts['answer_ms']} ms."
    )
    columns = ("", *(f"{threads} threads" for threads in options.threads), "auto")
    publish("depth", facts, (title, columns, rows), as_json=options.json)


_NUMBERS = {"delay-ms": 2, "chunk-kib": 2048, "total-mib": 128, "rounds": 3}


def numbers(text: str) -> list[int]:
    return [positive(word) for word in text.split(",")]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("depth", __doc__, io=False)
    made.add_argument("--threads", type=numbers, default=[4, 8, 16, 32], help="(4,8,16,32)")
    for name, default in _NUMBERS.items():
        made.add_argument(
            f"--{name}",
            type=int if name == "delay-ms" else positive,
            default=default,
            help=f"({default})",
        )
    made.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return made.parse_args(arguments)


def _say_facts(options: argparse.Namespace) -> int:
    print(json.dumps(measure_here(options)))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.here:
        return command("depth", lambda: _say_facts(options))
    return judged("depth", options, measure, report)


if __name__ == "__main__":
    sys.exit(main())
