"""Stores and loads with and without a key, in turns, alone and beside a thread that keeps the interpreter.

    python -m benchmarks.encryption [--threads 2] [--rounds 7]

Each round moves the same chunks in clear and encrypted; every loaded byte is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.options import add_pages, parser, positive, positive_float, settings
from benchmarks.report import judged, publish, show, spread
from benchmarks.rig import Rig, Shape, Traffic, patient_config, work_directory
from fskv.config import MIB

STEP_S = 0.001
KINDS = ("clear", "encrypted")


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Keep the interpreter busy with a loop of Python on a thread, as an engine does."""
    over = threading.Event()

    def loop() -> None:
        number = 0
        while not over.is_set():
            number += 1

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates in GB/s by traffic, and those of encrypted files in parts of those in clear."""
    shape = Shape(options.chunk_kib << 10, options.page_kib << 10, options.layers, options.places)
    rates: dict[str, list[float]] = defaultdict(list)
    nbytes_compared = 0
    with (
        work_directory(options.dir) as directory,
        tempfile.NamedTemporaryFile("w") as keys,
        contextlib.ExitStack() as closing,
    ):
        keys.write(f"names {secrets.token_hex(32)}\nk1 {secrets.token_hex(32)}\n")
        keys.flush()
        traffic = {}
        for kind, key_file in zip(KINDS, (None, keys.name), strict=True):
            os.mkdir(where := f"{directory}/{kind}")
            config = patient_config(
                where,
                io_threads=options.threads,
                direct_io=options.direct_io,
                key_file=key_file,
            )
            rig = Rig(where, shape, config)
            closing.callback(rig.close)
            traffic[kind] = Traffic(
                rig, job_chunks=options.job_chunks, step_s=STEP_S, keep=shape.num_places
            )
        for _ in range(options.rounds):
            for beside in ("alone", "busy"):
                with _busy() if beside == "busy" else contextlib.nullcontext():
                    for is_load in (False, True):
                        for kind in KINDS:
                            one = traffic[kind]
                            one.begin_loads()
                            moved = one.run(
                                is_load=is_load,
                                rate=float("inf"),
                                until=lambda seconds: seconds >= options.seconds,
                            )
                            one.drain()
                            nbytes = moved.num_chunks * shape.chunk_nbytes
                            nbytes_compared += one.check() if is_load else 0
                            verb = "load" if is_load else "store"
                            rates[f"{verb} {beside} {kind}"].append(nbytes / moved.seconds / 1e9)
    facts: dict[str, Any] = {"settings": settings(options), "bytes_compared": nbytes_compared}
    for name in ("store alone", "store busy", "load alone", "load busy"):
        clear, encrypted = (rates[f"{name} {kind}"] for kind in KINDS)
        facts[name] = {
            "clear": spread(clear),
            "encrypted": spread(encrypted),
            "part": round(statistics.median(encrypted) / statistics.median(clear), 3),
        }
    return facts


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [name, show(one["clear"]), show(one["encrypted"]), f"{one['part']:.2f}"]
        for name, one in facts.items()
        if isinstance(one, dict) and "part" in one
    ]
    title = (
        f"GB/s of {options.chunk_kib} KiB chunks by {options.threads} threads. Median [min - max] of "
        f"{options.rounds} rounds. Compared: {facts['bytes_compared'] // MIB} MiB."
    )
    columns = ("", "clear", "encrypted", "part")
    publish("encryption", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("encryption", __doc__)
    add_pages(made)
    add = made.add_argument
    add("--rounds", type=positive, default=7, help="(7)")
    add("--seconds", type=positive_float, default=0.5, help="of one kind of traffic (0.5)")
    add("--job-chunks", type=positive, default=16, help="chunks of a job (16)")
    add("--places", type=positive, default=64, help="chunks of KV to store; as many to load (64)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("encryption", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
