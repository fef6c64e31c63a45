"""`fskv explain` tells what an engine's lookup and load would do with what is on disk, and why.

Roots are written without an engine (tool_lab), under keys of fskv_tools.block_hashes (compared with vLLM in
test_block_hashes). On roots of real engines: test_engine_plan.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from types import SimpleNamespace

import pytest
from fskv_tools import block_hashes
from tool_lab import Lab, check_lines, run
from world import damage, make_identity

from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.namespace import GroupIdentity, directory
from fskv.root.process_id import HOST, TOKEN

TOKENS = random.Random(3).choices(range(1000), k=330)
FULL = GroupIdentity(0, "full/FullAttentionSpec/bfloat16/none", None, 16, (3000, 5000), ("a", "b"))
WINDOW = GroupIdentity(1, "sliding_window/SlidingWindowSpec/bf16/none", 40, 16, (2000,), ("c",))
STATE = GroupIdentity(2, "state/gdn/align/bfloat16", None, 16, (9000,), ("d",))


def identity_of(*groups, **changes):
    fields = {"engine_version": "0.32", "hash_seed": "default", "blocks_per_chunk": 2}
    return make_identity(**{**fields, "groups": groups, **changes})


class Prompted(Lab):
    """A root in which the chunks of prompts are stored under their real keys."""

    def store(self, identity, tokens, chunks, group_idx=0, *, ranks=(None,), **changes):
        """Store chunks of one group of a prompt; returns the paths."""
        where = self.namespace_of(identity)
        group = next(g for g in identity.groups if g.group_idx == group_idx)
        hashes = list(block_hashes.block_hashes(identity, tokens))
        per_chunk = group.tokens_per_block * identity.blocks_per_chunk // identity.tokens_per_hash
        return [
            self.chunk(
                where,
                chunk,
                group=group_idx,
                rank=rank,
                key=hashes[(chunk + 1) * per_chunk - 1],
                **changes,
            )
            for chunk in chunks
            for rank in ranks
        ]

    def explain(self, identity, *options, tokens=TOKENS):
        words = ("explain", identity.digest16, "--tokens", json.dumps(tokens), "--json", *options)
        done = run(*words, root=self.path)
        assert done.lines, done.stderr
        check_lines("explain", [dict(line) for line in done.lines])
        of = lambda kind: [line for line in done.lines if line["type"] == kind]
        return SimpleNamespace(
            **done.summary,
            exit_code=done.exit_code,
            chunks={(line["group"], line["chunk"]): line for line in of("chunk")},
            causes=" | ".join(line["text"] for line in of("cause")),
            whys=of("cause"),
            neighbours=[line for line in of("cause") if line["namespace"]],
        )


@pytest.fixture
def lab(tmp_path):
    return Prompted(tmp_path / "kv")


# --- how far a hit goes -----------------------------------------------------------------


def test_a_stored_prompt_hits_its_whole_chunks(lab):
    one = identity_of(FULL)
    lab.store(one, TOKENS, range(10))
    found = lab.explain(one)
    assert (found.hit_tokens, found.best_tokens, found.exit_code) == (320, 320, 0)
    assert {line["use"] for line in found.chunks.values()} == {"loaded"}
    # Negative control: another first token, and nothing is found.
    other = lab.explain(one, tokens=[TOKENS[0] + 1, *TOKENS[1:]])
    assert (other.hit_tokens, other.exit_code) == (0, 1)
    assert not any(line["present"] for line in other.chunks.values())
    assert "differs from the stored ones in tokens 0 to 31 |" in other.causes


def test_a_window_needs_the_chunks_at_the_end_of_the_hit_only(lab):
    one = identity_of(FULL, WINDOW)
    lab.store(one, TOKENS, range(10))
    lab.store(one, TOKENS, (8, 9), 1)
    found = lab.explain(one)
    assert found.hit_tokens == 320
    assert [c for c in range(10) if found.chunks[1, c]["use"] == "loaded"] == [8, 9]
    # Without the last one there is no window anywhere, and without any no hit.
    (path,) = lab.store(one, TOKENS, (9,), 1)
    os.unlink(path)
    missing = lab.explain(one)
    assert (missing.hit_tokens, missing.lookup_tokens) == (0, 0)
    assert "group 1 (sliding window 40) lacks chunk 9" in missing.verdict
    assert "--prefix-cache-retention-interval" in missing.causes
    # Where the prompts part before, that is the cause, and the window follows from it.
    other = lab.explain(one, tokens=[*TOKENS[:100], TOKENS[100] + 1, *TOKENS[101:]])
    assert {line["group"] for line in other.whys} == {0}
    assert "differs from the stored ones in tokens 96 to 127" in other.whys[0]["text"]


def test_a_hit_goes_on_inside_a_block_to_where_an_earlier_prompt_ended(lab):
    """Blocks of 64 tokens, hashes of 16: an engine with vLLM's prefix_match_unit."""
    full, state = (dataclasses.replace(group, tokens_per_block=64) for group in (FULL, STATE))
    one = identity_of(full, state, blocks_per_chunk=1, tokens_per_hash=16)
    lab.store(one, TOKENS, range(2))
    lab.store(one, TOKENS, (1,), 2)
    assert lab.explain(one, tokens=TOKENS[:200]).hit_tokens == 128
    # The prompt of 180 tokens ended at 176, the one of 150 at 144.
    hashes = list(block_hashes.block_hashes(one, TOKENS))
    where = lab.namespace_of(one)
    ends = {
        (end, group): lab.chunk(where, 2, group=group, key=hashes[end // 16 - 1])
        for end in (144, 176)
        for group in (0, 2)
    }
    found = lab.explain(one, tokens=TOKENS[:200])
    assert (found.hit_tokens, found.best_tokens) == (176, 192), "its third block was never whole"
    assert "48 of them inside a block" in found.verdict
    assert lab.explain(one, tokens=TOKENS[:176]).hit_tokens == 144, "the last token is computed"
    os.unlink(ends[176, 2])
    assert lab.explain(one, tokens=TOKENS[:200]).hit_tokens == 144, "all groups have to have it"
    damage(ends[144, 0], 100)
    bad = lab.explain(one, tokens=TOKENS[:200])
    assert (bad.lookup_tokens, bad.hit_tokens, bad.exit_code) == (144, 0, 1)
    # The negative control: an engine without the option never looks there.
    without = identity_of(full, state, blocks_per_chunk=1, tokens_per_hash=64)
    lab.store(without, TOKENS, range(2))
    lab.store(without, TOKENS, (1,), 2)
    assert lab.explain(without, tokens=TOKENS[:200]).hit_tokens == 128


# --- what is wrong with files -----------------------------------------------------------


def with_wrong_size(path):
    os.truncate(path, os.path.getsize(path) - 1)


def with_a_link(path):
    os.rename(path, path + ".moved")
    os.symlink(path + ".moved", path)


def with_a_fifo(path):
    os.unlink(path)
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoiling", "words"),
    [
        (os.unlink, "no such file"),
        (with_wrong_size, "bytes, expected"),
        (with_a_link, "a symbolic link"),
        (with_a_fifo, "a FIFO"),
    ],
)
def test_what_a_lookup_sees_ends_the_hit(lab, spoiling, words):
    one = identity_of(FULL)
    paths = lab.store(one, TOKENS, range(10))
    spoiling(paths[5])
    found = lab.explain(one)
    assert (found.hit_tokens, found.lookup_tokens) == (160, 160)
    assert "group 0 (full attention) lacks chunk 5 (tokens 160 to 191)" in found.verdict
    uses = [found.chunks[0, chunk]["use"] for chunk in range(10)]
    assert uses == ["loaded"] * 5 + ["wanted"] * 5
    (file,) = found.chunks[0, 5]["files"]
    assert words in f"{file['state']} {file['detail']}"
    assert words in found.causes or spoiling is os.unlink


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"namespace_digest": bytes(32)}, "another namespace"),
        ({"key_hash": bytes(32)}, "holds the key of"),
        ({"layout_digest": bytes(16)}, "another layout"),
    ],
)
def test_a_sound_file_of_something_else_fails_the_load(lab, changes, words):
    """A lookup compares lengths alone; the load does not believe the file, and recomputes all."""
    one = identity_of(FULL)
    lab.store(one, TOKENS, range(10))
    lab.store(one, TOKENS, (5,), **changes)
    found = lab.explain(one)
    assert (found.lookup_tokens, found.hit_tokens, found.exit_code) == (320, 0, 1)
    assert "chunk 5" in found.verdict
    assert "recomputed whole" in found.verdict
    assert words in found.causes


