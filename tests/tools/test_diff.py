"""`fskv diff` says why two engines do not share, for every field, and survives any manifest."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from fskv_tools import identity_words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_lab import check_lines, fskv, run
from world import make_identity

from fskv.namespace import GroupIdentity, Identity

# One change of each field, and words that an operator must find in what is printed of it.
CHANGES = {
    "engine": ("other-engine", "in its own way"),
    "engine_version": ("0.34", "how it was built"),
    "arch": ("sm_120", "arch cpu-x86_64 / sm_120"),
    "model_name": ("org/other", "model name org/model / org/other"),
    "weights": ("commit:" + "b" * 40, "same revision"),
    "model_config": ({"text": {"rope_theta": 1}}, "config.json"),
    "kv_cache_dtype": ("fp8_e4m3", "kv cache dtype bfloat16 / fp8_e4m3"),
    "model_dtype": ("float16", "--dtype"),
    "kv_cache_layout": ("NHD", "VLLM_KV_CACHE_LAYOUT"),
    "attention_backend": ("FLASH_ATTN", "--attention-backend"),
    "tokens_per_hash": (32, "--block-size"),
    "blocks_per_chunk": (8, "hybrid_chunk_size"),
    "groups": ((GroupIdentity(0, "full", None, 32, (1,), ("layers.0",)),), "follows from another"),
    "hash_algorithm": ("sha256_cbor", "--prefix-caching-hash-algo"),
    "hash_seed": ("PYTHONHASHSEED=7", "PYTHONHASHSEED"),
    "topology": ({"tp": 2}, "canonical_layout"),
    "canonical_format": ("LBHNC/8", "canonical_layout"),
    "tenant": ("acme", "option `tenant`"),
    "encryption": ("aes-256-gcm/" + "7" * 16, "`key_file`"),
    "model_runner": ("v2", "VLLM_USE_V2_MODEL_RUNNER"),
    "epoch": ({"model": {"run": "r7", "version": "42"}}, "epoch none / model run r7 version 42"),
    "extra": ({"page_layouts": {"group0": "amx"}}, "instruction set"),
}


def test_every_field_of_an_identity_is_in_these_tests_and_has_words():
    fields = {field.name for field in dataclasses.fields(Identity)}
    assert fields == CHANGES.keys() | {"format"}
    assert fields == identity_words.MEANINGS.keys()


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_that_differs_is_said_in_words_with_what_to_do(lab, field):
    value, words = CHANGES[field]
    one, other = lab.namespace(), None
    other = lab.namespace(**{"pages": (40000, 24000), field: value})
    if field != "groups":
        one = lab.namespace(pages=(40000, 24000))
    done = run("diff", one.id, other.id, root=lab.path)
    assert done.exit_code == 1
    flat = " ".join(done.stdout.split())
    assert "these two do not share because: " in flat
    assert words in flat
    for name, (_, others) in CHANGES.items():
        if name != field and len(others) > 20:
            assert others not in flat
    *differences, _ = run("diff", one.id, other.id, "--json", root=lab.path).lines
    assert [line["field"].partition(".")[0] for line in differences] == [field]


@pytest.mark.parametrize("weights", ["commit:" + "b" * 40, None], ids=["", "negative control"])
def test_two_models_are_said_to_be_two_without_advice(lab, weights):
    """In the control only the name differs, and there is something to do."""
    changes = {"weights": weights} if weights else {}
    pair = lab.namespace().id, lab.namespace(model_name="org/other", **changes).id
    shown = " ".join(run("diff", *pair, root=lab.path).stdout.split())
    assert ("these are two models" in shown) is bool(weights)
    assert ("same name" in shown) is (not weights)


def test_one_namespace_is_said_to_be_one(lab):
    where = lab.namespace()
    for other in (where.id, where.directory.path, f"{where.directory.path}/namespace.json"):
        done = run("diff", where.id, other, root=lab.path)
        assert (done.exit_code, done.stderr) == (0, "")
        assert where.id in done.stdout
        lines = run("diff", where.id, other, "--json", root=lab.path).lines
        assert lines[-1]["equal"] is True


def test_paths_need_no_root(lab, tmp_path):
    one, other = lab.namespace(arch="sm_89"), lab.namespace(arch="sm_120", tenant="acme")
    copy = tmp_path / "copied-from-another-node.json"
    copy.write_bytes((tmp_path / "kv" / other.id / "namespace.json").read_bytes())
    done = run("diff", one.directory.path, copy)
    assert done.exit_code == 1
    assert "because: tenant none / acme; arch sm_89 / sm_120" in done.stdout
    missing = run("diff", one.directory.path, "no-such-thing")
    assert missing.exit_code == 2
    assert "--root" in missing.stderr


def test_json_lines_hold_every_difference(lab):
    one = lab.namespace()
    other = lab.namespace(arch="sm_90", topology={"tp": 2, "pp": 1}, extra={"odd": None})
    done = run("diff", one.id, other.id, "--json", root=lab.path)
    summary = done.lines[-1]
    assert (summary["fields"], summary["equal"]) == (3, False)
    assert summary["paths"] == sum(len(line["paths"]) for line in done.lines[:-1]) == 4
    by_field = {line["field"]: line for line in done.lines[:-1]}
    assert "cannot share" in by_field["arch"]["meaning"]
    odd = by_field["extra.odd"]["paths"][0]
    assert (odd["path"], odd["a_absent"], odd["b"], odd["b_absent"]) == (
        "extra.odd",
        True,
        None,
        False,
    )
    check_lines("diff", done.lines)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no JSON"),
        ('{"format": 2}', "format is 2"),
        ("[" * 100_000, "deep"),
        ("\ud800\udfff", "UTF-8"),
    ],
    ids=range(4),
)
def test_a_damaged_manifest_is_a_problem_and_says_what_is_wrong(lab, tmp_path, content, words):
    good = lab.namespace()
    path = tmp_path / "damaged.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    for pair in ((good.id, path), (path, good.id)):
        done = run("diff", *pair, root=lab.path)
        assert done.exit_code == 1
        assert done.stdout == ""
        assert words in done.stderr
        assert str(path) in done.stderr
    manifest = tmp_path / "kv" / good.id / "namespace.json"
    manifest.write_bytes(path.read_bytes())
    by_name = run("diff", good.id, good.id, root=lab.path)
    assert (by_name.exit_code, by_name.stdout) == (1, "")
    assert good.id in by_name.stderr


def test_what_is_no_file_is_refused_without_waiting(lab, tmp_path):
    good = lab.namespace()
    os.mkfifo(tmp_path / "fifo")
    for strange in (tmp_path / "fifo", "/dev/zero", tmp_path):
        done = fskv("diff", good.id, strange, root=lab.path, timeout_s=60)
        assert done.exit_code == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
LEAVES |= st.sampled_from([2**63, 2**70, 10**300])
TREES = st.recursive(
    LEAVES,
    lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(max_size=8), one, max_size=4),
    max_leaves=12,
)
FIELDS = [*(field.name for field in dataclasses.fields(Identity)), "unknown"]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), TREES, max_size=3), raw=st.binary(max_size=40)
)
def test_no_manifest_makes_it_fail(tmp_path, changes, raw):
    """Any value in any field, and files that are no manifests: a sentence or a diff, never a traceback."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(make_identity().to_manifest()))
    content = json.dumps({**make_identity().to_manifest(), **changes}).encode()
    bad.write_bytes(content if changes else raw)
    done = run("diff", good, bad)
    assert done.exit_code in (0, 1)
    assert bool(done.stdout) != bool(done.stderr)
    assert all(c.isprintable() or c == "\n" for c in done.stdout + done.stderr)
