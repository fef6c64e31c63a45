"""Time to first token of prompts that an engine has seen before: no connector, vLLM's CPU offload, fskv.

Without --model an engine of Llama-3-8B's shape, with dummy weights: only time is measured. Each way is an
engine of its own; between new and seen prompts vLLM's own cache is emptied.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.options import parser, positive
from benchmarks.report import command
from demo.checkpoints import MODELS
from demo.engine import SETTLE, generates, run_engine

_ENGINE_S = 280.0
_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCH_COMPILE_DISABLE": "0"}
_WAYS = ("no connector", "vLLM's CPU offload", "fskv, host", "fskv, gds")


def connector(way: str, directory: str, offload_gib: int) -> dict[str, Any] | None:
    """Return what KVTransferConfig takes; makes fskv's root."""
    if way == "no connector":
        return None
    name, extra = "OffloadingConnector", dict[str, Any](cpu_bytes_to_use=offload_gib << 30)
    if way.startswith("fskv"):
        root, transport = f"{directory}/root", way.rpartition(" ")[2]
        os.mkdir(root)
        name, extra = "FskvConnector", {"root": root, "transport": transport}
        extra["weights_id"] = "benchmark"
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    engine = {"max_model_len": options.prompt_tokens + 64, "max_num_batched_tokens": 8192}
    engine |= {"dtype": options.dtype, "enforce_eager": options.eager}
    model = options.model or f"{options.dir}/model"
    if options.model is None:
        os.mkdir(model)
        with open(f"{model}/config.json", "w") as file:
            json.dump({**_SHAPE, "torch_dtype": options.dtype}, file)
        engine["load_format"] = "dummy"
    prompts = [
        MODELS["llama"].tokens(f"{n}", options.prompt_tokens) for n in range(options.prompts)
    ]
    new: list[dict[str, Any]] = [
        {"prompt_token_ids": prompt, "max_tokens": 2, "label": f"new {n}"}
        for n, prompt in enumerate(prompts)
    ]
    seen = [{**ask, "label": ask["label"].replace("new", "seen")} for ask in new]
    steps = [*SETTLE, *new, *SETTLE, {"reset_prefix_cache": True}, *seen]
    found: dict[str, Any] = {}
    for way in options.way or _WAYS:
        directory = f"{options.dir}/{way}"
        os.mkdir(directory)
        request = {"model": model, "engine": engine, "env": _ENV, "steps": steps}
        request["kv_transfer_config"] = connector(way, directory, options.offload_gib)
        result = run_engine(request, _ENGINE_S, directory)
        if result["exit_code"] != 0:  # the others are worth something without it
            found |= {f"{way}: failed": str(result.get("error")), "good": False}
            continue
        done = generates(result)
        for when, asks in (("new", new), ("seen", seen)):
            times = [done[ask["label"]]["ttft_s"] for ask in asks]
            found[f"{way}: {when}, median ms"] = statistics.median(times) * 1e3
        cached = sum(done[ask["label"]]["num_cached_tokens"] or 0 for ask in seen)
        found[f"{way}: tokens of hits"] = cached
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser("gpu.first_token", __doc__)
    add = made.add_argument
    add("--model", help="a directory")
    add("--dtype", default="bfloat16")
    add("--eager", action="store_true")
    add("--prompts", type=positive, default=6)
    add("--prompt-tokens", type=positive, default=16000)
    add("--offload-gib", type=positive, default=32, help="CPU memory for vLLM's own (32)")
    add("--way", action="append", choices=_WAYS, help="only this one (repeatable)")
    options = made.parse_args(arguments)

    def run() -> int:
        found = measure(options)
        print(json.dumps(found))
        return 0 if found.get("good", True) else 1

    return command("gpu.first_token", run)


if __name__ == "__main__":
    sys.exit(main())
