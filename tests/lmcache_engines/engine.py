"""A real vLLM engine with LMCache's connector: reads a step a line, answers each with a line of JSON.

{"generate": TEXT, "tokens": 8}   ids as text, tokens of the prompt and from LMCache, seconds to the first one
"""

from __future__ import annotations

import builtins
import time
import types

from asked_engine import answer_lines


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
        "text": list(said.outputs[0].token_ids),
        "prompt_tokens": len(ids),
        "loaded": first.num_cached_tokens or 0,  # the engine's own prefix cache is off
        "first_s": first_s,
    }


def make(**arguments):
    numba_and_vllm()
    from vllm import LLM

    return LLM(**arguments)


if __name__ == "__main__":
    answer_lines(make, answer).llm_engine.engine_core.shutdown()
