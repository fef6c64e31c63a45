"""The main job on real engines: store, restart, load; the tokens of an engine without fskv, always."""

from __future__ import annotations

import pathlib
import re
import shutil

import engine_lab as lab
import pytest
import read_only
from places import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()


class Shared:
    """One model's root, stored by one engine, with the reference tokens of an engine without fskv."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        self.model = lab.MODELS[name]
        self.options = lab.options_for(name)
        self.directory = directory
        self.root = str(directory / "root")
        reference = lab.reference(name)
        self.main_tokens = reference["main"]["tokens"]
        self.partial_tokens = reference["partial"]["tokens"]
        cold = lab.stored(name, self.root)
        self.cold = lab.generates(cold)["main"]
        self.cold_metrics = cold["steps"][-1]
        self.stored = lab.snapshot(self.root)

    def transfer(self, root: str | None = None, **options: object) -> dict:
        return lab.connector(root or self.root, **{**self.options, **options})


@pytest.fixture(scope="module")
def made() -> dict[str, Shared]:
    return {}


@pytest.fixture
def shared(request, made, tmp_path_factory) -> Shared:
    """Each model's is made once, in whatever order the tests run."""
    name = request.param
    if name not in made:
        made[name] = Shared(name, tmp_path_factory.mktemp(name))
    return made[name]


def on(*fast: str, slow: tuple[str, ...]):
    """Run a test on these models, on those of `slow` only in `make test-slow`.

    llama is full attention alone, gpt_oss has windows, qwen3_next has states: the others are of these kinds.
    """
    slow_ones = (pytest.param(name, marks=pytest.mark.slow) for name in slow)
    return pytest.mark.parametrize("shared", [*fast, *slow_ones], indirect=True)


@on("llama", "gpt_oss", "qwen3_next", slow=("gemma3", "lfm2"))
def test_store_restart_load_partial_prefix_and_zeroed_groups(shared, tmp_path):
    assert shared.cold["tokens"] == shared.main_tokens
    assert lab.counter(shared.cold_metrics, "stored_chunks") == len(shared.stored) > 0
    lab.assert_sound(shared.root)
    (rate,) = pathlib.Path(shared.root).glob("*/*@*/prefill_rate.txt")
    assert float(rate.read_text()) > 0

    # A new process loads; then every group's payload is zeroed in turn, under valid checksums: the
    # negative control without which identical tokens prove nothing.
    groups = lab.by_group(lab.chunks(shared.root))
    main = lab.generate(shared.model.main_prompt(), "main")
    talk = lab.Conversation(tmp_path)
    talk.say(
        main,
        {"metrics": True},
        lab.generate(shared.model.partial_prompt(), "partial"),
        {"reset_prefix_cache": True},
    )
    pauses = {}
    for group in groups:
        pauses[group] = talk.pause()
        talk.say(lab.generate(shared.model.main_prompt(), f"zeroed{group}"))
        talk.say({"reset_prefix_cache": True})
    last = talk.pause()
    talk.say(lab.generate(shared.model.main_prompt(), "restored"))
    engine = lab.start_engine(
        lab.request(shared.model, talk.steps, transfer=shared.transfer()), str(tmp_path / "engine")
    )

    def zero(group: int) -> None:
        lab.restore(shared.stored)
        for path in groups[group]:
            lab.zero_payload(path)

    for group, pause in pauses.items():
        talk.resume(engine, pause, lambda g=group: zero(g))
    talk.resume(engine, last, lambda: lab.restore(shared.stored))
    result = engine.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
    done = lab.generates(result)

    assert done["main"]["tokens"] == shared.main_tokens
    assert done["main"]["num_cached_tokens"] >= shared.model.prompt_tokens // 2
    assert lab.counter(result["steps"][1], "load_failures") == 0
    assert lab.counter(result["steps"][1], "loaded_bytes") > 0
    assert done["partial"]["tokens"] == shared.partial_tokens
    assert 0 < done["partial"]["num_cached_tokens"] <= shared.model.shared_tokens
    for group in groups:
        assert done[f"zeroed{group}"]["num_cached_tokens"] == done["main"]["num_cached_tokens"]
        assert done[f"zeroed{group}"]["tokens"] != shared.main_tokens, (
            f"group {group} had no effect"
        )
    assert done["restored"]["tokens"] == shared.main_tokens
    lab.restore(shared.stored)


