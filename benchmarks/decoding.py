"""The child of benchmarks.engine: a real vLLM engine in this process, and phases that time one request.

A phase decodes one request token by token and notes when each token came, while other requests, or
traffic on a second runner, go on beside it. The engine runs in this process, so that scheduler, worker and
I/O threads share one interpreter, as scheduler and traffic do in an engine core. Weights are
dummies: only time is measured. The parent says what to do through a connection.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engine_process import begin
from benchmarks.rig import BenchmarkError, Rig, Shape, Traffic, patient_config
from benchmarks.wrapping import Hang, Times, time_calls

VOCAB_SIZE = 512
MAX_MODEL_LEN = 8192
MOVES = ("move stores", "move loads")
WARM_TOKENS = 20  # before the window opens
# 33 million parameters in float32; a chunk of 128 tokens is 2 MiB: 32 pages of 64 KiB.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(slots=True)
class Phase:
    """What a phase saw between its first other request and the end of its last one."""

    gaps_ms: list[float]  # between two tokens of the decoding request
    seconds: float
    prompt_tokens: int = 0  # of the other requests
    cached_tokens: int = 0
    chunks_per_s: float = 0.0  # of traffic
    chunk_lookups: Times = field(default_factory=list)
    request_lookups: Times = field(default_factory=list)


def write_model(directory: str) -> None:
    """Make what vLLM needs to build the model; there are no weights."""
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(MODEL, file)


class Engine:
    """One engine, with fskv or without."""

    def __init__(self, directory: str, root: str | None, options: argparse.Namespace) -> None:
        self._directory, self._options = directory, options
        self._hang = Hang()
        self._chunk_lookups: Times = []
        self._request_lookups: Times = []
        self._traffic: Traffic | None = None
        self._num_requests = 0
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if root is not None:
            self._instrument()
            extra = {"root": root, "weights_id": "benchmark", "direct_io": options.direct_io}
            extra |= {"io_threads": options.threads}
            transfer = KVTransferConfig(
                kv_connector="FskvConnector",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
                kv_load_failure_policy="recompute",
            )
        llm = LLM(
            model=directory,
            load_format="dummy",
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=32,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=options.batched_tokens,
            max_num_seqs=options.concurrent + 1,
            gpu_memory_utilization=0.3,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
            kv_transfer_config=transfer,
        )
        self._engine = llm.llm_engine

    def phase(self, kind: str, number: int) -> Phase:
        """Run one phase; `number` decides the prompts of the other requests."""
        self._chunk_lookups.clear()
        self._request_lookups.clear()
        if not self._engine.reset_prefix_cache():
            raise BenchmarkError("the engine's prefix cache could not be emptied: blocks in use")
        if kind in ("prefill", "reload"):
            phase = self._decode(self._prompts(number))
        elif kind == "hang":
            # Half of them are stored.
            half = self._options.prompts // 2
            self._hang.on = True
            try:
                new = self._prompts(f"hang {number}")
                phase = self._decode(self._prompts(number)[half:] + new[half:])
            finally:
                self._hang.on = False
        elif kind in ("store traffic", "load traffic"):
            phase = self._beside_traffic(is_load=kind == "load traffic")
        else:
            phase = self._decode([])
        phase.chunk_lookups = list(self._chunk_lookups)
        phase.request_lookups = list(self._request_lookups)
        self._settle()
        return phase

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _instrument(self) -> None:
        from fskv.data_path.breaker import Breaker
        from fskv.data_path.store import ChunkStore
        from fskv.engines.vllm.connector import FskvConnector
        from fskv.engines.vllm.manager import FskvManager

        for owner, name in ((FskvManager, "_probe"), (ChunkStore, "get"), (ChunkStore, "put")):
            self._hang.wrap(owner, name)
        # The phases after a hang find the root back.
        Breaker.__init__.__kwdefaults__["probe_s"] = 0.5  # type: ignore[index]
        time_calls(FskvManager, "lookup", self._chunk_lookups)
        time_calls(FskvConnector, "get_num_new_matched_tokens", self._request_lookups)

    def _prompts(self, name: int | str) -> list[list[int]]:
        generator = random.Random(str(name))  # noqa: S311  reproducible, not secret
        length = self._options.prompt_tokens
        return [
            [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]
            for _ in range(self._options.prompts)
        ]

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self._num_requests += 1
        name = f"request-{self._num_requests}"
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def _decode(self, others: list[list[int]], opened: Callable[[], None] | None = None) -> Phase:
        """Decode one request; from its WARM_TOKENS-th token on, send the others, a few at a time.

        Without others the window is --tokens long, or --seconds.
        """
        decoding = self._add(range(3, 60), MAX_MODEL_LEN - 100)
        waiting, running = list(others), set[str]()
        times: list[float] = []
        phase = Phase([], 0.0, prompt_tokens=sum(len(prompt) for prompt in others))
        wanted = WARM_TOKENS + (0 if others else self._options.tokens)
        late = False
        while (len(times) < wanted and not late) or waiting or running:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id == decoding:
                    if output.finished:
                        raise BenchmarkError("the decoding request ended before the others")
                    times.append(now)
                elif output.finished:
                    running.discard(output.request_id)
                    phase.cached_tokens += output.num_cached_tokens or 0
            if len(times) == WARM_TOKENS and opened is not None:
                opened()
            if len(times) >= WARM_TOKENS:
                late = now - times[WARM_TOKENS - 1] > self._options.seconds
                while waiting and len(running) < self._options.concurrent:
                    running.add(self._add(waiting.pop(0), 1))
        self._engine.abort_request([decoding])
        window = times[WARM_TOKENS - 1 :]
        phase.gaps_ms = [(b - a) * 1e3 for a, b in pairwise(window)]
        phase.seconds = window[-1] - window[0]
        return phase

    def ready_traffic(self) -> Traffic:
        """Return the traffic on a runner of its own, with something to load."""
        if self._traffic is None:
            config = patient_config(
                self._directory, io_threads=self._options.threads, direct_io=self._options.direct_io
            )
            rig = Rig(self._directory, Shape(num_places=64), config)
            self._traffic = Traffic(rig, job_chunks=16, step_s=0.001, keep=256)
            self._traffic.run(is_load=False, rate=math.inf, until=lambda seconds: seconds > 0.2)
            self._traffic.drain()
        return self._traffic

    def move(self, *, is_load: bool, rate: float, until: Callable[[float], bool]) -> float:
        """Move chunks from the calling thread; return how many a second."""
        traffic = self.ready_traffic()
        moved = traffic.run(is_load=is_load, rate=rate, until=until)
        traffic.drain()
        return moved.num_chunks / moved.seconds

    def _beside_traffic(self, *, is_load: bool) -> Phase:
        """Decode while another thread moves chunks, as many as get through."""
        rate = self._options.traffic_rate or math.inf
        stop = threading.Event()
        moved: list[Any] = []

        def run() -> None:
            try:
                moved.append(self.move(is_load=is_load, rate=rate, until=lambda _: stop.is_set()))
            except Exception as error:  # handed to the engine's thread
                moved.append(error)

        self.ready_traffic()
        thread = threading.Thread(target=run, name="traffic", daemon=True)
        try:
            phase = self._decode([], opened=thread.start)
        finally:
            stop.set()
        thread.join()
        if isinstance(moved[0], Exception):
            raise moved[0]
        phase.chunks_per_s = moved[0]
        return phase

    def _settle(self) -> None:
        """Let stores end and their news arrive: a step submits what the one before it stored."""
        for _ in range(3):
            self._add([2], 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            time.sleep(0.3)


def serve(
    connection: Connection,
    log: str,
    directory: str,
    root: str | None,
    options: argparse.Namespace,
) -> None:
    """Be the child: start the engine, run phases as told until the connection ends."""
    # A model on all CPUs would wait for I/O in each of its loops.
    begin(log, max(1, len(os.sched_getaffinity(0)) - options.spare_cpus))
    engine = Engine(directory, root, options)
    connection.send("ready")
    try:
        while True:
            kind, number = connection.recv()
            if kind in MOVES:  # at the rate `number`, until the parent says something
                engine.ready_traffic()
                connection.send("begun")
                is_load = kind == MOVES[1]
                rate = engine.move(is_load=is_load, rate=number, until=lambda _: connection.poll())
                connection.recv()
                connection.send(rate)
            else:
                connection.send(engine.phase(kind, number))
    finally:
        engine.close()
