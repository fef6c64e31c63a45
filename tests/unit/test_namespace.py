"""The identity covers everything it holds, and names on disk lead back to what made them."""

from __future__ import annotations

import dataclasses
import json
import math
from enum import StrEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fskv.errors import ConfigError, IdentityMismatch
from fskv.namespace import (
    Absent,
    GroupIdentity,
    Identity,
    chunk_name,
    chunk_path,
    diff,
    directory,
    explain,
    parse_chunk_path,
)

GROUPS = (
    GroupIdentity(0, "full", None, 16, (65536, 65536), ("layers.0.attn", "layers.2.attn")),
    GroupIdentity(1, "sliding_window", 4096, 16, (65536,), ("layers.1.attn",)),
)

FIELDS = {
    "engine": "vllm",
    "engine_version": "0.32",
    "arch": "sm_90",
    "model_name": "meta-llama/Llama-3-8B",
    "weights": "commit:" + "a" * 40,
    "model_config": {"rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "type": "llama3"}},
    "kv_cache_dtype": "bfloat16",
    "model_dtype": "bfloat16",
    "kv_cache_layout": "HND",
    "attention_backend": "FLASH_ATTN",
    "tokens_per_hash": 16,
    "blocks_per_chunk": 16,
    "groups": GROUPS,
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "0",
    "topology": {"tp": 1, "pp": 1, "pcp": 1, "dcp": 1},
}

OTHER = {
    "format": 2,
    "engine": "sglang",
    "engine_version": "0.33",
    "arch": "sm_120",
    "model_name": "meta-llama/Llama-3-8B-Instruct",
    "weights": "commit:" + "b" * 40,
    "model_config": {"rope_theta": 500000.0, "rope_scaling": {"factor": 4.0, "type": "llama3"}},
    "kv_cache_dtype": "fp8_e4m3",
    "model_dtype": "float16",
    "kv_cache_layout": "NHD",
    "attention_backend": "FLASHINFER",
    "tokens_per_hash": 32,
    "blocks_per_chunk": 8,
    "groups": GROUPS[:1],
    "hash_algorithm": "xxhash_cbor",
    "hash_seed": "1",
    "topology": {"tp": 2, "pp": 1, "pcp": 1, "dcp": 1},
    "canonical_format": "c1",
    "tenant": "blue",
    "model_runner": "v2",
    "extra": {"kernel": "x"},
    "encryption": "aes-256-gcm/0123456789abcdef",
    "epoch": {"model": {"run": "r", "version": "7"}},
}

OTHER_GROUP = {
    "group_idx": 7,
    "kind": "mamba",
    "window_tokens": 4097,
    "tokens_per_block": 32,
    "page_nbytes": (65537,),
    "layer_names": ("layers.3.attn",),
}


# Computed once with hashlib and json alone, outside of fskv.
GOLDEN_PLAIN = "f03d24f6900c200f012ed9936f887068f41b46741c8e9b2987ff3ba646e563bf"
GOLDEN_TENANT = "b34bdc56324125506beaf9f3dc87e971344275ad39ced3a791d27c9e3c1b80eb"


def identity(**changes):
    return Identity(**{**FIELDS, **changes})


def through_json(manifest):
    return json.loads(json.dumps(manifest))


# --- the digest -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Identity)])
def test_every_field_changed_alone_gives_another_digest_and_is_named_by_diff(name):
    assert name in OTHER, f"new field {name}: give it another value in OTHER"
    changed = identity(**{name: OTHER[name]})
    assert changed.digest != identity().digest
    assert {d.path.split(".")[0].split("[")[0] for d in diff(identity(), changed)} == {name}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(GroupIdentity)])
def test_every_field_of_a_group_changed_alone_gives_another_digest(name):
    assert name in OTHER_GROUP, f"new field {name}: give it another value in OTHER_GROUP"
    group = dataclasses.replace(GROUPS[1], **{name: OTHER_GROUP[name]})
    changed = identity(groups=(GROUPS[0], group))
    assert changed.digest != identity().digest
    assert all(d.path.startswith(f"groups[1].{name}") for d in diff(identity(), changed))


def test_the_digest_of_a_known_identity_never_changes():
    # Golden: only added to. A change here renames every directory in the world.
    assert identity().digest.hex() == GOLDEN_PLAIN
    assert identity(tenant="blue", extra={"kernel": "x"}).digest.hex() == GOLDEN_TENANT


def test_an_unset_optional_field_is_not_in_the_manifest_and_keeps_the_old_digest():
    optional = {"canonical_format", "tenant", "model_runner", "extra"}
    assert not optional & identity().to_manifest().keys()
    unset = identity(canonical_format=None, tenant=None, model_runner=None, extra={})
    assert unset.digest.hex() == GOLDEN_PLAIN


