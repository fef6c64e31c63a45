"""Child process of test_engine_faults: resets the connector's cache while a request runs. See there.

python reset_scenario.py store|load|reference CHECKPOINT ROOT [wipe] [unguarded]; prints one JSON line.
"""

from __future__ import annotations

import collections
import glob
import json
import os
import random
import sys

import places  # noqa: F401

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
)


def main() -> None:
    mode, checkpoint, root, *how = sys.argv[1:]
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from demo.checkpoints import MODELS

    model = MODELS["gpt_oss"]
    transfer = None
    if mode != "reference":
        options = {"root": root, "hybrid_chunk_size": 128, "weights_fixed": "vouch" in how}
        transfer = KVTransferConfig(
            kv_connector="FskvConnector", kv_role="kv_both", kv_connector_extra_config=options
        )
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
    llm = LLM(
        model=checkpoint,
        kv_transfer_config=transfer,
        num_gpu_blocks_override=48,  # few, so that what slides out of the window is used again
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        max_num_seqs=4,
        disable_log_stats=False,
        seed=0,
        **model.engine_kwargs(),
    )
    prompt = model.main_prompt()
    engine = llm.llm_engine

    def sampling(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)

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
        llm.generate([{"prompt_token_ids": [1]}], sampling(1), use_tqdm=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling(16), use_tqdm=False)
    answer = {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
    engine.engine_core.shutdown()
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
