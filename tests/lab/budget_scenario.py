"""Shorter prefixes than were found, on a real engine in this process: each that a model can end a hit at.

    python tests/lab/budget_scenario.py CHECKPOINT ROOT ENGINE_JSON PROMPT_TOKENS CAP...

The choice is replaced by the given caps (tokens), one a request, so that it depends on no measurement; all
that follows it is the real thing. Prints a line of JSON: what was loaded and which tokens were made, for the
prompt before anything was stored, then for all of the hit, then for each cap.
"""

from __future__ import annotations

import json
import os
import sys

import places  # noqa: F401

from demo.engine import ENGINE_DEFAULTS, ENV_DEFAULTS

os.environ.update(ENV_DEFAULTS)


def main(path: str, root: str, engine: str, prompt: str, *caps: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from fskv.engines.vllm.budget import LoadBudget
    from fskv.routing.load_time import Cut

    transfer = KVTransferConfig(
        kv_connector="FskvConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "root": root,
            "load_budget": "auto",
            **json.loads(os.environ.get("SCENARIO_OPTIONS", "{}")),
        },
    )
    llm = LLM(model=path, kv_transfer_config=transfer, **{**ENGINE_DEFAULTS, **json.loads(engine)})
    sampling = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, seed=0
    )
    token_ids = json.loads(prompt)

    def ask(ids: list[int]) -> dict:
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
        }

    def empty() -> None:
        for _ in range(3):  # stores hold blocks, and are submitted a step late
            ask([2])
        assert llm.reset_prefix_cache()

    found = [ask(token_ids)]
    empty()
    found.append(ask(token_ids))  # measures a load
    for cap in map(int, caps):
        empty()
        chosen = Cut(cap, 0.0, 1.0) if cap else None
        LoadBudget._best = lambda self, computed, tokens, ahead_s, cut=chosen: cut
        LoadBudget._look_up_again = _trusting
        found.append(ask(token_ids))
    counted = {
        metric.name.removeprefix("vllm:fskv_"): metric.value
        for metric in llm.get_metrics()
        if "fskv" in metric.name and hasattr(metric, "value")
    }
    llm.llm_engine.engine_core.shutdown()
    print("\n" + json.dumps({"found": found, "counted": counted}), flush=True)


def _trusting(budget, verdict, lookup):
    """As the method does, but take whatever legal hit the cap gives: here no prediction may decide."""
    return lookup(verdict.taken + budget._past_cap if verdict.taken else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
