"""FskvTier behind vLLM's CPU tier, on real engines: the tokens of an engine without offloading, always."""

from __future__ import annotations

import os

import engine_lab as lab
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

RESET, transfer = lab.RESET_TIERS, lab.tier
HYBRIDS = ("gpt_oss", "qwen3_next")


@pytest.fixture
def other_root(tmp_path) -> str:
    (tmp_path / "other").mkdir()
    return str(tmp_path / "other")


def engine(name: str, steps: list, kv: dict | None, **options) -> dict:
    model = lab.MODELS[name]
    return lab.run(lab.request(model, steps, transfer=kv, env=model.env, **options))


def main_of(name: str, label: str = "main") -> dict:
    return lab.generate(lab.MODELS[name].main_prompt(), label)


class Talk(lab.Conversation):
    """An engine with a tier that is talked to; the files are what they were before each damage."""

    def __init__(self, name: str, root: str, tmp_path, **options) -> None:
        super().__init__(tmp_path / "talk")
        # Promised, or the tier would stop at the first reset; and a busy machine's files are waited for.
        options = {"weights_fixed": True, "lookup_timeout_s": 10, **options}
        self.name, self.stored, self.kv = name, lab.snapshot(root), transfer(root, **options)

    def damage(self, do) -> None:
        """Empty vLLM's tiers, make the files whole again and spoil them."""
        self.say(RESET)
        self.spoil(self.stored, do)

    def finish(self) -> dict:
        model = lab.MODELS[self.name]
        return self.run(model, transfer=self.kv, env=model.env)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(hybrid, marks=pytest.mark.slow) for hybrid in HYBRIDS)]
)
def test_store_restart_load_damage_and_heal(name, root, tmp_path):
    cold = engine(name, [main_of(name), *lab.SETTLE, {"metrics": True}], transfer(root))
    assert lab.generates(cold)["main"]["tokens"] == lab.main_tokens(name)
    lab.assert_sound(root)
    files = lab.chunks(root)
    assert lab.counter(cold["steps"][-1], "stored_chunks") == len(files) > 0

    talk = Talk(name, root, tmp_path)
    talk.say(main_of(name, "warm"), {"metrics": True})
    groups = lab.by_group(files)
    spoilt = {group: paths[-1] for group, paths in groups.items()}
    # Damage that the checks find...
    flip = lab.DAMAGES[0].do
    talk.damage(lambda: [flip(path, None) for path in spoilt.values()])
    talk.say(main_of(name, "damaged"), *lab.SETTLE, {"metrics": True}, RESET)
    talk.say(main_of(name, "healed"), {"metrics": True})
    # ...and the control: of what they cannot find, each group's, the tokens change.
    for group, paths in groups.items():
        talk.damage(lambda paths=paths: lab.zero(paths))
        talk.say(main_of(name, f"zeroed{group}"))
    result = talk.finish()
    done, metrics = lab.generates(result), lab.metrics(result)

    for label in ("warm", "damaged", "healed"):
        assert done[label]["tokens"] == lab.main_tokens(name), label
    # vLLM counts external hits among the cached tokens; nothing else can be cached in a new process.
    assert done["warm"]["num_cached_tokens"] >= lab.MODELS[name].prompt_tokens // 2
    assert lab.counter(metrics[0], "loaded_chunks") > 0
    assert lab.counter(metrics[0], "load_failures") == 0
    assert done["damaged"]["num_cached_tokens"] < done["warm"]["num_cached_tokens"]
    assert lab.counter(metrics[1], "load_failures", reason="corrupt") > 0
    assert done["healed"]["num_cached_tokens"] == done["warm"]["num_cached_tokens"]
    failures = lab.counter(metrics[1], "load_failures")
    assert lab.counter(metrics[2], "load_failures") == failures, "what was healed loads"
    for group in groups:
        zeroed = done[f"zeroed{group}"]
        assert zeroed["num_cached_tokens"] == done["warm"]["num_cached_tokens"]
        assert zeroed["tokens"] != lab.main_tokens(name), f"group {group} had no effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_tier_and_connector_serve_each_others_files(name, root, other_root):
    """The same chunk size: the same namespace, the same names, the same bytes."""
    by_tier, by_connector = root, other_root
    size = {} if name == "qwen3_next" else {"hybrid_chunk_size": 128}  # else one block, as the tier
    steps = [main_of(name), *lab.SETTLE, {"metrics": True}]
    engine(name, steps, transfer(by_tier))
    engine(name, steps, lab.connector(by_connector, **size))
    assert lab.payloads(by_tier) == lab.payloads(by_connector) != {}
    for where, kv in (
        (by_tier, lab.connector(by_tier, **size)),
        (by_connector, transfer(by_connector)),
    ):
        before = lab.snapshot(where)
        result = engine(name, steps, kv)
        done = lab.generates(result)["main"]
        assert done["tokens"] == lab.main_tokens(name)
        assert done["num_cached_tokens"] > 0
        assert lab.counter(result["steps"][-1], "load_failures") == 0
        assert lab.snapshot(where).keys() == before.keys()


