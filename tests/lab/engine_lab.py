"""What the engine tests share: real engines on real roots, and the damage done to them from outside.

The damage is done with plain file calls and with fskv.format.chunk_file alone, never through the store under
test.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import places
import pytest
from fork_server import ForkServer
from places import LAB, REPOSITORY
from world import damage as flip

from demo.checkpoints import MODELS, Model, make
from demo.engine import ENV_DEFAULTS, SETTLE, RunningEngine, generates
from faults import files as damage
from faults.files import by_group, group_of, zero_payload
from fskv.format import chunk_file

ENGINE_TIMEOUT_S = 240
# One thread computes: the models are tiny, and threads of several engines that spin at each other's barriers
# make each ten times slower.
ENGINE_ENV = {**ENV_DEFAULTS, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
KV_NBYTES = 256 << 20  # vLLM writes zeros into all of it when it starts
MAX_TOKENS = 16
RESET = {"reset_prefix_cache": True}  # the engine's own cache, not the connector's
# Empties vLLM's CPU tier too, or nothing would be asked of the files.
RESET_TIERS = {**RESET, "connector": True}
METRICS = {"metrics": True}
# Else vLLM refuses the second rank.
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}

# Small chunks, so that a prompt has many; hybrids choose one block a chunk by themselves.
CHUNK_TOKENS = {"llama": 128}


def checkpoint(name: str) -> str:
    """Return the directory of a model's checkpoint, made once and kept in the user's cache."""
    cache = os.environ.get("FSKV_CHECKPOINTS") or str(REPOSITORY / ".cache" / "checkpoints")
    os.makedirs(cache, exist_ok=True)
    return str(make(name, cache))


def connector(root: str, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "FskvConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"root": root, **options},
    }


def multi(*children: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the kv_transfer_config of several roots, each with that of its own."""
    return {
        "kv_connector": "FskvMultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children), **options},
    }


def tier(root: str, *, extra: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the kv_transfer_config with FskvTier behind vLLM's CPU tier, as far as that runs without a GPU.

    `extra` stands beside `secondary_tiers`. The files of a busy machine are waited for.
    """
    tier = {"type": "FskvTier", "module_path": "fskv.engines.vllm_tier", "root": root}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "demo.cpu_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [{**tier, "lookup_timeout_s": 10, **options}],
            **(extra or {}),
        },
    }


def request(
    model: Model,
    steps: list[dict[str, Any]],
    *,
    transfer: dict[str, Any] | None = None,
    path: str | None = None,
    engine: dict[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the request of an engine of demo/engine.py; `more` has what lab_engine.py adds to it."""
    return {
        "model": path or checkpoint(model.name),
        "engine": {"kv_cache_memory_bytes": KV_NBYTES, **model.engine_kwargs(), **(engine or {})},
        "kv_transfer_config": transfer,
        "env": {**ENGINE_ENV, **(env or {})},
        "steps": steps,
        **more,
    }


def generate(prompt: list[int], label: str) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "label": label}


