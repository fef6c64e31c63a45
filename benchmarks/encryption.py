"""Stores and loads with and without a key, in turns, alone and beside a thread that keeps the interpreter.

    python -m benchmarks.encryption [--threads 2] [--rounds 7]

Each round moves chunks in clear and encrypted, as fast as they go; every loaded byte is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.counter import Counter
from benchmarks.interpreter import DIRECTIONS, Side
from benchmarks.options import add_pages, add_traffic, parser, settings
from benchmarks.report import judged, publish, show, spread
from benchmarks.rig import work_directory
from fskv.config import MIB

KINDS = ("clear", "encrypted")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rates in GB/s by traffic, and those of encrypted files in parts of those in clear."""
    rates: dict[str, list[float]] = defaultdict(list)
    nbytes_compared = 0
    counter = Counter()
    with (
        work_directory(options.dir) as directory,
        tempfile.NamedTemporaryFile("w") as keys,
        contextlib.ExitStack() as closing,
    ):
        keys.write(f"names {secrets.token_hex(32)}\nk1 {secrets.token_hex(32)}\n")
        keys.flush()
        sides = {}
        for kind, key_file in zip(KINDS, (None, keys.name), strict=True):
            os.mkdir(where := f"{directory}/{kind}")
            sides[kind] = Side(where, options, key_file=key_file, keep=options.places)
            closing.callback(sides[kind].close)
        for _ in range(options.rounds):
            for beside in ("alone", "busy"):
                if beside == "busy":
                    counter.go()
                for direction in DIRECTIONS:
                    for kind, side in sides.items():
                        side.start(direction)
                        moved = side.move(direction, options.seconds, float("inf"))
                        nbytes_compared += side.finish(direction)
                        gb = moved.num_chunks * options.chunk_kib * 1024 / 1e9
                        rates[f"{direction} {beside} {kind}"].append(gb / moved.seconds)
                if beside == "busy":
                    counter.pause()
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


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("encryption", __doc__)
    add_pages(made)
    add_traffic(made)
    made.set_defaults(pages="host")
    return judged("encryption", made.parse_args(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
