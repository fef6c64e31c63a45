"""Time to the first token of requests that wait behind others, with and without reading ahead.

One real vLLM engine on a FUSE mount whose reads can be throttled (faults/mount.py). The prompts of the queued
requests are computed and stored first. Then in each round, with the engine's own cache emptied, as many
requests as it may run at once are begun, and the queued ones are added behind them: once with what they will
load read ahead (`prefetch_bytes`), once without, in turns. First on the throttled mount, then on the mount as
fast as it is.

    python -m benchmarks.prefetch [--json] [--rounds 5] ...

Needs vLLM, mfusepy and /dev/fuse. Figures of a CPU engine and a small model with much KV per token. Exit
code 1: a hit was not loaded, tokens differ, nothing was read ahead, the median on the throttled mount is no
better with it, or the one on the fast mount is above 1.1 of the one without.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import START_S, EngineProcess, ending
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.prefetch_engine import WAYS, Answer, Setup, serve
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import BenchmarkError, work_directory
from faults import mount as faulty_mount

_PROMISE = 1.1
_ANSWER_S = 900.0
MIB = 1 << 20


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if missing := faulty_mount.why_not():
        raise BenchmarkError(missing)
    with (
        work_directory(options.dir) as directory,
        faulty_mount.FaultyMount(Path(directory) / "fuse") as mount,
    ):
        log = f"{directory}/engine.log"
        setup = Setup(
            model=f"{directory}/model",
            log=log,
            root=mount.path,
            queued=options.queued,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            busy=options.busy,
            busy_tokens=options.busy_tokens,
            block_size=options.block_size,
            prefetch_bytes=options.prefetch_mib * MIB,
            deadline_s=options.deadline_s,
            num_threads=max(1, len(os.sched_getaffinity(0)) // 2),  # the others are the mount's
        )
        engine = EngineProcess("the engine", log, serve, setup)
        with ending([engine]):
            engine.hear(START_S + _ANSWER_S)
            say("the engine runs, and its prompts are stored")
            slow = {"ops": ["read"], "suffix": ".kv", "bytes_per_s": options.rate_mb * 1e6}
            mount.set(slow)
            asked = {"throttled": _rounds(engine, options, "throttled")}
            throttled = mount.fired()
            mount.clear()
            asked["fast"] = _rounds(engine, options, "fast")
    if not throttled:
        raise BenchmarkError("no read was throttled: nothing was shown")
    return _facts(options, asked)


def _rounds(
    engine: EngineProcess, options: argparse.Namespace, storage: str
) -> dict[str, list[Answer]]:
    asked: dict[str, list[Answer]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            engine.child.say(way)
            answer: Answer = engine.hear(_ANSWER_S)
            asked[way].append(answer)
            say(
                f"{storage}, round {number + 1} of {options.rounds}, {way}: "
                f"median {statistics.median(answer.ttft_s):.2f} s, last {max(answer.ttft_s):.2f} s, "
                f"{answer.used} chunks used of {answer.used + answer.dropped} read ahead, "
                f"{sum(answer.cached_tokens)} tokens loaded; "
                f"those ahead took {answer.busy_s:.2f} s"
            )
    return asked


def _facts(
    options: argparse.Namespace, asked: dict[str, dict[str, list[Answer]]]
) -> dict[str, Any]:
    cells = {
        storage: {way: _cell(answers) for way, answers in by_way.items()}
        for storage, by_way in asked.items()
    }
    answers = [one for by_way in asked.values() for of_way in by_way.values() for one in of_way]
    same = len({answer.tokens for answer in answers}) == 1
    loaded = all(min(answer.cached_tokens) > 0 for answer in answers)
    used = all(answer.used for by_way in asked.values() for answer in by_way["with"])
    ratios = {
        storage: round(by_way["with"]["p50"]["median"] / by_way["without"]["p50"]["median"], 3)
        for storage, by_way in cells.items()
    }
    return {
        "settings": settings(options),
        "cells": cells,
        "ratios": ratios,
        "tokens_equal": same,
        "all_loaded": loaded,
        "read_ahead": used,
        "good": same and loaded and used and ratios["throttled"] < 1 and ratios["fast"] <= _PROMISE,
    }


def _cell(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of the rounds: seconds to the first token, its median and its last one in each, and chunks."""
    return {
        "p50": spread([statistics.median(answer.ttft_s) for answer in answers]),
        "last": spread([max(answer.ttft_s) for answer in answers]),
        "busy": spread([answer.busy_s for answer in answers]),
        "used": sum(answer.used for answer in answers),
        "dropped": sum(answer.dropped for answer in answers),
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [
            f"{storage}, {way}",
            *(show(cell[key]) for key in ("p50", "last", "busy")),
            *(str(cell[key]) for key in ("used", "dropped")),
        ]
        for storage, by_way in facts["cells"].items()
        for way, cell in by_way.items()
    ]
    title = (
        f"Seconds to the first token of {options.queued} queued requests of {options.prompt_tokens} tokens; "
        f"throttled: {options.rate_mb:g} MB/s; median [least - greatest] of {options.rounds} rounds.\n"
        f"The median with prefetch against the one without: {facts['ratios']['throttled']:.2f} throttled, "
        f"{facts['ratios']['fast']:.2f} fast."
    )
    columns = ("", "median request", "last request", "those ahead", "chunks used", "dropped")
    publish("prefetch", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("prefetch", __doc__)
    add = made.add_argument
    add("--rounds", type=positive, default=5, help="(5)")
    add("--queued", type=positive, default=16, help="requests that wait (16)")
    add("--prompt-tokens", type=positive, default=500, help="of each (500)")
    add("--new-tokens", type=positive, default=4, help="of each (4)")
    add("--busy", type=positive, default=4, help="requests that run at once (4)")
    add(
        "--busy-tokens",
        type=positive,
        default=450,
        help="of each that is ahead of the others (450)",
    )
    add("--block-size", type=positive, default=32, help="tokens of a chunk file of 2 MiB (32)")
    add("--prefetch-mib", type=positive, default=512, help="(512)")
    add("--rate-mb", type=positive_float, default=100.0, help="MB/s of the throttled mount (100)")
    add("--deadline-s", type=positive_float, default=120.0, help="of a load (120)")
    options = made.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        made.error("vLLM is not installed in this Python: `make setup` makes an environment")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("prefetch", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