def test_a_partial_chunk_serves_a_window_that_begins_in_it(lab):
    one = identity_of(FULL, WINDOW)
    lab.store(one, TOKENS, range(10))
    lab.store(one, TOKENS, (9,), 1)
    # A window of 40 at 320 begins at token 281: in the second block of chunk 8.
    lab.store(one, TOKENS, (8,), 1, first_block=1)
    assert lab.explain(one).hit_tokens == 320
    lab.store(one, TOKENS, (9,), 1, first_block=1)  # block 0 of chunk 9 is needed
    found = lab.explain(one)
    assert (found.lookup_tokens, found.hit_tokens) == (320, 0)
    assert "blocks from 1 on" in found.causes


def test_every_rank_has_to_have_its_file(lab):
    one = identity_of(FULL, topology={"tp": 2, "pp": 1})
    paths = lab.store(one, TOKENS, range(10), ranks=(0, 1))
    assert lab.explain(one).hit_tokens == 320
    os.unlink(paths[7])  # rank 1 of chunk 3
    found = lab.explain(one)
    assert found.hit_tokens == 96
    assert "ranks 1 are missing and the others are there" in found.causes
    sliced = identity_of(FULL, topology={}, canonical_format="LBHNC/3")
    lab.store(sliced, TOKENS, range(10), ranks=(0, 1, 2))
    assert lab.explain(sliced).hit_tokens == 320


