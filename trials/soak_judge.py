"""What trials.soak holds its engines against; imports nothing of fskv.

Draws of the workload, exact caches of the same size over the same requests, and a sampler that finds the
files of a root by docs/format.md alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest

CHUNK_TOKENS = 128
_BLOCK_NBYTES = 512  # of st_blocks
_CONTROL_DIR = ".fskv-maintenance"
_BAD_WORDS = (" ERROR ", " CRITICAL ", "Traceback (most recent call last)")


@dataclass(frozen=True, slots=True)
class Pool:
    """The prompts of a run: as many different ones, of different lengths, the same in every process."""

    seed: int
    num_prompts: int
    min_tokens: int
    max_tokens: int
    vocab_size: int

    def tokens(self, idx: int) -> list[int]:
        generator = random.Random(f"prompt-{self.seed}-{idx}")  # noqa: S311  reproducible, not secret
        length = generator.randint(self.min_tokens, self.max_tokens)
        return [generator.randrange(3, self.vocab_size) for _ in range(length)]

    def num_chunks(self, idx: int) -> int:
        """Return how many whole chunks can be a hit: of the last token nothing is loaded."""
        return (len(self.tokens(idx)) - 1) // CHUNK_TOKENS

    def draws(self, who: str, count: int, skew: float) -> list[int]:
        """Return prompts in the order in which an engine is asked for them; few of them often (Zipf)."""
        generator = random.Random(f"draws-{self.seed}-{who}")  # noqa: S311
        weights = [1 / (rank + 1) ** skew for rank in range(self.num_prompts)]
        return generator.choices(range(self.num_prompts), weights, k=count)


@dataclass(slots=True)
class Cached:
    """What a cache of `capacity` chunks made of a sequence of requests."""

    hit_chunks: int = 0
    asked_chunks: int = 0
    written_chunks: int = 0
    hits: list[int] = field(default_factory=list)  # chunks, of each request

    @property
    def ratio(self) -> float:
        return self.hit_chunks / max(1, self.asked_chunks)


def simulate(
    requests: Iterable[tuple[int, int]], capacity: int, policy: str = "lru", seed: int = 0
) -> Cached:
    """Replay (prompt, its chunks) on an exact cache; a hit is a prefix, as in an engine.

    What is behind a hole counts as a miss, and as used: the recompute offers it again. `policy` is "lru",
    "fifo" (what was written first goes first) or "random".
    """
    generator = random.Random(seed)  # noqa: S311
    present: OrderedDict[tuple[int, int], None] = OrderedDict()
    order: list[tuple[int, int]] = []  # for "random": any may be picked in constant time
    found = Cached()
    for prompt, num_chunks in requests:
        chunks = [(prompt, number) for number in range(num_chunks)]
        hits = next((n for n, chunk in enumerate(chunks) if chunk not in present), num_chunks)
        found.hits.append(hits)
        found.hit_chunks += hits
        found.asked_chunks += num_chunks
        for chunk in chunks:
            if chunk in present:
                if policy == "lru":
                    present.move_to_end(chunk)
                continue
            found.written_chunks += 1
            if len(present) >= capacity:
                if policy == "random":
                    at = generator.randrange(len(order))
                    order[at], order[-1] = order[-1], order[at]
                    del present[order.pop()]
                else:
                    present.popitem(last=False)
            present[chunk] = None
            order.append(chunk)
    return found


def merged(draws: Sequence[Sequence[int]]) -> list[int]:
    """Return the draws of several engines in turns, as if all were equally fast."""
    return [idx for idx in chain.from_iterable(zip_longest(*draws)) if idx is not None]


def capacity_for(requests: Sequence[tuple[int, int]], times: float) -> int:
    """Return the capacity in chunks of which an exact LRU would write `times` as much over all requests."""
    low, high = 1, sum(num_chunks for _, num_chunks in requests)
    while low < high:
        middle = (low + high) // 2
        if simulate(requests, middle).written_chunks < times * middle:
            high = middle
        else:
            low = middle + 1
    return max(1, low - 1)


def hits(requests: Sequence[tuple[int, int]], hit_chunks: int, capacity: int) -> dict[str, float]:
    """Return the share of chunks that were a hit, in per cent, beside those of exact caches."""
    asked = sum(num_chunks for _, num_chunks in requests)
    ratios = {
        "measured": hit_chunks / max(1, asked),
        **{
            policy: simulate(requests, capacity, policy).ratio
            for policy in ("lru", "fifo", "random")
        },
        "without a bound": simulate(requests, asked).ratio,
    }
    return {name: round(100 * ratio, 2) for name, ratio in ratios.items()}


class Sampler:
    """Walks a root every `interval_s` on a thread of its own: chunk files and parts, in bytes on disk.

    A walk is no snapshot: what is removed after it was counted and what takes its place meanwhile are both
    in its sum. So a sum can be too large, by what is written during the walk, and never hides an excess
    that lasts.
    """

    def __init__(self, root: str, interval_s: float) -> None:
        self._root = root
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.nbytes: list[int] = []
        self.num_parts: list[int] = []
        self.walk_s: list[float] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            started = time.monotonic()
            files, parts = count(self._root)
            self.nbytes.append(files + parts[1])
            self.num_parts.append(parts[0])
            self.walk_s.append(time.monotonic() - started)
            self._over.wait(max(0.0, self._interval_s - self.walk_s[-1]))


def count(directory: str) -> tuple[int, tuple[int, int]]:
    """Return bytes on disk of all chunk files below, and (number, bytes) of all parts."""
    files = parts = part_nbytes = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != _CONTROL_DIR:
                    below, (more, more_nbytes) = count(entry.path)
                    files, parts, part_nbytes = (
                        files + below,
                        parts + more,
                        part_nbytes + more_nbytes,
                    )
                continue
            if not entry.name.endswith((".kv", ".part")):
                continue
            with contextlib.suppress(FileNotFoundError):
                nbytes = entry.stat(follow_symlinks=False).st_blocks * _BLOCK_NBYTES
                if entry.name.endswith(".kv"):
                    files += nbytes
                else:
                    parts, part_nbytes = parts + 1, part_nbytes + nbytes
    return files, (parts, part_nbytes)


def mean_file_nbytes(root: str) -> int:
    """Return what a chunk file takes on disk, on average."""
    sizes = [
        os.lstat(os.path.join(path, name)).st_blocks * _BLOCK_NBYTES
        for path, _, names in os.walk(root)
        for name in names
        if name.endswith(".kv")
    ]
    return sum(sizes) // max(1, len(sizes))


def bad_lines(log: str) -> list[str]:
    """Return the lines of an engine's log with errors and tracebacks."""
    with open(log, errors="replace") as file:
        # vLLM itself warns, with a traceback, that there is no tokenizer.
        return [
            line.rstrip()
            for line in file
            if any(word in line for word in _BAD_WORDS) and " WARNING " not in line
        ]


def maintenance_processes(engines: Iterable[int]) -> dict[int, str]:
    """Return the maintenance processes of these processes: pid -> start time, which no other one has."""
    wanted = {str(pid).encode() for pid in engines}
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                after = dict(pairwise(words))
                if b"fskv.maintenance" in words and after.get(b"--engine") in wanted:
                    found[int(name)] = _started(int(name))
    return found


def still_running(processes: dict[int, str]) -> list[int]:
    """Return those of `maintenance_processes` that have not ended."""
    left = []
    for pid, started in processes.items():
        with contextlib.suppress(OSError):
            if _started(pid) == started:
                left.append(pid)
    return left


def _started(pid: int) -> str:
    """Return a process's start time."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
