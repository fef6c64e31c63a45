"""Engines of different tensor-parallel sizes on one root (`canonical_layout`): tokens as without fskv."""

from __future__ import annotations

import os
import pathlib
from dataclasses import replace

import engine_lab as lab
import networks
import pytest

from fskv.format import chunk_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

PROMPTS = lab.MODELS["llama"]  # any model with this vocabulary
NUM_CHUNKS = PROMPTS.prompt_tokens // 128
MAIN = lab.generate(PROMPTS.main_prompt(), "main")


class Engines:
    """Engines of one checkpoint on one root."""

    def __init__(self, config: object, root: str, tmp_path: pathlib.Path, **engine: object) -> None:
        self.path = networks.save(networks.make(config), tmp_path / "checkpoint")
        self.root, self.tmp_path, self.engine = root, tmp_path, {"block_size": 128, **engine}
        self.changes: dict = {}

    def what(self, tp: int, *, fskv: bool = True) -> dict:
        transfer = lab.connector(self.root, hybrid_chunk_size=128, canonical_layout=True)
        return {
            "transfer": transfer if fskv else None,
            "path": self.path,
            "engine": {**self.engine, "tensor_parallel_size": tp},
            "env": lab.TWO_RANKS if tp == 2 else {},
            "changes": self.changes,
        }

    def run(self, steps: list, tp: int, *, fskv: bool = True) -> dict:
        result = lab.run(lab.request(PROMPTS, steps, **self.what(tp, fskv=fskv)))
        return {**lab.generates(result), "metrics": result["steps"][-1]}

    def tokens_with(self, tp: int, damages: dict) -> dict:
        """Return what one engine generates after each damage; the files are whole again before the next."""
        stored = lab.snapshot(self.root)
        talk = lab.Conversation(self.tmp_path / f"talk{tp}")
        for label, damage in damages.items():
            talk.spoil(stored, damage)
            talk.say({**MAIN, "label": label}, lab.RESET, *lab.SETTLE)
        talk.say(lab.METRICS)
        result = talk.run(PROMPTS, **self.what(tp))
        lab.restore(stored)
        return {**lab.generates(result), "metrics": result["steps"][-1]}


def _of_slice(root: str, number: int) -> list[str]:
    return [path for path in lab.chunks(root) if path.endswith(f".g0.r{number}.kv")]


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


@pytest.fixture
def scattered(root, tmp_path) -> tuple[Engines, list[int]]:
    """Engines of a model with a head for each of 4 slices, and its tokens without fskv."""
    config = networks.config("Llama", num_attention_heads=4, num_key_value_heads=4)
    engines = Engines(config, root, tmp_path)
    reference = engines.run([MAIN], 1, fskv=False)["main"]["tokens"]
    assert len(set(reference)) > 4, "degenerate tokens would prove nothing"
    return engines, reference


@pytest.mark.slow
def test_what_one_rank_stored_two_load(scattered, root):
    engines, reference = scattered
    assert engines.run([MAIN, *lab.SETTLE], 1)["main"]["tokens"] == reference
    assert len(lab.chunks(root)) == 4 * NUM_CHUNKS, "a file for each KV head"
    lab.assert_sound(root)
    slices = {f"zeroed{n}": (lambda n=n: lab.zero(_of_slice(root, n))) for n in range(4)}
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
    assert len(lab.identities(root)) == 1


@pytest.mark.slow
def test_what_two_ranks_stored_one_loads(scattered, root):
    engines, reference = scattered
    assert engines.run([MAIN, *lab.SETTLE], 2)["main"]["num_cached_tokens"] == 0
    assert len(lab.chunks(root)) == 4 * NUM_CHUNKS, "a file for each KV head"
    lab.assert_sound(root)
    slices = {f"zeroed{n}": (lambda n=n: lab.zero(_of_slice(root, n))) for n in range(4)}
    done = engines.tokens_with(1, {"main": lambda: None, **slices})
    for label in ("main", *slices):
        assert done[label]["num_cached_tokens"] == PROMPTS.prompt_tokens // 128 * 128, label
        # The negative control: each slice is used.
        assert (done[label]["tokens"] == reference) == (label == "main"), label
    assert lab.counter(done["metrics"], "load_failures") == 0
    assert len(lab.identities(root)) == 1


@pytest.mark.slow
def test_heads_that_every_rank_has_are_stored_once_and_loaded_by_all(root, tmp_path):
    engines = Engines(networks.config("Llama", num_attention_heads=4), root, tmp_path)
    reference = engines.run([MAIN], 1, fskv=False)["main"]["tokens"]
    stored = engines.run([MAIN, *lab.SETTLE, lab.METRICS], 2)
    names = [os.path.basename(path) for path in lab.chunks(root)]
    assert len(names) == NUM_CHUNKS
    assert all(name.endswith(".g0.kv") for name in names), "no rank, no slice"
    assert lab.counter(stored["metrics"], "stored_chunks") == NUM_CHUNKS, "by one rank each"
    for tp in (1, 2):
        done = engines.tokens_with(
            tp, {"main": lambda: None, "zeroed": lambda: lab.zero(lab.chunks(root))}
        )
        assert done["main"]["tokens"] == reference
        assert done["zeroed"]["tokens"] != reference
        for label in ("main", "zeroed"):
            assert done[label]["num_cached_tokens"] == NUM_CHUNKS * 128


@pytest.mark.slow
def test_mla_is_stored_once_for_all_ranks(root, tmp_path):
    engines = Engines(networks.mla(), root, tmp_path, block_size=16)
    engines.run([MAIN, *lab.SETTLE], 2)
    assert lab.chunks(root) == []  # vLLM turns prefix caching off for MLA on CPUs
    engines.changes = {"never_rests": True}
    stored = engines.run([MAIN, *lab.SETTLE, lab.METRICS], 2)
    reference = engines.run([MAIN], 2, fskv=False)["main"]["tokens"]
    assert stored["main"]["tokens"] == reference
    assert len(lab.chunks(root)) == NUM_CHUNKS
    done = engines.tokens_with(
        2, {"main": lambda: None, "zeroed": lambda: lab.zero(lab.chunks(root))}
    )
    assert done["main"]["num_cached_tokens"] == NUM_CHUNKS * 128
    assert done["main"]["tokens"] == reference
    assert done["zeroed"]["tokens"] != reference
    # On CPUs vLLM's own MLA gives other KV with another TP size: there they do not share.
    assert engines.run([MAIN], 1)["main"]["num_cached_tokens"] == 0


def test_a_model_whose_layout_vllm_does_not_certify_is_refused_at_start(root):
    model = lab.MODELS["qwen3_next"]
    transfer = lab.connector(root, canonical_layout=True)
    result = lab.start_engine(lab.request(model, [MAIN], transfer=transfer)).wait()
    assert result["exit_code"] != 0
    assert "option 'canonical_layout': found true, expected false" in lab.log_of(result)
    assert lab.chunks(root) == []
