"""Engines of different tensor-parallel sizes on one root (`canonical_layout`): tokens as without fskv."""

from __future__ import annotations

import os
import pathlib
from dataclasses import replace

import engine_lab as lab
import pytest
from places import LAB

from demo import engine as engine_program
from fskv.format import chunk_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

PROMPTS = lab.MODELS["llama"]  # any model with this vocabulary
NUM_CHUNKS = PROMPTS.prompt_tokens // 128
TP2 = {"tensor_parallel_size": 2}
TP2_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # or vLLM refuses the second rank
COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def _checkpoint(directory: pathlib.Path, config: object) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return str(directory)


def _llama(directory: pathlib.Path, num_kv_heads: int) -> str:
    from transformers import LlamaConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": num_kv_heads, "head_dim": 32}
    return _checkpoint(directory, LlamaConfig(**COMMON, **heads))


class Engines:
    """Engines of one checkpoint on one root."""

    def __init__(self, path: str, root: str, tmp_path: pathlib.Path, **engine: object) -> None:
        self.path, self.root, self.tmp_path = path, root, tmp_path
        self.engine = {"block_size": 128, **engine}
        self.program = engine_program.__file__
        os.makedirs(root, exist_ok=True)

    def request(self, steps: list, tp: int, *, fskv: bool = True) -> dict:
        transfer = lab.connector(self.root, hybrid_chunk_size=128, canonical_layout=True)
        return lab.request(
            replace(PROMPTS, engine={}),
            steps,
            transfer=transfer if fskv else None,
            path=self.path,
            engine={**self.engine, **(TP2 if tp == 2 else {})},
            env=TP2_ENV if tp == 2 else {},
        )

    def run(self, steps: list, tp: int, *, fskv: bool = True) -> dict:
        result = lab.run(self.request(steps, tp, fskv=fskv), program=self.program)
        return {**lab.generates(result), "metrics": result["steps"][-1]}

    def tokens_with(self, tp: int, damages: dict) -> dict:
        """Return what one engine generates after each damage; the files are whole again before the next."""
        stored = lab.snapshot(self.root)
        directory = self.tmp_path / f"talk{len(list(self.tmp_path.glob('talk*')))}"
        directory.mkdir()
        talk = lab.Conversation(directory)
        pauses = {}
        for label in damages:
            pauses[label] = talk.pause()
            talk.say(lab.generate(PROMPTS.main_prompt(), label), {"reset_prefix_cache": True})
            talk.say(*lab.SETTLE)
        talk.say({"metrics": True})
        engine = lab.start_engine(
            self.request(talk.steps, tp), str(directory / "engine"), program=self.program
        )
        try:
            for label, damage in damages.items():

                def spoil(damage=damage) -> None:
                    lab.restore(stored)
                    damage()

                talk.resume(engine, pauses[label], spoil)
            result = engine.wait(lab.ENGINE_TIMEOUT_S)
        finally:
            engine.kill()
        lab.restore(stored)
        assert result["exit_code"] == 0, result.get("error")
        return {**lab.generates(result), "metrics": result["steps"][-1]}


def _of_slice(root: str, number: int) -> list[str]:
    return [path for path in lab.chunks(root) if path.endswith(f".g0.r{number}.kv")]


def _zero(paths: list[str]) -> None:
    for path in paths:
        lab.zero_payload(path)


def _exchange(root: str, one: int, other: int) -> None:
    """Put the KV of two slices into each other's files, under valid headers and checksums."""
    for paths in zip(_of_slice(root, one), _of_slice(root, other), strict=True):
        contents = [pathlib.Path(path).read_bytes() for path in paths]
        headers = [chunk_file.parse_header(content) for content in contents]
        for path, mine, foreign, content in zip(
            paths, headers, reversed(headers), reversed(contents), strict=True
        ):
            header = replace(mine, row_digests=foreign.row_digests)
            encoded = bytes(chunk_file.encode_header(header, mine.header_nbytes))
            pathlib.Path(path).write_bytes(encoded + content[mine.header_nbytes :])


def _heads_scattered_over_ranks(tmp_path: pathlib.Path) -> tuple[Engines, dict, list[int]]:
    """Return engines of a model with a head for each of 4 slices, a request, and its tokens without fskv."""
    path = _llama(tmp_path / "checkpoint", num_kv_heads=4)
    engines = Engines(path, str(tmp_path / "root"), tmp_path)
    main = lab.generate(PROMPTS.main_prompt(), "main")
    reference = engines.run([main], 1, fskv=False)["main"]["tokens"]
    assert len(set(reference)) > 4, "degenerate tokens would prove nothing"
    return engines, main, reference


