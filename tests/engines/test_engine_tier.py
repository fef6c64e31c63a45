"""FskvTier behind vLLM's CPU tier, on real engines: the tokens of an engine without offloading, always."""

from __future__ import annotations

import os
import pathlib

import engine_lab as lab
import pytest
from tier_lab import RESET, transfer

from faults.disk import DiskFaults
from fskv.format import chunk_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

HYBRIDS = ("gpt_oss", "qwen3_next")


def reference(name: str) -> list[int]:
    """Return the tokens of the main prompt from an engine without a connector."""
    return lab.reference(name)["main"]["tokens"]


def make_root(tmp_path: pathlib.Path, name: str = "root") -> str:
    root = tmp_path / name
    root.mkdir()
    return str(root)


def engine(name: str, steps: list, kv: dict | None, **options) -> dict:
    model = lab.MODELS[name]
    return lab.run(lab.request(model, steps, transfer=kv, env=dict(model.env), **options))


def main_of(name: str, label: str = "main") -> dict:
    return lab.generate(lab.MODELS[name].main_prompt(), label)


def payloads(root: str) -> dict[str, bytes]:
    """Return the payloads of a root by file name, without header (which tells the time of writing)."""
    found = {}
    for path in lab.chunks(root):
        content = pathlib.Path(path).read_bytes()
        found[os.path.basename(path)] = content[chunk_file.header_length(content) :]
    return found


def namespaces(root: str) -> list[str]:
    return sorted(str(p.parent) for p in pathlib.Path(root).rglob("namespace.json"))


class Talk:
    """An engine with a tier that is talked to; the files are what they were before each damage."""

    def __init__(self, name: str, root: str, tmp_path: pathlib.Path, **options) -> None:
        self.name, self.root, self.options = name, root, options
        self.directory = tmp_path / f"talk{len(list(tmp_path.glob('talk*')))}"
        self.directory.mkdir()
        self.stored = lab.snapshot(root)
        self.talk = lab.Conversation(self.directory)
        self.damages: list[tuple[int, object]] = []

    def say(self, *steps: dict) -> None:
        self.talk.say(*steps)

    def damage(self, do) -> None:
        """Empty vLLM's tiers, make the files whole again and spoil them."""
        self.say(RESET)
        self.damages.append((self.talk.pause(), do))

    def run(self) -> dict:
        # Promised, or the tier would stop at the first reset; and a busy machine's files are waited for.
        kv = transfer(self.root, **{"weights_fixed": True, "lookup_timeout_s": 10, **self.options})
        model = lab.MODELS[self.name]
        what = lab.request(model, self.talk.steps, transfer=kv, env=dict(model.env))
        started = lab.start_engine(what, str(self.directory / "engine"))
        try:
            for pause, do in self.damages:

                def between(do=do) -> None:
                    lab.restore(self.stored)
                    do()

                self.talk.resume(started, pause, between)
            result = started.wait(lab.ENGINE_TIMEOUT_S)
        finally:
            started.kill()
        assert result["exit_code"] == 0, result.get("error")
        return result


def zero(paths: list[str]) -> None:
    for path in paths:
        lab.zero_payload(path)


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) - 4200)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(hybrid, marks=pytest.mark.slow) for hybrid in HYBRIDS)]
)
def test_store_restart_load_damage_and_heal(name, tmp_path):
    root = make_root(tmp_path)
    cold = engine(name, [main_of(name), *lab.SETTLE, {"metrics": True}], transfer(root))
    assert lab.generates(cold)["main"]["tokens"] == reference(name)
    lab.assert_sound(root)
    files = lab.chunks(root)
    assert lab.counter(cold["steps"][-1], "stored_chunks") == len(files) > 0

    talk = Talk(name, root, tmp_path)
    talk.say(main_of(name, "warm"), {"metrics": True})
    groups = lab.by_group(files)
    spoilt = {group: paths[-1] for group, paths in groups.items()}
    # Damage that the checks find...
    talk.damage(lambda: [flip(path) for path in spoilt.values()])
    talk.say(main_of(name, "damaged"), *lab.SETTLE, {"metrics": True}, RESET)
    talk.say(main_of(name, "healed"), {"metrics": True})
    # ...and the control: of what they cannot find, each group's, the tokens change.
    for group, paths in groups.items():
        talk.damage(lambda paths=paths: zero(paths))
        talk.say(main_of(name, f"zeroed{group}"))
    result = talk.run()
    done, metrics = lab.generates(result), lab.metrics(result)

    for label in ("warm", "damaged", "healed"):
        assert done[label]["tokens"] == reference(name), label
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
        assert zeroed["tokens"] != reference(name), f"group {group} had no effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *HYBRIDS])
