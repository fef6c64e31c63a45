"""The child of trials.shared_root: a real vLLM engine in this process, one request after the other.

Before each request the engine's own cache is emptied, so that what is cached comes from fskv. The parent
says what to do through a connection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engine_process import begin
from benchmarks.rig import BenchmarkError
from trials.shared_root_judge import CHUNK_TOKENS, Pool

MAX_MODEL_LEN = 4096
BATCHED_TOKENS = 512  # four chunks a step
GPU_BLOCKS = 64  # of CHUNK_TOKENS tokens: a few prompts
NEW_TOKENS = 8
_EMPTY_S = 30.0


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
    """One request."""

    at: float  # by time.monotonic, which all processes of a machine share
    idx: int
    cached_tokens: int
    seconds: float
    longest_step_s: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """What an engine did."""

    records: list[Record]
    seconds: float
    waits_s: float  # until the engine's own cache could be emptied: stores held its blocks
    metrics: list[tuple[str, dict[str, str], float]]


class Engine:
    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._pool = setup.pool
        self._num_requests = 0
        self._waits_s = 0.0
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
        """Do one request and return what it was like."""
        self._empty_cache()
        return self._generate(idx, self._pool.tokens(idx), NEW_TOKENS)

    def run(self, draws: list[int], ends_at: float) -> Run:
        """Do as many of the requests as there is time for."""
        records = []
        started = time.monotonic()
        for idx in draws:
            if time.monotonic() >= ends_at:
                break
            records.append(self.ask(idx))
        seconds = time.monotonic() - started
        self.settle()
        return Run(records, seconds, self._waits_s, self.metrics())

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
        self._waits_s += time.monotonic() - started

    def _generate(self, idx: int, prompt: list[int], max_tokens: int) -> Record:
        from vllm import SamplingParams

        self._num_requests += 1
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        started = last = time.monotonic()
        self._engine.add_request(
            f"request-{self._num_requests}", {"prompt_token_ids": prompt}, sampling
        )
        longest_s = 0.0
        done: Any = None
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now
            done = next((output for output in outputs if output.finished), done)
        if done is None:
            raise BenchmarkError(f"request {self._num_requests} ended without an output")
        return Record(
            started,
            idx,
            done.num_cached_tokens or 0,
            last - started,
            longest_s,
            tuple(done.outputs[0].token_ids),
        )

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        """Return fskv's metrics: name, labels, value."""
        return [
            (read.name.removeprefix("vllm:"), dict(read.labels), float(read.value))
            for read in self._llm.get_metrics()
            if hasattr(read, "value") and ("fskv" in read.name or "external_prefix" in read.name)
        ]


def serve(connection: Connection, setup: Setup) -> None:
    """Be the child: start the engine and do what the parent says until the connection ends."""
    begin(setup.log, num_threads=1)  # each engine has a core
    engine = Engine(setup)
    connection.send("ready")
    try:
        while True:
            what, *arguments = connection.recv()
            if what == "ask":
                connection.send([engine.ask(idx) for idx in arguments[0]])
            else:
                connection.send(engine.run(*arguments))
    finally:
        engine.close()
