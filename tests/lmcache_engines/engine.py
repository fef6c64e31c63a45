"""A real vLLM engine with LMCache's connector: reads a step a line, answers each with a line of JSON.

{"generate": TEXT, "tokens": 8}   ids, tokens of the prompt and from LMCache, seconds to the first token
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import time
import types


def numba_and_vllm():
    """Let vLLM 0.32's scan of kernels pass objects of numba, whose __dict__ is none."""
    from vllm.triton_utils import dispatcher

    def only_plain(value):
        found = builtins.vars(value)
        return found if isinstance(found, dict | types.MappingProxyType) else {}

    dispatcher.vars = only_plain


def answer(llm, step):
    from vllm import SamplingParams

    ids = llm.get_tokenizer()(step["generate"]).input_ids
    prompt = {"prompt_token_ids": ids}
    began = time.monotonic()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (first,) = llm.generate([prompt], one, use_tqdm=False)
    first_s = time.monotonic() - began
    more = SamplingParams(temperature=0, max_tokens=step.get("tokens", 8), ignore_eos=True)
    (said,) = llm.generate([prompt], more, use_tqdm=False)
    return {
        "ids": list(said.outputs[0].token_ids),
        "prompt_tokens": len(ids),
        "loaded": first.num_cached_tokens or 0,  # the engine's own prefix cache is off
        "first_s": first_s,
    }


def main():
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to 1
    os.dup2(2, 1)
    numba_and_vllm()
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            said = answer(llm, json.loads(line))
        except Exception as error:
            said = {"error": repr(error)}
        print(json.dumps(said), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