# --- why ----------------------------------------------------------------------------------


def ranges(found):
    return [(line["group"], line["chunk"], line["last_chunk"]) for line in found.whys]


def test_what_follows_shows_that_a_prompt_was_stored_and_its_files_were_removed(lab):
    one = identity_of(FULL)
    for path in lab.store(one, TOKENS, range(9))[2:5]:
        os.unlink(path)
    found = lab.explain(one)
    assert ranges(found) == [(0, 2, 4), *[(0, 9, 9)] * 3]
    assert "removed since (pruned" in found.whys[0]["text"]
    assert "differs from the stored ones in tokens 288 to 319" in found.whys[1]["text"]
    shown = run("explain", one.digest16, "--tokens", json.dumps(TOKENS), root=lab.path).stdout
    assert "group 0 chunks 2-4: a prompt with these tokens was stored" in shown
    # The control: with nothing behind it, nobody can tell whether the prompt was stored.
    for path in lab.store(one, TOKENS, range(9))[2:]:
        os.unlink(path)
    assert ranges(alone := lab.explain(one)) == [(0, 2, 9)] * 3
    assert "differs from the stored ones in tokens 64 to 95" in alone.whys[0]["text"]


def engine(lab, identity, *, counted, **limits):
    """Leave what a living engine and the holder of the lease leave in a root."""
    shared = f"{lab.path}/.fskv-maintenance"
    os.makedirs(shared, exist_ok=True)
    name = f"{HOST}-{os.getpid()}-{TOKEN}-1"
    where = directory(identity)
    files = SharedFiles(shared)
    files.publish(Heartbeat(name, where, None, Limits(**limits)))
    files.publish_usage(Usage(namespaces={where: (counted, 1)}, at_ms=1))


