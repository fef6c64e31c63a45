"""The main job on real engines: store, restart, load; the tokens of an engine without fskv, always."""

from __future__ import annotations

import pathlib
import re

import engine_lab as lab
import pytest
import read_only
from places import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()


class Shared:
    """A root on which an engine stored a model's main prompt, and the tokens of one without fskv."""

    def __init__(self, name: str, root: str) -> None:
        self.model, self.root = lab.MODELS[name], root
        reference = lab.reference(name)
        self.main_tokens = reference["main"]["tokens"]
        self.partial_tokens = reference["partial"]["tokens"]
        self.cold = lab.stored(name, root)
        self.stored = lab.snapshot(root)

    def transfer(self, root: str | None = None, **options: object) -> dict:
        return lab.connector(root or self.root, **lab.options_for(self.model.name), **options)


@pytest.fixture
def shared(request, root) -> Shared:
    return Shared(request.param, root)


def on(*fast: str, slow: tuple[str, ...]):
    """Run a test on these models, on those of `slow` only in `make test-slow`.

    llama is full attention alone, gpt_oss has windows, qwen3_next has states: the others are of these kinds.
    """
    slow_ones = (pytest.param(name, marks=pytest.mark.slow) for name in slow)
    return pytest.mark.parametrize("shared", [*fast, *slow_ones], indirect=True)


@on("llama", "gpt_oss", "qwen3_next", slow=("gemma3", "lfm2"))
def test_store_restart_load_partial_prefix_and_zeroed_groups(shared, tmp_path):
    assert lab.generates(shared.cold)["main"]["tokens"] == shared.main_tokens
    assert lab.counter(shared.cold["steps"][-1], "stored_chunks") == len(shared.stored) > 0
    lab.assert_sound(shared.root)
    (rate,) = pathlib.Path(shared.root).glob("*/*@*/prefill_rate.txt")
    assert float(rate.read_text()) > 0

    # A new process loads; then every group's payload is zeroed in turn, under valid checksums: the
    # negative control without which identical tokens prove nothing.
    groups = lab.by_group(lab.chunks(shared.root))
    main = lab.generate(shared.model.main_prompt(), "main")
    talk = lab.Conversation(tmp_path)
    partial = lab.generate(shared.model.partial_prompt(), "partial")
    talk.say(main, lab.METRICS, partial, lab.RESET)
    for group, paths in groups.items():
        talk.spoil(shared.stored, lambda paths=paths: lab.zero(paths))
        talk.say({**main, "label": f"zeroed{group}"}, lab.RESET)
    talk.spoil(shared.stored, lambda: None)
    talk.say({**main, "label": "restored"})
    result = talk.run(shared.model, transfer=shared.transfer())
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


@on("llama", slow=("gpt_oss", "qwen3_next"))
def test_an_engine_that_only_loads_runs_on_a_read_only_mount_and_changes_nothing(shared, tmp_path):
    """Negative controls: one that stores is refused there, and touches what it loads where it may."""
    root = shared.root
    main = lab.generate(shared.model.main_prompt(), "main")
    partial = lab.generate(shared.model.partial_prompt(), "partial")
    steps = [main, {"metrics": True}, partial, *lab.SETTLE]

    def run_at(at: str, **options: object) -> dict:
        what = lab.request(shared.model, steps, transfer=shared.transfer(at, **options))
        return lab.start_engine(what).wait()

    read_only.make_old(root)
    before = read_only.look(root)
    with read_only.mounted(root, tmp_path / "ro") as at:
        loaded = run_at(at, store=False)
        assert loaded["exit_code"] == 0, loaded.get("error")
        refused = run_at(at)
        assert refused["exit_code"] != 0
        assert "'store' false" in lab.log_of(refused)
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
    (tmp_path / "other").mkdir()
    other = str(tmp_path / "other")
    steps = [lab.generate(shared.model.main_prompt(), "other")]
    lab.run(lab.request(shared.model, steps, transfer=shared.transfer(other, tenant="other")))
    _damage_and_heal(shared, tmp_path, lab.DAMAGES, lab.DamageContext(shared.root, other))
    assert list(pathlib.Path(shared.root).rglob("*.foreign-*")), "moved aside, not deleted"


@on(slow=("gpt_oss", "llama"))
def test_damaged_chunks_are_handled_across_processes(shared, tmp_path):
    some = [d for d in lab.DAMAGES if d.name in ("payload_bit_flip", "removed_after_lookup")]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    _damage_and_heal(shared, tmp_path, some, lab.DamageContext(shared.root), env)


def _damage_and_heal(
    shared: Shared,
    tmp_path: pathlib.Path,
    damages: list[lab.Damage],
    context: lab.DamageContext,
    env: dict[str, str] | None = None,
) -> None:
    prompt = shared.model.main_prompt()
    groups = lab.by_group(shared.stored)
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(prompt, "full"), lab.RESET, lab.METRICS)
    for number, damage in enumerate(damages):
        # Another group each time, all its chunks: whichever the prompt needs is among them.
        victims = groups[sorted(groups)[number % len(groups)]]

        def spoil(damage=damage, victims=victims) -> None:
            for path in victims:
                damage.do(path, context)

        # Windows and states that the prompt does not need were damaged before and not looked at.
        talk.spoil(shared.stored, spoil)
        talk.say(lab.generate(prompt, damage.name), lab.RESET, lab.METRICS, *lab.SETTLE)
        talk.say(lab.generate(prompt, f"{damage.name}_again"), lab.RESET, lab.METRICS)
    env = {"FSKV_TEST_DROP_CAPS": "1", **(env or {})}
    result = talk.run(shared.model, transfer=shared.transfer(), env=env)
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
def test_log_lines_in_the_documents_are_what_an_engine_says_at_its_start(doctored, root):
    model = lab.MODELS["gpt_oss"]
    steps = [lab.generate(model.partial_prompt(), "any")]
    log = lab.log_of(lab.run(lab.request(model, steps, transfer=lab.connector(root))))
    said = {_plain(line, root) for line in log.splitlines() if "fskv: " in line}
    text = (REPOSITORY / "docs" / "vllm.md").read_text(encoding="utf-8")
    shown = re.findall(r"^(?:INFO +|WARNING +)fskv: .*$", text, re.MULTILINE)
    assert len(shown) >= 2
    if doctored:
        shown = [line.replace(" a chunk; ", " a block; ") for line in shown]
    missing = [line for line in shown if _plain(line, "/mnt/kv") not in said]
    assert len(missing) == (1 if doctored else 0), missing
