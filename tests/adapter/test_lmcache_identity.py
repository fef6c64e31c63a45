"""Which facts of LMCache and which options give another namespace. Without LMCache: its keys stand here."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fskv.engines.lmcache.identity import (
    ObjectKind,
    build_identity,
    chunk_of,
    read_model,
    store_options,
    take_options,
)
from fskv.errors import ConfigError

pytest.importorskip("torch", reason="dtypes are torch's: make test")

ENTRY = {
    "engine": "vllm 0.32.0",
    "arch": "sm_90",
    "attention_backend": "FLASH_ATTN",
    "settings": {"tensor_parallel_size": 1},
    "server": [0, 1],
}
SHAPE, DTYPE = [2, 30, 128, 192], "torch.bfloat16"
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rope_theta": 10000.0,
    "transformers_version": "5.19.0",
}


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "SmolLM2"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    (directory / "model.bin").write_bytes(bytes(range(256)) * 64)
    return directory


def key(**changes):
    fields = {
        "chunk_hash": b"h" * 32,
        "model_name": "m",
        "kv_rank": 0x01000100,
        "object_group_id": 0,
        "cache_salt": "",
    }
    return SimpleNamespace(**{**fields, **changes})


def identity(checkpoint, *, entry=(), kind=(), options=(), version="0.5.6", hf=()):
    """Build one, with changes of the user's words, the objects, the options and the checkpoint."""
    if hf:
        (checkpoint / "config.json").write_text(json.dumps({**HF_CONFIG, **dict(hf)}))
    given = {"checkpoint": str(checkpoint), **ENTRY, **dict(entry)}
    given = {name: value for name, value in given.items() if value is not None}
    config, models = take_options(
        {"root": "/mnt/kv", "weights_fixed": True, "models": {"m": given}, **dict(options)}
    )
    facts = {"key": key(), "shapes": [SHAPE], "dtypes": [DTYPE], **dict(kind)}
    return build_identity(read_model("m", models["m"], config), ObjectKind.of(**facts), version)


