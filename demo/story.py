"""Tell one model's story with real engines, one process after the other, on one root directory.

    reference   an engine without fskv: the tokens that everything below is compared with
    cold        an engine with fskv computes the prompt and stores its KV cache
    restart     a new process loads it; then, with the engine's own cache emptied before each:
                  a prompt that shares only a part of the prefix
                  three of the files just used are spoiled: a recompute, and the same tokens
                  the same again: a full hit, the files are back and sound
                  the control: one KV group's data is zeroed under valid checksums, and the
                  tokens MUST change, or identical tokens above would prove nothing

`Story.tell` returns a line for everything that was not as it must be, and raises for nothing that
an engine does. Called by `run.py` on its main thread.
"""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rich import filesize

from demo.checkpoints import Model
from demo.engine import SETTLE, RunningEngine, generates
from demo.progress import Lines, StoryError, follow, living
from faults import files as damage

MAX_TOKENS = 16
# For an engine whose demo was killed during a pause: nobody would end that pause.
PAUSE_TIMEOUT_S = 600.0

# By itself fskv makes chunks of about 2 MiB; that would be all of this prompt.
CONNECTOR_OPTIONS: Mapping[str, dict[str, Any]] = {"llama": {"hybrid_chunk_size": 128}}

# One process for the scheduler and the requests makes start-up short, but its loop spins while a load is
# under way and keeps the interpreter from the threads that load. `vllm serve` has two, and so has the
# model whose times are compared.
ENGINE_ENV: Mapping[str, dict[str, str]] = {"llama_large": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}

# What an engine is asked to do, and between two steps what is done behind its back.
Step = dict[str, Any] | Callable[[], None]

# The first request of a process pays for what the process does only once.
WARM_UP: Step = {"prompt_token_ids": list(range(3, 67)), "max_tokens": 2, "label": "warm-up"}
RESET: Step = {"reset_prefix_cache": True}
METRICS: Step = {"metrics": True}


