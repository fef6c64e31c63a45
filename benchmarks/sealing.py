"""What does a MAC cost? Store and load in GB/s with sealed files, and the digests alone.

The same chunks through JobRunner, ChunkStore and transport, in turns in one process: as engines move them
(`XXH3`), the same with every step in Python (`XXH3, in Python`), and sealed (`sealed`: keyed BLAKE3, whose
digests are computed from Python). Every round stores all chunks and loads them into other pages, which are
compared byte by byte outside of the timed part. `--busy` runs a Python loop beside them, as an engine does.
`cpu` is the process's CPU seconds for a GB of KV, kernel included: on a machine with other work it says more
than a rate does (with --busy it is the loop's, too).

The digests alone, of rows of 64 KiB in memory: XXH3-64, keyed BLAKE3 and, for the choice between the two,
keyed BLAKE2b.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

import xxhash

from benchmarks.options import add_pages, parser, positive, settings
from benchmarks.report import say
from benchmarks.rig import BenchmarkError, Rig, Shape, patient_config, work_directory
from fskv.config import MIB
from fskv.format.chunk_file import ROW_NBYTES
from fskv.format.mac import MacKey, MacKeys
from fskv.types import FileId, Status

_DIGEST_NBYTES = 16 * MIB
_DIGEST_S = 0.1
_PATIENCE_S = 300.0


def _move(rig: Rig, number: int, round_: int, *, is_load: bool) -> tuple[float, float]:
    """Store or load `number` chunks in one job; returns seconds, and CPU seconds of the process."""
    chunks = [
        (FileId(hashlib.sha256(b"%d/%d" % (round_, i)).digest(), 0), i % rig.shape.num_places)
        for i in range(number)
    ]
    requests = rig.requests(chunks, is_load=is_load)
    submit = rig.runner.submit_load if is_load else rig.runner.submit_store
    start, cpu_start = time.perf_counter(), time.process_time()
    submit(2 * round_ + is_load, requests, None)
    done = 0
    while done < number:
        rig.runner.poll()
        for outcome in rig.runner.take_outcomes():
            if outcome.status is not Status.OK:
                raise BenchmarkError(f"a chunk ended as {outcome.status.value}")
            done += 1
        if time.perf_counter() - start > _PATIENCE_S:
            raise BenchmarkError(f"{done} of {number} chunks have ended in {_PATIENCE_S:g} s")
        time.sleep(0.001)
    took_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    if is_load:
        rig.compare(range(number))
        for chunk, _ in chunks:
            rig.remove(chunk)
    return took_s, cpu_s


@contextlib.contextmanager
def _busy_loop(*, wanted: bool) -> Iterator[None]:
    """Run Python beside it all, which gives the interpreter up only when it is asked to."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            sum(range(200))

    thread = threading.Thread(target=loop, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


def _rates(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_path(
    directory: str, shape: Shape, *, threads: int, rounds: int, direct_io: str, busy: bool
) -> dict[str, dict[str, dict[str, float]]]:
    """Return GB/s, and CPU seconds a GB, by contestant and operation."""
    config = patient_config(directory, io_threads=threads, direct_io=direct_io)
    keys = MacKeys([MacKey("benchmark", secrets.token_bytes(32))])
    rigs = {
        "XXH3": Rig(directory, shape, config),
        "XXH3, in Python": Rig(directory, shape, config, native=False),
        "sealed": Rig(directory, shape, config, keys=lambda: keys),
    }
    number = shape.num_places
    operations = ("store", "load")
    found: dict[str, dict[str, list[float]]] = {
        name: {f"{op}{cpu}": [] for op in operations for cpu in ("", " cpu")} for name in rigs
    }
    gb = number * shape.chunk_nbytes / 1e9
    with _busy_loop(wanted=busy):
        for round_ in range(rounds + 1):
            order = list(rigs)[round_ % 3 :] + list(rigs)[: round_ % 3]
            for name in order if round_ % 2 else reversed(order):
                rigs[name].clear()
                for operation in operations:
                    took_s, cpu_s = _move(rigs[name], number, round_, is_load=operation == "load")
                    if round_:  # the first makes slots and directories
                        found[name][operation].append(gb / took_s)
                        found[name][f"{operation} cpu"].append(cpu_s / gb)
    for rig in rigs.values():
        rig.close()
    return {n: {op: _rates(values) for op, values in of.items()} for n, of in found.items()}


def measure_digests(threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return GB/s of `threads` threads that digest rows, by algorithm."""
    data = memoryview(os.urandom(_DIGEST_NBYTES))
    rows = [data[at : at + ROW_NBYTES] for at in range(0, len(data), ROW_NBYTES)]
    secret = secrets.token_bytes(32)
    key = MacKey("benchmark", secret)
    kinds: dict[str, Callable[[memoryview], object]] = {
        "XXH3-64": xxhash.xxh3_64_digest,
        "BLAKE3, keyed": lambda row: key.row_digests(row, ROW_NBYTES),
        "BLAKE2b, keyed": lambda row: hashlib.blake2b(row, key=secret, digest_size=16).digest(),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(rounds + 1):
        for name, digest in kinds.items():
            counts = [0] * threads
            end = time.perf_counter() + _DIGEST_S

            def work(
                idx: int,
                digest: Callable[[memoryview], object] = digest,
                counts: list[int] = counts,
                end: float = end,
            ) -> None:
                at = idx * 7
                while time.perf_counter() < end:
                    for _ in range(16):
                        digest(rows[at % len(rows)])
                        at += 1
                    counts[idx] += 16

            start = time.perf_counter()
            crew = [threading.Thread(target=work, args=(idx,)) for idx in range(threads)]
            for thread in crew:
                thread.start()
            for thread in crew:
                thread.join()
            if round_:
                took_s = time.perf_counter() - start
                found[name].append(sum(counts) * ROW_NBYTES / took_s / 1e9)
    return {name: _rates(values) for name, values in found.items()}


def main(arguments: list[str] | None = None) -> int:
    made = parser("sealing", __doc__)
    add_pages(made)
    made.add_argument("--chunks", type=positive, default=64, help="chunks a round (64)")
    made.add_argument("--rounds", type=positive, default=9, help="rounds that count (9)")
    made.add_argument("--busy", action="store_true", help="a Python loop runs beside it")
    options = made.parse_args(arguments)
    shape = Shape(options.chunk_kib << 10, options.page_kib << 10, options.layers, options.chunks)
    try:
        digests = {n: measure_digests(n, options.rounds) for n in sorted({1, options.threads})}
        with work_directory(options.dir) as directory:
            paths = measure_path(
                directory,
                shape,
                threads=options.threads,
                rounds=options.rounds,
                direct_io=options.direct_io,
                busy=options.busy,
            )
    except (BenchmarkError, OSError) as error:
        say(f"benchmarks.sealing: {error}")
        return 2
    if options.json:
        facts = {"benchmark": "sealing", "settings": settings(options)}
        print(json.dumps({**facts, "digests": digests, "paths": paths}))
        return 0
    print("GB/s; cpu: CPU seconds a GB. Median of rounds [least to most]")
    for number, of in digests.items():
        for name, rates in of.items():
            print(f"{name:18} rows alone, {number} threads  {_words(rates)}")
    for name, operations in paths.items():
        for operation, rates in operations.items():
            print(f"{name:18} {operation:9}, {options.threads} I/O threads  {_words(rates)}")
    return 0


def _words(rates: dict[str, float]) -> str:
    return f"{rates['median']:6.2f}  [{rates['min']:.2f} to {rates['max']:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
