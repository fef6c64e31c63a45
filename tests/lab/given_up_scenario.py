"""Child process of test_engine_faults: an engine in it gives its KV up while stores wait. See there.

python given_up_scenario.py CHECKPOINT ROOT [two_ranks] [raw_sleep] [unguarded]; prints one JSON line. Two
ranks are two processes beside this one.
"""

from __future__ import annotations

import glob
import os
import sys
import time

from scenarios import ask, make_llm, sampling, tell

POISON = 0x5A
_LONGEST_S = 60.0


# --- in every worker, sent there by value ----------------------------------------------------


def close_gate(_worker: object) -> None:
    """I/O threads begin when the gate opens: until then all that is submitted is queued."""
    import threading
    from types import SimpleNamespace

    from fskv.data_path import file_steps

    file_steps.gate = threading.Event()
    file_steps.numa = SimpleNamespace(pin_thread=lambda cpus: file_steps.gate.wait(60.0))


def waiting(_worker: object) -> tuple[int, int]:
    """Return how many chunks are queued or being written, and how many vLLM has put off."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half = get_kv_transfer_group().connector_worker
    deferred = sum(len(keys.chunks) for _, _, keys in half._unsubmitted_store_jobs)
    return half.spec.worker.mover._runner.num_open_stores, deferred


def spoil(_worker: object, poison: int) -> None:
    """Overwrite the KV, then open the gate."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from fskv.data_path import file_steps

    for tensor in get_kv_transfer_group().connector_worker.spec.worker._files.tensors:
        tensor.fill_(poison)
    file_steps.gate.set()


# --- the engine ------------------------------------------------------------------------------


def main() -> None:
    checkpoint, root, *how = sys.argv[1:]
    from engine_lab import MODELS, connector

    from fskv.engines.vllm import connector as of_fskv
    from fskv.engines.vllm.weights import Weights

    model = MODELS["llama"]
    if "unguarded" in how:  # the negative control: vLLM's own reset tells the worker nothing
        of_fskv.drop_in_workers = lambda: None
        Weights._lose_pages = lambda self: None
    # Vouched for, or nothing would be stored after the reset.
    transfer = connector(root, hybrid_chunk_size=128, weights_fixed=True)
    ranks = 2 if "two_ranks" in how else 1
    llm = make_llm(model, checkpoint, transfer, tensor_parallel_size=ranks)
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    core.collective_rpc(close_gate)
    end = time.monotonic() + _LONGEST_S

    def stores() -> tuple[int, int]:
        """Return how many files are queued and deferred, of all ranks."""
        found = core.collective_rpc(waiting)
        return sum(queued for queued, _ in found), sum(deferred for _, deferred in found)

    def settle() -> None:
        """Step until nothing is left to be stored: what a step stores is submitted in the next one."""
        for _ in range(2):
            ask(llm, [1], 1)
        while any(stores()) and time.monotonic() < end:
            ask(llm, [1], 1)

    engine.add_request("long", {"prompt_token_ids": model.main_prompt()}, sampling(16))
    while not all(stores()):
        assert time.monotonic() < end, "stores were never queued and deferred at the same time"
        engine.step()
    answer: dict = dict(zip(("queued", "deferred"), stores(), strict=True))
    # A CPU cannot unmap the KV.
    if "raw_sleep" in how:  # a trainer has its own way
        engine.abort_request(["long"])
        assert core.reset_prefix_cache()
        core.collective_rpc("sleep", args=(1,))
        core.collective_rpc(spoil, args=(POISON,))
    else:  # what `sleep` does before it unmaps the KV, and `wake_up` before the next step
        core.pause_scheduler(mode="abort", clear_cache=True)
        core.collective_rpc(spoil, args=(POISON,))
        core.resume_scheduler()
        engine.abort_request(["long"])
    settle()
    files = [path for path in glob.glob(f"{root}/**/*.kv", recursive=True) if os.path.isfile(path)]
    answer["files"] = len(files)
    foreign = bytes([POISON]) * 4096
    answer["foreign"] = sum(foreign in open(path, "rb").read() for path in files)  # noqa: SIM115
    answer["computed"] = ask(llm, model.main_prompt(), 16)
    settle()
    llm.reset_prefix_cache()
    answer["loaded"] = ask(llm, model.main_prompt(), 16)
    engine.engine_core.shutdown()
    tell(answer)


if __name__ == "__main__":
    main()