def test_key_order_and_sequence_type_do_not_change_the_digest():
    reordered = dict(reversed(list(FIELDS["model_config"].items())))
    assert identity(model_config=reordered) == identity()
    assert identity(model_config={"x": (1, 2)}) == identity(model_config={"x": [1, 2]})


def test_values_that_python_calls_equal_are_told_apart():
    one, real, true = (identity(model_config={"x": v}) for v in (1, 1.0, True))
    assert len({one.digest, real.digest, true.digest}) == 3
    assert len({one, real, true}) == 3
    assert [d.path for d in diff(one, real)] == ["model_config.x"]


def test_the_identity_is_not_changed_by_its_callers_later_writes():
    config = {"rope": {"theta": 1.0}}
    one = identity(model_config=config)
    config["rope"]["theta"] = 2.0
    one.to_manifest()["model_config"]["rope"]["theta"] = 3.0
    assert one == identity(model_config={"rope": {"theta": 1.0}})


def test_integer_keys_are_the_text_they_become_in_json():
    assert identity(model_config={"m": {1: "a"}}) == identity(model_config={"m": {"1": "a"}})
    with pytest.raises(ConfigError, match="occurs twice"):
        identity(model_config={"m": {1: "a", "1": "b"}})


def test_text_enums_become_their_value():
    class Backend(StrEnum):
        FLASH = "FLASH_ATTN"

    assert identity(attention_backend=Backend.FLASH) == identity()


def nested(depth):
    tree = {}
    for _ in range(depth):
        tree = {"x": tree}
    return tree


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tenant", ""),
        ("weights", ""),
        ("weights", None),
        *(("tokens_per_hash", bad) for bad in (True, -1, 1.0, "16")),
        *(("model_config", {"x": bad}) for bad in (math.nan, [1, {"y": math.inf}], 10**5000)),
        *(("model_config", bad) for bad in ({"x": object()}, {None: 1}, [1], nested(1000))),
        ("topology", {"tp": "1"}),
        *(("groups", bad) for bad in (GROUPS[::-1], GROUPS[:1] * 2, ({"group_idx": 0},))),
    ],
)
def test_a_wrong_value_is_a_config_error_that_names_the_field(name, value):
    with pytest.raises(ConfigError, match=f"identity.{name}"):
        identity(**{name: value})


# --- the manifest -----------------------------------------------------------------------


def test_the_manifest_round_trips_exactly_through_json():
    for one in (identity(), identity(tenant="blué", extra={"a": [None, {"b": 1.5}]})):
        back = Identity.from_manifest(through_json(one.to_manifest()))
        assert (back, back.to_manifest()) == (one, one.to_manifest())
        assert back.groups == one.groups
        assert not diff(one, back)


@pytest.mark.parametrize("name", sorted({*FIELDS, "format"}))
@pytest.mark.parametrize("bad", ["missing", None, [], {}, 1.5, "", True, [[]], {"a": nested(2000)}])
def test_a_damaged_manifest_is_a_mismatch_that_names_the_field(name, bad):
    manifest = through_json(identity().to_manifest())
    if bad == "missing":
        del manifest[name]
    else:
        manifest[name] = bad
    if (name, bad) in [("groups", []), ("model_config", {}), ("topology", {})]:  # well-formed
        assert diff(identity(), Identity.from_manifest(manifest))
        return
    with pytest.raises(IdentityMismatch, match=name):
        Identity.from_manifest(manifest)


UNFIT = [{"colour": "red"}, {"tenant": None}, {"tenant": ""}, {"extra": {}}, {"format": 2}]
UNFIT += [{"format": True}, {"groups": [{"group_idx": 0}]}, {"groups": [None]}]


@pytest.mark.parametrize("changes", UNFIT)
def test_a_manifest_this_version_cannot_compare_is_a_mismatch(changes):
    name = next(iter(changes))
    with pytest.raises(IdentityMismatch, match=name):
        Identity.from_manifest({**identity().to_manifest(), **changes})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(list(FIELDS)), inner, max_size=4)
    ),
    max_leaves=12,
)


# --- diff -------------------------------------------------------------------------------


def test_diff_names_the_leaf_by_its_path():
    other = identity(
        model_config={"rope_theta": 500000.0, "rope_scaling": {"factor": 4.0}},
        groups=(GROUPS[0], dataclasses.replace(GROUPS[1], window_tokens=None)),
        tenant="blue",
    )
    assert diff(identity(), other) == [
        ("groups[1].window_tokens", 4096, None),
        ("model_config.rope_scaling.factor", 8.0, 4.0),
        ("model_config.rope_scaling.type", "llama3", Absent.ABSENT),
        ("tenant", Absent.ABSENT, "blue"),
    ]


