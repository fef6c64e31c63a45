"""LMCache's own benchmark asks served engines: recompute, vLLM's file tier, fs_native, fskv behind each.

    FSKV_LMCACHE_MODEL=DIR python tests/lmcache_engines/harness.py [--rounds 3] [--dir DIR] [--json]

In the environment of `make test-lmcache`. In each round one engine of each way is started on an empty root,
as `vllm serve` starts it, and the ways take turns. `lmcache bench engine` asks it for answers about long
documents and for many rounds of chats, each after a warm-up of its own that asks for each document and each
chat once. The KV cache, and with vLLM's tiers the memory behind it, hold fewer of them than there are, so
that what is asked for again comes from files; LMCache has it in its memory as well. Seconds and tokens a
second are the harness's, tokens from outside the engine's.

Exit code 1: a request failed, or a way of fskv's loaded nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

import lmcache_lab as lab
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks.options import parser, positive, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import BenchmarkError, work_directory
from benchmarks.side_by_side import BLOCK_TOKENS, KINDS, connector, session_cpu_s, token_nbytes

ADAPTERS: dict[str, Callable[[pathlib.Path], dict[str, Any]]] = {
    "LMCache, fs_native": lambda root: {"type": "fs_native", "base_path": str(root)},
    "LMCache, fskv": lambda root: lab.plugin(root, block_tokens=BLOCK_TOKENS, dtype="float32"),
}
WAYS = (*KINDS, *ADAPTERS)
# Of four documents or chats, two and a half fit into the KV cache and one into vLLM's memory behind it.
NUM, TOKENS, GPU_BLOCKS, CPU_BLOCKS = 4, 1500, 30, 15
# LMCache stores nothing while its memory is full, and makes room once a second, so all may be there.
LMCACHE_GB = 1.0
SYSTEM_TOKENS, QUERY_TOKENS, ANSWER_TOKENS = 400, 20, 16
WORKLOADS: dict[str, dict[str, Any]] = {
    "long-doc-qa": {
        "ldqa-document-length": TOKENS,
        "ldqa-query-per-document": 3,
        "ldqa-shuffle-policy": "tile",
        "ldqa-num-inflight-requests": 1,
        "ldqa-max-output-length": ANSWER_TOKENS,
    },
    "multi-round-chat": {
        "mrc-shared-prompt-length": SYSTEM_TOKENS,
        "mrc-chat-history-length": TOKENS - SYSTEM_TOKENS,
        "mrc-user-input-length": QUERY_TOKENS,
        "mrc-output-length": ANSWER_TOKENS,
        "mrc-qps": 0.5,
        "mrc-duration": 30,
    },
}
HITS = "vllm:external_prefix_cache_hits_total"
ASK_S, SETTLE_S = 600, 3.0


def one(way: str, directory: pathlib.Path) -> dict[str, Any]:
    """Start an engine of one way, let the harness ask it, and return the facts by workload."""
    root = directory / "root"
    root.mkdir(parents=True)
    nbytes = token_nbytes(lab.MODEL)
    cpu_nbytes = CPU_BLOCKS * BLOCK_TOKENS * nbytes
    with contextlib.ExitStack() as stack:
        sessions = []
        if way in ADAPTERS:
            size = ("--l1-size-gb", str(LMCACHE_GB))
            server = lab.Server(directory / "server.log", ADAPTERS[way](root), options=size)
            sessions.append(stack.enter_context(server).process.pid)
            transfer = lab.connector(server.port)
        else:
            transfer = connector(way, str(root), cpu_nbytes)
        engine = stack.enter_context(
            lab.Served(
                directory / "engine.log",
                transfer,
                **{
                    "dtype": "float32",
                    "block-size": BLOCK_TOKENS,
                    "max-model-len": 2048,
                    "max-num-seqs": 4,
                    "num-gpu-blocks-override": GPU_BLOCKS,
                },
            )
        )
        sessions.append(engine.process.pid)
        facts: dict[str, Any] = {}
        for workload in WORKLOADS:
            cpu_s, loaded = sum(map(session_cpu_s, sessions)), engine.metric(HITS)
            facts[workload] = harness(engine.url, workload, directory / workload, nbytes)
            time.sleep(SETTLE_S)  # what is still being stored
            facts[workload]["cpu_s"] = sum(map(session_cpu_s, sessions)) - cpu_s
            facts[workload]["loaded_tokens"] = engine.metric(HITS) - loaded
    files = [path for path in root.rglob("*") if path.suffix in (".data", ".kv", ".bin")]
    facts["files"] = {"number": len(files), "nbytes": sum(path.stat().st_size for path in files)}
    return facts


def harness(url: str, workload: str, directory: pathlib.Path, nbytes: int) -> dict[str, Any]:
    """Return what `lmcache bench engine` found."""
    directory.mkdir()
    options = {
        "engine-url": url,
        "model": lab.MODEL,
        "workload": workload,
        "tokens-per-gb-kvcache": int(1e9 / nbytes),
        "kv-cache-volume": (NUM + 0.1) * TOKENS * nbytes / 1e9,
        "output-dir": directory,
        **WORKLOADS[workload],
    }
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "engine", "--no-interactive"]
    command += ["--json", "--no-csv", "--quiet", "--ignore-eos"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    env = os.environ | lab.environment()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ASK_S)
    summary = directory / "bench_summary.json"
    if not summary.exists():
        raise BenchmarkError(f"lmcache bench engine: {(done.stdout + done.stderr)[-2000:]}")
    return dict(json.loads(summary.read_text())["results"])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    order = list(WAYS)
    with work_directory(options.dir) as directory:
        for number in range(options.rounds):
            for way in order:
                place = pathlib.Path(directory, f"{number}-{WAYS.index(way)}")
                found[way].append(one(way, place))
                shutil.rmtree(place)
                said = [f"{w} {found[way][-1][w]['p50_ttft_ms']:.0f} ms" for w in WORKLOADS]
                say(f"round {number + 1} of {options.rounds}: {way}: {', '.join(said)}")
            order = [*order[1:], order[0]]
    runs = [(way, run[workload]) for way in WAYS for run in found[way] for workload in WORKLOADS]
    return {
        "settings": settings(options),
        "ways": found,
        "good": all(
            not run["failed_requests"] and (run["loaded_tokens"] > 0 or "fskv" not in way.lower())
            for way, run in runs
        ),
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    def of(way: str, workload: str, name: str, scale: float = 1.0, digits: int = 2) -> str:
        values = [run[workload][name] * scale for run in facts["ways"][way]]
        return show(spread(values), digits)

    for workload in WORKLOADS:
        rows = [
            [
                way,
                of(way, workload, "p50_ttft_ms", 1e-3),
                of(way, workload, "p99_ttft_ms", 1e-3),
                of(way, workload, "input_throughput", digits=0),
                of(way, workload, "loaded_tokens", digits=0),
                of(way, workload, "cpu_s", digits=0),
                str(sum(run[workload]["failed_requests"] for run in facts["ways"][way])),
            ]
            for way in WAYS
        ]
        number = facts["ways"][WAYS[0]][0][workload]["total_requests"]
        title = (
            f"{workload}, {number} requests of about {TOKENS} tokens: seconds to the first token, tokens a "
            f"second of prompts; median [least - greatest] of {options.rounds} rounds."
        )
        columns = ("", "p50", "p99", "tokens/s", "tokens from outside", "CPU s", "failed")
        publish("harness", facts, (title, columns, rows), as_json=options.json)
        if options.json:
            return


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("harness", __doc__)
    made.add_argument("--rounds", type=positive, default=3, help="engines of each way (3)")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(judged("harness", parse(None), measure, report))
