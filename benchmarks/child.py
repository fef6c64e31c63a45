"""A process of its own for the part of a benchmark that must not share the parent's interpreter or memory.

Parent and child talk through a connection; what the child cannot do it sends as a BenchmarkError. The
child ends when the connection does, and `kill` leaves nothing of it: not even Ctrl-C reaches it first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Self

from benchmarks.rig import PATIENCE_S, BenchmarkError

_SAMPLE_S = 0.002


class Child:
    """One child, owned by one thread; a context manager that leaves no process behind."""

    def __init__(
        self, name: str, run: Callable[..., None], *arguments: Any, forked: bool = False
    ) -> None:
        """`run(connection, *arguments)` is a module's function: the child imports it.

        With `forked` a server does the importing once (`preload`), and each child is a fork of it.
        """
        self._name = name
        context: SpawnContext | ForkServerContext
        if forked:
            context = multiprocessing.get_context("forkserver")
        else:
            context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(run, theirs, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def connection(self) -> Connection:
        """For multiprocessing.connection.wait: who of several has something to say."""
        return self._connection

    def say(self, what: Any) -> None:
        """Send something; that the child is gone is noticed by the next `hear`."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(what)

    def hear(
        self, timeout_s: float = PATIENCE_S, meanwhile: Callable[[], None] | None = None
    ) -> Any:
        """Return what the child says next, calling `meanwhile` until it does; raises BenchmarkError."""
        end = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(_SAMPLE_S if meanwhile else timeout_s):
                if time.monotonic() >= end:
                    raise BenchmarkError(f"{self._name} has said nothing for {timeout_s:g} s")
                if meanwhile:
                    meanwhile()
            said = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise BenchmarkError(f"{self._name} has died") from None
        if isinstance(said, BenchmarkError):
            raise BenchmarkError(f"{self._name}: {said}")
        return said

    def end(self, timeout_s: float) -> None:
        """Let the child end by itself; it has until the timeout."""
        self._connection.close()
        self._process.join(timeout_s)
        self.kill()

    def kill(self) -> int | None:
        """SIGKILL; return how the process has ended, as subprocess says it."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        return self._process.exitcode


def preload(*modules: str) -> None:
    """Let the server of forked children import these before it makes the first one."""
    multiprocessing.set_forkserver_preload(list(modules))


def _serve(run: Callable[..., None], connection: Connection, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    try:
        run(connection, *arguments)
    except (EOFError, BrokenPipeError):
        return  # the parent needs no more
    except Exception as error:
        text = (
            str(error) if isinstance(error, BenchmarkError) else f"{type(error).__name__}: {error}"
        )
        connection.send(BenchmarkError(text))
        if not isinstance(error, BenchmarkError):
            raise
