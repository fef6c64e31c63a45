"""Child process of test_engine_unruly: a session of two turns, then its whole text asked of a new engine.

python session_scenario.py CHECKPOINT ROOT (connector|tier) [unguarded]; prints one JSON line. The text is
asked under another salt as well, where nothing is shared: these tokens are the right ones.
"""

from __future__ import annotations

import asyncio
import random
import sys

from scenarios import sampling, tell

_TURNS = (300, 900)
_NUM_TOKENS = 16

if "unguarded" in sys.argv:  # in the engine's process too, which imports this
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    # fskv takes vLLM's method for its own.
    scheduler.OffloadingConnectorScheduler._update_req_states.by_fskv = True


def _engine(checkpoint: str, root: str, kind: str):
    import engine_lab as lab
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    make = lab.tier if kind == "tier" else lab.connector
    arguments = AsyncEngineArgs(
        model=checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=128,
        max_model_len=4096,
        max_num_batched_tokens=1024,
        seed=0,
        kv_transfer_config=KVTransferConfig(**make(root, trust=["media"])),
    )
    return AsyncLLM.from_engine_args(arguments)


async def _ask(engine, prompt, num_tokens: int) -> dict:
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA
    answered = asyncio.Event()

    async def turns():
        from vllm.engine.protocol import StreamingInput

        for turn, number in zip(prompt, (1, num_tokens), strict=True):
            said = {"prompt_token_ids": list(turn)}  # vLLM makes it longer
            answered.clear()
            yield StreamingInput(prompt=said, sampling_params=sampling(number, output_kind=kind))
            await answered.wait()
            await asyncio.sleep(0.5)  # it waits for the next turn then

    asked = prompt if isinstance(prompt, dict) else turns()
    tokens, cached = [], 0
    async for output in engine.generate(
        asked, sampling(num_tokens, output_kind=kind), str(id(prompt))
    ):
        tokens += output.outputs[0].token_ids
        answered.set()
        cached = max(cached, output.num_cached_tokens or 0)
    return {"tokens": tokens, "cached": cached}


async def _settle(engine) -> None:
    for _ in range(3):
        await asyncio.sleep(0.5)
        await _ask(engine, {"prompt_token_ids": [2]}, 1)


async def run(checkpoint: str, root: str, kind: str) -> dict:
    draw = random.Random(7)
    first, second = ([draw.randrange(3, 512) for _ in range(number)] for number in _TURNS)
    engine = _engine(checkpoint, root, kind)
    session = await _ask(engine, [first, second], 8)
    await _settle(engine)
    engine.shutdown(timeout=10)
    engine = _engine(checkpoint, root, kind)
    text = {"prompt_token_ids": first + second}
    loaded = await _ask(engine, text, _NUM_TOKENS)
    computed = await _ask(engine, {**text, "cache_salt": "other"}, _NUM_TOKENS)
    engine.shutdown(timeout=10)
    return {"session": session, "loaded": loaded, "computed": computed}


if __name__ == "__main__":
    tell(asyncio.run(run(*sys.argv[1:4])))
