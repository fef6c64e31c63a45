"""The child of trials.soak: a real vLLM engine in this process, one request after the other.

Before each request the engine's own cache is emptied, so that what is cached comes from fskv. The parent
says what to do through a connection.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engine_process import begin
from benchmarks.rig import BenchmarkError
from trials.soak_judge import CHUNK_TOKENS, Pool

MAX_MODEL_LEN = 4096
BATCHED_TOKENS = 512  # four chunks a step
GPU_BLOCKS = 64  # of CHUNK_TOKENS tokens: a few prompts
NEW_TOKENS = 8
_EMPTY_S = 30.0
# What --break does: "kv" makes wrong KV under right checksums, "bound" gives the engines a larger one,
# "orphans" leaves a part and a heartbeat of a living process, "engine" is an engine that fails; the others
# leak.
BREAKS = ("kv", "bound", "orphans", "engine", "memory", "threads", "descriptors")
_LEAK_NBYTES = 4 << 20
_LEAK_S = 0.25
_METRICS_EVERY = 25  # requests


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine needs to know; `root` None: without fskv."""

    name: str
    model: str
    log: str
    pool: Pool
    root: str | None = None
    fskv: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """One request and its answer."""

    at: float  # by time.monotonic, which all processes of a machine share
    idx: int
    cached_tokens: int
    seconds: float
    tokens: tuple[int, ...]


class Engine:
    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._pool = setup.pool
        self._num_requests = 0
        transfer = None
        if setup.root is not None:
            transfer = KVTransferConfig(
                kv_connector="FskvConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"root": setup.root, **setup.fskv},
                kv_load_failure_policy="recompute",
            )
        self._llm = LLM(
            model=setup.model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=CHUNK_TOKENS,
            num_gpu_blocks_override=GPU_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=2,
            gpu_memory_utilization=0.1,
            enable_prefix_caching=True,
            disable_log_stats=False,  # without it there are no metrics
            seed=0,
            kv_transfer_config=transfer,
        )
        self._engine = self._llm.llm_engine

    def ask(self, idx: int) -> Record:
        """Do one request and return its record."""
        self._empty_cache()
        return self._generate(idx, self._pool.tokens(idx), NEW_TOKENS)

    def settle(self) -> None:
        """Let stores end and their news arrive: a step submits what the one before it stored."""
        for _ in range(3):
            self._generate(-1, [2], 1)
            time.sleep(0.3)

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _empty_cache(self) -> None:
        started = time.monotonic()
        while not self._engine.reset_prefix_cache():
            if time.monotonic() - started > _EMPTY_S:
                raise BenchmarkError(
                    f"blocks were in use for {_EMPTY_S:g} s after the last request"
                )
            self._generate(-1, [2], 1)  # a step, which hears how stores have ended

    def _generate(self, idx: int, prompt: list[int], max_tokens: int) -> Record:
        from vllm import SamplingParams

        self._num_requests += 1
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        started = time.monotonic()
        self._engine.add_request(
            f"request-{self._num_requests}", {"prompt_token_ids": prompt}, sampling
        )
        done: Any = None
        while self._engine.has_unfinished_requests():
            done = next((output for output in self._engine.step() if output.finished), done)
        if done is None:
            raise BenchmarkError(f"request {self._num_requests} ended without an output")
        return Record(
            started,
            idx,
            done.num_cached_tokens or 0,
            time.monotonic() - started,
            tuple(done.outputs[0].token_ids),
        )

    def counters(self) -> Counter[str]:
        """Return fskv's counters; those with a reason, by reason."""
        found: Counter[str] = Counter()
        for read in self._llm.get_metrics():
            name = read.name.removeprefix("vllm:fskv_")
            if name in {"stored_bytes", "stores_skipped", "load_failures"}:
                labels = read.labels
                found[f"{name} {labels['reason']}" if "reason" in labels else name] += int(
                    read.value
                )
        return found


def serve(connection: Connection, setup: Setup, broken: frozenset[str]) -> None:
    """Be the child: start the engine and do what the parent says until the connection ends."""
    # By default oneDNN keeps 1024 kernels, one for each length of a prompt, a quarter of a MiB each.
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "16"
    begin(setup.log, num_threads=1)
    engine = Engine(setup)
    kept: list[object] = []
    leaked_at = 0.0
    connection.send("ready")
    try:
        while True:
            what, *arguments = connection.recv()
            if what == "counters":
                connection.send(engine.counters())
                continue
            if what == "settle":
                engine.settle()
                connection.send(None)
                continue
            connection.send([engine.ask(idx) for idx in arguments[0]])
            if time.monotonic() - leaked_at > _LEAK_S:  # however fast it is, the machine has room
                leaked_at = time.monotonic()
                kept += _leak(broken)
            if "engine" in broken and len(kept) > _METRICS_EVERY:
                raise BenchmarkError("it was to fail")
            kept.append(None)
    finally:
        engine.close()


def _leak(broken: frozenset[str]) -> list[object]:
    kept: list[object] = []
    if "memory" in broken:
        kept.append(b"x" * _LEAK_NBYTES)
    if "threads" in broken:
        kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
        kept[-1].start()  # type: ignore[attr-defined]
    if "descriptors" in broken:
        kept.append(os.open(os.devnull, os.O_RDONLY))
    return kept
