"""Many clients at once, with fskv and without: seconds until all of them have their answers.

Two real vLLM engines of one model take turns, one with FskvConnector and one without; the other one waits. In
each round as many new prompts come at once as there are clients (cold). Then the engine's own cache is
emptied, and the same come again (warm): with fskv they are loaded, without it computed once more.

    python -m benchmarks.clients --model DIR [--clients 32] [--rounds 5] [--kv-gib 4] [--dir DIR] [--json]

DIR is a checkpoint that vLLM runs here. Engine and I/O threads share a process, and the root is not pruned.
Exit code 1: tokens differ, nothing was loaded, or cold takes more than 1.03 of the time without.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engine_process import START_S, EngineProcess, begin, ending
from benchmarks.options import parser, positive, settings
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import work_directory

WAYS = ("without", "with")
_PROMISE = 1.03
_ROUND_S = 1800.0
_EMPTY_S, _BLOCK_TOKENS = 120.0, 128


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine needs to know; without a root it has no connector."""

    model: str
    log: str
    root: str | None
    clients: int
    prompt_tokens: int
    new_tokens: int
    num_threads: int
    kv_gib: int


@dataclass(frozen=True, slots=True)
class Answer:
    seconds: float  # until the last token of the last client
    tokens: tuple[tuple[int, ...], ...]
    cached: int  # tokens, of all clients, that were not computed


class Engine:
    """In the child."""

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = {"root": setup.root, "hybrid_chunk_size": _BLOCK_TOKENS, "maintenance": "off"}
        transfer = KVTransferConfig(
            kv_connector="FskvConnector",
            kv_role="kv_both",
            kv_connector_extra_config={**options, "lookup_timeout_s": 30},
            kv_load_failure_policy="recompute",
        )
        self._setup = setup
        self._llm = LLM(
            model=setup.model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=_BLOCK_TOKENS,
            max_model_len=setup.prompt_tokens + setup.new_tokens,
            max_num_seqs=setup.clients,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            seed=0,
            kv_transfer_config=transfer if setup.root else None,
        )

    def ask(self, number: int) -> Answer:
        """Let all clients ask the prompts of a round."""
        draw = random.Random(number)  # noqa: S311  reproducible, not secret
        setup = self._setup
        prompts = [
            {"prompt_token_ids": [draw.randrange(100, 20000) for _ in range(setup.prompt_tokens)]}
            for _ in range(setup.clients)
        ]
        self._empty_cache()
        began = time.monotonic()
        outputs = self._generate(prompts, setup.new_tokens)
        seconds = time.monotonic() - began
        return Answer(
            seconds,
            tuple(tuple(one.outputs[0].token_ids) for one in outputs),
            sum(one.num_cached_tokens or 0 for one in outputs),
        )

    def _generate(self, prompts: list[Any], new_tokens: int) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        return list(self._llm.generate(prompts, sampling, use_tqdm=False))

    def _empty_cache(self) -> None:
        """Blocks are in use until they are stored."""
        end = time.monotonic() + _EMPTY_S
        self._generate([{"prompt_token_ids": [2]}], 1)
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise RuntimeError(f"blocks were in use for {_EMPTY_S:g} s after a request")
            self._generate([{"prompt_token_ids": [2]}], 1)


def serve(connection: Connection, setup: Setup) -> None:
    """Be the child: start the engine and answer until the connection ends."""
    begin(setup.log, num_threads=setup.num_threads)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(setup.kv_gib)
    engine = Engine(setup)
    connection.send("ready")
    while True:
        connection.send(engine.ask(connection.recv()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[tuple[str, str], list[Answer]] = {
        (way, what): [] for way in WAYS for what in ("cold", "warm")
    }
    with work_directory(options.dir) as directory:
        root = f"{directory}/root"
        os.mkdir(root)
        engines = {}
        for way in WAYS:
            log = f"{directory}/{way}.log"
            setup = Setup(
                model=options.model,
                log=log,
                root=root if way == "with" else None,
                clients=options.clients,
                prompt_tokens=options.prompt_tokens,
                new_tokens=options.new_tokens,
                num_threads=len(os.sched_getaffinity(0)),
                kv_gib=options.kv_gib,
            )
            engines[way] = EngineProcess(f"the engine {way} fskv", log, serve, setup)
        with ending(engines.values()):
            for engine in engines.values():
                engine.hear(START_S)
            for number in range(options.rounds + 1):  # the first is not counted
                for what in ("cold", "warm"):
                    for way in WAYS if number % 2 else reversed(WAYS):
                        engines[way].child.say(number)
                        answer: Answer = engines[way].hear(_ROUND_S)
                        say(
                            f"round {number} of {options.rounds}, {what}, {way}: "
                            f"{answer.seconds:.2f} s, {answer.cached} tokens not computed"
                        )
                        if number:
                            found[way, what].append(answer)
    ratios = [
        ours.seconds / theirs.seconds
        for ours, theirs in zip(found["with", "cold"], found["without", "cold"], strict=True)
    ]
    same = all(
        ours.tokens == theirs.tokens
        for what in ("cold", "warm")
        for ours, theirs in zip(found["with", what], found["without", what], strict=True)
    )
    cold = spread(ratios)
    return {
        "settings": settings(options),
        "seconds": {
            f"{what}, {way}": spread([answer.seconds for answer in answers])
            for (way, what), answers in found.items()
        },
        "loaded_tokens": min(answer.cached for answer in found["with", "warm"]),
        "cold_ratio": cold,
        "tokens_equal": same,
        "good": same
        and min(answer.cached for answer in found["with", "warm"]) > 0
        and cold["median"] <= _PROMISE,
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    tokens = options.clients * options.prompt_tokens
    rows = [
        [name, show(seconds), f"{tokens / seconds['median']:,.0f}"]
        for name, seconds in facts["seconds"].items()
    ]
    title = (
        f"{options.clients} clients at once, prompts of {options.prompt_tokens} tokens, {options.new_tokens} "
        f"new ones each; median [least - greatest] of {options.rounds} rounds.\n"
        f"Cold with fskv by cold without, of each round: {show(facts['cold_ratio'], 3)}; tokens "
        f"{'are equal' if facts['tokens_equal'] else 'DIFFER'}; {facts['loaded_tokens']} of {tokens} loaded."
    )
    publish("clients", facts, (title, ("", "s", "prompt tokens/s"), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("clients", __doc__)
    add = made.add_argument
    add("--model", required=True, help="directory of a checkpoint")
    add("--clients", type=positive, default=32, help="(32)")
    add("--rounds", type=positive, default=5, help="(5)")
    add("--prompt-tokens", type=positive, default=520, help="of each (520)")
    add("--new-tokens", type=positive, default=16, help="of each (16)")
    add(
        "--kv-gib",
        type=positive,
        default=4,
        help="KV cache of each engine (4: nobody waits for a block)",
    )
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("clients", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
