"""Which facts of LMCache and which options give another namespace. Without LMCache: its keys stand here."""

from __future__ import annotations

import json
import os
import platform
import re
from types import SimpleNamespace

import pytest
from lmcache_lab import FACTS
from places import REPOSITORY

from fskv.engines.lmcache.identity import (
    _OPTIONAL,
    _REFUSED,
    _REQUIRED,
    ObjectKind,
    build_identity,
    chunk_of,
    read_model,
    take_options,
)
from fskv.engines.lmcache.server import check_arguments
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import Checkpoint

torch = pytest.importorskip("torch", reason="dtypes are torch's: make test")

ENTRY = {
    **FACTS,
    "arch": "sm_90",
    "attention_backend": "FLASH_ATTN",
    "block_size": 16,
    "settings": {"tensor_parallel_size": 1},
}
ON_A_CPU = {
    "arch": "cpu-aarch64",
    "attention_backend": "CPU_ATTN",
    "block_size": 128,
    "isa": "neon",
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
    _, models = take_options(
        {"root": "/mnt/kv", "weights_fixed": True, "models": {"m": given}, **dict(options)}
    )
    facts = {"key": key(), "shapes": [SHAPE], "dtypes": [DTYPE], **dict(kind)}
    return build_identity(read_model("m", models["m"]), ObjectKind.of(**facts), version)


CHANGES = {
    "LMCache's version": {"version": "0.5.7"},
    "the engine's version": {"entry": {"engine": "vllm 0.33.0"}},
    "the GPU": {"entry": {"arch": "sm_80"}},
    "the attention backend": {"entry": {"attention_backend": "FLASHINFER"}},
    "the block size": {"entry": {"block_size": 32}},
    "a CPU": {"entry": ON_A_CPU},
    "a CPU's block size": {"entry": {**ON_A_CPU, "block_size": 64}},
    "how a CPU packs pages": {"entry": {**ON_A_CPU, "isa": "vec16"}},
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
        {"entry": {"settings": {"--tensor-parallel-size": 1}}},
        {"entry": {"media": "trusted"}},
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
        ({"entry": {"settings": {"--enable-lora": True}}}, "found '--enable-lora'"),
        ({"entry": {"settings": {"enable-prompt-embeds": True}}}, "embeddings are zeros"),
        ({"entry": {"settings": {"calculate_kv_scales": True}}}, "the scales of KV"),
        *(
            ({"entry": {"settings": {name: value}}}, sentence)
            for name, value, sentence in (
                ("--prefix-caching-hash-algo", "xxhash", "takes for one another"),
                ("prefix_caching_hash_algo", "xxhash_cbor", "takes for one another"),
                ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", 1, "keys of the first"),
            )
        ),
        (
            {"entry": {"settings": {"kv-cache-dtype": "fp8", "kv_cache_dtype": "auto"}}},
            "'kv_cache_dtype' is in 'settings' twice",
        ),
        *(
            ({"entry": {"block_size": size}}, f"'block_size' is {size!r}, expected tokens")
            for size in (0, -16, True, "16", 16.0)
        ),
        ({"entry": {**ON_A_CPU, "isa": None}}, "'isa' is None with 'arch' 'cpu-aarch64'"),
        ({"entry": {**ON_A_CPU, "isa": ""}}, "'isa' is '', expected text"),
        ({"entry": {"isa": "neon"}}, "'isa' is 'neon' with 'arch' 'sm_90', expected it"),
        ({"entry": {**ON_A_CPU, "isa": "vec", "block_size": 48}}, 'expected "vec16"'),
        ({"entry": {"media": "checked"}}, "'media' is 'checked', expected"),
        ({"options": {"trust": ["media"]}}, "option 'trust'"),
        *(
            ({"entry": {"server": server}}, "'server' is .*, expected \\[index, count\\]")
            for server in (0, [0], [2, 2], [-1, 2], [0, 0], [False, True], ["0", "1"], "01")
        ),
        ({"options": {"models": {}}}, "option 'models': found {}"),
        ({"options": {"models": {"m": []}}}, "found \\[\\], expected an object"),
        ({"options": {"weights_fixed": False}}, "option 'weights_fixed': found false"),
        ({"options": {"load_deadline_s": 600}}, "option 'load_deadline_s': found 600"),
        ({"options": {"trust": ["lora"]}}, "option 'trust'"),
        ({"options": {"weights_id": "w"}}, "option 'weights_id'"),
        ({"options": {"max_byte": 1}}, "'max_byte'"),
        *(
            ({"hf": said}, f"'media' is \"none\" for a model with '{word}'")
            for said, word in (
                ({"vision_config": {}}, "vision_config"),
                ({"img_processor": {"name": "clip"}}, "img_processor"),
                ({"visual": {"image_size": 448}}, "image_size"),
                ({"visual": {}}, "visual"),
                ({"thinker_config": {"AudioConfig": {}}}, "audioconfig"),
                ({"parts": [{"mm_hidden_size": 1}]}, "mm_hidden_size"),
            )
        ),
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
    identity(checkpoint, hf={"vision_config": {}}, entry={"media": "trusted"})
    identity(checkpoint, hf={"code_revision": "main", "norm_eps": 1e-5})
    identity(checkpoint, hf={"intermediate_size": 64, "moe_intermediate_size": 64})
    identity(checkpoint, entry={"settings": {"enable_lora": False}})
    identity(checkpoint, entry={"settings": {"prefix_caching_hash_algo": "sha256_cbor"}})
    (checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
    told = {"kv-cache-dtype": "fp8_e4m3", "dtype": "bfloat16"}
    found = identity(checkpoint, entry={"settings": told}, kind={"dtypes": ["torch.uint8"]})
    assert (found.kv_cache_dtype, found.model_dtype) == ("fp8_e4m3", "bfloat16")


@pytest.mark.parametrize("world", [256, 257, 65536])
def test_ranks_that_overlap_in_lmcaches_key_are_refused(world):
    """The control is at the end: 255 ranks have keys of their own."""

    def of(world, rank):
        return key(kv_rank=world << 24 | rank << 16 | world << 8 | rank)  # ObjectKey.ComputeKVRank

    for rank in (0, 1, world - 1):
        with pytest.raises(ValueError, match="a rank of more than 32 bits"):
            chunk_of(of(world, rank))
    assert len({chunk_of(of(255, rank)) for rank in range(255)}) == 255


def test_a_short_hash_is_refused_and_rank_and_salt_are_in_the_name():
    with pytest.raises(ValueError, match="hash of 8 bytes"):
        chunk_of(key(chunk_hash=b"h" * 8))
    plain = chunk_of(key())
    assert plain.key_hash == b"h" * 32
    others = [key(cache_salt="a"), key(kv_rank=0x02000200), key(kv_rank=0x02010201)]
    others.append(key(cache_salt="a 02000200"))  # neither can be mistaken for the other
    assert len({plain, *map(chunk_of, others)}) == 5


def test_a_configuration_of_mistrals_own_is_looked_at_for_media(checkpoint):
    """The control: without the word it is taken."""
    (checkpoint / "config.json").unlink()
    (checkpoint / "params.json").write_text(json.dumps({"dim": 64}))
    identity(checkpoint)
    (checkpoint / "params.json").write_text(json.dumps({"dim": 64, "vision_encoder": {}}))
    with pytest.raises(ConfigError, match="'vision_encoder'"):
        identity(checkpoint)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_a_configuration_that_is_none_is_refused_in_one_sentence(checkpoint, text):
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        identity(checkpoint, entry={"weights_id": "w"})
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
@pytest.mark.parametrize(
    ("amx", "isa", "dtype", "size", "sentence"),
    [
        (True, "vec", "bfloat16", 128, "for bfloat16, expected what vLLM chooses"),
        (False, "amx", "bfloat16", 128, "for bfloat16, expected what vLLM chooses"),
        (True, "amx", "bfloat16", 128, None),
        (False, "vec", "bfloat16", 128, None),
        (True, "vec", "float32", 128, None),
        (True, "vec16", "bfloat16", 16, None),
    ],
)
def test_an_isa_that_vllm_does_not_choose_on_this_machine_is_refused(
    checkpoint, monkeypatch, amx, isa, dtype, size, sentence
):
    """The controls: what vLLM's _get_attn_isa chooses."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    facts = {
        "entry": {**ON_A_CPU, "arch": "cpu-x86_64", "isa": isa, "block_size": size},
        "kind": {"dtypes": [f"torch.{dtype}"]},
    }
    if sentence is None:
        assert identity(checkpoint, **facts).extra["isa"] == isa
    else:
        with pytest.raises(ConfigError, match=sentence):
            identity(checkpoint, **facts)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub's cache with two commits; returns what sets its branch to one of them."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's library")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--org--m"
    for commit in ("a" * 40, "b" * 40):
        snapshot = place / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(HF_CONFIG))
        (snapshot / "model.bin").write_bytes(commit.encode() * 64)
    (place / "refs").mkdir()

    def branch(commit):
        (place / "refs" / "main").write_text(commit)

    branch("a" * 40)
    return branch


def test_a_branch_of_the_hub_that_has_moved_on_is_seen(hub, tmp_path):
    """The controls: it is where it was; a commit does not move; the cache is away for a moment."""
    plain, pinned = Checkpoint("org/m"), Checkpoint("org/m", "a" * 40)
    weights = read_model("org/m", ENTRY).weights
    assert plain.place == pinned.place
    assert not plain.changed()
    os.rename(tmp_path / "hub", tmp_path / "away")
    assert not plain.changed()
    os.rename(tmp_path / "away", tmp_path / "hub")
    hub("b" * 40)
    assert plain.changed()
    assert not pinned.changed()
    assert read_model("org/m", ENTRY).weights != weights
    hub("a" * 40)
    assert not plain.changed()


def test_the_page_has_the_words_of_a_model_and_a_line_that_is_taken():
    text = (REPOSITORY / "docs" / "lmcache.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"--l2-adapter '(.*)'", text)
    config, models = take_options(json.loads(line)["adapter_params"])
    assert config.root == "/mnt/kv"
    assert set(models["MODEL"]) == set(_REQUIRED)
    table = text[text.index("| in `models` |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {*_REQUIRED, *_OPTIONAL}
    for name in _REFUSED:
        assert f"`{name}`" in text, name


ADAPTER = json.dumps({"type": "plugin", "module_path": "fskv.engines.lmcache"})
SERVER = ["server", "--l1-size-gb", "1", "--eviction-policy", "LRU", "--l2-adapter", ADAPTER]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine-type", "blend"], '--engine-type: found "blend"'),
        (["--engine-type=blend"], '--engine-type: found "blend"'),
        (["--engine-ty", "blend"], '--engine-type: found "blend"'),
        (["--p2p-advertise-url", "host:1"], "--p2p-advertise-url: found 'host:1'"),
        (["--hash-algorithm", "xxhash_cbor"], "--hash-algorithm: found 'xxhash_cbor', expected"),
        (["--p2p-advertise-url=host:1"], "--p2p-advertise-url: found 'host:1'"),
        (["--l2-adapter", '{"type": "fs_native"}'], "--l2-adapter: found 2 of them"),
        (["--l2-adapter=" + ADAPTER], "--l2-adapter: found 2 of them"),
        (["--l1-read-ttl-seconds", "99"], "--l1-read-ttl-seconds: found 99, expected 100 at least"),
        (["--l1-read-ttl-seconds=99"], "--l1-read-ttl-seconds: found 99, expected 100 at least"),
        (["--l1-write-ttl-seconds", "99"], "--l1-write-ttl-seconds: found 99, expected 100"),
        (
            ["--l1-manager", '{"type": "DRAM", "read_ttl_seconds": 9}'],
            "--l1-manager: 'read_ttl_seconds': found 9",
        ),
    ],
)
def test_what_does_not_go_with_fskv_is_refused_where_the_command_line_says_it(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence) as refusal:
        check_arguments([*SERVER, *arguments], 100)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "arguments",
    [
        SERVER,
        [],
        [*SERVER, "--engine-type", "default", "--p2p-advertise-url", "", "--port=1"],
        [*SERVER, "--l1-read-ttl-seconds", "100", "--l1-write-ttl-seconds=600"],
        [*SERVER, "--l1-read-ttl-seconds", "many"],  # LMCache's to refuse, as are these
        [*SERVER, "--l1-manager", "{"],
        [*SERVER, "--l1-manager", "[1]"],
        [*SERVER, "--engine-type"],
        [*SERVER, "--hash-algorithm", "sha256_cbor"],
    ],
)
def test_other_command_lines_are_taken(arguments):
    """The controls."""
    check_arguments(arguments, 100)