@on("llama", slow=("gpt_oss", "qwen3_next"))
def test_an_engine_that_only_loads_runs_on_a_read_only_mount_and_changes_nothing(shared, tmp_path):
    """Negative controls: one that stores is refused there, and touches what it loads where it may."""
    root = str(tmp_path / "root")
    shutil.copytree(shared.root, root)
    main = lab.generate(shared.model.main_prompt(), "main")
    partial = lab.generate(shared.model.partial_prompt(), "partial")
    steps = [main, {"metrics": True}, partial, *lab.SETTLE]

    def run_at(at: str, **options: object) -> dict:
        return lab.run_engine(
            lab.request(shared.model, steps, transfer=shared.transfer(at, **options))
        )

    read_only.make_old(root)
    before = read_only.look(root)
    with read_only.mounted(root, tmp_path / "ro") as at:
        loaded = run_at(at, store=False)
        assert loaded["exit_code"] == 0, loaded.get("error")
        refused = run_at(at)
        assert refused["exit_code"] != 0
        assert "'store' false" in pathlib.Path(refused["log_path"]).read_text()
    done = lab.generates(loaded)
    assert done["main"]["tokens"] == shared.main_tokens
    assert done["partial"]["tokens"] == shared.partial_tokens
    assert done["main"]["num_cached_tokens"] >= shared.model.prompt_tokens // 2
    assert lab.counter(loaded["steps"][1], "load_failures") == 0
    assert lab.counter(loaded["steps"][1], "loaded_chunks") > 0
    assert read_only.look(root) == before

    assert run_at(root)["exit_code"] == 0
    assert read_only.look(root) != before


@on(slow=("llama", "gpt_oss", "qwen3_next", "gemma3", "lfm2"))
def test_an_engine_in_several_processes_loads_what_one_in_one_process_stored(shared):
    lab.restore(shared.stored)
    main = lab.generate(shared.model.main_prompt(), "main")
    partial = lab.generate(shared.model.partial_prompt(), "partial")
    # And vLLM binds its threads to cores, as it does where nobody says otherwise.
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
    steps = [main, partial, {"metrics": True}]
    # A new interpreter: the hashes of its strings are others, and nothing may depend on them.
    request = lab.request(shared.model, steps, transfer=shared.transfer(), env=env)
    result = lab.run(request, fresh=True)
    done = lab.generates(result)
    assert done["main"]["num_cached_tokens"] > 0
    assert done["main"]["tokens"] == shared.main_tokens
    assert done["partial"]["tokens"] == shared.partial_tokens
    assert lab.counter(result["steps"][-1], "load_failures") == 0


@on("llama", slow=("gpt_oss", "qwen3_next", "gemma3", "lfm2"))
def test_damaged_chunks_cost_a_recompute_and_heal(shared, tmp_path):
    _damage_and_heal(shared, tmp_path, multiprocess=False)


@on(slow=("gpt_oss", "llama"))
def test_damaged_chunks_are_handled_across_processes(shared, tmp_path):
    _damage_and_heal(shared, tmp_path, multiprocess=True)


