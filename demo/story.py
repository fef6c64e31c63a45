"""Tell one model's story with real engines, one process after the other, on one root directory.

    reference   an engine without fskv: the tokens that everything below is compared with
    cold        an engine with fskv computes the prompt and stores its KV cache
    restart     a new process loads it; then, with the engine's own cache emptied before each:
                  a prompt that shares only a part of the prefix
                  three of the files just used are spoiled: a recompute, and the same tokens
                  the same again: a full hit, the files are back and sound
                  the control: one KV group's data is zeroed under valid checksums, and the
                  tokens MUST change, or identical tokens above would prove nothing

`Story.tell` fills a `Row` and lists in `Row.problems` everything that was not as it must be; it
raises for nothing that an engine does. Called by `run.py` on its main thread.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from demo.checkpoints import Model
from demo.engine import SETTLE, generates, start_engine
from faults import files as damage

MAX_TOKENS = 16
TIMEOUT_S = 300.0  # of one engine process; they take 10 to 60 s
PAUSE_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_LINES = 12

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


class StoryError(Exception):
    """Something is not as it must be; one line that says what."""


class Display(Protocol):
    """Where a story shows what happens (`run.py`)."""

    def phase(self, text: str) -> None: ...
    def waiting(self) -> None: ...  # called all the time while an engine runs
    def done(self, what: str, detail: str, problems: list[str], seconds: float | None) -> None: ...
    def log(self, lines: list[str]) -> None: ...


@dataclass(slots=True)
class Row:
    """What one model did; None: not reached, or not part of its story. Becomes JSON as it is."""

    model: str
    groups: str
    prompt_tokens: int
    cached_tokens: int | None = None  # tokens of the main prompt that came from files
    partial_shared_tokens: int | None = None
    partial_cached_tokens: int | None = None
    ttft_recompute_s: float | None = None  # without fskv
    ttft_cold_s: float | None = None  # computing, while it stores
    ttft_load_s: float | None = None
    stored_files: int | None = None
    stored_bytes: int | None = None
    loaded_bytes: int | None = None
    tokens_identical: bool | None = None
    damaged: list[dict[str, Any]] = field(default_factory=list)
    damage_recomputed: bool | None = None
    damage_counted: dict[str, int] = field(default_factory=dict)  # reason -> chunks
    healed: bool | None = None
    # KV group -> whether zeroing its data changed the tokens.
    control_changes_tokens: dict[str, bool] = field(default_factory=dict)
    process_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Story:
    """One model on one root; `directory` takes requests, results and logs of its engines."""

    def __init__(
        self,
        model: Model,
        checkpoint: str,
        root: str,
        directory: str,
        display: Display,
        connector: Mapping[str, Any],
    ) -> None:
        """`connector` are options of fskv over those that the model's story needs."""
        self.model = model
        self.row = Row(model.name, model.groups, model.prompt_tokens)
        self._checkpoint = checkpoint
        self._root = root
        self._directory = directory
        self._display = display
        self._connector = connector
        self._tokens: dict[str, list[int]] = {}  # of the reference, by prompt
        self._num_shown = 0  # of row.problems
        self._files: list[str] = []  # stored by the cold engine

    def tell(self, *, damage_too: bool) -> Row:
        """Run the three processes; `damage_too`: with partial prefix, damage and control."""
        try:
            self._reference(partial_too=damage_too)
            self._cold()
            if damage_too:
                self._restart_and_damage()
            else:
                self._restart()
        except StoryError as problem:
            self._problem(str(problem))
            self._show("not finished", "the story ends here")
        if self.row.tokens_identical is None and self.row.ttft_load_s is not None:
            self.row.tokens_identical = True
        return self.row

    # --- chapters -------------------------------------------------------------------------

    def _reference(self, *, partial_too: bool) -> None:
        steps = [WARM_UP, self._main("main")]
        if partial_too:
            steps.append(_generate(self.model.partial_prompt(), "partial"))
        done = generates(self._engine("reference", "computes without fskv", steps, fskv=False))
        self._tokens = {label: step["tokens"] for label, step in done.items()}
        self.row.ttft_recompute_s = done["main"]["ttft_s"]
        self._show(
            "reference without fskv",
            f"{self.model.prompt_tokens} tokens computed, first token after "
            f"{duration(done['main']['ttft_s'])}",
            "reference",
        )

    def _cold(self) -> None:
        before = damage.chunk_files(self._root)
        result = self._engine("cold", "computes and stores", [WARM_UP, self._main("cold")])
        cold = generates(result)["cold"]
        self._files = sorted(damage.chunk_files(self._root) - before)
        self.row.ttft_cold_s = cold["ttft_s"]
        self.row.stored_files = len(self._files)
        self.row.stored_bytes = sum(os.path.getsize(path) for path in self._files)
        self._compare("cold", cold["tokens"], "main")
        if cold["num_cached_tokens"]:
            self._problem(f"cold: {cold['num_cached_tokens']} tokens were cached on an empty root")
        self._show(
            "cold engine stores",
            f"{count(len(self._files), 'file')}, {size(self.row.stored_bytes)}",
            "cold",
        )
        if not self._files:
            raise StoryError("cold: the engine stored no file")

    def _restart(self) -> None:
        steps = [WARM_UP, self._main("load"), METRICS]
        self._loaded(self._engine("restart", "a new process loads", steps))

    def _restart_and_damage(self) -> None:
        content = {path: pathlib.Path(path).read_bytes() for path in self._files}
        used: set[str] = set()
        spoiled: list[damage.Damaged] = []
        unsound: list[str] = []

        def remember_used() -> None:
            used.update(damage.used(self._files))
            self._display.phase("a prompt that shares a part of the prefix")

        def spoil() -> None:
            self._display.phase("files are damaged under the running engine")
            spoiled.extend(damage.spoil_three(used))
            if len(spoiled) < 3:
                raise StoryError(f"damage: the load used only {count(len(used), 'file')}")

        def look_at_healed() -> None:
            unsound.extend(damage.unsound([file.path for file in spoiled]))
            self._display.phase("control: zeroed data must change the tokens")

        def zero(group: int) -> None:
            restore(content)
            for path in groups[group]:
                damage.zero_payload(path)

        groups = damage.by_group(self._files)
        steps: list[Step] = [WARM_UP, self._main("load"), METRICS, remember_used, RESET]
        steps += [_generate(self.model.partial_prompt(), "partial"), RESET]
        steps += [spoil, self._main("damaged"), METRICS, *SETTLE, RESET]
        steps += [self._main("healed"), look_at_healed, RESET]
        for group in groups:
            steps += [lambda group=group: zero(group), self._main(f"zeroed{group}"), RESET]
        damage.make_old(self._files)
        try:
            result = self._engine("restart", "a new process loads", steps)
        finally:
            restore(content)  # a kept root must not keep the zeroed data

        done = generates(result)
        self._loaded(result)
        self._partial(done["partial"])
        self.row.damaged = [
            {"what": d.what, "group": d.group, "file": os.path.relpath(d.path, self._root)}
            for d in spoiled
        ]
        self._damaged(done["damaged"], result)
        self._healed(done["healed"], unsound)
        self._control({group: done[f"zeroed{group}"] for group in groups})

    # --- what must be true ----------------------------------------------------------------

    def _loaded(self, result: dict[str, Any]) -> None:
        load = generates(result)["load"]
        self.row.cached_tokens = load["num_cached_tokens"]
        self.row.ttft_load_s = load["ttft_s"]
        self.row.loaded_bytes = int(_counter(_metrics(result)[0], "loaded_bytes"))
        self._compare("load", load["tokens"], "main")
        if not load["num_cached_tokens"]:
            self._problem("load: nothing came from the files (0 cached tokens)")
        elif not self.row.loaded_bytes:
            self._problem("load: cached tokens, but fskv counted no loaded byte")
        self._show(
            "restarted engine loads",
            f"{load['num_cached_tokens']} of {self.model.prompt_tokens} tokens from files, "
            f"first token after {duration(load['ttft_s'])}",
            "restart",
        )

    def _partial(self, partial: dict[str, Any]) -> None:
        self.row.partial_shared_tokens = self.model.shared_tokens
        self.row.partial_cached_tokens = partial["num_cached_tokens"]
        self._compare("partial prefix", partial["tokens"], "partial")
        if not partial["num_cached_tokens"]:
            self._problem("partial prefix: nothing came from the files (0 cached tokens)")
        self._show(
            "partial prefix",
            f"{partial['num_cached_tokens']} of {self.model.shared_tokens} shared tokens from files",
        )

    def _damaged(self, hurt: dict[str, Any], result: dict[str, Any]) -> None:
        before, after = _metrics(result)
        for reason in sorted(_labels(after, "load_failures", "reason")):
            counts = [_counter(step, "load_failures", reason=reason) for step in (before, after)]
            if counts[1] > counts[0]:
                self.row.damage_counted[reason] = int(counts[1] - counts[0])
        full = self.row.cached_tokens or 0
        self.row.damage_recomputed = hurt["num_cached_tokens"] < full
        noticed = ", ".join(f"{n} {reason}" for reason, n in self.row.damage_counted.items())
        self._compare("damaged files", hurt["tokens"], "main")
        if not self.row.damage_recomputed:
            self._problem(
                f"damaged files: {hurt['num_cached_tokens']} tokens still came from the cache"
            )
        if sum(self.row.damage_counted.values()) < len(self.row.damaged):
            self._problem(f"damaged files: spoiled {len(self.row.damaged)}, noticed {noticed or 0}")
        self._show(
            "one file " + ", one ".join(file["what"] for file in self.row.damaged),
            f"noticed ({noticed or 'nothing'}), "
            + ("recomputed" if self.row.damage_recomputed else "NOT recomputed"),
        )

    def _healed(self, healed: dict[str, Any], unsound: list[str]) -> None:
        full = self.row.cached_tokens
        self.row.healed = healed["num_cached_tokens"] == full and not unsound
        self._compare("healed", healed["tokens"], "main")
        if healed["num_cached_tokens"] != full:
            self._problem(
                f"healed: {healed['num_cached_tokens']} tokens from files, {full} before the damage"
            )
        for line in unsound:
            self._problem(f"healed: {line}")
        self._show(
            "the next run",
            f"{healed['num_cached_tokens']} tokens from files again, "
            + (
                f"{count(len(unsound), 'file')} NOT healed" if unsound else "the three files healed"
            ),
        )

    def _control(self, zeroed: dict[int, dict[str, Any]]) -> None:
        for group, step in zeroed.items():
            changed = step["tokens"] != self._tokens["main"]
            self.row.control_changes_tokens[str(group)] = changed
            if step["num_cached_tokens"] != self.row.cached_tokens:
                self._problem(f"control: the zeroed data of group {group} was not loaded")
            elif not changed:
                self._problem(
                    f"control: zeroing group {group} changed no token, so this model proves nothing"
                )
        changes = sum(self.row.control_changes_tokens.values())
        self._show(
            "control: data zeroed",
            f"tokens change in {changes} of {count(len(zeroed), 'KV group')}",
        )

    def _compare(self, label: str, found: list[int], reference: str) -> None:
        expected = self._tokens[reference]
        if found == expected:
            return
        self.row.tokens_identical = False
        at = next(
            (i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(found)),
        )
        self._problem(
            f"{label}: tokens differ from the reference from position {at} on: "
            f"expected {expected[at:]}, got {found[at:]}"
        )

    def _problem(self, text: str) -> None:
        self.row.problems.append(text)

    def _show(self, what: str, detail: str, process: str | None = None) -> None:
        """Show what was done, with the problems found since the last time."""
        new = self.row.problems[self._num_shown :]
        self._num_shown = len(self.row.problems)
        seconds = None if process is None else self.row.process_s[process]
        self._display.done(what, detail, new, seconds)

    # --- engines --------------------------------------------------------------------------

    def _main(self, label: str) -> Step:
        return _generate(self.model.main_prompt(), label)

    def _engine(
        self, name: str, text: str, steps: list[Step], *, fskv: bool = True
    ) -> dict[str, Any]:
        """Run one engine process through its steps; raises StoryError unless it did all of them."""
        self._display.phase(text)
        directory = os.path.join(self._directory, name)
        os.makedirs(directory)
        between: list[Callable[[], None]] = []
        asked: list[dict[str, Any]] = []
        for step in steps:
            if isinstance(step, dict):
                asked.append(step)
                continue
            pause = os.path.join(directory, f"pause{len(between)}")
            between.append(step)
            asked.append({"touch_file": f"{pause}.reached"})
            asked.append({"wait_for_file": f"{pause}.over", "timeout_s": PAUSE_TIMEOUT_S})
        options = {**CONNECTOR_OPTIONS.get(self.model.name, {}), **self._connector}
        options["root"] = self._root
        transfer = {
            "kv_connector": "FskvConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        request = {
            "model": self._checkpoint,
            "engine": self.model.engine_kwargs(),
            "env": {**ENGINE_ENV.get(self.model.name, {}), **self.model.env},
            "kv_transfer_config": transfer if fskv else None,
            "steps": asked,
        }
        start = time.monotonic()
        result = _converse(request, directory, between, self._display.waiting)
        self.row.process_s[name] = round(time.monotonic() - start, 2)
        if result["exit_code"] != 0 or "error" in result:
            self._display.log(result.get("log_tail", [])[-LOG_LINES:])
            error = result.get("error", f"exit code {result['exit_code']}")
            raise StoryError(f"{name}: the engine failed: {error}; log: {result['log_path']}")
        return result


