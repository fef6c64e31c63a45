"""A request trace on a real root with a bound: does it hit what `fskv replay` says?

One engine without a model (benchmarks.replay_engine) looks up, loads and stores the blocks of each request in
files of 4 KiB of KV, while its maintenance process prunes. Every loaded byte is compared with what it must
be. The hits stand beside those that `fskv replay` simulates for that size, and for a root without a bound. At
full speed more is stored between two looks of the maintenance process than by an engine: up to 12 % of the
bound stay free. With --speed it is as in an engine.

Exit code 1: a loaded byte was wrong, or a load or store failed in another way than by pruning.

    python -m benchmarks.replay TRACE --dir DIR [--blocks 10000] [--speed 5] [--json]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from typing import Any

from fskv_tools.replay.curve import simulate
from fskv_tools.replay.trace import Request, read_trace

from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.replay_engine import Engine
from benchmarks.report import judged, publish, say
from benchmarks.rig import work_directory
from fskv.root.filesystem import unit_nbytes

_BLOCK_NBYTES = 4096  # of KV
_SAY_S = 10.0


def replay(options: argparse.Namespace, requests: list[Request], root: str) -> dict[str, Any]:
    """Replay the requests on `root`, which is empty; returns sums of what became of them."""
    unit = unit_nbytes(os.statvfs(root)) or 1
    engine = Engine(
        root,
        os.path.basename(options.trace),
        _BLOCK_NBYTES,
        max_nbytes=options.blocks * _on_disk(unit),
        io_threads=options.threads,
        direct_io=options.direct_io,
        speed=options.speed,
    )
    sums: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    start = said = time.monotonic()
    try:
        for number, request in enumerate(requests, 1):
            if options.speed:
                due_s = (request.timestamp_ms - requests[0].timestamp_ms) / 1000 / options.speed
                while (left_s := start + due_s - time.monotonic()) > 0:
                    time.sleep(min(left_s, 0.05))
                    engine.step()
            done = engine.handle(request.hash_ids)
            for name in ("hits", "loaded", "stored", "wrong_nbytes", "waited_s"):
                sums[name] += getattr(done, name)
            failures += done.failures
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                say(f"{number} of {len(requests)} requests")
    finally:
        engine.close()
    return {**sums, "failures": dict(failures), "seconds": round(time.monotonic() - start, 1)}


def _on_disk(unit: int) -> int:
    """Return what a block takes on a file system of that unit: a header of 4 KiB, and the KV."""
    return -(-2 * _BLOCK_NBYTES // unit) * unit


def measure(options: argparse.Namespace) -> dict[str, Any]:
    requests = read_trace(options.trace)
    num_blocks = sum(len(request.hash_ids) for request in requests)
    with work_directory(options.dir) as own:
        facts = replay(options, requests, own)
    # Pruned between its lookup and its load: a miss, as in an engine.
    failed = {name for name in facts["failures"] if name != "load absent"}
    return {
        "settings": settings(options),
        "requests": len(requests),
        "blocks": num_blocks,
        **facts,
        "hit_ratio": facts["hits"] / num_blocks,
        "simulated": simulate(requests, 1, options.blocks).hits / num_blocks,
        "no_bound": simulate(requests, 1).hits / num_blocks,
        "good": not facts["wrong_nbytes"] and not failed,
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        ["hits", f"{facts['hit_ratio']:.2%}"],
        ["simulated", f"{facts['simulated']:.2%}"],
        ["without a bound", f"{facts['no_bound']:.2%}"],
        ["stored", f"{facts['stored']:,} blocks"],
        ["loaded", f"{facts['loaded']:,} blocks"],
        ["wrong bytes", f"{facts['wrong_nbytes']:,}"],
        ["waited for room", f"{facts['waited_s']:.1f} s of {facts['seconds']} s"],
        *([f"failed: {name}", f"{count:,}"] for name, count in facts["failures"].items()),
    ]
    title = (
        f"{facts['requests']:,} requests, {facts['blocks']:,} blocks; room for {options.blocks:,}"
    )
    publish("replay", facts, (title, ("", ""), rows), as_json=options.json)


def main() -> int:
    made = parser("replay", __doc__)
    add = made.add_argument
    add("trace", metavar="TRACE", help="a trace in the Mooncake JSONL format")
    add("--blocks", type=positive, default=10_000, help="the root's bound, in blocks (10000)")
    add("--speed", type=positive_float, help="seconds of the trace a second (as fast as it goes)")
    options = made.parse_args()
    return judged("replay", options, measure, report)


if __name__ == "__main__":
    sys.exit(main())
