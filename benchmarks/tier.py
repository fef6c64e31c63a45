"""How long a prompt's KV takes to files and back: FskvTier, FskvConnector and vLLM's own file tier.

Each engine is a process of its own with a root of its own, on the same prompts; the kinds take turns, and
every round begins with another one. For every prompt:

    first     the prompt is new: time to first token, and until its last chunk file is complete
    again     after vLLM's prefix cache and CPU tier were emptied: time to first token, loaded from files

`recompute` is an engine without offloading. Every engine must produce its tokens, and must have loaded every
chunk of a prompt, or nothing is reported. fskv verifies every byte that it loads, vLLM's file tier none.

    python -m benchmarks.tier [--json] [--rounds 3] [--prompts 3] [--dir DIR --direct-io auto] ...

Needs vLLM and 3 GB of memory. vLLM's tiering runs on a CPU by demo/cpu_tiering.py: GPU and CPU tier are both
host memory, and the copies between them cost what memory costs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.options import parser, positive, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import BenchmarkError, work_directory
from demo.checkpoints import MODELS, make
from demo.engine import generates, start_engine
from fskv.config import MIB

BLOCK_TOKENS = 128
TOKEN_NBYTES = {"llama_large": 64 << 10, "llama": 1 << 10}  # KV of a token
NEW_TOKENS = 8
RESET = {"reset_prefix_cache": True, "connector": True}
KINDS = ("FskvTier", "FskvConnector", "vLLM's fs tier")
STORE_S, ENGINE_S = 120.0, 900.0


def transfer(kind: str, root: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the kv_transfer_config of an engine; None for one that recomputes."""
    fskv = {
        "root": root,
        "io_threads": options.threads,
        "direct_io": options.direct_io,
        "weights_fixed": True,  # or it would stop at the first reset
        "maintenance": "off",
    }
    if kind == "recompute":
        return None
    if kind == "FskvConnector":
        connector = {**fskv, "hybrid_chunk_size": BLOCK_TOKENS}
        return {
            "kv_connector": kind,
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector,
        }
    tier = {"type": "FskvTier", "module_path": "fskv.engines.vllm_tier", **fskv}
    if kind != "FskvTier":
        tier = {"type": "fs", "root_dir": root}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": 2 * num_chunks(options) * chunk_nbytes(options),
            "secondary_tiers": [tier],
        },
    }