def test_tier_and_connector_serve_each_others_files(name, tmp_path):
    """The same chunk size: the same namespace, the same names, the same bytes."""
    by_tier, by_connector = make_root(tmp_path, "tier"), make_root(tmp_path, "connector")
    size = {} if name == "qwen3_next" else {"hybrid_chunk_size": 128}  # else one block, as the tier
    steps = [main_of(name), *lab.SETTLE, {"metrics": True}]
    engine(name, steps, transfer(by_tier))
    engine(name, steps, lab.connector(by_connector, **size))
    assert payloads(by_tier) == payloads(by_connector) != {}
    assert [os.path.basename(n) for n in namespaces(by_tier)] == [
        os.path.basename(n) for n in namespaces(by_connector)
    ]
    for root, kv in (
        (by_tier, lab.connector(by_tier, **size)),
        (by_connector, transfer(by_connector)),
    ):
        before = lab.snapshot(root)
        result = engine(name, steps, kv)
        done = lab.generates(result)["main"]
        assert done["tokens"] == reference(name)
        assert done["num_cached_tokens"] > 0
        assert lab.counter(result["steps"][-1], "load_failures") == 0
        assert lab.snapshot(root).keys() == before.keys()


@pytest.mark.slow
def test_other_chunk_sizes_are_another_namespace(tmp_path):
    root = make_root(tmp_path)
    steps = [main_of("llama"), *lab.SETTLE, {"metrics": True}]
    engine("llama", steps, lab.connector(root, hybrid_chunk_size=128))
    for number, size in enumerate((256, 512), start=2):
        kv = transfer(root, extra={"block_size": size})
        for tries in ("cold", "warm"):
            result = engine("llama", steps, kv)
            done = lab.generates(result)["main"]
            assert done["tokens"] == reference("llama")
            assert bool(done["num_cached_tokens"]) == (tries == "warm")
        assert len(namespaces(root)) == number
    lab.assert_sound(root)


@pytest.mark.slow
def test_every_damage_costs_a_recompute_is_counted_and_heals(tmp_path):
    name = "llama"
    root, other = make_root(tmp_path), make_root(tmp_path, "other")
    engine(name, [main_of(name), *lab.SETTLE], transfer(root))
    engine(name, [main_of(name), *lab.SETTLE], transfer(other, tenant="another"))
    context = lab.DamageContext(root, other)
    talk = Talk(name, root, tmp_path)
    # Root reads what nobody may; "denied" is tried with the connector, which shares the store.
    damages = [damage for damage in lab.DAMAGES if damage.reason != "denied"]
    target = lab.chunks(root)[0]
    for damage in damages:
        # Whatever is known of the chunk must be older than the damage: it is a hit when it is asked for.
        talk.say(RESET, main_of(name, f"{damage.name}-before"))
        talk.damage(lambda damage=damage: damage.do(target, context))
        talk.say(main_of(name, damage.name), *lab.SETTLE, {"metrics": True}, RESET)
        talk.say(main_of(name, f"{damage.name}-healed"))
    result = talk.run()
    done, metrics = lab.generates(result), lab.metrics(result)
    full = done[f"{damages[0].name}-before"]["num_cached_tokens"]
    for damage, after in zip(damages, metrics, strict=True):
        for label in (damage.name, f"{damage.name}-healed", f"{damage.name}-before"):
            assert done[label]["tokens"] == reference(name), label
        assert done[damage.name]["num_cached_tokens"] < full
        assert done[f"{damage.name}-healed"]["num_cached_tokens"] == full, damage.name
        missed = lab.counter(after, "load_failures", reason=damage.reason)
        assert missed + lab.counter(after, "lookup_misses", reason="absent") > 0, damage.name


