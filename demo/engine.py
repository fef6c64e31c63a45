"""Run one real vLLM engine in a child process and report what it did.

The child (`python engine.py request.json result.json`) builds one `LLM`, walks the
request's steps in order, shuts the engine down and writes one JSON result, also when
something fails. It knows nothing of fskv: which connector runs is the request's
`kv_transfer_config`. It downloads nothing and loads no tokenizer.

Parents start one as a `RunningEngine`, which imports no vLLM. The demo, engine tests and
benchmarks do so, on any thread. Invariant: when `RunningEngine.wait` or `kill` returns, no process
of the engine is left.

Request:
    model               directory of the checkpoint
    engine              keyword arguments of LLM, over ENGINE_DEFAULTS
    kv_transfer_config  keyword arguments of KVTransferConfig, or null
    env                 environment variables of the child, over ENV_DEFAULTS
    flush               run an unreported 1-token request after each generate, because a
                        connector submits the stores of one step in the next one;
                        default: when kv_transfer_config is given
    steps               list, each one of
        {"prompt_token_ids": [...], "max_tokens": 16, "label": "cold"}   (greedy)
        {..., "again_while": metric}        again and again while that is not 0, AGAIN_S at most
        {"reset_prefix_cache": true}        the engine's own cache, not the connector's...
        {"reset_prefix_cache": true, "connector": true}     ...and that too
        {"metrics": true}
        {"shutdown": seconds}               end the engine as `vllm serve` does; the last step
        {"sleep": seconds}
        {"touch_file": path}                tells a parent that this step is reached
        {"wait_for_file": path, "timeout_s": 60}

Result:
    steps       one dict per step done: the step's name in "step" and, for a generate,
                label, tokens, num_cached_tokens, ttft_s (arrival to first token), wall_s;
                for metrics, a list of {name, labels, value} or {name, labels, count, sum}
    error       only after a failure ("ValueError: one line"); exit code 1
  added by the parent: exit_code, log_path
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

ENV_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # It fails below a directory with a space in its name; vLLM compiles a step of two ranks also when eager.
    "TORCH_COMPILE_DISABLE": "1",
}

ENGINE_DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": True,
    "disable_log_stats": False,  # without it there are no metrics and no ttft
    "seed": 0,
}

METRIC_WORDS = ("kv_offload", "external_prefix", "fskv", "spec_decode")
POLL_S = 0.05
AGAIN_S, PAUSE_S = 10.0, 0.25  # stores that hang are waited for in vain


# (paths of request and result, environment, path of the log) -> the process, which leads a session of its own
Launch = Callable[[list[str], dict[str, str], str], Any]


def launch_child(paths: list[str], env: dict[str, str], log_path: str) -> subprocess.Popen[bytes]:
    """Start this file as a new process."""
    return launch([sys.executable, os.path.abspath(__file__), *paths], env, log_path)


def launch(command: list[str], env: dict[str, str], log_path: str) -> subprocess.Popen[bytes]:
    """Start a command with its output in the log, as the leader of a session."""
    with open(log_path, "ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # the engine and its workers are one process group
        )


class RunningEngine:
    """An engine child that was started; `wait` must be called, or `kill`.

    Request, result and log go to `directory`. One thread owns it, but `kill` may be called from any other.
    """

    def __init__(
        self, request: dict[str, Any], directory: str, launch: Launch = launch_child
    ) -> None:
        os.makedirs(directory, exist_ok=True)
        self.log_path = os.path.join(directory, "engine.log")
        self._result_path = os.path.join(directory, "result.json")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._result_path)
        request_path = os.path.join(directory, "request.json")
        _write_json(request_path, request)
        env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        env.update(ENV_DEFAULTS)
        env.update(request.get("env") or {})
        self._process = launch([request_path, self._result_path], env, self.log_path)
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        """True until the engine's process has ended."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the engine to end and return its result; kill it after the timeout.

        Never raises for what the engine does: look at "exit_code" and "error".
        """
        timed_out = False
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            self.kill()
        code = self._process.returncode
        result: dict[str, Any] = {"steps": []}
        with contextlib.suppress(FileNotFoundError), open(self._result_path) as file:
            result = json.load(file)
        if timed_out:
            result["error"] = f"TimeoutError: the engine was killed after {timeout_s:g} s"
        elif code != 0 and "error" not in result:
            result["error"] = f"EngineCrash: exit code {code} without a result"
        result["exit_code"] = code
        result["log_path"] = self.log_path
        return result

    def kill(self) -> None:
        """SIGKILL the engine with all its workers and reap it, as a lost machine would."""
        # The group outlives its leader as long as a worker does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


# Stores go on after their request: a moment, then steps until the scheduler has heard how they ended.
SETTLE: list[dict[str, Any]] = [
    {"sleep": 0.5},
    {
        "prompt_token_ids": [2],
        "max_tokens": 1,
        "label": "settle",
        "again_while": "fskv_store_queue_chunks",
    },
]


def generates(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the result's generate steps by label."""
    return {step["label"]: step for step in result["steps"] if step["step"] == "generate"}