class Story:
    """One model on one root; `directory` takes requests, results and logs of its engines."""

    def __init__(
        self, model: Model, checkpoint: str, root: str, directory: pathlib.Path, lines: Lines
    ) -> None:
        self.problems: list[str] = []
        self._model = model
        self._checkpoint = checkpoint
        self._root = root
        self._directory = directory
        self._lines = lines
        self._computed_s = 0.0  # without fskv, to the first token
        self._cached_tokens = 0  # of the main prompt, that came from files
        self._tokens: dict[str, list[int]] = {}  # of the reference, by prompt
        self._num_shown = 0  # of the problems
        self._main = partial(_generate, model.main_prompt())
        self._partial_prompt = _generate(model.partial_prompt(), "partial")
        self._files: list[str] = []  # stored by the cold engine

    def tell(self, *, damage_too: bool) -> list[str]:
        """Run the three processes; `damage_too`: with partial prefix, damage and control."""
        try:
            self._reference([self._partial_prompt] * damage_too)
            self._cold()
            if damage_too:
                self._restart_and_damage()
            else:
                steps = [WARM_UP, self._main("load"), METRICS]
                self._loaded(self._engine("restart", "a new process loads", steps))
        except StoryError as problem:
            self.problems.append(str(problem))
            self._show("not finished", "the story ends here")
        return self.problems

    # --- chapters -------------------------------------------------------------------------

    def _reference(self, more: list[Step]) -> None:
        steps = [WARM_UP, self._main("main"), *more]
        done = generates(self._engine("reference", "computes without fskv", steps, fskv=False))
        self._tokens = {label: step["tokens"] for label, step in done.items()}
        self._computed_s = done["main"]["ttft_s"]
        self._show(
            "reference without fskv",
            f"{self._model.prompt_tokens} tokens, first one after {duration(self._computed_s)}",
        )

    def _cold(self) -> None:
        before = damage.chunk_files(self._root)
        result = self._engine("cold", "computes and stores", [WARM_UP, self._main("cold")])
        cold = generates(result)["cold"]
        self._files = sorted(damage.chunk_files(self._root) - before)
        stored = filesize.decimal(sum(os.path.getsize(path) for path in self._files))
        self._compare("cold", cold["tokens"], "main")
        if cold["num_cached_tokens"]:
            self.problems.append(f"cold: {cold['num_cached_tokens']} tokens from an empty root")
        self._show("cold engine stores", f"{count(len(self._files), 'file')}, {stored}")
        if not self._files:
            raise StoryError("cold: the engine stored no file")

    def _restart_and_damage(self) -> None:
        content = {path: pathlib.Path(path).read_bytes() for path in self._files}
        used: set[str] = set()
        spoiled: list[damage.Damaged] = []
        unsound: list[str] = []

        def spoil() -> None:
            self._lines.phase("files are damaged under the running engine")
            spoiled.extend(damage.spoil_three(used))
            if len(spoiled) < 3:
                raise StoryError(f"damage: the load used only {count(len(used), 'file')}")

        def restore() -> None:
            for path, data in content.items():
                pathlib.Path(path).write_bytes(data)

        def zero(group: int) -> None:
            self._lines.phase("control: zeroed data must change the tokens")
            restore()
            for path in groups[group]:
                damage.zero_payload(path)

        groups = damage.by_group(self._files)
        steps: list[Step] = [WARM_UP, self._main("load"), METRICS]
        steps += [lambda: used.update(damage.used(self._files)), RESET]
        steps += [self._partial_prompt, RESET]
        steps += [spoil, self._main("damaged"), METRICS, *SETTLE, RESET, self._main("healed")]
        steps += [lambda: unsound.extend(damage.unsound([one.path for one in spoiled])), RESET]
        for group in groups:
            steps += [lambda group=group: zero(group), self._main(f"zeroed{group}"), RESET]
        damage.make_old(self._files)
        try:
            result = self._engine("restart", "a new process loads", steps)
        finally:
            restore()  # a kept root must not keep the zeroed data

        done = generates(result)
        self._loaded(result)
        self._partial(done["partial"])
        self._damaged(done["damaged"], spoiled, result)
        self._healed(done["healed"], unsound)
        self._control({group: done[f"zeroed{group}"] for group in groups})

    # --- what must be true ----------------------------------------------------------------

    def _loaded(self, result: dict[str, Any]) -> None:
        load = generates(result)["load"]
        self._cached_tokens = load["num_cached_tokens"]
        loaded_bytes = _counter(_metrics(result)[0], "loaded_bytes").total()
        self._compare("load", load["tokens"], "main")
        if not self._cached_tokens or not loaded_bytes:
            self.problems.append(
                f"load: {self._cached_tokens} tokens from files, {loaded_bytes} bytes loaded"
            )
        self._show(
            "restarted engine loads",
            f"{self._cached_tokens} of {self._model.prompt_tokens} tokens from files, "
            f"first token after {duration(load['ttft_s'])} instead of {duration(self._computed_s)}",
        )

    def _partial(self, shared: dict[str, Any]) -> None:
        self._compare("partial prefix", shared["tokens"], "partial")
        if not shared["num_cached_tokens"]:
            self.problems.append("partial prefix: nothing came from the files (0 cached tokens)")
        self._show(
            "partial prefix",
            f"{shared['num_cached_tokens']} of {self._model.shared_tokens} shared tokens from files",
        )

    def _damaged(
        self, hurt: dict[str, Any], spoiled: list[damage.Damaged], result: dict[str, Any]
    ) -> None:
        before, after = (_counter(step, "load_failures", "reason") for step in _metrics(result))
        counted = {reason: n - before.get(reason, 0) for reason, n in sorted(after.items())}
        noticed = ", ".join(f"{n} {reason}" for reason, n in counted.items() if n) or "nothing"
        self._compare("damaged files", hurt["tokens"], "main")
        recomputed = self._cached_tokens - hurt["num_cached_tokens"]
        if recomputed <= 0:
            self.problems.append("damaged files: no token was recomputed")
        if sum(counted.values()) < len(spoiled):
            self.problems.append(f"damaged files: spoiled {len(spoiled)}, noticed {noticed}")
        self._show(
            "one file " + ", one ".join(one.what for one in spoiled),
            f"noticed ({noticed}), {recomputed} tokens recomputed",
        )

    def _healed(self, healed: dict[str, Any], unsound: list[str]) -> None:
        found, full = healed["num_cached_tokens"], self._cached_tokens
        self._compare("healed", healed["tokens"], "main")
        if found != full:
            self.problems.append(f"healed: {found} tokens from files, {full} before the damage")
        self.problems.extend(f"healed: {line}" for line in unsound)
        sound = 3 - len(unsound)
        self._show("the next run", f"{found} tokens from files again, {sound} of 3 files healed")

    def _control(self, zeroed: dict[int, dict[str, Any]]) -> None:
        for group, step in zeroed.items():
            if step["num_cached_tokens"] != self._cached_tokens:
                self.problems.append(f"control: the zeroed data of group {group} was not loaded")
        same = [group for group, step in zeroed.items() if step["tokens"] == self._tokens["main"]]
        if same:
            self.problems.append(f"control: groups {same} zeroed, same tokens: this proves nothing")
        changed = len(zeroed) - len(same)
        self._show("control: data zeroed", f"tokens change in {changed} of {len(zeroed)} KV groups")

    def _compare(self, label: str, found: list[int], reference: str) -> None:
        if found != (expected := self._tokens[reference]):
            self.problems.append(f"{label}: tokens are {found}, the reference's {expected}")

    def _show(self, what: str, detail: str) -> None:
        """Show what was done, with the problems found since the last time."""
        self._lines.done(what, detail, self.problems[self._num_shown :])
        self._num_shown = len(self.problems)

    # --- engines --------------------------------------------------------------------------

    def _engine(
        self, name: str, text: str, steps: list[Step], *, fskv: bool = True
    ) -> dict[str, Any]:
        """Run one engine process through its steps; raises StoryError unless it did all of them."""
        self._lines.phase(text)
        directory = self._directory / name
        between: list[tuple[Callable[[], None], pathlib.Path, pathlib.Path]] = []
        asked: list[dict[str, Any]] = []
        for step in steps:
            if isinstance(step, dict):
                asked.append(step)
                continue
            pause = directory / f"pause{len(between)}"
            reached, over = pause.with_suffix(".reached"), pause.with_suffix(".over")
            between.append((step, reached, over))
            asked.append({"touch_file": str(reached)})
            asked.append({"wait_for_file": str(over), "timeout_s": PAUSE_TIMEOUT_S})
        transfer = connector(self._root, **CONNECTOR_OPTIONS.get(self._model.name, {}))
        request = {
            "model": self._checkpoint,
            "engine": self._model.engine_kwargs(),
            "env": {**ENGINE_ENV.get(self._model.name, {}), **self._model.env},
            "kv_transfer_config": transfer if fskv else None,
            "steps": asked,
        }
        engine = RunningEngine(request, str(directory))
        with living(engine, name, self._lines):
            for act, reached, over in between:
                follow(engine.pid, lambda r=reached: r.exists() or not engine.running, self._lines)
                if reached.exists():
                    act()
                    over.touch()
            follow(engine.pid, lambda: not engine.running, self._lines)
            result = engine.wait(0)
            if result["exit_code"] != 0:
                raise StoryError(f"the engine failed: {result['error']}")
        return result


def connector(root: str, **options: Any) -> dict[str, Any]:
    """Return the --kv-transfer-config that the README has, for a root."""
    return {
        "kv_connector": "FskvConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"root": root, **options},
    }


def _generate(prompt: list[int], label: str) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "label": label}


def _metrics(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [step["metrics"] for step in result["steps"] if step["step"] == "metrics"]


def _counter(metrics: list[dict[str, Any]], name: str, label: str = "") -> Counter[str]:
    """Return the values of one fskv counter by one of its labels, summed over all others."""
    found: Counter[str] = Counter()
    for metric in metrics:
        if metric["name"] == f"vllm:fskv_{name}":
            found[metric["labels"].get(label, "")] += int(metric.get("value", 0))
    return found


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Return a time in words, e.g. "42 ms"."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