CHANGES = {
    "LMCache's version": {"version": "0.5.7"},
    "the engine's version": {"entry": {"engine": "vllm 0.33.0"}},
    "the GPU": {"entry": {"arch": "sm_80"}},
    "the attention backend": {"entry": {"attention_backend": "FLASHINFER"}},
    "a setting": {"entry": {"settings": {"tensor_parallel_size": 1, "hf_overrides": {"a": 1}}}},
    "the KV dtype in the settings": {"entry": {"settings": {"kv_cache_dtype": "fp8_e4m3"}}},
    "the weights by name": {"entry": {"weights_id": "w2"}},
    "RoPE in the checkpoint": {"hf": {"rope_theta": 20000.0}},
    "the number of ranks": {"kind": {"key": key(kv_rank=0x02000200)}},
    "the second of two servers": {"entry": {"server": [1, 2]}},
    "the first of two servers": {"entry": {"server": [0, 2]}},
    "the layers of each stage": {
        "entry": {"settings": {"tensor_parallel_size": 1, "VLLM_PP_LAYER_PARTITION": "4,12,8,8"}}
    },
    "the object group": {"kind": {"key": key(object_group_id=1)}},
    "the dtype of objects": {"kind": {"dtypes": ["torch.float16"]}},
    "the shape of objects": {"kind": {"shapes": [[2, 30, 192, 128]]}},
    "a second shape": {"kind": {"shapes": [SHAPE, SHAPE], "dtypes": [DTYPE, DTYPE]}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_kv_changes_the_namespace_and_back_again(checkpoint, what):
    plain = identity(checkpoint)
    assert identity(checkpoint, **CHANGES[what]) != plain
    (checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
    assert identity(checkpoint) == plain, "the control: the reversal shares again"


def test_all_changes_are_different_ones(checkpoint):
    digests = set()
    for change in CHANGES.values():
        digests.add(identity(checkpoint, **change).digest)
        (checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
    assert len(digests) == len(CHANGES)


def test_other_weights_are_another_namespace(checkpoint):
    plain = identity(checkpoint)
    (checkpoint / "model.bin").write_bytes(bytes(range(255, -1, -1)) * 64)
    assert identity(checkpoint) != plain


def test_what_does_not_change_kv_shares(checkpoint):
    plain = identity(checkpoint)
    for same in (
        {"kind": {"key": key(chunk_hash=b"i" * 32, cache_salt="alice", kv_rank=0x01000100)}},
        {"options": {"io_threads": 8}},
        {"hf": {"transformers_version": "5.20.0"}},
    ):
        assert identity(checkpoint, **same) == plain
    moved = checkpoint.rename(checkpoint.with_name("elsewhere"))
    assert identity(moved) == plain


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(({"entry": {name: None}}, f"'{name}' is missing") for name in ENTRY),
        ({"entry": {"dtype": "bfloat16"}}, "found 'dtype', expected one of the known names"),
        ({"entry": {"settings": "none"}}, "'settings' is 'none', expected an object"),
        ({"entry": {"engine": ""}}, "'engine' is '', expected text"),
        ({"entry": {"settings": {"enable_lora": True}}}, "do not hold the adapter"),
        *(
            ({"entry": {"server": server}}, "'server' is .*, expected \\[index, count\\]")
            for server in (0, [0], [2, 2], [-1, 2], [0, 0], [False, True], ["0", "1"], "01")
        ),
        ({"options": {"models": {}}}, "option 'models': found {}"),
        ({"options": {"models": {"m": []}}}, "found \\[\\], expected an object"),
        ({"options": {"weights_fixed": False}}, "option 'weights_fixed': found false"),
        ({"options": {"deadline_max_s": 600}}, "option 'deadline_max_s': found 600"),
        ({"options": {"lora": "by-name"}}, "option 'lora'"),
        ({"options": {"weights_id": "w"}}, "option 'weights_id'"),
        ({"options": {"max_byte": 1}}, "'max_byte'"),
        ({"hf": {"vision_config": {}}}, "option 'media_keys'"),
        ({"entry": {"checkpoint": "/nowhere"}}, "set the option 'weights_id'"),
        ({"kind": {"dtypes": ["torch.uint8"]}}, "'kv_cache_dtype' is not in 'settings'"),
        ({"kind": {"dtypes": ["torch.uint8"], "shapes": [[4096]]}}, "'serde'"),
        ({"version": "unknown"}, "does not tell its version"),
    ],
)
def test_what_cannot_be_found_out_is_refused_in_one_sentence(checkpoint, change, sentence):
    with pytest.raises(ConfigError, match=sentence) as refusal:
        identity(checkpoint, **change)
    assert "\n" not in str(refusal.value)


def test_what_the_user_vouches_for_is_taken(checkpoint):
    """The controls of the refusals."""
    assert (
        identity(checkpoint, entry={"weights_id": "w", "checkpoint": "/nowhere"}).model_config == {}
    )
    identity(checkpoint, hf={"vision_config": {}}, options={"media_keys": "trusted"})
    (checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
    told = {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}
    found = identity(checkpoint, entry={"settings": told}, kind={"dtypes": ["torch.uint8"]})
    assert (found.kv_cache_dtype, found.model_dtype) == ("fp8_e4m3", "bfloat16")


def test_each_store_has_a_health_file_of_its_own_or_the_first_has_it():
    def paths(path):
        params = {"root": "/mnt/kv", "weights_fixed": True, "models": {"m": ENTRY}}
        config, _ = take_options({**params, "health_file": path})
        return [store_options(config, number).health_file for number in (0, 1)]

    assert paths("/run/kv{rank}") == ["/run/kv0", "/run/kv1"]
    assert paths("/run/kv") == ["/run/kv", None]


def test_ranks_of_two_servers_with_one_key_have_namespaces_of_their_own(checkpoint):
    """Tensor parallelism of 4 on two servers: ranks 0 and 2 are both LMCache's rank 0 of 2."""
    kind = {"key": key(kv_rank=0x02000200)}
    first, second = (
        identity(checkpoint, entry={"server": [index, 2]}, kind=kind) for index in (0, 1)
    )
    assert first.digest != second.digest
    again = identity(checkpoint, entry={"server": [1, 2]}, kind=kind)
    assert again.digest == second.digest, "the control: a server shares with itself"


@pytest.mark.parametrize("world", [256, 257, 65536])
def test_ranks_that_overlap_in_lmcaches_key_are_refused(world):
    """The control is at the end: 255 ranks have keys of their own."""

    def of(world, rank):
        return key(kv_rank=world << 24 | rank << 16 | world << 8 | rank)  # ObjectKey.ComputeKVRank

    for rank in (0, 1, world - 1):
        with pytest.raises(ValueError, match="a rank of more than 32 bits"):
            chunk_of(of(world, rank))
    assert len({chunk_of(of(255, rank)) for rank in range(255)}) == 255


def test_every_part_of_a_rank_is_in_the_name():
    ranks = [0, 1, 0x01000000, 0x01000100, 0x01000101, 0x01010100, 0x01020102]
    assert len({chunk_of(key(kv_rank=rank)) for rank in ranks}) == len(ranks)


def test_a_short_hash_is_refused_and_rank_and_salt_are_in_the_name():
    with pytest.raises(ValueError, match="hash of 8 bytes"):
        chunk_of(key(chunk_hash=b"h" * 8))
    plain = chunk_of(key())
    assert plain.key_hash == b"h" * 32
    others = [key(cache_salt="a"), key(kv_rank=0x02000200), key(kv_rank=0x02010201)]
    assert len({plain, *map(chunk_of, others)}) == 4