def run(what: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Run an engine to its end; it must not have failed. `how` is of `start_engine`."""
    return good(start_engine(what, **how).wait())


def good(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an engine that must not have failed; else the end of the log is printed."""
    if result["exit_code"] != 0:
        lines = [f"engine failed: {result['error']} (log: {result['log_path']})"]
        lines += [f"  | {line}" for line in log_of(result).splitlines()[-30:]]
        print("\n".join(lines), file=sys.stderr)
    assert result["exit_code"] == 0, result.get("error")
    return result


# --- starts ---------------------------------------------------------------------------------


class Engine(RunningEngine):
    """An engine that is killed at the end of its test if it still runs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waited_for = False
        _started.append(self)

    def __str__(self) -> str:
        return f"engine {self.pid}: {self.log_path}"

    def wait(self, timeout_s: float = ENGINE_TIMEOUT_S) -> dict[str, Any]:
        result = super().wait(timeout_s)
        self.waited_for = True
        return result


_started: list[Engine] = []


def start_engine(
    what: dict[str, Any],
    directory: str | os.PathLike[str] | None = None,
    *,
    program: str = str(LAB / "lab_engine.py"),
    fresh: bool = False,
) -> Engine:
    """Start an engine; its request, result and log are in `directory` (default: a new one).

    What runs is `program request result`: in a fork of a process that has imported vLLM already, unless the
    environment forbids that or it is to be `fresh`: a new interpreter, with another seed of its hashes.
    """

    def launch(paths: list[str], env: dict[str, str], log_path: str) -> Any:
        return _launch([program, *paths], env, log_path, fresh=fresh)

    return Engine(what, str(directory or _new_directory()), launch)


def _new_directory() -> str:
    return tempfile.mkdtemp(prefix="fskv-engine-", dir=places.run_directory)


def scenario(name: str, *words: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a program of the lab that makes engines itself; return its one line of JSON, and its `log`."""
    said = run_program(str(LAB / name), *words, env=env)
    (line,) = [line for line in said.splitlines() if line.startswith('{"')]
    return {**json.loads(line), "log": said}


def run_program(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Run a program to its end; return all that it printed. It must not fail."""
    log = pathlib.Path(_new_directory()) / "engine.log"
    process = start_program(*command, env=env, log=log)
    try:
        code = process.wait(ENGINE_TIMEOUT_S)
    finally:
        kill_program(process)
    said = log.read_text(errors="replace")
    assert code == 0, f"{log}: {said[-4000:]}"
    return said


def start_program(*command: str, env: Mapping[str, str] | None = None, log: pathlib.Path) -> Any:
    """Start a program of the lab; what it prints goes to `log`. `kill_program` must be called."""
    around = {**_without_vllm(os.environ), **ENGINE_ENV, **(env or {})}
    return _launch(list(command), around, str(log), fresh=False)


def kill_program(process: Any) -> None:
    """Kill what is left of it and of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def _server() -> ForkServer:
    return ForkServer({**_without_vllm(os.environ), **ENGINE_ENV})


def _launch(command: list[str], env: dict[str, str], log_path: str, *, fresh: bool) -> Any:
    server = _server()
    return server.start(command, env, log_path, fresh=fresh or not server.forkable(env))


def _without_vllm(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("VLLM_")}


# --- made once a run, whatever worker needs it first ----------------------------------------


def reference(name: str) -> dict[str, dict[str, Any]]:
    """Return what an engine without fskv makes of the model's main and partial prompt, by label."""
    model = MODELS[name]
    steps = [generate(model.main_prompt(), "main"), generate(model.partial_prompt(), "partial")]

    def make_it(directory: pathlib.Path) -> dict[str, Any]:
        done = generates(run(request(model, steps, env=dict(model.env))))
        assert len(set(done["main"]["tokens"])) > 4, "degenerate tokens would prove nothing"
        return done

    return _once(f"reference-{name}", make_it)[1]


def main_tokens(name: str) -> list[int]:
    """Return the tokens of the main prompt from an engine without a connector."""
    return list(reference(name)["main"]["tokens"])


def stored(name: str, root: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Make `root` a copy of what an engine stored of the main prompt; return that engine's result.

    The steps are the prompt ("main") and metrics. `options` are fskv's, beside the model's own.
    """
    model = MODELS[name]
    options = {**options_for(name), **options}
    steps = [generate(model.main_prompt(), "main"), {"metrics": True}]

    def make_it(directory: pathlib.Path) -> dict[str, Any]:
        (directory / "root").mkdir()
        transfer = connector(str(directory / "root"), **options)
        result = run(request(model, steps, transfer=transfer, env=dict(model.env)))
        assert generates(result)["main"]["num_cached_tokens"] == 0
        return result

    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    directory, result = _once(f"stored-{name}-{key}", make_it)
    shutil.copytree(directory / "root", root, dirs_exist_ok=True)
    return result


def _once(
    name: str, make_it: Callable[[pathlib.Path], dict[str, Any]]
) -> tuple[pathlib.Path, dict[str, Any]]:
    directory = places.run_directory / name
    with (places.run_directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "answer.json").exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            (directory / "answer.json").write_text(json.dumps(make_it(directory)))
    return directory, json.loads((directory / "answer.json").read_text())


def end_engines() -> tuple[list[Engine], list[Engine]]:
    """Kill what still runs; return all engines that were started since the last call, and those killed."""
    started, _started[:] = list(_started), []
    left = [engine for engine in started if engine.running]
    for engine in started:
        # Not waited for: of one that crashed, processes may be left.
        if not engine.waited_for:
            engine.kill()
    return started, left


def options_for(name: str) -> dict[str, Any]:
    return {"hybrid_chunk_size": CHUNK_TOKENS[name]} if name in CHUNK_TOKENS else {}


def metrics(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics steps of a result, in order; each is for `counter`."""
    return [step for step in result["steps"] if step["step"] == "metrics"]


def counter(step: dict[str, Any], name: str, **labels: str) -> float:
    """Return the value of one fskv metric in a metrics step, summed over other labels."""
    return sum(
        m.get("value", 0.0)
        for m in step["metrics"]
        if m["name"] == f"vllm:fskv_{name}"
        and all(m["labels"].get(key) == value for key, value in labels.items())
    )


# --- files, looked at from outside ----------------------------------------------------------


def chunks(root: str) -> list[str]:
    return sorted(path for path in damage.chunk_files(root) if os.path.isfile(path))


def parts(root: str) -> list[str]:
    return sorted(str(p) for p in pathlib.Path(root).rglob("*.part"))


def payloads(root: str) -> dict[str, bytes]:
    """Return the KV of each file by its path below the root, without the header and its time of writing."""
    return {
        os.path.relpath(path, root): content[chunk_file.header_length(content) :]
        for path, content in snapshot(root).items()
    }


def identities(root: str) -> list[dict[str, Any]]:
    """Return the manifests of all namespaces, oldest first."""
    paths = sorted(pathlib.Path(root).rglob("namespace.json"), key=lambda p: p.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in paths]


def zero(paths: Iterable[str]) -> None:
    for path in paths:
        zero_payload(path)


def remove(root: str) -> None:
    """Remove all chunks of a root."""
    for path in chunks(root):
        os.unlink(path)


def log_of(result: dict[str, Any]) -> str:
    return pathlib.Path(result["log_path"]).read_text(errors="replace")


def snapshot(root: str) -> dict[str, bytes]:
    return {path: pathlib.Path(path).read_bytes() for path in chunks(root)}


def restore(files: dict[str, bytes]) -> None:
    for path, content in files.items():
        if os.path.isdir(path):
            os.rmdir(path)
        if not os.path.exists(path) or pathlib.Path(path).read_bytes() != content:
            pathlib.Path(path).write_bytes(content)


def assert_sound(root: str) -> None:
    """Check every file of a root with nothing but the format: header, rows, length, no parts."""
    assert parts(root) == []
    assert damage.unsound(chunks(root)) == []


# --- damage ---------------------------------------------------------------------------------


@dataclass
class Damage:
    """One way to spoil the chunk `path`; `reason` is the label under which the engine must count it."""

    name: str
    reason: str
    do: Callable[[str, DamageContext], None]


@dataclass
class DamageContext:
    root: str
    other_root: str = ""
    saved: dict[str, Any] = field(default_factory=dict)


def _swap_in_neighbour(path: str, context: DamageContext) -> None:
    # As it was before: a neighbour that was swapped already may hold this file's own content.
    group = by_group(chunks(context.root))[group_of(path)]
    sound = context.saved.setdefault(
        group_of(path), {p: pathlib.Path(p).read_bytes() for p in group}
    )
    pathlib.Path(path).write_bytes(next(sound[p] for p in group if p != path))


def _from_other_namespace(path: str, context: DamageContext) -> None:
    name = os.path.basename(path)
    shutil.copyfile(next(p for p in chunks(context.other_root) if p.endswith(name)), path)


def _directory_instead(path: str, context: DamageContext) -> None:
    os.unlink(path)
    os.mkdir(path)


DAMAGES = [
    # In the chunk's last block: a sliding window may need only that, and only what is needed is read.
    Damage("payload_bit_flip", "corrupt", lambda p, c: flip(p, os.path.getsize(p) - 4200, 0x10)),
    Damage("header_bit_flip", "corrupt", lambda p, c: flip(p, 100, 0x10)),
    Damage("truncated_to_zero", "corrupt", lambda p, c: os.truncate(p, 0)),
    Damage("truncated_mid_header", "corrupt", lambda p, c: os.truncate(p, 1000)),
    Damage(
        "truncated_mid_payload", "corrupt", lambda p, c: os.truncate(p, os.path.getsize(p) // 2)
    ),
    Damage("trailing_garbage", "corrupt", lambda p, c: os.truncate(p, os.path.getsize(p) + 4096)),
    Damage("chunk_of_another_key", "stale", _swap_in_neighbour),
    Damage("chunk_of_another_namespace", "stale", _from_other_namespace),
    Damage("removed_after_lookup", "absent", lambda p, c: os.unlink(p)),
    Damage("directory_instead", "stale", _directory_instead),
    Damage("unreadable", "denied", lambda p, c: os.chmod(p, 0)),
]


class Conversation:
    """An engine whose steps wait for the parent, so that it can do damage between them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.steps: list[dict[str, Any]] = []
        self._num_pauses = 0
        self._meanwhile: list[tuple[int, Callable[[], object]]] = []

    def say(self, *steps: dict[str, Any]) -> None:
        self.steps.extend(steps)

    def pause(self, limit_s: int = 120) -> int:
        """Add a point where the engine waits for `resume`."""
        number = self._num_pauses
        self._num_pauses += 1
        self.say(
            {"touch_file": str(self.directory / f"{number}.reached")},
            {"wait_for_file": str(self.directory / f"{number}.go"), "timeout_s": limit_s},
        )
        return number

    def meanwhile(self, do: Callable[[], object]) -> None:
        """Add a point where the engine waits until `go` has called `do`."""
        self._meanwhile.append((self.pause(), do))

    def spoil(self, stored: dict[str, bytes], do: Callable[[], object]) -> None:
        """Add a point where these files are made whole again, and then `do` spoils them."""
        self.meanwhile(lambda: (restore(stored), do()))

    def resume(self, engine: Any, number: int, between: Callable[[], object]) -> None:
        reached = self.directory / f"{number}.reached"
        end = time.monotonic() + ENGINE_TIMEOUT_S
        while not reached.exists():
            if time.monotonic() > end or not engine.running:
                break
            time.sleep(0.02)
        if reached.exists():
            between()
        (self.directory / f"{number}.go").touch()

    def go(self, engine: Engine) -> None:
        """Do what is to be done meanwhile."""
        for number, do in self._meanwhile:
            self.resume(engine, number, do)

    def run(self, model: Model, timeout_s: float = ENGINE_TIMEOUT_S, **what: Any) -> dict[str, Any]:
        """Say all of it to an engine, which must not fail; return its result. `what` is of `request`."""
        engine = start_engine(request(model, self.steps, **what), self.directory / "engine")
        self.go(engine)
        return good(engine.wait(timeout_s))


needs_two_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")


def needs_vllm() -> None:
    pytest.importorskip("vllm", reason="the engine tests need the vllm environment: make test")


__all__ = ["MODELS", "SETTLE", "by_group", "generates", "group_of", "zero_payload"]