@pytest.mark.slow
def test_two_ranks_share_a_row_and_have_files_of_their_own(tmp_path):
    name = "llama_tp2"
    root = make_root(tmp_path)
    steps = [main_of(name), *lab.SETTLE, {"metrics": True}]
    engine(name, steps, transfer(root))
    assert {path.rpartition(".r")[2] for path in lab.chunks(root)} == {"0.kv", "1.kv"}
    lab.assert_sound(root)
    by_connector = make_root(tmp_path, "connector")
    engine(name, steps, lab.connector(by_connector, hybrid_chunk_size=128))
    assert payloads(root) == payloads(by_connector)

    talk = Talk(name, root, tmp_path, load_deadline_s=60)  # the machine may be busy
    talk.say(main_of(name, "warm"))
    for rank in (0, 1):
        paths = [path for path in lab.chunks(root) if path.endswith(f".r{rank}.kv")]
        talk.damage(lambda paths=paths: os.unlink(paths[3]))
        talk.say(main_of(name, f"lost{rank}"), *lab.SETTLE, RESET, main_of(name, f"healed{rank}"))
        talk.damage(lambda paths=paths: zero(paths))
        talk.say(main_of(name, f"zeroed{rank}"))
    done = lab.generates(talk.run())
    full = done["warm"]["num_cached_tokens"]
    assert full > 0
    for rank in (0, 1):
        for label in ("warm", f"lost{rank}", f"healed{rank}"):
            assert done[label]["tokens"] == reference(name), label
        assert done[f"lost{rank}"]["num_cached_tokens"] < full
        assert done[f"healed{rank}"]["num_cached_tokens"] == full
        assert done[f"zeroed{rank}"]["tokens"] != reference(name)


@pytest.mark.slow
def test_canonical_pages_are_shared_by_engines_of_another_topology(tmp_path):
    """What the tier stored of one rank, the connector of two ranks loads, and the other way round."""
    extra = {"canonical_layout": True}
    one, two = "llama", "llama_tp2"  # the same weights: seeded
    path = lab.checkpoint(one)
    roots = {"tier": make_root(tmp_path, "tier"), "connector": make_root(tmp_path, "connector")}
    steps = [main_of(one), *lab.SETTLE, {"metrics": True}]

    def kv(kind: str, root: str) -> dict:
        if kind == "tier":
            return transfer(root, extra=extra, load_deadline_s=60)  # the machine may be busy
        options = {"canonical_layout": True, "load_deadline_s": 60, "lookup_timeout_s": 10}
        return lab.connector(root, hybrid_chunk_size=128, **options)

    engine(one, steps, kv("tier", roots["tier"]), path=path)
    engine(one, steps, kv("connector", roots["connector"]), path=path)
    assert payloads(roots["tier"]) == payloads(roots["connector"]) != {}
    for reader, root in (("connector", roots["tier"]), ("tier", roots["connector"])):
        result = engine(two, steps, kv(reader, root), path=path)
        done = lab.generates(result)["main"]
        assert done["tokens"] == reference(one)
        assert done["num_cached_tokens"] > 0
        assert lab.counter(result["steps"][-1], "load_failures") == 0


