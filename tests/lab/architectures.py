"""Two real engines of two GPU architectures on one root: the phases of vLLM's pull request #38261, A to J.

The engines run on a CPU. What fskv takes for the architecture is patched, and each one's model computes other
KV, as other kernels do: KV of the other architecture, loaded, gives other tokens. The model is a hybrid.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass, field
from typing import Any

import engine_lab as lab

MODEL = lab.MODELS["gpt_oss"]
KERNELS = {"sm_89": 1.0, "sm_120": 1.5}
FIRST, OTHER = KERNELS
_PROMPTS = {
    "main": MODEL.main_prompt(),
    **{f"new {n}": MODEL.tokens(f"architectures-{n}", 700) for n in range(3)},
}
_NEW = [label for label in _PROMPTS if label != "main"]


def request(
    arch: str,
    steps: list[dict[str, Any]],
    root: str | None,
    called: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return an engine's request; `called` is what fskv takes the architecture for, if not for `arch`."""
    transfer = lab.connector(root, **options) if root else None
    changes = {"arch": called or arch, "kernels": KERNELS[arch]}
    return lab.request(MODEL, steps, transfer=transfer, env=MODEL.env, changes=changes)


def ask(label: str, of: str | None = None) -> dict[str, Any]:
    """Return the step that asks for the prompt `of`, or for that of the label's own name."""
    return lab.generate(_PROMPTS[of or label], label)


def run(*what: Any, **how: Any) -> dict[str, Any]:
    return lab.run(request(*what, **how))


def start(*what: Any, **how: Any) -> lab.Engine:
    return lab.start_engine(request(*what, **how))


def expected() -> dict[str, dict[str, list[int]]]:
    """Return the tokens of each prompt without fskv, by architecture."""
    found = {}
    for arch in KERNELS:
        done = lab.generates(run(arch, [ask(label) for label in _PROMPTS], None))
        found[arch] = {label: done[label]["tokens"] for label in _PROMPTS}
    for label in _PROMPTS:
        assert found[FIRST][label] != found[OTHER][label], "poison would not be seen"
    return found


def files(root: str, arch: str) -> dict[str, tuple[bytes, int]]:
    """Return what an architecture has: bytes and mtime of each chunk and manifest, by the path below it."""
    top = pathlib.Path(root, arch)
    found = [*top.rglob("*.kv"), *top.rglob("namespace.json")]
    return {str(p.relative_to(top)): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(found)}


