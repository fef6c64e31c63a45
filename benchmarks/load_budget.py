"""Time to the first token with a load budget, without one and without loading, on fast and crawling storage.

One real vLLM engine on a FUSE mount whose reads can be throttled (faults/mount.py). Its prompts are
computed and stored first. Then, with its own cache emptied before each request, it is asked in turns

    recompute   for a prompt without looking into any cache
    off         for a stored prompt; every hit is loaded
    auto        the same with load_budget "auto", which knows only what it measured itself

first with the mount as fast as it is, then with its reads throttled, then with `auto` alone until the mount,
fast again, is loaded from. The first `auto` on the throttled mount is the one that has to find out.

    python -m benchmarks.load_budget [--json] [--rounds 5] ...

Needs vLLM, mfusepy and /dev/fuse; writes a checkpoint of 1 GB into --checkpoints once. Figures of a CPU
engine. Exit code 1: something that fast storage had was not loaded, or tokens differ, or the median of auto
on the throttled mount is above 1.1 of the recompute's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import START_S, EngineProcess, ending
from benchmarks.load_budget_engine import WAYS, Answer, Setup, serve
from benchmarks.options import parser, positive, positive_float, settings
from benchmarks.report import judged, publish, say
from benchmarks.rig import BenchmarkError, work_directory
from demo.checkpoints import make
from faults import mount as faulty_mount

_PROMISE = 1.1
_ANSWER_S = 900.0
_RECOVER_S = 300.0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    os.makedirs(options.checkpoints, exist_ok=True)
    model = make("llama_large", options.checkpoints)
    if missing := faulty_mount.why_not():
        raise BenchmarkError(missing)
    with (
        work_directory(options.dir) as directory,
        faulty_mount.FaultyMount(Path(directory) / "fuse") as mount,
    ):
        log = f"{directory}/engine.log"
        setup = Setup(
            model,
            log,
            mount.path,
            options.prompts,
            options.prompt_tokens,
            options.block_size,
            options.deadline_s,
            len(os.sched_getaffinity(0)),
        )
        engine = EngineProcess("the engine", log, serve, setup)
        with ending([engine]):
            engine.hear(START_S + _ANSWER_S)
            say("the engine runs, and its prompts are stored")
            asked = {"fast": _rounds(engine, options, "fast")}
            slow = {"ops": ["read"], "suffix": ".kv", "bytes_per_s": options.rate_mb * 1e6}
            mount.set(slow)
            asked["crawl"] = _rounds(engine, options, "crawl")
            throttled = mount.fired()
            mount.clear()
            recovered = _recover(engine, options)
    if not throttled:
        raise BenchmarkError("no read was throttled: nothing was shown")
    return _facts(options, asked, recovered)


def _ask(engine: EngineProcess, way: str, idx: int) -> Answer:
    engine.child.say((way, idx))
    answer: Answer = engine.hear(_ANSWER_S)
    return answer


def _rounds(
    engine: EngineProcess, options: argparse.Namespace, storage: str
) -> dict[str, list[Answer]]:
    asked: dict[str, list[Answer]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        # None is always after the same one.
        order = [WAYS[(number + at) % 3] for at in range(3)]
        for way in order:
            answer = _ask(engine, way, number % options.prompts)
            asked[way].append(answer)
            say(
                f"{storage}, round {number + 1} of {options.rounds}, {way}: {answer.ttft_s:.2f} s, "
                f"{answer.cached_tokens} tokens loaded"
            )
    return asked


def _recover(engine: EngineProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Ask until a whole hit is loaded again."""
    ttfts: list[float] = []
    started = time.monotonic()
    while time.monotonic() < started + _RECOVER_S:
        answer = _ask(engine, "auto", len(ttfts) % options.prompts)
        ttfts.append(answer.ttft_s)
        if answer.cached_tokens > options.prompt_tokens // 2 and not answer.probe:
            return {"after_s": round(time.monotonic() - started, 2), "requests": len(ttfts)}
    return {"after_s": None, "requests": len(ttfts)}


