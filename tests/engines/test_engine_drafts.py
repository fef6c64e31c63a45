"""Speculative decoding: what an engine has stored is loaded after a restart, the KV of its draft too."""

from __future__ import annotations

import engine_lab as lab
import pytest
from drafts import DRAFTS, NGRAMS, OVERWRITING, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

FAST = ("eagle", "windows_mtp")
MAX_TOKENS = 96  # enough for some drafts to be accepted


def accepted(result):
    """Return how many tokens of drafts were accepted between each metrics step and the one before."""
    name = "vllm:spec_decode_num_accepted_tokens"
    totals = [
        sum(metric["value"] for metric in step["metrics"] if metric["name"] == name)
        for step in lab.metrics(result)
    ]
    return [after - before for before, after in zip([0.0, *totals], totals, strict=False)]


def answer(label):
    prompt = PROMPTS.main_prompt()
    return [
        {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "label": label},
        {"metrics": True},
    ]


def run(drafting, steps, transfer=None, **changes):
    return lab.run(lab.request(PROMPTS, steps, **drafting.what(transfer, **changes)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in DRAFTS]
)
def test_what_an_engine_that_drafts_has_stored_is_loaded_after_a_restart(name, root, tmp_path):
    drafting = DRAFTS[name].written(tmp_path)
    transfer = lab.connector(root, lookup_timeout_s=10, **drafting.options)
    plain = run(drafting, answer("plain"))
    reference, guessed = lab.generates(plain)["plain"], accepted(plain)[0]
    assert len(set(reference["tokens"])) > 4, "degenerate tokens would prove nothing"
    assert guessed > 0 or not drafting.guesses
    cold = run(drafting, [*answer("cold"), *lab.SETTLE, *lab.SETTLE], transfer)
    assert lab.generates(cold)["cold"]["tokens"] == reference["tokens"]
    lab.assert_sound(root)
    stored = lab.snapshot(root)
    (manifest,) = lab.identities(root)
    groups = manifest["groups"]
    assert tuple(group["kind"].partition("/")[0] for group in groups) == drafting.groups

    # What is zeroed in turn, under right checksums: of each group the model's layers, then the draft's.
    victims = {}
    for group in groups:
        layers = list(enumerate(group["layer_names"]))
        of_draft = [page for page, layer in layers if layer.startswith(drafting.layers)]
        of_model = [page for page, _ in layers if page not in of_draft]
        index = group["group_idx"]
        victims |= {("model", index): of_model} if of_model else {}
        victims |= {("draft", index): of_draft} if of_draft else {}
    assert [whose for whose, _ in victims].count("draft") == 1, "vLLM keeps a draft in one group"
    talk = lab.Conversation(tmp_path)
    talk.say(*answer("loaded"), lab.RESET)

    def zero(index, pages):
        for file in stored:
            if lab.group_of(file) == index:
                lab.zero_payload(file, pages)

    for (whose, index), pages in victims.items():
        talk.spoil(stored, lambda index=index, pages=pages: zero(index, pages))
        talk.say(*answer(f"{(whose, index)}"), lab.RESET)
    talk.spoil(stored, lambda: None)
    talk.say(*answer("restored"))
    result = talk.run(PROMPTS, **drafting.what(transfer))
    done = lab.generates(result)
    in_turn = dict(zip(done, accepted(result), strict=True))
    assert lab.counter(lab.metrics(result)[-1], "load_failures") == 0
    for label, one in done.items():
        assert one["num_cached_tokens"] == drafting.hit_tokens, label
    for label in ("loaded", "restored"):
        assert done[label]["tokens"] == reference["tokens"], label
        assert in_turn[label] == guessed, f"{label}: other drafts are accepted than without fskv"
    for whose, index in victims:
        label = f"{(whose, index)}"
        if whose == "model":
            assert done[label]["tokens"] != reference["tokens"], f"group {index} had no effect"
        else:
            assert done[label]["tokens"] == reference["tokens"], "a draft decides no token"
            assert in_turn[label] < guessed or not drafting.guesses, "its KV had no effect"


@pytest.mark.slow
def test_a_draft_model_that_vllm_lets_write_over_the_models_kv_is_refused(root, tmp_path):
    drafting = OVERWRITING.written(tmp_path)
    alone = lab.generates(run(drafting, answer("alone"), speculative_config=None))["alone"]
    drafts = lab.generates(run(drafting, answer("drafts")))["drafts"]
    assert drafts["tokens"] != alone["tokens"], (
        "this vLLM has it right without fskv: fskv need not refuse it any more"
    )
    what = drafting.what(lab.connector(root, **drafting.options))
    result = lab.start_engine(lab.request(PROMPTS, answer("refused"), **what)).wait()
    assert result["exit_code"] == 1
    assert "option 'speculative_config': found method \"draft_model\"" in result["error"]
    assert lab.snapshot(root) == {}


@pytest.mark.slow
def test_an_engine_that_guesses_from_n_grams_loads_what_one_without_stored(root):
    lab.stored("llama", root)
    what = lab.request(
        PROMPTS,
        [lab.generate(PROMPTS.main_prompt(), "main")],
        transfer=lab.connector(root, **lab.options_for("llama")),
        engine={"speculative_config": NGRAMS},
        changes={"cpu_gaps": True},
    )
    done = lab.generates(lab.run(what))["main"]
    assert done["num_cached_tokens"] == 1920
    assert done["tokens"] == lab.main_tokens("llama")
