"""A vLLM engine in a process of its own: how the parent starts, hears and ends it, and how the child begins.

What the child does then is in trials.soak_child.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.child import Child
from benchmarks.rig import BenchmarkError

START_S = 600.0  # it only bounds a hang, also on a busy machine
_END_S = 20.0
_LOG_LINES = 20
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineProcess:
    """An engine's process, from the parent; one that fails says so with the end of its log."""

    def __init__(self, name: str, log: str, run: Callable[..., None], *arguments: Any) -> None:
        """`run(connection, *arguments)` calls `begin` with the same log and says "ready"."""
        self._log = log
        self.child = Child(name, run, *arguments)

    def hear(self, timeout_s: float) -> Any:
        try:
            return self.child.hear(timeout_s)
        except BenchmarkError as error:
            with contextlib.suppress(FileNotFoundError), open(self._log, errors="replace") as file:
                raise BenchmarkError(
                    f"{error}\n{''.join(file.readlines()[-_LOG_LINES:])}"
                ) from None
            raise


@contextlib.contextmanager
def ending(engines: Iterable[EngineProcess]) -> Iterator[None]:
    """Let these engines end by themselves after the block; after an error they are killed."""
    try:
        yield
        for engine in engines:
            engine.child.end(_END_S)
    finally:
        for engine in engines:
            engine.child.kill()


def begin(log: str, num_threads: int) -> None:
    """In the child, before vLLM is imported: its environment, its threads, its output into a log."""
    import torch  # not in the parent

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    os.environ.update(_ENV)
    torch.set_num_threads(num_threads)  # before vLLM, which replaces this function
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
