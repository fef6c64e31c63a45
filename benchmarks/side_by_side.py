"""Real weights, side by side: recompute, vLLM's file tier, FskvConnector and FskvTier; then with bad files.

Each engine is a process with a root of its own, on the same prompts, and the kinds take turns. The prompts
are questions about documents: groups that share a prefix, one after another, more of them than the KV cache
and the CPU tier hold together. So a document comes from files each time but the first.

    cold       the first question about each document
    warm       two more about each
    missing    one about each, after every second file was removed
    slow       one about each, while every read takes --slow-ms
    damaged    one about each, after the middle of every second file became zeros

Right is what the engine without offloading answers. A request fails where the engine ends before it answered.

    python -m benchmarks.side_by_side --model DIR [--rounds 3] [--documents 4] [--dir DIR] [--json]

DIR holds real weights and tokenizer.json. Needs vLLM and a C compiler (`slow`). vLLM's tiering runs on a
CPU by demo/cpu_tiering.py: its CPU tier is host memory as the KV cache is, and copies between them cost what
memory costs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.options import parser, positive, settings
from benchmarks.questions import Documents
from benchmarks.report import judged, percentile, publish, say, show, spread
from benchmarks.rig import BenchmarkError, work_directory
from demo.engine import RunningEngine
from faults.disk import DiskFaults, build_library

BLOCK_TOKENS, ANSWER_TOKENS = 128, 8
KINDS = ("recompute", "vLLM's fs tier", "FskvConnector", "FskvTier")
PASSES = {
    "cold": 1,
    "warm": 2,
    "missing": 1,
    "slow": 1,
    "damaged": 1,
}  # questions about each document
FAULTS = ("missing", "slow", "damaged")
SETTLED_S, STORE_S, ENGINE_S = 2.0, 120.0, 1800.0


class Plan:
    """What is asked in which pass, and how large things are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        documents = Documents(options.model, number=options.documents, tokens=options.tokens)
        questions = iter(range(sum(PASSES.values())))
        self.prompts: dict[str, list[list[int]]] = {
            name: [
                documents.prompt(document, question)
                for question in [next(questions) for _ in range(times)]
                for document in range(options.documents)
            ]
            for name, times in PASSES.items()
        }
        longest = max(len(prompt) for prompts in self.prompts.values() for prompt in prompts)
        self.blocks = -(-(longest + ANSWER_TOKENS) // BLOCK_TOKENS)
        self.chunk_nbytes = BLOCK_TOKENS * token_nbytes(options.model)

    @property
    def gpu_blocks(self) -> int:
        """Of the engine's KV cache: for less than half of the documents, and a request."""
        groups = num_groups(self.options.model)
        return int(self.blocks * groups * max(2, self.options.documents // 2) + 1)

    @property
    def cpu_nbytes(self) -> int:
        """Of the CPU tier, for one document and a bit more."""
        return int(self.chunk_nbytes * (self.blocks + 2))


def num_groups(model: str) -> int:
    """Return how many KV groups vLLM makes of the layers of the checkpoint in a directory.

    As many layers are in each as there are of the rarest kind.
    """
    kinds = Counter(_config(model).get("layer_types") or ["full_attention"])
    return sum(-(-number // min(kinds.values())) for number in kinds.values())


def token_nbytes(model: str) -> int:
    """Return the bytes of a token's KV in float32, of the checkpoint in a directory."""
    config = _config(model)
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * heads * dim * 2 * 4)


def _config(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(pathlib.Path(model, "config.json").read_text())
    return config


def connector(
    kind: str, root: str, cpu_nbytes: int, direct_io: str = "off"
) -> dict[str, Any] | None:
    """Return the kv_transfer_config of an engine; None for one that recomputes.

    `cpu_nbytes`: of the CPU tier, where there is one.
    """
    # Of everybody's patience: a busy machine is waited for. The deadlines of loads are the defaults.
    fskv = {"root": root, "maintenance": "off", "direct_io": direct_io}
    if kind == "recompute":
        return None
    if kind == "FskvConnector":
        extra = {**fskv, "hybrid_chunk_size": BLOCK_TOKENS, "lookup_timeout_s": 10}
        return {"kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    tier = {"type": "FskvTier", "module_path": "fskv.engines.vllm_tier", **fskv}
    if kind != "FskvTier":
        tier = {"type": "fs", "root_dir": root}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": cpu_nbytes,
            "secondary_tiers": [tier],
        },
    }


class Run:
    """One engine of one kind, and what was done to its files between the passes."""

    def __init__(self, kind: str, directory: str, plan: Plan, library: str | None) -> None:
        self.kind, self.plan, self.directory = kind, plan, directory
        self.root = f"{directory}/root"
        os.makedirs(self.root)
        self.faults = None
        if library is not None:
            self.faults = DiskFaults(
                library, pathlib.Path(self.root), pathlib.Path(directory, "faults")
            )
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self.nbytes = 0
        self.num_spoilt = 0

    def run(self) -> dict[str, Any]:
        """Return the engine's result, which may be that of one that ended before its time."""
        steps: list[dict[str, Any]] = [{"prompt_token_ids": [2], "max_tokens": 1, "label": ""}]
        for name, prompts in self.plan.prompts.items():
            steps += [{"touch_file": self._file(name, "reached")}]
            steps += [{"wait_for_file": self._file(name, "go"), "timeout_s": 2 * STORE_S}]
            steps += [
                {"prompt_token_ids": p, "max_tokens": ANSWER_TOKENS, "label": f"{name}-{n}"}
                for n, p in enumerate(prompts)
            ]
        steps += [{"touch_file": self._file("end", "reached")}]
        engine = RunningEngine(
            {
                "model": self.plan.options.model,
                "engine": {
                    "dtype": "float32",
                    "block_size": BLOCK_TOKENS,
                    "num_gpu_blocks_override": self.plan.gpu_blocks,
                    "max_model_len": self.plan.blocks * BLOCK_TOKENS,
                },
                "kv_transfer_config": connector(
                    self.kind, self.root, self.plan.cpu_nbytes, self.plan.options.direct_io
                ),
                "env": {
                    # The engine's core goes on stepping after a request, as it does behind `vllm serve`.
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    **(self.faults.env() if self.faults else {}),
                },
                "flush": False,
                "steps": steps,
            },
            f"{self.directory}/engine",
        )
        try:
            self._walk(engine)
            return engine.wait(ENGINE_S)
        finally:
            engine.kill()

    def _walk(self, engine: Any) -> None:
        before: tuple[str, float, float] | None = None
        for name in (*self.plan.prompts, "end"):
            while not os.path.exists(self._file(name, "reached")):
                if not engine.running:
                    return
                time.sleep(0.02)
            cpu_s, now = session_cpu_s(engine.pid), time.monotonic()
            if before is not None:
                last, cpu_before, began = before
                self.cpu_s[last], self.wall_s[last] = cpu_s - cpu_before, now - began
            if self.kind != "recompute" and name != "end":
                self._prepare(name)
            before = name, session_cpu_s(engine.pid), time.monotonic()
            with open(self._file(name, "go"), "w"):
                pass

    def _prepare(self, name: str) -> None:
        if name != "cold":
            self._settle()
        if name == "warm":
            self.nbytes = sum(os.path.getsize(path) for path in files(self.root))
        if self.faults is not None:
            slow = f"pread slow_ms={self.plan.options.slow_ms}"
            reads = [slow, slow.replace("pread", "read")]
            self.faults.set(*reads) if name == "slow" else self.faults.clear()
        spoil: Callable[[str], None] | None = {"missing": os.unlink, "damaged": zero_middle}.get(
            name
        )
        if spoil is not None:
            for path in files(self.root)[::2]:
                spoil(path)
                self.num_spoilt += 1

    def _settle(self) -> None:
        """Wait until no file was added for a while."""
        since, known, end = time.monotonic(), -1, time.monotonic() + STORE_S
        while time.monotonic() < min(since + SETTLED_S, end):
            if (number := len(files(self.root))) != known:
                since, known = time.monotonic(), number
            time.sleep(0.1)

    def _file(self, name: str, what: str) -> str:
        return f"{self.directory}/{name}.{what}"


def files(root: str) -> list[str]:
    """Return the chunk files that have their name, of fskv or of vLLM's file tier."""
    return sorted(
        os.path.join(where, name)
        for where, _, names in os.walk(root)
        for name in names
        if name.endswith((".kv", ".bin"))
    )


def zero_middle(path: str) -> None:
    """Make zeros of the middle half of a file, as a power cut may."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(size // 4)
        file.write(bytes(size // 2))


def session_cpu_s(session: int) -> float:
    """Return the CPU seconds of all processes of a session and of their children that ended."""
    ticks = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = pathlib.Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, the kinds taking turns, and return the facts."""
    plan = Plan(options)
    right: dict[str, list[int]] = {}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    order = list(KINDS)
    with work_directory(options.dir) as directory:
        library = build_library(directory)
        if library is None:
            say("side_by_side: no C compiler, so reads cannot be made slow")
        for number in range(options.rounds):
            for kind in order:
                one = Run(kind, f"{directory}/{number}-{KINDS.index(kind)}", plan, library)
                result = one.run()
                shutil.rmtree(one.root)
                found[kind].append(judge(one, result, right))
                say(f"round {number + 1} of {options.rounds}: {kind}: {summary(found[kind][-1])}")
            # The first stays the first: it says what is right.
            order = [order[0], *order[2:], order[1]]
    return {
        "settings": settings(options),
        "requests": {name: len(prompts) for name, prompts in plan.prompts.items()},
        "prompt_tokens": len(plan.prompts["cold"][0]),
        "chunk_nbytes": plan.chunk_nbytes,
        "kinds": found,
        # Of fskv alone: what others answer is what is measured.
        "good": all(
            passed["wrong"] == passed["failed"] == 0
            for kind in KINDS
            if "Fskv" in kind
            for run in found[kind]
            for passed in run["passes"].values()
        ),
    }


def judge(one: Run, result: dict[str, Any], right: dict[str, list[int]]) -> dict[str, Any]:
    """Return the facts of one engine; the first one that recomputes fills `right`."""
    answers = {s["label"]: s for s in result["steps"] if s["step"] == "generate" and s["label"]}
    passes = {}
    for name, prompts in one.plan.prompts.items():
        labels = [f"{name}-{n}" for n in range(len(prompts))]
        got = [answers[label] for label in labels if label in answers]
        if one.kind == "recompute":
            for label in labels:
                if label in answers:
                    right.setdefault(label, answers[label]["tokens"])
        passes[name] = {
            "ttft_s": [round(answer["ttft_s"], 3) for answer in got],
            "from_cache": [answer["num_cached_tokens"] for answer in got],
            "wrong": sum(answer["tokens"] != right.get(answer["label"]) for answer in got),
            "failed": len(labels) - len(got),
            "cpu_s": round(one.cpu_s.get(name, 0.0), 2),
            "wall_s": round(one.wall_s.get(name, 0.0), 2),
        }
    if one.kind == "recompute" and len(right) < sum(map(len, one.plan.prompts.values())):
        raise BenchmarkError(f"recompute: {result.get('error')} (see {result['log_path']})")
    return {
        "passes": passes,
        "nbytes": one.nbytes,
        "spoilt": one.num_spoilt,
        "error": result.get("error"),
    }


def summary(run: dict[str, Any]) -> str:
    """Return one line of progress."""
    words = [
        f"{name} {percentile(passed['ttft_s'], 50):.2f} s" if passed["ttft_s"] else f"{name} -"
        for name, passed in run["passes"].items()
    ]
    bad = [
        f"{passed[what]} {what} ({name})"
        for name, passed in run["passes"].items()
        for what in ("wrong", "failed")
        if passed[what]
    ]
    return ", ".join([*words, *bad, *([run["error"]] if run["error"] else [])])


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    def of(kind: str, name: str, value: Callable[[dict[str, Any]], float | None]) -> str:
        values = [value(run["passes"][name]) for run in facts["kinds"][kind]]
        known = [v for v in values if v is not None]
        return show(spread(known)) if known else "-"

    def at(percent: float) -> Callable[[dict[str, Any]], float | None]:
        return lambda p: percentile(p["ttft_s"], percent) if p["ttft_s"] else None

    def rate(passed: dict[str, Any]) -> float | None:
        return len(passed["ttft_s"]) / passed["wall_s"] if passed["wall_s"] else None

    def total(kind: str, name: str, what: str) -> str:
        return str(sum(run["passes"][name][what] for run in facts["kinds"][kind]))

    rows = [
        [
            kind,
            of(kind, "cold", at(50)),
            of(kind, "warm", at(50)),
            of(kind, "warm", at(99)),
            of(kind, "warm", rate),
            of(kind, "warm", lambda p: p["cpu_s"] / max(1, len(p["ttft_s"]))),
            f"{facts['kinds'][kind][0]['nbytes'] / 2**20:.0f}",
        ]
        for kind in KINDS
    ]
    title = (
        f"{options.documents} documents, prompts of {facts['prompt_tokens']} tokens; seconds to the first "
        f"token; median [least - greatest] of {options.rounds} rounds."
    )
    columns = (
        "",
        "cold p50",
        "warm p50",
        "warm p99",
        "warm requests/s",
        "CPU s/request",
        "MiB in files",
    )
    publish("side_by_side", facts, (title, columns, rows), as_json=options.json)
    if options.json:
        return
    bad = [
        [
            kind,
            name,
            of(kind, name, at(50)),
            of(kind, name, at(100)),
            total(kind, name, "wrong"),
            total(kind, name, "failed"),
        ]
        for name in FAULTS
        for kind in KINDS
    ]
    number = facts["requests"]["slow"] * options.rounds
    title = f"With bad files, {number} requests each; slow reads take {options.slow_ms} ms."
    heads = ("", "files", "p50", "slowest", "wrong answers", "failed requests")
    publish("side_by_side", facts, (title, heads, bad), as_json=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("side_by_side", __doc__)
    made.add_argument("--model", required=True, help="directory of a checkpoint with real weights")
    made.add_argument("--rounds", type=positive, default=3, help="engines of each kind (3)")
    made.add_argument("--documents", type=positive, default=4, help="(4)")
    made.add_argument("--tokens", type=positive, default=900, help="of a document (900)")
    made.add_argument("--slow-ms", type=positive, default=3000, help="of a read (3000)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("side_by_side", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
