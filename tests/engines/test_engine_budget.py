"""Load or recompute, on real engines: storage that crawls is declined and fast storage is loaded from.

The tokens are those of an engine without fskv, always. Only ratios that are far apart count here.
"""

from __future__ import annotations

import itertools
import pathlib

import engine_lab as lab
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
lab.needs_vllm()

CRAWL = "pread slow_ms=30000 suffix=.kv"


def on_a_crawl(faults, root: str, directory: pathlib.Path, num_slow: int, **options) -> dict:
    """Compute a prompt, let the disk crawl, and ask for it again and again; return the result."""
    model = lab.MODELS["llama"]
    main = lab.generate(model.main_prompt(), "cold")
    talk = lab.Conversation(directory)
    talk.say(main, *lab.SETTLE, lab.RESET, lab.METRICS)
    talk.meanwhile(lambda: faults.set(CRAWL))
    for number in range(num_slow):
        talk.say({**main, "label": f"slow{number}"}, lab.RESET)
    talk.say(lab.METRICS)
    transfer = lab.connector(root, **lab.options_for("llama"), **options)
    result = talk.run(model, transfer=transfer, env=faults.env())
    assert faults.matched() > 0, "no read was slow: nothing was shown"
    done = lab.generates(result)
    assert len(lab.chunks(root)) == model.prompt_tokens // 128
    for number in range(num_slow):
        assert done[f"slow{number}"]["tokens"] == done["cold"]["tokens"]
    return result


@pytest.mark.slow
def test_storage_that_crawls_is_found_out_by_one_load_and_then_declined(faults, root, tmp_path):
    result = on_a_crawl(faults, root, tmp_path, 4, load_budget="on")
    before, after = lab.metrics(result)
    assert lab.counter(before, "prefill_rate") > 0, "the recompute was measured"
    assert lab.counter(before, "declined_tokens") == 0
    # Each file takes half a minute: nothing can be loaded, and the first one finds out.
    assert lab.counter(after, "cut_loads") == 1
    done = lab.generates(result)
    assert all(done[f"slow{number}"]["num_cached_tokens"] == 0 for number in range(4))
    assert lab.counter(after, "declined_tokens") >= 1920
    # Given up is not failed: nothing is held against the chunks or the root.
    assert lab.counter(after, "load_failures") == 0
    assert lab.counter(after, "breaker_open") == 0


@pytest.mark.slow
def test_negative_control_without_the_option_the_engine_waits_for_the_crawl(faults, root, tmp_path):
    result = on_a_crawl(faults, root, tmp_path, 1, load_deadline_s=20)
    _, after = lab.metrics(result)
    assert lab.counter(after, "declined_tokens") == lab.counter(after, "cut_loads") - 1 == 0
    assert lab.counter(after, "load_failures", reason="timed_out") > 0
    done = lab.generates(result)
    assert done["slow0"]["ttft_s"] > 20 > done["cold"]["ttft_s"]


@pytest.mark.slow
def test_fast_storage_is_loaded_from_and_found_again_after_a_crawl(faults, root, tmp_path):
    """A model whose recompute takes seconds, so that a busy machine cannot turn the balance."""
    model = lab.MODELS["llama_large"]
    prompt = lab.generate(model.tokens("budget", 400), "cold")

    def asked(label: str, times: int) -> list[dict]:
        steps = [({**prompt, "label": f"{label}{n}"}, lab.RESET) for n in range(times)]
        return [*itertools.chain(*steps), lab.METRICS]

    talk = lab.Conversation(tmp_path)
    talk.say(prompt, *lab.SETTLE, lab.RESET)
    talk.say(*asked("fast", 4))
    talk.meanwhile(lambda: faults.set(CRAWL))
    talk.say(*asked("slow", 2))
    talk.meanwhile(faults.clear)
    talk.say(*asked("again", 17))  # after 15 that are declined one is loaded
    result = talk.run(
        model,
        timeout_s=900,
        transfer=lab.connector(root, load_budget="on", hybrid_chunk_size=32),
        env=faults.env(),
        engine={"block_size": 32},
    )
    done = lab.generates(result)
    for label, step in done.items():
        assert label == "settle" or step["tokens"] == done["cold"]["tokens"], label
    fast, slow, again = lab.metrics(result)
    # Nothing is declined. The first load has a quarter of a second, which a busy machine may not have.
    loaded = [done[f"fast{n}"]["num_cached_tokens"] for n in range(4)]
    assert lab.counter(fast, "declined_tokens") == 0
    assert loaded[1:] == [384] * 3
    assert lab.counter(fast, "cut_loads") <= (loaded[0] == 0)
    assert lab.counter(slow, "declined_tokens") > 0
    assert done["again16"]["num_cached_tokens"] == 384
    assert lab.counter(again, "declined_tokens") > lab.counter(slow, "declined_tokens")
