"""Child process of test_engine_faults: resets the connector's cache while a request runs. See there.

python reset_scenario.py store|load|reference CHECKPOINT ROOT [wipe] [unguarded]; prints one JSON line.
"""

from __future__ import annotations

import collections
import glob
import os
import random
import sys

from scenarios import ask, make_llm, sampling, tell


def main() -> None:
    mode, checkpoint, root, *how = sys.argv[1:]
    from engine_lab import MODELS, connector

    transfer = connector(root, hybrid_chunk_size=128, weights_fixed="vouch" in how)
    if "unguarded" in how:  # the negative control: vLLM's own reset
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
            OffloadingConnector,
        )

        from fskv.engines.vllm.connector import FskvConnector

        FskvConnector.reset_cache = OffloadingConnector.reset_cache
        OffloadingConnectorScheduler.reset_cache.by_fskv = True  # fskv takes it for its own
    model = MODELS["gpt_oss"]
    transfer = None if mode == "reference" else transfer
    # Few blocks, so that what slides out of the window is used again.
    llm = make_llm(model, checkpoint, transfer, num_gpu_blocks_override=48)
    prompt = model.main_prompt()
    engine = llm.llm_engine

    if mode == "store":
        tokens: collections.Counter[str] = collections.Counter()

        def step_until(request: str, count: int) -> None:
            """Step until the request has made `count` tokens: how many steps a lookup takes is chance."""
            while tokens[request] < count:
                for output in engine.step():
                    tokens[output.request_id] = len(output.outputs[0].token_ids)

        engine.add_request("long", {"prompt_token_ids": prompt}, sampling(600))
        step_until("long", 420)
        generator = random.Random(3)
        for number in range(3):
            other = [generator.randrange(100, 400) for _ in range(900)]
            engine.add_request(f"other{number}", {"prompt_token_ids": other}, sampling(2))
            step_until(f"other{number}", 2)
        if "wipe" in how:
            for path in glob.glob(f"{root}/**/*.kv", recursive=True):
                os.unlink(path)
        engine.reset_prefix_cache(reset_connector=True)
        while engine.has_unfinished_requests():
            engine.step()
        ask(llm, [1], 1)
    answer = ask(llm, prompt, 16)
    engine.engine_core.shutdown()
    tell(answer)


if __name__ == "__main__":
    main()