def test_a_missing_layer_is_one_difference():
    names = tuple(f"layers.{i}" for i in range(80))
    group = dataclasses.replace(GROUPS[0], layer_names=names)
    short = dataclasses.replace(GROUPS[0], layer_names=names[:40] + names[41:])
    (found,) = diff(identity(groups=(group,)), identity(groups=(short,)))
    (line,) = explain([found], "node1", "node2")
    assert found.path == "groups[0].layer_names"
    assert "layers.40" in line
    assert len(line) < 350


def test_explain_names_both_sides_in_printable_lines():
    hostile = identity(model_config={"a\nb\x7f": "x\x1b[2J\u202e\x7f"}, tenant="blue")
    lines = explain(diff(identity(), hostile), "this engine", "namespace.json")
    assert 'tenant: absent in this engine, "blue" in namespace.json' in lines
    assert all(line.isprintable() and line.isascii() for line in lines)


CONFIGS = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


def clean(tree):
    try:
        return identity(model_config=tree)
    except ConfigError:
        return identity()


@settings(deadline=None)
@given(a=CONFIGS, b=CONFIGS)
def test_diff_is_empty_exactly_if_the_digests_are_equal(a, b):
    one, two = clean(a), clean(b)
    assert (not diff(one, two)) == (one.digest == two.digest) == (one == two)
    assert [(d.path, d.b, d.a) for d in diff(one, two)] == [tuple(d) for d in diff(two, one)]


# --- directories ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("meta-llama/Llama-3-8B", "meta-llama--Llama-3-8B"),
        ("/mnt/models/meta-llama/Llama-3-8B/", "meta-llama--Llama-3-8B"),
        ("gpt2", "gpt2"),
        ("/c/models--org--name/snapshots/" + "a" * 40, "org--name"),
        ("../../etc/passwd", "etc--passwd"),
        ("..", "model"),
        ("/", "model"),
        ("a/.hidden", "a--.hidden"),
        (".hidden", "hidden"),
        ("-rf", "rf"),
        ("modèle/é", "modele--e"),
        ("模型", "model"),
        ("a b\n\0c", "a_b_c"),
        ("x@deadbeef", "x_deadbeef"),
        ("a\\b", "a--b"),
    ],
)
def test_the_directory_keeps_the_readable_end_of_the_model_name(model, shown):
    one = identity(model_name=model)
    assert directory(one) == f"sm_90/{shown}@{one.digest16}"


@settings(deadline=None)
@given(model=st.text(min_size=1, max_size=500), arch=st.text(min_size=1, max_size=100))
def test_no_name_leaves_its_directory_or_its_limits(model, arch):
    one = identity(model_name=model, arch=arch)
    arch_part, leaf = directory(one).split("/")
    model_part, digest16 = leaf.split("@")
    assert digest16 == one.digest16
    assert 0 < len(model_part) <= 120
    assert 0 < len(arch_part) <= 40
    for part in (arch_part, model_part):
        assert part.isascii()
        assert part.isprintable()
        assert " " not in part
        assert part[0] not in ".-"


# --- chunk names ------------------------------------------------------------------------

INDEX = st.integers(0, 999_999)


def test_chunk_names_never_change():
    # xxh3_128 of the key, seed 0: golden.
    assert chunk_name(b"") == "99aa06d3014798d86001c324468d497f"
    name = chunk_name(b"\x00" * 32)
    assert chunk_path(b"\x00" * 32, 3, None) == f"chunks/{name[:3]}/{name}.g3.kv"
    assert chunk_path(b"\x00" * 32, 0, 12) == f"chunks/{name[:3]}/{name}.g0.r12.kv"


@settings(deadline=None)
@given(key=st.binary(max_size=64), group_idx=INDEX, rank=st.none() | INDEX)
def test_parse_is_the_inverse_of_chunk_path(key, group_idx, rank):
    path = chunk_path(key, group_idx, rank)
    assert parse_chunk_path(path) == (chunk_name(key), group_idx, rank)


GOOD = chunk_path(b"key", 1, 2)


@settings(deadline=None)
@given(
    at=st.integers(0, len(GOOD)),
    cut=st.integers(0, 3),
    text=st.text("0123456789abcdefgrkv./\n\0ABF٣²-+ _", max_size=3),
)
def test_whatever_parses_is_what_chunk_path_makes(at, cut, text):
    path = GOOD[:at] + text + GOOD[at + cut :]
    found = parse_chunk_path(path)
    if found is not None:
        suffix = "" if found.rank is None else f".r{found.rank}"
        assert path == f"chunks/{found.name[:3]}/{found.name}.g{found.group_idx}{suffix}.kv"
        assert path.isascii()


def test_models_that_look_alike_after_sanitising_have_different_directories():
    assert directory(identity(model_name="a b")) != directory(identity(model_name="a_b"))