def _facts(
    options: argparse.Namespace,
    asked: dict[str, dict[str, list[Answer]]],
    recovered: dict[str, Any],
) -> dict[str, Any]:
    cells = {
        storage: {way: _cell(answers, by_way["recompute"]) for way, answers in by_way.items()}
        for storage, by_way in asked.items()
    }
    tokens = {
        (number % options.prompts, answer.tokens)
        for by_way in asked.values()
        for answers in by_way.values()
        for number, answer in enumerate(answers)
    }
    same = len(tokens) == min(options.prompts, options.rounds)
    declined = sum(not answer.cached_tokens for answer in asked["fast"]["auto"])
    later = cells["crawl"]["auto"]["later"]
    return {
        "settings": settings(options),
        "cells": cells,
        "recovered": recovered,
        "declined_on_fast": declined,
        "tokens_equal": same,
        "good": same and not declined and later["ratio_p50"] <= _PROMISE,
    }


def _cell(answers: Sequence[Answer], recomputed: Sequence[Answer]) -> dict[str, Any]:
    """Seconds, and how they compare with the recompute of the same round."""
    ratios = [a.ttft_s / r.ttft_s for a, r in zip(answers, recomputed, strict=True)]
    recompute_s = statistics.median(answer.ttft_s for answer in recomputed)

    def of(chosen: slice) -> dict[str, Any]:
        times = [answer.ttft_s for answer in answers[chosen]]
        if not times:
            return {}
        return {
            "p50_s": round(statistics.median(times), 3),
            "max_s": round(max(times), 3),
            "ratio_p50": round(statistics.median(ratios[chosen]), 3),
            "ratio_max": round(max(ratios[chosen]), 3),
            "lost_max": round(max(a.lost_s for a in answers[chosen]) / recompute_s, 3),
            "loaded": sum(answer.cached_tokens > 0 for answer in answers[chosen]),
            "cut": sum(answer.cut for answer in answers[chosen]),
            "probes": sum(answer.probe for answer in answers[chosen]),
            "requests": len(times),
        }

    return {"all": of(slice(None)), "first": of(slice(0, 1)), "later": of(slice(1, None))}


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for storage, by_way in facts["cells"].items():
        for way, cell in by_way.items():
            parts = ("first", "later") if (storage, way) == ("crawl", "auto") else ("all",)
            for part in parts:
                found = cell[part]
                name = f"{storage}, {way}" + (f", {part}" if part != "all" else "")
                seconds = [f"{found[key]:.2f}" for key in ("p50_s", "max_s")]
                ratios = [f"{found[key]:.2f}" for key in ("ratio_p50", "ratio_max", "lost_max")]
                counts = [str(found[key]) for key in ("requests", "loaded", "cut", "probes")]
                rows.append([name, *seconds, *ratios, *counts])
    after = facts["recovered"]["after_s"]
    title = (
        f"Seconds to the first token, {options.prompt_tokens} tokens of prompt; the crawl reads "
        f"{options.rate_mb:g} MB/s; x: against the recompute of the same round; "
        "x lost: the most that one request spent\nin loads that were given up, against the median recompute. "
        + (
            f"Fast again: loaded after {after:.0f} s, {facts['recovered']['requests']} requests."
            if after is not None
            else f"Fast again: not loaded within {_RECOVER_S:g} s."
        )
    )
    columns = (
        *("", "p50", "max", "x p50", "x max", "x lost"),
        *("requests", "loaded", "cut", "probes"),
    )
    publish("load_budget", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("load_budget", __doc__)
    add = made.add_argument
    add("--rounds", type=positive, default=5, help="(5)")
    add("--prompts", type=positive, default=2, help="(2)")
    add("--prompt-tokens", type=positive, default=1000, help="of each (1000)")
    add("--block-size", type=positive, default=32, help="tokens of a chunk file of 2 MiB (32)")
    add("--rate-mb", type=positive_float, default=1.0, help="MB/s that the crawl reads (1)")
    add("--deadline-s", type=positive_float, default=120.0, help="of a load (120)")
    add("--checkpoints", default=".cache/checkpoints", help="(.cache/checkpoints)")
    options = made.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        made.error("vLLM is not installed in this Python: `make setup` makes an environment")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("load_budget", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
