"""Child process of test_engine_faults: an engine in it gives its KV up while stores wait. See there.

python given_up_scenario.py CHECKPOINT ROOT [unguarded]; prints one JSON line.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import places  # noqa: F401

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
)
POISON = 0x5A
_LONGEST_S = 60.0


def main() -> None:
    checkpoint, root, *how = sys.argv[1:]
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from demo.checkpoints import MODELS
    from fskv import jobs
    from fskv.engines import vllm_connector

    model = MODELS["llama"]
    # I/O threads begin when the gate opens: until then all that is submitted is queued.
    gate = threading.Event()
    jobs.numa = SimpleNamespace(pin_thread=lambda cpus: gate.wait(_LONGEST_S))
    if "unguarded" in how:  # the negative control: vLLM's own reset tells the worker nothing
        vllm_connector.drop_in_workers = lambda: None
    llm = LLM(
        model=checkpoint,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FskvConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "root": root,
                "hybrid_chunk_size": 128,
                "weights_fixed": True,  # or nothing would be stored after the reset
            },
        ),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        max_num_seqs=4,
        disable_log_stats=False,
        seed=0,
        **model.engine_kwargs(),
    )
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    half = get_kv_transfer_group().connector_worker
    runner = half.spec.worker._runner
    end = time.monotonic() + _LONGEST_S

    def sampling(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)

    def generate(prompt: list[int], count: int) -> dict:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling(count), use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def settle() -> None:
        """Step until nothing is left to be stored: what a step stores is submitted in the next one."""
        for _ in range(2):
            generate([1], 1)
        while runner.num_open_stores and time.monotonic() < end:
            generate([1], 1)

    engine.add_request("long", {"prompt_token_ids": model.main_prompt()}, sampling(16))
    while not (half._unsubmitted_store_jobs and runner.num_open_stores):
        assert time.monotonic() < end, "stores were never queued and deferred at the same time"
        engine.step()
    answer = {
        "queued": runner.num_open_stores,
        "deferred": sum(len(keys.chunks) for _, _, keys in half._unsubmitted_store_jobs),
    }
    # What `sleep` does before it unmaps the KV, and `wake_up` before the next step. A CPU cannot unmap it.
    core.pause_scheduler(mode="abort", clear_cache=True)
    for tensor in half.spec.worker._files.tensors:
        tensor.fill_(POISON)
    core.resume_scheduler()
    engine.abort_request(["long"])
    gate.set()
    settle()
    files = [path for path in glob.glob(f"{root}/**/*.kv", recursive=True) if os.path.isfile(path)]
    answer["files"] = len(files)
    foreign = bytes([POISON]) * 4096
    answer["foreign"] = sum(foreign in open(path, "rb").read() for path in files)  # noqa: SIM115
    answer["computed"] = generate(model.main_prompt(), 16)
    settle()
    llm.reset_prefix_cache()
    answer["loaded"] = generate(model.main_prompt(), 16)
    engine.engine_core.shutdown()
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