def _converse(
    request: dict[str, Any],
    directory: str,
    between: list[Callable[[], None]],
    waiting: Callable[[], None],
) -> dict[str, Any]:
    """Run an engine to its end; at each pause it waits until `between` is done.

    Whatever is raised here, Ctrl-C included, no process of the engine is left.
    """
    engine = start_engine(request, directory)
    with ThreadPoolExecutor(1, "engine") as thread:
        try:
            ending = thread.submit(engine.wait, TIMEOUT_S)
            for number, act in enumerate(between):
                pause = os.path.join(directory, f"pause{number}")
                while not os.path.exists(f"{pause}.reached") and not ending.done():
                    wait([ending], POLL_S)
                    waiting()
                if ending.done():
                    break
                act()
                pathlib.Path(f"{pause}.over").touch()
            while not ending.done():
                wait([ending], POLL_S)  # in slices: a signal is handled between two of them
                waiting()
            return ending.result()
        finally:
            engine.kill()


def restore(content: Mapping[str, bytes]) -> None:
    """Write files as they were; `content` by path."""
    for path, data in content.items():
        pathlib.Path(path).write_bytes(data)


def _generate(prompt: list[int], label: str) -> Step:
    return {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "label": label}


def _metrics(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [step["metrics"] for step in result["steps"] if step["step"] == "metrics"]


def _counter(metrics: list[dict[str, Any]], name: str, **labels: str) -> float:
    """Return the value of one fskv counter, summed over all other labels."""
    return sum(
        metric.get("value", 0.0)
        for metric in metrics
        if metric["name"] == f"vllm:fskv_{name}" and labels.items() <= metric["labels"].items()
    )


def _labels(metrics: list[dict[str, Any]], name: str, label: str) -> set[str]:
    found = (m["labels"].get(label) for m in metrics if m["name"] == f"vllm:fskv_{name}")
    return {value for value in found if value}


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Return a time in words, e.g. "42 ms"."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(nbytes: float) -> str:
    """Return a size in words, e.g. "3.8 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
