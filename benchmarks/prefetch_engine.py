"""The child of benchmarks.prefetch: one real vLLM engine that is busy, and requests that wait behind.

One engine, so that both ways see the same machine at the same time. What differs between them is whether the
connector has anything read ahead (`prefetch_bytes`); the memory for it is there in both.
"""

from __future__ import annotations

import glob
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engine_process import begin
from benchmarks.rig import BenchmarkError

WAYS = ("without", "with")
_EMPTY_S = 120.0
# Of a prompt that keeps the engine busy: less than two chunks, and nothing is stored of it.
_BUSY_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engine needs to know."""

    model: str
    log: str
    root: str
    queued: int
    prompt_tokens: int
    new_tokens: int
    busy: int
    busy_tokens: int
    block_size: int
    prefetch_bytes: int
    deadline_s: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One round: seconds to the first token of each queued request, from when it came."""

    ttft_s: tuple[float, ...]
    cached_tokens: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    busy_s: float  # until the last of those that were ahead had ended
    used: int  # chunks that loads took from what was read ahead
    dropped: int


def write_checkpoint(path: str) -> None:
    """Write a Llama of 12 million parameters with 64 KiB of KV per token: storage decides, not the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    made: Any = AutoModelForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    made.from_config(config, dtype=torch.float32).save_pretrained(path)


class Engine:
    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._setup = setup
        self._llm = LLM(
            model=setup.model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=setup.block_size,
            max_model_len=4096,
            max_num_batched_tokens=1024,
            max_num_seqs=setup.busy,
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=KVTransferConfig(
                kv_connector="FskvConnector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "root": setup.root,
                    "hybrid_chunk_size": setup.block_size,
                    "prefetch_bytes": setup.prefetch_bytes,
                    "deadline_base_s": setup.deadline_s,
                    "deadline_max_s": setup.deadline_s,
                    # All of it is there. A mount that is starved of CPU must not turn hits into misses.
                    "positive_ttl_s": 3600,
                    "lookup_timeout_s": 30,
                },
                kv_load_failure_policy="recompute",
            ),
        )
        self._engine = self._llm.llm_engine
        core: Any = self._engine.engine_core
        self._scheduler = core.engine_core.scheduler
        self._connector = self._scheduler.connector
        self._waiting = self._connector._waiting  # noqa: SLF001
        self._draw = random.Random(0)  # noqa: S311
        self._prompts = [self._prompt(setup.prompt_tokens) for _ in range(setup.queued)]
        self._asked = 0

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(3, 512) for _ in range(num_tokens)]

    def warm_up(self) -> None:
        """Compute every prompt until all their chunks are stored: a slow mount has some skipped at first."""
        setup = self._setup
        expected = setup.queued * (setup.prompt_tokens // setup.block_size)
        end = time.monotonic() + _EMPTY_S
        while self._num_stored() < expected:
            if time.monotonic() > end:
                raise BenchmarkError(f"{self._num_stored()} of {expected} chunks are stored")
            for prompt in self._prompts:
                self._empty_cache()
                self._add(prompt, 1)
                self._run()

    def _num_stored(self) -> int:
        for _ in range(3):  # let stores end and their news arrive
            self._add([2], 1)
            self._run()
            time.sleep(0.5)
        return len(glob.glob(f"{self._setup.root}/**/*.kv", recursive=True))

    def ask(self, way: str) -> Answer:
        setup = self._setup
        self._empty_cache()
        self._connector._waiting = self._waiting if way == "with" else None  # noqa: SLF001
        before = self._counts()
        ahead = {
            self._add(self._prompt(_BUSY_TOKENS), setup.busy_tokens) for _ in range(setup.busy)
        }
        self._until_running(setup.busy)
        started = time.monotonic()
        queued = [self._add(prompt, setup.new_tokens) for prompt in self._prompts]
        first, done, ended = self._run()
        self._add([2], 1)  # one more step: what it was told of last is counted
        self._run()
        used, dropped = (now - then for now, then in zip(self._counts(), before, strict=True))
        return Answer(
            tuple(first[req_id] - started for req_id in queued),
            tuple(done[req_id].num_cached_tokens or 0 for req_id in queued),
            tuple(tuple(done[req_id].outputs[0].token_ids) for req_id in queued),
            max(ended[req_id] for req_id in ahead) - started,
            used,
            dropped,
        )

    def _until_running(self, number: int) -> None:
        """Step until so many run: while fewer do, vLLM begins the loads of all that wait."""
        started = time.monotonic()
        while len(self._scheduler.running) < number:
            if time.monotonic() - started > _EMPTY_S:
                raise BenchmarkError(f"not {number} requests ran after {_EMPTY_S:g} s")
            self._engine.step()

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _counts(self) -> tuple[int, int]:
        found = {"used": 0, "dropped": 0}
        for read in self._llm.get_metrics():
            if read.name == "vllm:fskv_prefetched_chunks" and hasattr(read, "value"):
                found[read.labels["result"]] += int(read.value)
        return found["used"], found["dropped"]

    def _empty_cache(self) -> None:
        started = time.monotonic()
        self._add([2], 1)
        self._run()
        while not self._engine.reset_prefix_cache():
            if time.monotonic() - started > _EMPTY_S:
                raise BenchmarkError(f"blocks were in use for {_EMPTY_S:g} s after a request")
            self._add([2], 1)
            self._run()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self._asked += 1
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        # vLLM makes another id of it, and its outputs have this one.
        req_id = f"request-{self._asked}"
        self._engine.add_request(req_id, {"prompt_token_ids": prompt}, sampling)
        return req_id

    def _run(self) -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
        """Step until nothing is left; return by request the time of its first token, its output, its end."""
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        ended: dict[str, float] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.monotonic()
                first.setdefault(output.request_id, now)
                if output.finished:
                    done[output.request_id], ended[output.request_id] = output, now
        return first, done, ended


def serve(connection: Connection, setup: Setup) -> None:
    """Be the child: start the engine and answer until the connection ends."""
    begin(setup.log, num_threads=setup.num_threads)
    write_checkpoint(setup.model)
    engine = Engine(setup)
    engine.warm_up()
    connection.send("ready")
    try:
        while True:
            connection.send(engine.ask(connection.recv()))
    finally:
        engine.close()