@pytest.mark.slow
def test_two_ranks_share_a_row_and_have_files_of_their_own(root, other_root, tmp_path):
    name, by_connector = "llama_tp2", other_root
    steps = [main_of(name), *lab.SETTLE, {"metrics": True}]
    engine(name, steps, transfer(root))
    assert {path.rpartition(".r")[2] for path in lab.chunks(root)} == {"0.kv", "1.kv"}
    lab.assert_sound(root)
    engine(name, steps, lab.connector(by_connector, hybrid_chunk_size=128))
    assert lab.payloads(root) == lab.payloads(by_connector)

    talk = Talk(name, root, tmp_path, load_deadline_s=60)  # the machine may be busy
    talk.say(main_of(name, "warm"))
    for rank in (0, 1):
        paths = [path for path in lab.chunks(root) if path.endswith(f".r{rank}.kv")]
        talk.damage(lambda paths=paths: os.unlink(paths[3]))
        talk.say(main_of(name, f"lost{rank}"), *lab.SETTLE, RESET, main_of(name, f"healed{rank}"))
        talk.damage(lambda paths=paths: lab.zero(paths))
        talk.say(main_of(name, f"zeroed{rank}"))
    done = lab.generates(talk.finish())
    full = done["warm"]["num_cached_tokens"]
    assert full > 0
    for rank in (0, 1):
        for label in ("warm", f"lost{rank}", f"healed{rank}"):
            assert done[label]["tokens"] == lab.main_tokens(name), label
        assert done[f"lost{rank}"]["num_cached_tokens"] < full
        assert done[f"healed{rank}"]["num_cached_tokens"] == full
        assert done[f"zeroed{rank}"]["tokens"] != lab.main_tokens(name)


@pytest.mark.slow
def test_canonical_pages_are_shared_by_engines_of_another_topology(root, other_root):
    """What the tier stored of one rank, the connector of two ranks loads, and the other way round."""
    extra = {"canonical_layout": True}
    one, two = "llama", "llama_tp2"  # the same weights: seeded
    path = lab.checkpoint(one)
    roots = {"tier": root, "connector": other_root}
    steps = [main_of(one), *lab.SETTLE, {"metrics": True}]

    def kv(kind: str, root: str) -> dict:
        if kind == "tier":
            return transfer(root, extra=extra, load_deadline_s=60)  # the machine may be busy
        options = {"canonical_layout": True, "load_deadline_s": 60, "lookup_timeout_s": 10}
        return lab.connector(root, hybrid_chunk_size=128, **options)

    engine(one, steps, kv("tier", roots["tier"]), path=path)
    engine(one, steps, kv("connector", roots["connector"]), path=path)
    assert lab.payloads(roots["tier"]) == lab.payloads(roots["connector"]) != {}
    for reader, writer in (("connector", "tier"), ("tier", "connector")):
        result = engine(two, steps, kv(reader, roots[writer]), path=path)
        done = lab.generates(result)["main"]
        assert done["tokens"] == lab.main_tokens(one)
        assert done["num_cached_tokens"] > 0
        assert lab.counter(result["steps"][-1], "load_failures") == 0


@pytest.mark.slow
def test_chunks_of_which_vllms_cpu_tier_fills_a_part_are_refused_with_a_sentence(root):
    model = lab.MODELS["gpt_oss"]
    kv = transfer(root, extra={"block_size": 256})
    result = lab.start_engine(lab.request(model, [], transfer=kv)).wait()
    assert result["exit_code"] != 0
    log = lab.log_of(result)
    lines = [line for line in log.splitlines() if "fskv: " in line and "expected 1 block" in line]
    assert len(lines) == 1, log[-3000:]
    # The control: without it the engine starts.
    assert lab.run(lab.request(model, [], transfer=transfer(root)))
