"""Programs that start without importing torch and vLLM again: forks of one process that did it once.

    engine = Nursery().start([script, argument, ...], env, log_path)

The nursery is a process of its own (this file as a program). It imports what engines need, has one
thread, never touches torch, and forks a child for each request. The child is a session of its own, gets
the wanted environment, output and `sys.argv` and runs the script as `__main__`. It dies with the
nursery, and the nursery with its parent. `fresh=True`: the child executes a new interpreter, which dies
with them too; a nursery with `modules=()` is enough for those.

A fork differs from a new interpreter in three ways. Its string hashes are those of its siblings: a
restart whose point is another hash seed takes a new interpreter. Variables that are read at import come
too late for it: `forkable` knows those that do not. And it ends without taking its modules apart, as
children of multiprocessing do: that would write to every page that it shares with the nursery.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

# Read when an engine is made or later, never at import.
_LATE = {
    "VLLM_CPU_KVCACHE_SPACE",
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
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.transformers_utils.config",
    "transformers.models.auto.modeling_auto",
)
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 20
_START_S = 500.0  # of the imports, on a busy machine; a nursery that ends is noticed at once


class Process:
    """A child of the nursery, asked as one asks subprocess.Popen."""

    def __init__(self, nursery: Nursery, pid: int, *, forked: bool) -> None:
        self._nursery = nursery
        self.pid = pid
        self.forked = forked
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.exit_code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._nursery.exit_code(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
        return self.returncode


class Nursery:
    """The process that forks; started by the first `start`. Any thread may call."""

    def __init__(self, env: dict[str, str], modules: Sequence[str] = ENGINE_MODULES) -> None:
        self.env = env
        self._modules = modules
        self._lock = threading.Lock()
        self._serials = itertools.count()
        self._living: set[int] = set()
        self._ended: dict[int, int] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def forkable(self, env: dict[str, str]) -> bool:
        """Whether a fork is what a new interpreter with this environment would be."""
        changed = {
            name for name in {*env, *self.env} if env.get(name) != self.env.get(name)
        } - _LATE
        return not any(not name.startswith(_LATE_PREFIXES) for name in changed)

    def start(
        self, arguments: list[str], env: dict[str, str], log_path: str, *, fresh: bool = False
    ) -> Process:
        """Run `python ARGUMENTS` in a fork or `fresh`, with its output appended to the log."""
        request = {
            "serial": next(self._serials),
            "arguments": [str(word) for word in arguments],
            "env": env,
            "log_path": str(log_path),
            "cwd": os.getcwd(),
            "fresh": fresh,
        }
        with self._lock:
            self._connected().send(json.dumps(request).encode())
            end = time.monotonic() + _START_S
            while self._server is not None:
                answer = self._receive(end - time.monotonic())
                assert answer is not None, "the nursery does not answer"
                if answer.get("serial") == request["serial"]:
                    self._living.add(answer["started"])
                    self._ended.pop(answer["started"], None)  # an older process of this number
                    return Process(self, answer["started"], forked=not fresh)
        raise RuntimeError("the nursery has ended: see what it wrote to stderr")

    def exit_code(self, pid: int, timeout_s: float | None) -> int | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                while pid not in self._ended and self._server and self._receive(0.0):
                    pass
                if pid in self._ended:
                    return self._ended[pid]
            if end is not None and time.monotonic() >= end:
                return None
            time.sleep(0.01)

    def close(self) -> None:
        """End the nursery with every child that is left."""
        with self._lock:
            if self._server is not None:
                self._socket.close()
                self._server.wait(60)
                self._server = self._socket = None

    def _connected(self) -> socket.socket:
        if self._server is not None and self._server.poll() is not None:  # nobody has noticed yet
            self._forget()
        if self._server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *self._modules],
                    # One thread in OpenBLAS: its pool would be the only other thread when it forks.
                    env={**self.env, "OPENBLAS_NUM_THREADS": "1"},
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            self._socket = ours
        return self._socket

    def _receive(self, timeout_s: float) -> dict | None:
        readable, _, _ = select.select([self._socket], [], [], max(0.0, timeout_s))
        if not readable:
            return None
        message = self._socket.recv(_MAX_MESSAGE)
        if not message:
            self._forget()
            return {}
        answer = json.loads(message)
        if "ended" in answer:
            self._living.discard(answer["ended"])
            self._ended[answer["ended"]] = answer["exit_code"]
        return answer

    def _forget(self) -> None:
        """It died, and its children with it; the next start makes another one."""
        self._ended |= dict.fromkeys(self._living, -signal.SIGKILL)
        self._living.clear()
        self._socket.close()
        self._server.wait()
        self._server = self._socket = None


# --- the nursery's own process --------------------------------------------------------------


def _serve(sock: socket.socket) -> dict | None:
    """Fork for each request until nobody asks any more; in a child, return its request."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: set[int] = set()
    nursery = os.getpid()
    while True:
        readable, _, _ = select.select([sock, read_end], [], [])
        if read_end in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(read_end, 4096)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.discard(pid)
                    ended = {"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)}
                    with contextlib.suppress(OSError):
                        sock.send(json.dumps(ended).encode())
        if sock in readable:
            message = sock.recv(_MAX_MESSAGE)
            if not message:
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return None
            tasks = len(os.listdir("/proc/self/task"))
            assert tasks == 1, f"{tasks} threads: a fork would lose all but one"
            pid = os.fork()
            if pid == 0:
                _die_with_the_parent(nursery)
                os.setsid()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.close(read_end)
                os.close(write_end)
                sock.close()
                return json.loads(message)
            children.add(pid)
            serial = json.loads(message)["serial"]
            sock.send(json.dumps({"started": pid, "serial": serial}).encode())


def _die_with_the_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def _become(request: dict) -> None:
    """Be the program that was asked for."""
    log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["cwd"])
    if request["fresh"]:
        command = [sys.executable, *request["arguments"]]
        print("$", shlex.join(command), flush=True)
        os.execve(command[0], command, request["env"])  # the parent-death signal stays
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.get("FSKV_TEST_DROP_CAPS"):
        importlib.import_module("drop_caps")
    script, *_ = sys.argv = request["arguments"]
    print("$ [forked]", *sys.argv, flush=True)
    sys.path[0] = str(Path(script).parent)
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    # A thread or a handler that hangs here hangs an engine, too.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(sock.fileno(), False)
    for name in sys.argv[2:]:
        # Another version's; the engine imports what it needs.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = _serve(sock)
    if request is not None:
        _become(request)
    os._exit(0)  # nothing here needs to be taken apart


if __name__ == "__main__":
    main()
