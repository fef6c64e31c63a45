"""Real engines whose weights are updated while they run: no KV of other weights is ever served.

What an engine says after an update is compared with what an engine says that was started with these weights.
"""

from __future__ import annotations

import json
import os
import random
import shutil

import odd_checkpoints as odd
import pytest
from engine_lab import (
    METRICS,
    MODELS,
    RESET,
    RESET_TIERS,
    SETTLE,
    TWO_RANKS,
    checkpoint,
    chunks,
    connector,
    counter,
    generate,
    generates,
    good,
    identities,
    metrics,
    multi,
    needs_two_cores,
    needs_vllm,
    request,
    run,
    start_engine,
    tier,
)
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
needs_vllm()

MODEL = MODELS["llama"]
CHUNK_TOKENS = 128
NUM_TOKENS = 4
# Five with one beginning of three chunks each, and an end of one or two.
PROMPTS = [
    MODEL.tokens(f"begin {n // 5}", 3 * CHUNK_TOKENS) + MODEL.tokens(f"end {n}", 150 + 10 * n)
    for n in range(25)
]
METHODS = {"worker_extension_cls": "weight_methods.WeightMethods"}
SHORT = generate(MODEL.tokens("short", CHUNK_TOKENS + 40), "short")
TEXT = PROMPTS[0]
# Steps until the namespace of new weights is open: what is asked before that may not be stored.
OPENED = {**generate([2], "opened"), "max_tokens": 1, "again_while": "fskv_weights_in_doubt"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Two checkpoints of one architecture with other weights."""
    other = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(checkpoint("llama"), other)
    path = other / "model.safetensors"
    path.write_bytes(odd.other_weights(path))
    return checkpoint("llama"), str(other)


def an_engine(
    steps, root=None, *, path=None, options=None, changes=None, env=None, limit_s=240, **engine
):
    """Run an engine to its end; return its result. `limit_s` bounds a hang."""
    small = {"hybrid_chunk_size": CHUNK_TOKENS, "admission": "all", **(options or {})}
    transfer = connector(root, **small) if root else None
    what = request(MODEL, steps, path=path, transfer=transfer, engine=engine, env=env)
    return good(start_engine({**what, "changes": changes or {}}).wait(limit_s))


def ask(prompt, label):
    return {**generate(prompt, label), "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def truth(weights):
    """What engines that were started with them say, by weights and prompt."""
    steps = [ask(prompt, str(number)) for number, prompt in enumerate(PROMPTS)]
    said = [generates(an_engine(steps, path=path)) for path in weights]
    tokens = [[done[str(n)]["tokens"] for n in range(len(PROMPTS))] for done in said]
    assert sum(one != other for one, other in zip(*tokens, strict=True)) > len(PROMPTS) / 2
    return tokens


def reload(path):
    return {"rpc": "reload_weights", "kwargs": {"weights_path": path}}


# --- under load -----------------------------------------------------------------------------


def conversation(root, weights, updates, num_prompts):
    """Return steps: requests run across each update, more are asked and some aborted, and files are damaged.

    The engine starts with the first weights, and changes to the others first.
    """
    draw = random.Random(updates)

    def named(number, part, count, of=num_prompts):
        return {f"{number} {part} {n}": PROMPTS[n] for n in draw.sample(range(of), count)}

    def answer(number, part, count):
        gone = named(number, f"{part}-gone", 2)
        return [
            {"add": named(number, part, count), "max_tokens": NUM_TOKENS, "turns": 0},
            {"add": gone, "max_tokens": NUM_TOKENS, "turns": draw.randrange(4)},
            {"abort": list(gone)},
            {"finish": True},
            METRICS,
        ]

    steps = answer(-1, "first", num_prompts)
    for number in range(updates):
        across = named(number, "across", 3)
        steps.append({"add": across, "max_tokens": 40})
        steps.append({"damage": root, "part": 0.2, "seed": number})
        update = reload(weights[(number + 1) % 2])
        abort, finish, preempt = {"abort": list(across)}, {"finish": True}, {"preempt": True}
        steps += [[abort, update], [update, preempt, finish], [update, finish]][number % 3]
        steps += [RESET, *answer(number, "first", num_prompts)]
        steps += [RESET, *answer(number, "again", max(2, num_prompts // 5))]
    return steps


def wrong(result, truth):
    """Return (the number of answers, the labels of those that are not of the weights of their time)."""
    answers = {
        tuple(label.split()): answer["tokens"]
        for step in result["steps"]
        for label, answer in step.get("answers", {}).items()
    }
    counted = {label: said for label, said in answers.items() if label[1] in ("first", "again")}
    bad = [
        label
        for label, tokens in counted.items()
        if tokens != truth[(int(label[0]) + 1) % 2][int(label[2])]
    ]
    return len(counted), bad


@pytest.mark.parametrize(
    ("updates", "num_prompts"), [(3, 10), pytest.param(100, 25, marks=pytest.mark.slow)]
)
def test_no_answer_after_an_update_is_of_other_weights(root, weights, truth, updates, num_prompts):
    result = an_engine(conversation(root, weights, updates, num_prompts), root, path=weights[0])
    count, bad = wrong(result, truth)
    assert bad == []
    assert count >= num_prompts * (updates + 1)
    assert all(step["count"] for step in result["steps"] if step["step"] == "damage")
    loaded = [counter(step, "loaded_tokens") for step in metrics(result)]
    first = [loaded[2 * n + 1] - loaded[2 * n] for n in range(updates)]
    again = [loaded[2 * n + 2] - loaded[2 * n + 1] for n in range(updates)]
    assert first[0] == 0, "of the weights of the start"
    assert all(first[2:]), "equal weights came back"
    assert all(again)


def test_control_without_epochs_in_the_identity_wrong_tokens_are_served(root, weights, truth):
    steps = conversation(root, weights, 2, 10)
    result = an_engine(steps, root, path=weights[0], changes={"one_epoch": None})
    assert wrong(result, truth)[1]


def test_another_engine_that_loaded_the_same_checkpoint_shares_and_one_of_the_start_does_not(
    root, weights
):
    steps = [reload(weights[1]), RESET, OPENED, ask(TEXT, "text"), *SETTLE]
    one, other = (generates(an_engine(steps, root, path=weights[0]))["text"] for _ in range(2))
    assert (one["num_cached_tokens"], other["num_cached_tokens"]) == (0, 4 * CHUNK_TOKENS)
    assert one["tokens"] == other["tokens"]
    start = generates(an_engine([ask(TEXT, "text")], root, path=weights[0]))["text"]
    assert start["num_cached_tokens"] == 0


@pytest.mark.parametrize("twice", [True, False])
def test_a_checkpoint_of_a_part_of_the_weights_names_them_only_where_it_holds_all_that_changed(
    root, weights, tmp_path, twice
):
    """VLLM leaves what it does not hold as it was: here, as the checkpoint before it had it."""
    part = tmp_path / "part"
    shutil.copytree(weights[0], part)
    tensors = load_file(part / "model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    save_file(some, part / "model.safetensors", metadata={"format": "pt"})
    between = [] if twice else [reload(weights[1]), RESET, OPENED]
    steps = [reload(str(part)), RESET, OPENED, ask(TEXT, "first"), *SETTLE, *between]
    steps += [reload(str(part)), RESET, OPENED, ask(TEXT, "again")]
    with_files = generates(an_engine(steps, root, path=weights[0]))["again"]
    without = generates(an_engine(steps, path=weights[0]))["again"]
    assert with_files["tokens"] == without["tokens"]
    assert (with_files["num_cached_tokens"] > 0) is twice


def test_a_checkpoint_names_no_weights_beside_what_a_user_s_method_has_changed(root, weights):
    """It holds no buffer of positions, which a reload leaves as it is."""
    update = [reload(weights[1]), RESET, OPENED, ask(TEXT, "text"), *SETTLE]
    turned = [{"rpc": "turn_positions"}, *update]
    one, other, same = (
        generates(an_engine(steps, root, path=weights[0], **METHODS))["text"]
        for steps in (turned, update, update)
    )
    assert one["tokens"] != other["tokens"] == same["tokens"]
    assert other["num_cached_tokens"] == 0 < same["num_cached_tokens"]


# --- an update without a reset of vLLM's own cache --------------------------------------------


def without_reset(root, weights, changes):
    """Update while a request is paused, and ask for what vLLM's own cache has of the old weights."""
    begin = TEXT[: 3 * CHUNK_TOKENS]
    steps = [ask(begin, "warm"), *SETTLE]
    # Its first chunk is complete only after the update.
    steps += [{"add": {"paused": PROMPTS[9][:100]}, "max_tokens": 60}, METRICS, reload(weights[1])]
    steps += [{"finish": True}, ask(TEXT, "stale"), *SETTLE, METRICS]
    steps += [RESET, OPENED, ask(TEXT, "after"), *SETTLE, RESET, ask(TEXT, "loaded"), METRICS]
    result = an_engine(steps, root, path=weights[0], changes=changes)
    return generates(result), [counter(step, "stored_chunks") for step in metrics(result)]


def test_nothing_is_stored_after_an_update_until_vllm_s_own_cache_was_reset(root, weights, truth):
    said, (before, unreset, end) = without_reset(root, weights, {})
    assert said["stale"]["num_cached_tokens"] > 0, "vLLM served it from its own cache"
    assert before == unreset < end
    assert said["after"]["num_cached_tokens"] == 0
    assert said["loaded"]["num_cached_tokens"] == 4 * CHUNK_TOKENS
    assert said["after"]["tokens"] == said["loaded"]["tokens"] == truth[1][0]


def test_control_where_any_state_of_vllm_s_cache_counts_wrong_tokens_are_served(
    root, weights, truth
):
    said, _ = without_reset(root, weights, {"always_pure": None})
    assert said["after"]["num_cached_tokens"] > 0
    assert said["after"]["tokens"] != truth[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
def test_a_tier_stores_nothing_after_an_update_until_vllm_s_tiers_were_reset(
    root, weights, truth, fixed
):
    others = [ask(PROMPTS[n], f"push {n}") for n in (5, 10, 15, 20)]
    steps = [ask(TEXT, "warm"), *SETTLE, METRICS, reload(weights[1]), RESET]
    steps += [ask([*TEXT, *PROMPTS[5][:CHUNK_TOKENS]], "stale"), *SETTLE, METRICS]
    steps += [RESET_TIERS, OPENED, ask(TEXT, "after"), *SETTLE, METRICS]
    # They take the text's place in vLLM's own tier.
    steps += [*others, *SETTLE, RESET, ask(TEXT, "loaded")]
    transfer = tier(root, weights_fixed=fixed, extra={"cpu_bytes_to_use": 2 << 20})
    result = run(request(MODEL, steps, path=weights[0], transfer=transfer))
    said = generates(result)
    warm, stale, after = (counter(step, "stored_chunks") for step in metrics(result))
    cached = [said[label]["num_cached_tokens"] for label in ("after", "loaded")]
    if fixed:  # the control: somebody vouched for what is not so
        assert warm < stale
        assert cached[0] > 0
        assert said["after"]["tokens"] != truth[1][0]
        return
    assert 0 < warm == stale < after
    assert cached == [0, 4 * CHUNK_TOKENS]
    assert said["after"]["tokens"] == said["loaded"]["tokens"] == truth[1][0]


@pytest.mark.slow
def test_several_roots_go_on_after_an_update_once_vllm_s_connectors_were_reset(
    tmp_path, weights, truth
):
    """A sibling may keep KV of before in its memory. After a reset of vLLM's own cache alone all rest."""
    roots = [str(tmp_path / name) for name in ("first", "second")]
    for each in roots:
        os.mkdir(each)
    children = (connector(each, hybrid_chunk_size=CHUNK_TOKENS, admission="all") for each in roots)
    steps = [ask(TEXT, "warm"), *SETTLE, METRICS, reload(weights[1])]
    steps += [RESET, ask(TEXT, "rests"), *SETTLE, METRICS, RESET_TIERS, OPENED]
    steps += [ask(TEXT, "after"), *SETTLE, RESET, ask(TEXT, "loaded"), METRICS]
    result = run(request(MODEL, steps, path=weights[0], transfer=multi(*children)))
    said = generates(result)
    cached = [said[label]["num_cached_tokens"] for label in ("rests", "after", "loaded")]
    assert cached == [0, 0, 4 * CHUNK_TOKENS]
    assert said["after"]["tokens"] == said["loaded"]["tokens"] == truth[1][0]
    warm, rests, end = (counter(step, "stored_chunks") for step in metrics(result))
    assert 0 < warm == rests < end
    assert len(chunks(roots[0])) == len(chunks(roots[1])) > 0


# --- ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_two_cores
def test_after_a_rank_failed_in_an_update_nothing_is_served_until_a_whole_one(
    root, weights, truth, tmp_path
):
    health = str(tmp_path / "health")

    def look(word):
        return [*SETTLE, {"read": health, "until": f'"{word}"'}, METRICS]

    fails = {"rpc": "scale_weights", "kwargs": {"factor": 3.0, "fails_on": 1}, "raises": True}
    steps = [
        ask(TEXT, "warm"),
        *look("ok"),
        fails,
        RESET,
        RESET_TIERS,
        ask(TEXT, "broken"),
        *look("weights_changing"),
    ]
    steps += [RESET, ask(TEXT, "still"), *look("weights_changing")]
    # The second checkpoint has all tensors that the failed method wrote.
    steps += [reload(weights[1]), RESET, OPENED, ask(TEXT, "whole"), *look("ok")]
    steps += [RESET, ask(TEXT, "loaded"), *look("ok")]
    result = an_engine(
        steps,
        root,
        path=weights[0],
        options={"health_file": health},
        env=TWO_RANKS,
        tensor_parallel_size=2,
        **METHODS,
    )
    said = generates(result)
    cached = {label: said[label]["num_cached_tokens"] for label in said}
    assert (cached["broken"], cached["still"], cached["whole"]) == (0, 0, 0)
    assert cached["loaded"] == 4 * CHUNK_TOKENS
    assert said["whole"]["tokens"] == said["loaded"]["tokens"] == truth[1][0]
    stored = [counter(step, "stored_chunks") for step in metrics(result)]
    assert 0 < stored[0] == stored[1] == stored[2] < stored[3]
    read = [json.loads(step["text"]) for step in result["steps"] if step["step"] == "read"]
    assert "failed (scale_weights)" in " ".join(read[1]["why"])


# --- names ------------------------------------------------------------------------------------


def test_engines_of_one_run_share_after_an_update_of_one_version_and_no_other_does(root, weights):
    update = [{"rpc": "scale_weights", "kwargs": {"factor": 2.0}}, {"version": "7"}]

    def says(updates, run):
        steps = [*updates, RESET, OPENED, ask(TEXT, "text"), *SETTLE]
        result = an_engine(steps, root, path=weights[0], options={"weights_run": run}, **METHODS)
        return generates(result)["text"]

    one, same, missed = says(update, "r"), says(update, "r"), says([], "r")
    assert one["num_cached_tokens"] == missed["num_cached_tokens"] == 0
    assert same["num_cached_tokens"] == 4 * CHUNK_TOKENS
    assert one["tokens"] == same["tokens"] != missed["tokens"]
    assert says(update, "another")["num_cached_tokens"] == 0
    named = [identity["epoch"]["model"] for identity in identities(root) if "epoch" in identity]
    assert named == [{"run": run, "version": "7"} for run in ("r", "another")]


def test_only_a_version_that_came_together_with_the_weights_names_an_update(root, weights):
    scale = {"rpc": "scale_weights", "kwargs": {"factor": 2.0}}
    apart = ask(PROMPTS[5][:50], "apart")  # a step with tokens between weights and version
    text = [RESET, OPENED, ask(TEXT, "text"), *SETTLE]
    steps = [scale, {"version": "1"}, *text, scale, *text, scale, apart, {"version": "2"}, *text]
    steps += [scale, {"version": "2"}, *text, {"version": "3"}, scale, *text]
    result = an_engine(steps, root, path=weights[0], options={"weights_run": "r"}, **METHODS)
    asked = [step for step in result["steps"] if step.get("label") == "text"]
    assert [step["num_cached_tokens"] for step in asked] == [0] * 5
    epochs = [identity.get("epoch", {}) for identity in identities(root)]
    named = [epoch["model"]["version"] for epoch in epochs if "model" in epoch]
    assert named == ["1", "3"]
    assert all("private" in epoch for epoch in epochs if epoch and "model" not in epoch)


# --- many ---------------------------------------------------------------------------------------

UPDATES = int(os.environ.get("UPDATES", "300"))
MAX_BYTES = 16 << 20


@pytest.mark.slow
def test_many_updates_leave_no_open_files_threads_or_memory(root, weights):
    update = [{"rpc": "scale_weights", "kwargs": {"factor": 1.0}}, RESET, SHORT]
    fifth = [*update * (UPDATES // 5), *SETTLE, {"facts": True}]
    options = {"max_bytes": MAX_BYTES, "keep_free": 0}
    path = weights[0]
    result = an_engine(fifth * 5, root, path=path, options=options, limit_s=800, **METHODS)
    first, *_, last = (step for step in result["steps"] if step["step"] == "facts")
    assert len(identities(root)) > UPDATES / 2, "each began a namespace"
    assert last["files"] <= first["files"] + 2
    assert last["threads"] <= first["threads"] + 2
    assert last["rss_kib"] <= first["rss_kib"] + (32 << 10)
    assert sum(map(os.path.getsize, chunks(root))) <= MAX_BYTES * 1.2