@pytest.mark.slow
def test_after_a_reset_of_the_cache_nothing_is_loaded_or_stored(tmp_path):
    """vLLM resets it when weights change, and the namespace names the weights of the start."""
    root = make_root(tmp_path)
    name = "llama"
    engine(name, [main_of(name), *lab.SETTLE], transfer(root))
    stored = lab.snapshot(root)
    partial = lab.generate(lab.MODELS[name].partial_prompt(), "partial")
    steps = [main_of(name, "before"), RESET, main_of(name, "after"), partial, *lab.SETTLE]
    done = lab.generates(engine(name, steps, transfer(root)))
    assert done["before"]["num_cached_tokens"] > 0
    assert done["after"]["num_cached_tokens"] == 0
    assert done["after"]["tokens"] == reference(name)
    assert lab.snapshot(root).keys() == stored.keys()
    # The control: vouched for, the same steps load and store.
    done = lab.generates(engine(name, steps, transfer(root, weights_fixed=True)))
    assert done["after"]["num_cached_tokens"] == done["before"]["num_cached_tokens"]
    assert lab.snapshot(root).keys() > stored.keys()


@pytest.mark.slow
def test_reads_that_never_return_cost_a_deadline_and_the_next_requests_nothing(
    tmp_path, native_library
):
    name = "llama"
    root = make_root(tmp_path)
    faults = DiskFaults(native_library("disk"), pathlib.Path(root), tmp_path / "faults")
    engine(name, [main_of(name), *lab.SETTLE], transfer(root))
    talk = lab.Conversation(tmp_path)
    talk.say(main_of(name, "warm"), RESET)
    start = talk.pause()
    talk.say(main_of(name, "hung"), RESET, main_of(name, "hung_again"), RESET, {"metrics": True})
    stop = talk.pause()
    for label in ("back", "full"):
        talk.say({"sleep": 1.5}, main_of(name, label), RESET)
    kv = transfer(root, weights_fixed=True, load_deadline_s=2.0)
    what = lab.request(lab.MODELS[name], talk.steps, transfer=kv, env=faults.env())
    quick = lab.quick(quarantine_s=1, probe_s=0.5)
    started = lab.start_engine(what, str(tmp_path / "engine"), **quick)
    talk.resume(started, start, lambda: faults.set("pread hang suffix=.kv"))
    talk.resume(started, stop, faults.clear)
    result = started.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
    done = lab.generates(result)
    for label in ("warm", "hung", "hung_again", "back", "full"):
        assert done[label]["tokens"] == reference(name), label
    assert faults.fired() > 0
    assert done["warm"]["num_cached_tokens"] == done["full"]["num_cached_tokens"] > 0
    assert done["hung"]["num_cached_tokens"] == 0
    # A generous bound against a hang, not a measurement.
    assert max(done[label]["wall_s"] for label in ("hung", "hung_again")) < 60
    assert lab.counter(lab.metrics(result)[0], "load_failures", reason="timed_out") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "extra", "options", "sentence"),
    [
        ("llama", {}, {"rooot": "/x"}, "option 'rooot': found '/x' under an unknown name"),
        ("llama", {}, {"hybrid_chunk_size": 128}, "set 'block_size' beside 'secondary_tiers'"),
        ("gpt_oss", {"block_size": 256}, {}, "expected 1 block"),
    ],
)
def test_what_cannot_be_used_refuses_to_start_with_a_sentence(
    name, extra, options, sentence, tmp_path
):
    kv = transfer(make_root(tmp_path), extra=extra, **options)
    result = lab.run_engine(lab.request(lab.MODELS[name], [], transfer=kv))
    assert result["exit_code"] != 0
    log = pathlib.Path(result["log_path"]).read_text()
    lines = [line for line in log.splitlines() if "fskv: " in line and sentence in line]
    assert len(lines) == 1, log[-3000:]
    # The control: without it the engine starts.
    kv = transfer(make_root(tmp_path, "good"))
    assert lab.run(lab.request(lab.MODELS[name], [], transfer=kv))["exit_code"] == 0
