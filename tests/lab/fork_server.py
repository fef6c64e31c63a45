"""Programs that start without importing torch and vLLM again: forks of multiprocessing's fork server.

    engine = ForkServer(env).start([script, argument, ...], env, log_path)

The server imports what engines need, once. Each child is a session of its own, gets the wanted environment,
output and `sys.argv` and runs the script as `__main__`. It dies with the server, and the server with pytest.
`fresh=True`: the child executes a new interpreter, which dies with them too.

A fork differs from a new interpreter in three ways. Its string hashes are those of its siblings: a restart
whose point is another hash seed takes a new interpreter. Variables that are read at import come too late for
it: `forkable` knows those that do not. And it ends without taking its modules apart.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from places import LAB

# Read when an engine is made or later, never at import.
_LATE = {
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
}
_LATE_PREFIXES = ("FSKV_", "PYTEST_", "SCENARIO_")
# What an engine imports by the time it answers, as far as it takes long; fskv itself is left to the engine.
ENGINE_MODULES = (
    "torch",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.transformers_utils.config",
    "transformers.models.auto.modeling_auto",
)
_PR_SET_PDEATHSIG = 1


class Process:
    """A child of the server, asked as one asks subprocess.Popen. Any thread may ask."""

    def __init__(self, child: BaseProcess, lock: threading.Lock) -> None:
        self._child = child
        self._lock = lock
        self.pid = child.pid

    def poll(self) -> int | None:
        with self._lock:  # an exit code can be read once
            return self._child.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.01)
        return code


class ForkServer:
    """The process that forks; started by the first `start`. Any thread may call."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self._lock = threading.Lock()
        self._started: list[Process] = []
        self._context = multiprocessing.get_context("forkserver")
        atexit.register(self.close)

    def forkable(self, env: dict[str, str]) -> bool:
        """Whether a fork is what a new interpreter with this environment would be."""
        changed = {name for name in {*env, *self.env} if env.get(name) != self.env.get(name)}
        return all(name.startswith(_LATE_PREFIXES) for name in changed - _LATE)

    def start(
        self, arguments: list[str], env: dict[str, str], log_path: str, *, fresh: bool = False
    ) -> Process:
        """Run `python ARGUMENTS` in a fork or `fresh`, with its output appended to the log."""
        words = [str(word) for word in arguments]
        with self._lock:
            if not self._started:
                self._context.set_forkserver_preload([*ENGINE_MODULES, "frozen"])
                path = os.pathsep.join(filter(None, [str(LAB), self.env.get("PYTHONPATH")]))
                # One thread in OpenBLAS: its pool would be the only other thread when it forks.
                around = {**self.env, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
                with mock.patch.dict(os.environ, around, clear=True):
                    forkserver.ensure_running()
            child = self._context.Process(
                target=_become, args=(words, env, str(log_path), os.getcwd(), fresh)
            )
            child.start()
            # Else who kills its session at once would miss it.
            with contextlib.suppress(ProcessLookupError):
                while os.getsid(child.pid) != child.pid and child.exitcode is None:
                    time.sleep(0.001)
            self._started.append(Process(child, self._lock))
            return self._started[-1]

    def close(self) -> None:
        """End every child that is left: pytest would wait for it."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _become(words: list[str], env: dict[str, str], log_path: str, cwd: str, fresh: bool) -> None:
    """Be the program that was asked for."""
    os.setsid()
    # While anybody has this end of the pipe, the server lives.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl")
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(cwd)
    if fresh:
        command = [sys.executable, *words]
        print("$", shlex.join(command), flush=True)
        os.execve(command[0], command, env)  # the parent-death signal stays
    os.environ.clear()
    os.environ.update(env)
    if os.environ.get("FSKV_TEST_DROP_CAPS"):
        importlib.import_module("drop_caps")
    script, *_ = sys.argv = words
    print("$ [forked]", *words, flush=True)
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