def test_where_nothing_is_stored_because_nothing_can_be_it_is_said(lab):
    one = identity_of(FULL)
    lab.namespace_of(one)
    # The control: there is room, and an engine that may write: then it is the prompt.
    engine(lab, one, counted=0, max_nbytes=1 << 30)
    assert [line["group"] for line in lab.explain(one).whys] == [0] * 3
    # A bound below one chunk.
    engine(lab, one, counted=0, max_nbytes=1024)
    found = lab.explain(one)
    assert [line["group"] for line in found.whys] == [None, 0, 0, 0]
    assert (
        "nothing can be stored now: 0 B of max_bytes 1.00 KiB are in use; a chunk has"
        in found.causes
    )
    shown = run("explain", one.digest16, "--tokens", json.dumps(TOKENS), root=lab.path).stdout
    assert "the root: nothing can be stored now" in shown
    # Engines that store what they see twice.
    files = SharedFiles(f"{lab.path}/.fskv-maintenance")
    files.publish_usage(dataclasses.replace(files.usage(), first_sight=False))
    assert "store a chunk here when they see it twice" in lab.explain(one).causes
    # One that is nearly reached.
    engine(lab, one, counted=1000 << 20, max_nbytes=1 << 30)
    assert "chunks are pruned to stay within a bound: 0.98 GiB of" in lab.explain(one).causes


