"""What the programs have in common that make engines themselves, in their own process."""

from __future__ import annotations

import json
import os
from typing import Any

import places  # noqa: F401

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def make_llm(model: Any, checkpoint: str, transfer: dict[str, Any] | None, **more: Any) -> Any:
    """Make an engine; `transfer` is what its connector is configured with, if it has one."""
    from engine_lab import KV_NBYTES
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from demo.engine import ENGINE_DEFAULTS

    small = {"kv_cache_memory_bytes": KV_NBYTES}
    return LLM(
        model=checkpoint,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **{**ENGINE_DEFAULTS, **small, **model.engine_kwargs(), **more},
    )


def sampling(count: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more
    )


def ask(llm: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """Ask for one prompt, and step until it is answered."""
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling(count), use_tqdm=False)
    return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}


def tell(answer: dict[str, Any]) -> None:
    """Print what `engine_lab.scenario` returns."""
    print("\n" + json.dumps(answer), flush=True)