def num_chunks(options: argparse.Namespace) -> int:
    """Of one prompt; its last token is always computed."""
    return int((options.prompt_tokens - 1) // BLOCK_TOKENS)


def chunk_nbytes(options: argparse.Namespace) -> int:
    return BLOCK_TOKENS * TOKEN_NBYTES[options.model]


class Round:
    """One engine of one kind with its files, from start to end."""

    def __init__(self, kind: str, directory: str, options: argparse.Namespace) -> None:
        self.kind, self.options = kind, options
        self.model = MODELS[options.model]
        self.directory = directory
        self.root = f"{directory}/root"
        os.makedirs(self.root)
        self.stored: list[float] = []

    def run(self, checkpoint: str) -> dict[str, Any]:
        """Return the engine's result; the seconds until everything was on disk are in `stored`."""
        steps: list[dict[str, Any]] = [{"prompt_token_ids": [2], "max_tokens": 1}]
        for number in range(self.options.prompts):
            prompt = {
                "prompt_token_ids": self.model.tokens(f"tier{number}", self.options.prompt_tokens),
                "max_tokens": NEW_TOKENS,
            }
            steps += [{"touch_file": self._file(number, "begin")}]
            steps += [prompt | {"label": f"first{number}"}]
            steps += [{"touch_file": self._file(number, "end")}]
            if self.kind == "recompute":
                steps += [{"reset_prefix_cache": True}]
                continue
            go = {"wait_for_file": self._file(number, "go"), "timeout_s": STORE_S}
            steps += [go, RESET, prompt | {"label": f"again{number}"}, RESET]
        engine = start_engine(
            {
                "model": checkpoint,
                "engine": self.model.engine_kwargs(),
                "kv_transfer_config": transfer(self.kind, self.root, self.options),
                # The engine's core goes on stepping after a request, as it does behind `vllm serve`.
                "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                "steps": steps,
            },
            f"{self.directory}/engine",
        )
        try:
            if self.kind != "recompute":
                for number in range(self.options.prompts):
                    self._wait(engine, number)
            result = engine.wait(ENGINE_S)
        finally:
            engine.kill()
        if result["exit_code"] != 0:
            raise BenchmarkError(f"{self.kind}: {result.get('error')} (see {result['log_path']})")
        return result

    def _file(self, number: int, what: str) -> str:
        return f"{self.directory}/{number}.{what}"

    def _wait(self, engine: Any, number: int) -> None:
        """Let the engine go on when all chunks of a prompt are complete; note when that was."""
        wanted = (number + 1) * num_chunks(self.options)
        end = time.monotonic() + ENGINE_S
        since = None
        while True:
            alive = engine.running
            if os.path.exists(self._file(number, "end")):
                since = since or time.monotonic()
                files = _complete(self.root)
                if len(files) >= wanted:
                    break
            if not alive or time.monotonic() > (end if since is None else since + STORE_S):
                raise BenchmarkError(
                    f"{self.kind}: {len(_complete(self.root))} of {wanted} chunks were stored"
                )
            time.sleep(0.02)
        last = max(os.stat(path).st_mtime for path in files)
        self.stored.append(last - os.stat(self._file(number, "begin")).st_mtime)
        with open(self._file(number, "go"), "w"):
            pass


def _complete(root: str) -> list[str]:
    """Return the chunk files that have their name, of fskv or of vLLM's file tier."""
    return [
        os.path.join(where, name)
        for where, _, names in os.walk(root)
        for name in names
        if name.endswith((".kv", ".bin"))
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, the kinds taking turns, and return the facts."""
    checkpoints = os.path.abspath(os.environ.get("FSKV_CHECKPOINTS") or ".cache/checkpoints")
    checkpoint = make(options.model, checkpoints)
    expected: dict[str, list[int]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    order = ["recompute", *KINDS]
    for number in range(options.rounds):
        for kind in order:
            with work_directory(options.dir) as directory:
                one = Round(kind, f"{directory}/{number}", options)
                done = generates(one.run(checkpoint))
                shutil.rmtree(one.root)
            of_kind = times.setdefault(kind, {"first": [], "again": [], "stored": []})
            of_kind["stored"] += one.stored
            for label, step in done.items():
                if not label:
                    continue
                of_kind[label.rstrip("0123456789")].append(step["ttft_s"])
                _check(kind, label, step, expected, options)
        say(f"round {number + 1} of {options.rounds}")
        order = [*order[1:], order[0]]
    return {
        "settings": settings(options),
        "chunks": num_chunks(options),
        "kv_nbytes": num_chunks(options) * chunk_nbytes(options),
        "kinds": {
            kind: {what: spread(values) for what, values in of_kind.items() if values}
            for kind, of_kind in times.items()
        },
    }


def _check(
    kind: str,
    label: str,
    step: dict[str, Any],
    expected: dict[str, list[int]],
    options: argparse.Namespace,
) -> None:
    """Raise BenchmarkError for tokens that are not those of the first engine, or chunks not loaded."""
    prompt = label.lstrip("firstagn")
    if step["tokens"] != expected.setdefault(prompt, step["tokens"]):
        raise BenchmarkError(f"{kind}: {label} has other tokens than the engine without offloading")
    wanted = num_chunks(options) * BLOCK_TOKENS if label.startswith("again") else 0
    if step["num_cached_tokens"] != wanted:
        raise BenchmarkError(
            f"{kind}: {step['num_cached_tokens']} tokens of {label} were cached, expected {wanted}"
        )


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for kind, found in facts["kinds"].items():
        rows.append(
            [kind, *(show(found[w]) if w in found else "" for w in ("first", "stored", "again"))]
        )
    title = (
        f"{options.prompt_tokens} tokens, {facts['chunks']} chunks of {chunk_nbytes(options) / MIB:g} MiB; "
        f"seconds, median [least - greatest] of {options.rounds} x {options.prompts}."
    )
    columns = ("", "first token, new", "all stored after", "first token, from files")
    publish("tier", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("tier", __doc__)
    made.add_argument("--model", choices=TOKEN_NBYTES, default="llama_large", help="(llama_large)")
    made.add_argument("--rounds", type=positive, default=3, help="engines of each kind (3)")
    made.add_argument("--prompts", type=positive, default=3, help="of each engine (3)")
    made.add_argument("--prompt-tokens", type=positive, default=4100, help="of each prompt (4100)")
    options = made.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        made.error("vLLM is not installed in this Python: `make setup` makes an environment")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("tier", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