def test_another_namespace_that_has_it_is_named_with_the_reason(lab):
    one = identity_of(FULL)
    others = {
        "sm_90": identity_of(FULL, arch="sm_90"),
        "PYTHONHASHSEED": identity_of(FULL, hash_seed="PYTHONHASHSEED=9"),
        "blocks per chunk": identity_of(FULL, blocks_per_chunk=5),
    }
    lab.root.open_namespace(one)
    for each in others.values():
        per_chunk = 16 * each.blocks_per_chunk
        lab.store(each, TOKENS, range(len(TOKENS) // per_chunk))
    lab.root.open_namespace(identity_of(FULL, tenant="empty"))
    found = lab.explain(one)
    assert found.hit_tokens == 0
    assert found.whys[: len(others)] == found.neighbours, "they are the likeliest cause"
    for words, each in others.items():
        (line,) = [n for n in found.neighbours if n["namespace"].endswith(each.digest16)]
        assert words in line["text"]
        assert line["hit_tokens"] == 320
    of_another_model = identity_of(FULL, model_name="org/else", weights="commit:" + "c" * 40)
    lab.store(of_another_model, TOKENS, range(10))
    shown = run("explain", one.digest16, "--tokens", json.dumps(TOKENS), root=lab.path).stdout
    assert all(each.digest16 in shown for each in others.values())
    assert of_another_model.digest16 not in shown
    # Negative control: where it hits itself, nobody else is asked.
    lab.store(one, TOKENS, range(10))
    assert lab.explain(one).neighbours == []


def test_of_epochs_that_have_it_one_is_named_and_a_models_name_means_none(lab):
    """The control: another namespace without an epoch is named beside it, and makes the name ambiguous."""
    one, name = identity_of(FULL), ("explain", "org/model", "--tokens", json.dumps(TOKENS))
    lab.root.open_namespace(one)
    for number in range(5):
        lab.store(identity_of(FULL, epoch={"private": f"{number:032x}"}), TOKENS, range(10))
    assert [n["text"].count("epoch none / private") for n in lab.explain(one).neighbours] == [1]
    for words in (name, ("explain", *name[2:])):
        assert one.digest16 in run(*words, root=lab.path).stdout.partition("\n")[0]
    lab.store(identity_of(FULL, arch="sm_90"), TOKENS, range(10))
    assert len(lab.explain(one).neighbours) == 2
    assert "may be any of" in run(*name, root=lab.path).stderr


# --- tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{0}", '{{"prompt_token_ids": {0}}}', "{1}"])
def test_tokens_come_in_several_forms(lab, tmp_path, form):
    one = identity_of(FULL)
    lab.store(one, TOKENS, range(10))
    path, text = tmp_path / "tokens", form.format(json.dumps(TOKENS), ", ".join(map(str, TOKENS)))
    path.write_text(text)
    ways = [
        ((path,), None),
        (("-",), text),
        *[((text,), None)] * (form != '{{"prompt_token_ids": {0}}}'),
    ]
    for words, stdin in ways:
        done = run("explain", "--tokens", *words, "--json", root=lab.path, stdin=stdin)
        assert done.summary["hit_tokens"] == 320


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "") for text in ("[" * 200_000, "9" * 5000, "[NaN]", "-1", "[1, -2]", "\x00")),
        ("What is the capital of France?", "; a prompt as text belongs to --prompt"),
    ],
    ids=range(7),
)
def test_hostile_tokens_are_a_usage_error(lab, tmp_path, text, words):
    lab.root.open_namespace(identity_of(FULL))
    path = tmp_path / "tokens"
    path.write_text(text)
    done = run("explain", "--tokens", path, root=lab.path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.rstrip().endswith(words)


def test_a_salt_makes_other_keys(lab):
    one = identity_of(FULL)
    lab.store(one, TOKENS, range(10))
    assert lab.explain(one).hit_tokens == 320
    assert lab.explain(one, "--cache-salt", "x").hit_tokens == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"hash_algorithm": "xxhash"},
        {"engine": "other"},
        {"groups": (GroupIdentity(0, "holographic", None, 16, (1,), ()),)},
        {"groups": (GroupIdentity(0, "full", None, 24, (1,), ()),)},
        {"blocks_per_chunk": 1 << 31},
        {"tokens_per_hash": 0},
        {"groups": (GroupIdentity(0, "full", None, 16, ((1 << 40) - 1,) * 2000, ()),)},
        {"topology": {"tp": 10**70}},
        {"canonical_format": "LBHNC/" + "9" * 5000},
    ],
    ids=range(9),
)
def test_an_identity_whose_keys_or_files_cannot_be_known_is_refused(lab, changes):
    odd, one = identity_of(FULL, **changes), identity_of(FULL)
    lab.root.open_namespace(odd)
    lab.root.open_namespace(one)
    done = run("explain", odd.digest16, "--tokens", json.dumps(TOKENS), root=lab.path)
    assert (done.exit_code, done.stdout) == (2, ""), done.stdout
    assert len(done.stderr.strip().splitlines()) <= 2
    # It is no reason not to explain another one.
    assert lab.explain(one).hit_tokens == 0


def test_exactly_one_thing_is_asked_for(lab):
    one = identity_of(FULL)
    lab.root.open_namespace(one)
    for words in ((), ("--prompt", "x", "--tokens", "[1]"), ("--tokens", "[1]", "--url", "x")):
        assert run("explain", one.digest16, *words, root=lab.path).exit_code == 2
    missing = run("explain", one.digest16, "--tokens", "no-such-file", root=lab.path)
    assert (missing.exit_code, "expected a list such as 1,2,3" in missing.stderr) == (2, True)
    assert run("explain", "--tokens", "[1]", root=f"{lab.path}/nowhere").exit_code == 10


@pytest.mark.parametrize(("version", "says"), [("0.32.1", False), ("0.320", True)])
def test_keys_of_a_version_that_was_not_compared_are_said_to_be_so(lab, version, says):
    one = identity_of(FULL, engine_version=version)
    lab.store(one, TOKENS, range(2))
    done = run("explain", one.digest16, "--tokens", json.dumps(TOKENS), root=lab.path)
    assert ("this namespace is of vLLM 0.320" in done.stderr) is says