def _damage_and_heal(shared: Shared, tmp_path: pathlib.Path, *, multiprocess: bool) -> None:
    lab.restore(shared.stored)
    other_root = tmp_path / "other"
    other_root.mkdir()
    prompt = shared.model.main_prompt()
    if multiprocess:
        damages = [d for d in lab.DAMAGES if d.name in ("payload_bit_flip", "removed_after_lookup")]
    else:
        damages = lab.DAMAGES
        lab.run(
            lab.request(
                shared.model,
                [lab.generate(prompt, "other")],
                transfer=shared.transfer(str(other_root), tenant="other"),
            )
        )

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(prompt, "full"), {"reset_prefix_cache": True}, {"metrics": True})
    pauses = {}
    for damage in damages:
        pauses[damage.name] = talk.pause()
        talk.say(
            lab.generate(prompt, f"{damage.name}"),
            {"reset_prefix_cache": True},
            {"metrics": True},
            *lab.SETTLE,
            lab.generate(prompt, f"{damage.name}_again"),
            {"reset_prefix_cache": True},
            {"metrics": True},
        )
    engine = lab.start_engine(
        lab.request(
            shared.model,
            talk.steps,
            transfer=shared.transfer(),
            env={
                "FSKV_TEST_DROP_CAPS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
            },
        ),
        str(tmp_path / "engine"),
    )
    context = lab.DamageContext(shared.root, str(other_root))
    groups = lab.by_group(shared.stored)
    for number, damage in enumerate(damages):
        # Another group each time, all its chunks: whichever the prompt needs is among them.
        victims = groups[sorted(groups)[number % len(groups)]]

        def spoil(damage=damage, victims=victims) -> None:
            # Windows and states that the prompt does not need were damaged before and not looked at.
            lab.restore(shared.stored)
            for path in victims:
                damage.do(path, context)

        talk.resume(engine, pauses[damage.name], spoil)
    result = engine.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
    done = lab.generates(result)
    metrics = lab.metrics(result)
    full = done["full"]["num_cached_tokens"]
    assert full > 0
    for number, damage in enumerate(damages):
        hurt, healed = done[damage.name], done[f"{damage.name}_again"]
        assert hurt["tokens"] == shared.main_tokens, damage.name
        assert hurt["num_cached_tokens"] < full, damage.name
        assert healed["tokens"] == shared.main_tokens, damage.name
        assert healed["num_cached_tokens"] == full, f"{damage.name} did not heal"
        before, after = metrics[2 * number], metrics[2 * number + 1]
        counted = [lab.counter(m, "load_failures", reason=damage.reason) for m in (before, after)]
        assert counted[1] > counted[0], f"{damage.name} was not counted as {damage.reason}"
    assert lab.parts(shared.root) == []
    if not multiprocess:
        assert list(pathlib.Path(shared.root).rglob("*.foreign-*")), "moved aside, not deleted"
    lab.restore(shared.stored)
    lab.assert_sound(shared.root)


def _plain(line: str, root: str) -> str:
    """Return what fskv says in a line of a log or a document, without what depends on the machine."""
    text = line[line.index("fskv: ") :].rstrip().replace(root, "/mnt/kv")
    threads = r"\d+ I/O threads \(auto: a file opens and is read in [\d.]+ ms\)"
    for what in (r"cpu-\w+/", r"@[0-9a-f]{16}", r"process \d+", "O_DIRECT|buffered", threads):
        text = re.sub(what, "...", text)
    return text.replace("in Python", "outside the interpreter")


@pytest.mark.parametrize("doctored", [False, pytest.param(True, id="negative_control")])
def test_log_lines_in_the_documents_are_what_an_engine_says_at_its_start(doctored, tmp_path):
    model, root = lab.MODELS["gpt_oss"], tmp_path / "root"
    root.mkdir()
    steps = [lab.generate(model.partial_prompt(), "any")]
    result = lab.run(lab.request(model, steps, transfer=lab.connector(str(root))))
    log = pathlib.Path(result["log_path"]).read_text()
    said = {_plain(line, str(root)) for line in log.splitlines() if "fskv: " in line}
    text = (REPOSITORY / "docs" / "vllm.md").read_text(encoding="utf-8")
    shown = re.findall(r"^(?:INFO +|WARNING +)fskv: .*$", text, re.MULTILINE)
    assert len(shown) >= 2
    if doctored:
        shown = [line.replace(" a chunk; ", " a block; ") for line in shown]
    missing = [line for line in shown if _plain(line, "/mnt/kv") not in said]
    assert len(missing) == (1 if doctored else 0), missing