@pytest.mark.slow
def test_what_one_rank_stored_two_load(tmp_path):
    engines, main, reference = _heads_scattered_over_ranks(tmp_path)
    root = engines.root
    assert engines.run([main, *lab.SETTLE], 1)["main"]["tokens"] == reference
    assert len(lab.chunks(root)) == 4 * NUM_CHUNKS, "a file for each KV head"
    lab.assert_sound(root)
    slices = {f"zeroed{n}": (lambda n=n: _zero(_of_slice(root, n))) for n in range(4)}
    done = engines.tokens_with(
        2,
        {
            "main": lambda: None,
            **slices,
            "exchanged_in_a_rank": lambda: _exchange(root, 0, 1),
            "exchanged_between_ranks": lambda: _exchange(root, 1, 2),
            "one_lost": lambda: os.unlink(_of_slice(root, 3)[4]),
            "restored": lambda: None,
        },
    )
    full = PROMPTS.prompt_tokens // 128 * 128
    for label in ("main", "restored"):
        assert done[label]["tokens"] == reference, label
        assert done[label]["num_cached_tokens"] == full, label
    # The negative controls: each slice is used, and it matters which is which.
    for label in (*slices, "exchanged_in_a_rank", "exchanged_between_ranks"):
        assert done[label]["num_cached_tokens"] == full, label
        assert done[label]["tokens"] != reference, label
    assert done["one_lost"]["tokens"] == reference
    assert done["one_lost"]["num_cached_tokens"] < full, "a chunk is a hit only with every slice"
    assert lab.counter(done["metrics"], "load_failures", reason="absent") > 0
    assert len(list(pathlib.Path(root).rglob("namespace.json"))) == 1


@pytest.mark.slow
def test_what_two_ranks_stored_one_loads(tmp_path):
    engines, main, reference = _heads_scattered_over_ranks(tmp_path)
    root = engines.root
    assert engines.run([main, *lab.SETTLE], 2)["main"]["num_cached_tokens"] == 0
    assert len(lab.chunks(root)) == 4 * NUM_CHUNKS, "a file for each KV head"
    lab.assert_sound(root)
    slices = {f"zeroed{n}": (lambda n=n: _zero(_of_slice(root, n))) for n in range(4)}
    done = engines.tokens_with(1, {"main": lambda: None, **slices})
    for label in ("main", *slices):
        assert done[label]["num_cached_tokens"] == PROMPTS.prompt_tokens // 128 * 128, label
        # The negative control: each slice is used.
        assert (done[label]["tokens"] == reference) == (label == "main"), label
    assert lab.counter(done["metrics"], "load_failures") == 0
    assert len(list(pathlib.Path(root).rglob("namespace.json"))) == 1


@pytest.mark.slow
def test_heads_that_every_rank_has_are_stored_once_and_loaded_by_all(tmp_path):
    path = _llama(tmp_path / "checkpoint", num_kv_heads=1)
    engines = Engines(path, str(tmp_path / "root"), tmp_path)
    main = lab.generate(PROMPTS.main_prompt(), "main")
    reference = engines.run([main], 1, fskv=False)["main"]["tokens"]
    stored = engines.run([main, *lab.SETTLE, {"metrics": True}], 2)
    names = [os.path.basename(path) for path in lab.chunks(engines.root)]
    assert len(names) == NUM_CHUNKS
    assert all(name.endswith(".g0.kv") for name in names), "no rank, no slice"
    assert lab.counter(stored["metrics"], "stored_chunks") == NUM_CHUNKS, "by one rank each"
    for tp in (1, 2):
        done = engines.tokens_with(
            tp, {"main": lambda: None, "zeroed": lambda: _zero(lab.chunks(engines.root))}
        )
        assert done["main"]["tokens"] == reference
        assert done["zeroed"]["tokens"] != reference
        for label in ("main", "zeroed"):
            assert done[label]["num_cached_tokens"] == NUM_CHUNKS * 128


@pytest.mark.slow
def test_mla_is_stored_once_for_all_ranks(tmp_path):
    from transformers import DeepseekV2Config

    # 512 and 64: what vLLM's CPU kernel is made for; all layers dense.
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    config = DeepseekV2Config(
        **COMMON,
        **mla,
        q_lora_rank=None,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        first_k_dense_replace=2,
    )
    path = _checkpoint(tmp_path / "checkpoint", config)
    engines = Engines(path, str(tmp_path / "root"), tmp_path, block_size=16)
    main = lab.generate(PROMPTS.main_prompt(), "main")
    engines.run([main, *lab.SETTLE], 2)
    assert lab.chunks(engines.root) == []  # vLLM turns prefix caching off for MLA on CPUs
    engines.program = str(LAB / "reusing_engine.py")
    stored = engines.run([main, *lab.SETTLE, {"metrics": True}], 2)
    reference = engines.run([main], 2, fskv=False)["main"]["tokens"]
    assert stored["main"]["tokens"] == reference
    assert len(lab.chunks(engines.root)) == NUM_CHUNKS
    done = engines.tokens_with(
        2, {"main": lambda: None, "zeroed": lambda: _zero(lab.chunks(engines.root))}
    )
    assert done["main"]["num_cached_tokens"] == NUM_CHUNKS * 128
    assert done["main"]["tokens"] == reference
    assert done["zeroed"]["tokens"] != reference
    # On CPUs vLLM's own MLA gives other KV with another TP size: there they do not share.
    assert engines.run([main], 1)["main"]["num_cached_tokens"] == 0


def test_a_model_whose_layout_vllm_does_not_certify_is_refused_at_start(tmp_path):
    model = lab.MODELS["qwen3_next"]
    os.mkdir(tmp_path / "root")
    result = lab.start_engine(
        lab.request(
            model,
            [lab.generate(model.main_prompt(), "main")],
            transfer=lab.connector(str(tmp_path / "root"), canonical_layout=True),
        ),
        str(tmp_path / "engine"),
    ).wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] != 0
    log = pathlib.Path(result["log_path"]).read_text()
    assert "option 'canonical_layout': found true, expected false" in log
    assert lab.chunks(str(tmp_path / "root")) == []
