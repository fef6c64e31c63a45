"""A real SGLang engine in a process of its own: reads a step a line, answers each with a line of JSON.

{"generate": TEXT, "tokens": 8}   text, ids, tokens from storage, seconds to the first token
{"flush": true}                    forgets what is in device and host memory
{"update_weights": PATH}           loads the weights again
"""

from __future__ import annotations

import time

from asked_engine import answer_lines


def answer(engine, step):
    if "generate" in step:
        params = {"temperature": 0, "max_new_tokens": step.get("tokens", 8), "ignore_eos": True}
        began = time.monotonic()
        first = None
        for chunk in engine.generate(step["generate"], params, stream=True):
            first = first or time.monotonic() - began
            out = chunk
        meta = out["meta_info"]
        return {
            "text": out["text"],
            "prompt_tokens": meta["prompt_tokens"],
            "cached": meta["cached_tokens"],
            "loaded": (meta.get("cached_tokens_details") or {}).get("storage", 0),
            "first_s": first,
        }
    if "flush" in step:
        # A backup that is still under way keeps the cache from being flushed.
        for _ in range(300):
            if getattr(engine.flush_cache(), "success", True):
                return {}
            time.sleep(0.1)
        return {"error": "not flushed"}
    if "update_weights" in step:
        return {"updated": bool(engine.update_weights_from_disk(step["update_weights"])[0])}
    return {"error": f"unknown step {step}"}


def make(**arguments):
    import sglang

    return sglang.Engine(**arguments)


if __name__ == "__main__":
    answer_lines(make, answer).shutdown()
