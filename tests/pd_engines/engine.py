"""Child process of test_pd: demo/engine.py with the two halves of a request that is prefilled elsewhere.

python engine.py request.json result.json

{"prefill": [...], "params": path}   computes the prompt for another engine, and writes what that one needs
{"decode": [...], "params": path, "label": ...}   goes on with it; "params" names such a file
{"rename": [path, path]}             so that the other engine finds what it waits for
{"serve_until": path}                takes steps until the file is there, as a served engine does
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

sys.path[:0] = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "lab")]

import lab_engine  # noqa: E402

from demo import engine  # noqa: E402

engine.METRIC_WORDS = (*engine.METRIC_WORDS, "nixl")
_FOR_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


class Child(lab_engine.Child):
    def _do(self, step: dict[str, Any]) -> dict[str, Any]:
        if "prefill" in step:
            output = self._request(step["prefill"], 1, _FOR_PREFILL)
            with open(step["params"], "w") as file:
                json.dump(output.kv_transfer_params, file)
            return {"step": "prefill", "num_cached_tokens": output.num_cached_tokens}
        if "decode" in step:
            with open(step["params"]) as file:
                params = json.load(file)
            before = time.monotonic()
            output = self._request(step["decode"], 16, params)
            return {
                "step": "generate",
                "label": step["label"],
                "tokens": list(output.outputs[0].token_ids),
                "finish_reason": output.outputs[0].finish_reason,
                "num_cached_tokens": output.num_cached_tokens,
                "wall_s": time.monotonic() - before,
            }
        if "rename" in step:
            os.replace(*step["rename"])
            return {"step": "rename"}
        if "serve_until" in step:
            end = time.monotonic() + 240
            while not os.path.exists(step["serve_until"]):
                if time.monotonic() > end:
                    raise TimeoutError(f"{step['serve_until']} did not appear")
                self._generate([1], 1)
                time.sleep(0.1)
            return {"step": "serve_until"}
        return super()._do(step)

    def _request(self, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> Any:
        extra = {"kv_transfer_params": params}
        (output,) = self._answer([{"prompt_token_ids": prompt}], max_tokens, extra_args=extra)
        return output


if __name__ == "__main__":
    engine.Child = Child
    sys.exit(engine.main(sys.argv[1:]))