@dataclass
class Phases:
    """Runs the phases on a root, which each architecture may reach by a path of its own.

    `rows` is the table: letter, what was done, tokens from files, what was seen. `pause_s`: until then
    a store has ended.
    """

    roots: dict[str, str]
    directory: pathlib.Path
    pause_s: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, object, str]] = field(default_factory=list)

    def run(self) -> None:
        want = expected()
        first, other = self.roots[FIRST], self.roots[OTHER]
        pause_step, options = {"sleep": self.pause_s}, self.options
        settle = [pause_step, *lab.SETTLE, lab.METRICS]
        seen: dict[str, Any] = {}

        def between() -> None:
            seen["dirs"] = _architectures(first)
            seen["own"] = files(first, FIRST)
            steps = [pause_step, ask("cold", "main"), *settle]
            steps += [lab.RESET, ask("again", "main"), *settle]
            seen["other"] = run(OTHER, steps, other, **options)
            seen["own after"] = files(first, FIRST)

        talk = lab.Conversation(self.directory)
        talk.say(pause_step, ask("cold", "main"), *settle, ask("warm", "main"), lab.METRICS)
        talk.meanwhile(between)
        talk.say(lab.RESET, ask("after", "main"), *settle)
        resident = start(FIRST, talk.steps, first, **options)
        talk.go(resident)
        result = lab.good(resident.wait())
        done, metrics = lab.generates(result), lab.metrics(result)
        own = seen["own"]

        assert_answer(done["cold"], want[FIRST]["main"], hit=False)
        self._row("A", f"{FIRST} cold", done["cold"], "all computed and stored, right tokens")
        assert_answer(done["warm"], want[FIRST]["main"], hit=True)
        assert lab.counter(metrics[1], "loaded_chunks") == 0
        self._row("B", f"{FIRST} warm", None, "from the engine's own cache, no file read")
        assert seen["dirs"] == {FIRST}
        assert len(own) > 1
        self._row("C", f"what {FIRST} wrote", None, f"{len(own) - 1} chunk files, none elsewhere")

        of_other = lab.generates(seen["other"])
        assert_answer(of_other["cold"], want[OTHER]["main"], hit=False)
        cold = lab.metrics(seen["other"])[0]
        assert (lab.counter(cold, "loaded_chunks"), lab.counter(cold, "load_failures")) == (0, 0)
        assert seen["own after"] == own
        self._row("D", f"{OTHER} cold", of_other["cold"], f"right tokens, {FIRST} untouched")
        assert_answer(done["after"], want[FIRST]["main"], hit=True)
        assert_answer(of_other["again"], want[OTHER]["main"], hit=True)
        assert lab.counter(metrics[-1], "loaded_chunks") > 0
        self._row("E", f"{FIRST} after {OTHER}", done["after"], "its own KV, right tokens")

        theirs = files(other, OTHER)
        one, two = lab.identities(first)
        assert {name for name in one if one[name] != two[name]} == {"arch"}
        assert {one["arch"], two["arch"]} == {FIRST, OTHER}
        assert _names(own) == _names(theirs)
        assert all(own[name][0] != theirs[name][0] for name in own.keys() & theirs.keys())
        self._row(
            "F", "side by side", None, "the same names of chunks, two namespaces, other bytes"
        )
        for letter, arch, root, beside in (("G", FIRST, first, OTHER), ("H", OTHER, other, FIRST)):
            of_beside = files(root, beside)
            again = run(arch, [ask("main"), *settle], root, **options)
            answer, counted = lab.generates(again)["main"], lab.metrics(again)[-1]
            assert_answer(answer, want[arch]["main"], hit=True)
            assert lab.counter(counted, "stored_chunks") == 0
            assert files(root, beside) == of_beside
            # An engine touches its own files when it loads them: only their times change.
            assert _bytes(files(first, FIRST)) == _bytes(own)
            assert _bytes(files(other, OTHER)) == _bytes(theirs)
            self._row(letter, f"{arch} restarted", answer, "its own KV, no file changed")
        num_groups = len({lab.group_of(name) for name in own if name.endswith(".kv")})
        assert num_groups > 1
        self._row("I", "a hybrid model", None, f"files of {num_groups} KV groups under each")

        steps = [
            step for label in ("main", *_NEW) for step in (ask(label), pause_step, *lab.SETTLE)
        ]
        steps += [*settle, lab.RESET, ask("twice", _NEW[0]), *settle]
        both = {arch: start(arch, steps, root, **options) for arch, root in self.roots.items()}
        for arch, engine in both.items():
            result = lab.good(engine.wait())
            answers = lab.generates(result)
            assert_answer(answers["main"], want[arch]["main"], hit=True)
            for label in _NEW:
                assert_answer(answers[label], want[arch][label], hit=False)
            assert_answer(answers["twice"], want[arch][_NEW[0]], hit=True)
            assert lab.counter(lab.metrics(result)[-1], "load_failures") == 0
        now, theirs_now = files(first, FIRST), files(other, OTHER)
        assert len(now) > len(own)
        assert _bytes(own).items() <= _bytes(now).items()
        assert _bytes(theirs).items() <= _bytes(theirs_now).items()
        assert _names(now) == _names(theirs_now)
        self._row("J", "both at once", answers["main"], f"right tokens, {len(now) - 1} files each")

    def _row(self, letter: str, what: str, answer: dict[str, Any] | None, seen: str) -> None:
        tokens = "" if answer is None else answer["num_cached_tokens"]
        self.rows.append((letter, what, tokens, seen))


def assert_answer(answer: dict[str, Any], tokens: list[int], *, hit: bool) -> None:
    assert answer["tokens"] == tokens
    assert (answer["num_cached_tokens"] > 0) == hit


def _architectures(root: str) -> set[str]:
    return {entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != "."}


def _names(found: dict[str, Any]) -> set[str]:
    return {os.path.basename(name) for name in found}


def _bytes(found: dict[str, tuple[bytes, int]]) -> dict[str, bytes]:
    return {name: content for name, (content, _) in found.items()}