# --- the child ---


class Child:
    """The engine's side: one LLM and the result that grows step by step."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.result: dict[str, Any] = {"steps": []}
        self.llm: Any = None
        flush = request.get("flush")
        self.flush = bool(request.get("kv_transfer_config")) if flush is None else bool(flush)

    def run(self) -> None:
        """Start the engine, do every step and shut the engine down, whatever happens."""
        try:
            self._start()
            for step in self.request["steps"]:
                self.result["steps"].append(self._do(step))
        except Exception as error:  # the parent must learn what it was
            self._fail(error)
        finally:
            try:
                if self.llm is not None:
                    self.llm.llm_engine.engine_core.shutdown()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        text = " ".join(str(error).split())
        self.result.setdefault("error", f"{type(error).__name__}: {text}")
        traceback.print_exception(error)

    def _start(self) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        arguments = ENGINE_DEFAULTS | (self.request.get("engine") or {})
        transfer = self.request.get("kv_transfer_config")
        if transfer:
            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(model=self.request["model"], **arguments)

    def _do(self, step: dict[str, Any]) -> dict[str, Any]:
        if "prompt_token_ids" in step:
            prompt, max_tokens = step["prompt_token_ids"], step.get("max_tokens", 16)
            done = self._generate(prompt, max_tokens)
            end = time.monotonic() + AGAIN_S
            while self._is_above_zero(step.get("again_while")) and time.monotonic() < end:
                time.sleep(PAUSE_S)
                done = self._generate(prompt, max_tokens)
            if self.flush:
                self._generate([1], 1)
            return {"step": "generate", "label": step.get("label", ""), **done}
        if step.get("reset_prefix_cache"):
            if not self.llm.reset_prefix_cache(reset_connector=bool(step.get("connector"))):
                raise RuntimeError("reset_prefix_cache: blocks are still in use")
            return {"step": "reset_prefix_cache"}
        if step.get("metrics"):
            return {"step": "metrics", "metrics": _read_metrics(self.llm)}
        if "shutdown" in step:  # what its server does with --shutdown-timeout
            self.llm.llm_engine.engine_core.shutdown(timeout=step["shutdown"])
            return {"step": "shutdown"}
        if "sleep" in step:
            time.sleep(step["sleep"])
            return {"step": "sleep"}
        if "touch_file" in step:
            with open(step["touch_file"], "w"):
                return {"step": "touch_file"}
        if "wait_for_file" in step:
            _wait_for_file(step["wait_for_file"], step.get("timeout_s", 60.0))
            return {"step": "wait_for_file"}
        raise ValueError(f"unknown step: {sorted(step)}")

    def _is_above_zero(self, metric: str | None) -> bool:
        return metric is not None and any(
            found.get("value", 0) > 0
            for found in _read_metrics(self.llm)
            if found["name"].endswith(metric)
        )

    def _generate(self, prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0
        )
        prompt = {"prompt_token_ids": prompt_token_ids}
        before = time.monotonic()
        (output,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        wall_s = time.monotonic() - before
        if output.metrics is None:
            raise RuntimeError("the request has no metrics: disable_log_stats must be false")
        return {
            "tokens": list(output.outputs[0].token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "ttft_s": output.metrics.first_token_latency,
            "wall_s": wall_s,
        }


def _read_metrics(llm: Any) -> list[dict[str, Any]]:
    found = []
    for read in llm.get_metrics():
        if not any(word in read.name for word in METRIC_WORDS):
            continue
        entry: dict[str, Any] = {"name": read.name, "labels": read.labels}
        if hasattr(read, "buckets"):
            entry |= {"count": read.count, "sum": read.sum}
        elif hasattr(read, "value"):
            entry["value"] = read.value
        found.append(entry)
    return found


def _wait_for_file(path: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not os.path.exists(path):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} did not appear in {timeout_s:g} s")
        time.sleep(POLL_S)


def _write_json(path: str, value: dict[str, Any]) -> None:
    temporary = f"{path}.tmp"
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1)
    os.replace(temporary, path)


def main(arguments: Sequence[str]) -> int:
    """Do one request (path) and write its result (path); return the exit code."""
    request_path, result_path = arguments
    with open(request_path) as file:
        request = json.load(file)
    # Set again for whoever starts the child by hand; vLLM reads them at import.
    for name, value in (ENV_DEFAULTS | (request.get("env") or {})).items():
        os.environ[name] = value
    child = Child(request)
    child.run()
    _write_json(result_path, child.result)
    return 1 if "error" in child.result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
