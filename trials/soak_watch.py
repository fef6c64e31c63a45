"""What trials.soak watches of its processes and of the root, and how it tells a leak from a burst."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

# A life is judged by what it had in its first quarter and in its last; its start is left out: an engine
# without fskv grows by 50 MiB with its first 50 prompts.
WARM_S = 60.0
MIN_SAMPLES = 8
# What a life may grow by: staging slots, which are made when they are needed, I/O threads that are written
# off and replaced, files that are open for a moment.
STAGING_NBYTES = 64 << 20
ALLOWED = {"memory": STAGING_NBYTES + (48 << 20), "threads": 16, "descriptors": 32}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process had at a moment: resident bytes of its own (no files), threads, open descriptors."""

    at: float
    memory: int
    threads: int
    descriptors: int


def sample(pid: int) -> Sample | None:
    """Return the present resources of a process; None if the process is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        return Sample(
            time.monotonic(),
            sum(int(fields[kind].split()[0]) for kind in ("RssAnon", "RssShmem")) << 10,
            int(fields["Threads"]),
            len(os.listdir(f"/proc/{pid}/fd")),
        )
    except (OSError, KeyError, ValueError):  # a process that is ending has no memory
        return None


def growth(life: Sequence[Sample], warm_s: float) -> dict[str, int] | None:
    """Return by how much a process has grown: the least of its last quarter over the most of its first.

    None where it did not live long enough to be judged. A burst at either end is no growth. `warm_s`: its
    start, which is left out.
    """
    warm = [one for one in life if one.at >= life[0].at + warm_s]
    if len(warm) < MIN_SAMPLES:
        return None
    first, last = warm[: len(warm) // 4], warm[-(len(warm) // 4) :]
    return {
        what: max(0, min(getattr(s, what) for s in last) - max(getattr(s, what) for s in first))
        for what in ALLOWED
    }


def heartbeats(root: str) -> int:
    """Return how many heartbeats a root has."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(f"{root}/.fskv-maintenance")
        return sum(name.startswith("heartbeat-") for name in names)
    return 0


def nbytes(root: str) -> int:
    """Return the bytes on disk of the chunk files and parts that two walks, one after the other, both saw.

    A walk is no snapshot: it counts what is removed behind it and what takes its place. What both saw was
    there when one ended and the other began.
    """
    first, second = _sizes(root), _sizes(root)
    return sum(min(first[path], second[path]) for path in first.keys() & second.keys())


def _sizes(root: str) -> dict[str, int]:
    found = {}
    for directory, _, names in os.walk(root):
        for path in (os.path.join(directory, name) for name in names):
            if path.endswith((".kv", ".part")):
                with contextlib.suppress(FileNotFoundError):
                    found[path] = os.lstat(path).st_blocks * 512
    return found


@dataclass(slots=True)
class Watch:
    """Samples processes and the size of a root, on two threads of its own: a root may hang."""

    root: str
    pids: Callable[[], dict[str, int]]
    interval_s: float  # of processes
    root_interval_s: float
    lives: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        for run in (self._processes, self._root):
            threading.Thread(target=run, name="watch", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _processes(self) -> None:
        while not self._over.wait(self.interval_s):
            for name, pid in self.pids().items():
                if (now := sample(pid)) is not None:
                    self.lives.setdefault((name, pid), []).append(now)

    def _root(self) -> None:
        while not self._over.wait(self.root_interval_s):
            with contextlib.suppress(OSError):  # the root is away, or its server is
                self.sizes.append(nbytes(self.root))


def write_rate(directory: str, seconds: float = 3.0) -> float:
    """Return the bytes a second that a file system takes, in whole files of 128 KiB, one after the other."""
    path, nbytes = f"{directory}/try", 0
    started = time.monotonic()
    while (took := time.monotonic() - started) < seconds:
        with open(path, "wb") as file:
            nbytes += file.write(bytes(128 << 10))
            file.flush()
            os.fsync(file.fileno())
        os.rename(path, f"{path}.whole")
    os.unlink(f"{path}.whole")
    return nbytes / took


def wait_for(value: Callable[[], _T], limit_s: float) -> _T:
    """Return the value as soon as it is true, or the last value at the time limit."""
    end = time.monotonic() + limit_s
    while not (now := value()) and time.monotonic() < end:
        time.sleep(1.0)
    return now
