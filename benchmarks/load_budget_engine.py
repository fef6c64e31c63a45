"""The child of benchmarks.load_budget: one real vLLM engine, asked in turns with and without a load budget.

One engine, so that all ways see the same machine at the same time and recompute at the same speed. What
differs between them is who decides: each has a LoadBudget of its own, with what it measured itself.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engine_process import begin
from benchmarks.rig import BenchmarkError

NEW_TOKENS = 4
_EMPTY_S = 120.0
WAYS = ("recompute", "off", "auto")


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engine needs to know."""

    model: str
    log: str
    root: str
    prompts: int
    prompt_tokens: int
    block_size: int
    deadline_s: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One request."""

    ttft_s: float
    cached_tokens: int
    tokens: tuple[int, ...]
    cut: int  # loads that were given up for it
    probe: int
    lost_s: float  # in those


class Engine:
    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = {
            "root": setup.root,
            "load_budget": "auto",
            "hybrid_chunk_size": setup.block_size,
            "load_deadline_s": setup.deadline_s,
        }
        self._llm = LLM(
            model=setup.model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=setup.block_size,
            max_model_len=4096,
            max_num_batched_tokens=1024,
            max_num_seqs=2,
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=KVTransferConfig(
                kv_connector="FskvConnector",
                kv_role="kv_both",
                kv_connector_extra_config=options,
                kv_load_failure_policy="recompute",
            ),
        )
        self._engine = self._llm.llm_engine
        core: Any = self._engine.engine_core
        self._connector = core.engine_core.scheduler.connector
        self._auto = self._connector._budget  # noqa: SLF001
        without = replace(self._connector._setup.config, load_budget="off")  # noqa: SLF001
        self._off = self._connector._make_budget(without)  # noqa: SLF001
        draw = random.Random(0)  # noqa: S311
        self._prompts = [
            [draw.randrange(3, 512) for _ in range(setup.prompt_tokens)]
            for _ in range(setup.prompts)
        ]
        self._asked = 0
        self._lost_s = 0.0
        for budget in (self._auto, self._off):
            self._watch(budget)

    def _watch(self, budget: Any) -> None:
        on_loads = budget.on_loads

        def watched(reports: Any) -> None:
            self._lost_s += sum(report.seconds for report in reports.values() if report.late)
            on_loads(reports)

        budget.on_loads = watched

    def warm_up(self) -> None:
        """Compute every prompt once: all are stored, and the engine's speed is known to the budget."""
        self._use(self._auto)
        for prompt in self._prompts:
            self._empty_cache()
            self._generate(prompt, NEW_TOKENS)
        self.settle()

    def ask(self, way: str, idx: int) -> Answer:
        self._use(self._off if way == "off" else self._auto)
        self._empty_cache()
        before, self._lost_s = self._counts(), 0.0
        ttft_s, output = self._generate(
            self._prompts[idx], NEW_TOKENS, skip_reading_prefix_cache=way == "recompute"
        )
        cut, probe = (now - then for now, then in zip(self._counts(), before, strict=True))
        return Answer(
            ttft_s,
            output.num_cached_tokens or 0,
            tuple(output.outputs[0].token_ids),
            cut,
            probe,
            self._lost_s,
        )

    def settle(self) -> None:
        """Let stores end and their news arrive: a step submits what the one before it stored."""
        for _ in range(3):
            self._generate([2], 1)
            time.sleep(0.5)

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _use(self, budget: Any) -> None:
        self._connector._budget = budget  # noqa: SLF001
        self._connector._manager.limit_loads(budget.limit)  # noqa: SLF001

    def _counts(self) -> tuple[int, int]:
        found = {"cut_loads": 0.0, "probe_loads": 0.0}
        for read in self._llm.get_metrics():
            name = read.name.removeprefix("vllm:fskv_")
            if name in found and hasattr(read, "value"):
                found[name] += float(read.value)
        return int(found["cut_loads"]), int(found["probe_loads"])

    def _empty_cache(self) -> None:
        started = time.monotonic()
        self._generate([2], 1)
        while not self._engine.reset_prefix_cache():
            if time.monotonic() - started > _EMPTY_S:
                raise BenchmarkError(f"blocks were in use for {_EMPTY_S:g} s after a request")
            self._generate([2], 1)  # a step, which hears how stores have ended

    def _generate(self, prompt: list[int], max_tokens: int, **how: Any) -> tuple[float, Any]:
        from vllm import SamplingParams

        self._asked += 1
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0, **how
        )
        started = time.monotonic()
        self._engine.add_request(f"request-{self._asked}", {"prompt_token_ids": prompt}, sampling)
        ttft_s, done = 0.0, None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                ttft_s = ttft_s or time.monotonic() - started
                done = output if output.finished else done
        if done is None:
            raise BenchmarkError(f"request {self._asked} ended without an output")
        return ttft_s, done


def serve(connection: Connection, setup: Setup) -> None:
    """Be the child: start the engine and answer until the connection ends."""
    begin(setup.log, num_threads=setup.num_threads)
    engine = Engine(setup)
    engine.warm_up()
    connection.send("ready")
    try:
        while True:
            connection.send(engine.ask(*connection.recv()))
    finally:
        engine.close()
