"""Lookups of chunks that a scheduler does not know yet: the presence index beside vLLM's file-system tier.

Both are asked as a scheduler asks: each key, end of the step, each key again until all have an answer. Half
of the keys have a file, the kernel knows all names, and every answer is compared. vLLM's is the real
FsAsyncLookupManager with its FileMapper: its thread makes the paths in Python and asks for all of them by one
call of fs_io_C. It asks whether something is there; fskv asks for its size too.

    python -m benchmarks.lookups [--keys 4096] [--rounds 15] [--json] [--dir DIR]

Exit code 1: fskv's median is below 0.95 of vLLM's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks.options import parser, positive, settings
from benchmarks.presence import chunk_id, new_index
from benchmarks.report import judged, publish, say, show, spread
from benchmarks.rig import PATIENCE_S, BenchmarkError, work_directory
from fskv import namespace
from fskv.index.presence import RankFiles, probe_chunks
from fskv.types import ChunkId, Presence

_PROMISE = 0.95
_FILE_NBYTES = 4096
_POLL_S = 50e-6


class Asked(ABC):
    """One of the two, with files of its own for the first half of the keys."""

    def __init__(self, directory: str, chunks: Sequence[ChunkId]) -> None:
        self._directory = directory
        os.mkdir(directory)
        self.keys = [self.key(chunk) for chunk in chunks]
        for key in self.keys[: len(chunks) // 2]:
            path = self.path(key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.truncate(_FILE_NBYTES)
        for key in self.keys:  # the kernel knows all names, also those that are nobody's
            os.path.exists(self.path(key))

    @abstractmethod
    def key(self, chunk: ChunkId) -> Any: ...

    @abstractmethod
    def path(self, key: Any) -> str: ...

    @abstractmethod
    def begin(self) -> None:
        """Forget all, outside of what is timed."""

    @abstractmethod
    def ask(self, key: Any) -> bool | None:
        """None: not known yet."""

    @abstractmethod
    def end_step(self) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    def round(self) -> float:
        """Return the keys a second of one round."""
        self.begin()
        start = time.perf_counter()
        for key in self.keys:
            self.ask(key)
        self.end_step()
        found = []
        for key in self.keys:
            while (answer := self.ask(key)) is None:
                if time.perf_counter() - start > PATIENCE_S:
                    raise BenchmarkError(f"no answer in {PATIENCE_S:g} s")
                time.sleep(_POLL_S)
                self.end_step()
            found.append(answer)
        seconds = time.perf_counter() - start
        self.end()
        half = len(self.keys) // 2
        if found != [True] * half + [False] * (len(found) - half):
            raise BenchmarkError("a wrong answer; no figure is valid")
        return len(found) / seconds


class PresenceIndexAsked(Asked):
    """fskv: `PresenceIndex` and its probes."""

    def key(self, chunk: ChunkId) -> ChunkId:
        return chunk

    def path(self, key: ChunkId) -> str:
        return f"{self._directory}/{namespace.chunk_path(key.key_hash, key.group_idx, None)}"

    def begin(self) -> None:
        ranks = [RankFiles(self._directory, None, {0: _FILE_NBYTES})]
        self._index = new_index(partial(probe_chunks, ranks))
        # An engine's index lives as long as the engine: its threads are there, and it knows its disk.
        strangers = [chunk_id(-number) for number in range(1, 257)]
        for key in strangers:
            self._index.lookup(key)
        self._index.flush()
        while any(self._index.lookup(key)[0] is Presence.UNKNOWN for key in strangers):
            time.sleep(_POLL_S)

    def ask(self, key: ChunkId) -> bool | None:
        presence = self._index.lookup(key)[0]
        return None if presence is Presence.UNKNOWN else presence is Presence.HIT

    def end_step(self) -> None:
        self._index.flush()

    def end(self) -> None:
        self._index.close()


class FileTierAsked(Asked):
    """vLLM's file-system tier."""

    def __init__(self, directory: str, chunks: Sequence[ChunkId]) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.file_mapper import FileMapper
        from vllm.v1.kv_offload.tiering.fs import manager

        if not manager._HAS_BATCH_LOOKUP_C:  # noqa: SLF001
            raise BenchmarkError("this vLLM comes without fs_io_C")
        self._manager = manager.FsAsyncLookupManager
        self._mapper = FileMapper(directory, "model", 16, 1, 1, 1, 1, 1, 0, "bfloat16")
        self._request = ReqContext
        super().__init__(directory, chunks)

    def key(self, chunk: ChunkId) -> Any:
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(*chunk)

    def path(self, key: Any) -> str:
        path: str = self._mapper.get_file_name(key)
        return path

    def begin(self) -> None:
        tier: Any = SimpleNamespace(file_mapper=self._mapper)
        self._lookups, self._context = self._manager(tier, "fs"), self._request("request")

    def ask(self, key: Any) -> bool | None:
        found: bool | None = self._lookups.lookup(key, self._context)
        return found

    def end_step(self) -> None:
        self._lookups.flush()

    def end(self) -> None:
        self._lookups.shutdown()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds, in turns, and return the facts."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        raise BenchmarkError("vLLM is not installed; expected it beside fskv") from None
    rates: dict[str, list[float]] = {"presence index": [], "vLLM's tier": []}
    with work_directory(options.dir) as directory:
        chunks = [chunk_id(number) for number in range(options.keys)]
        asked = {
            "presence index": PresenceIndexAsked(f"{directory}/fskv", chunks),
            "vLLM's tier": FileTierAsked(f"{directory}/vllm", chunks),
        }
        for number in range(options.rounds + 1):
            for name in sorted(asked, reverse=bool(number % 2)):
                rate = asked[name].round()
                if number:  # the first one warms up
                    rates[name].append(rate / 1e3)
    ours, theirs = rates.values()
    ratio = spread([a / b for a, b in zip(ours, theirs, strict=True)])
    say(f"{options.rounds} rounds of {options.keys} keys")
    return {
        "settings": settings(options),
        "thousand_keys_per_s": {name: spread(values, 1) for name, values in rates.items()},
        "ratio": ratio,
        "good": ratio["median"] >= _PROMISE,
    }


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [[name, show(rates, 0)] for name, rates in facts["thousand_keys_per_s"].items()]
    rows.append(["by vLLM's", show(facts["ratio"])])
    title = (
        f"{options.keys} keys that nobody knows, half of them with a file; thousand keys a second."
    )
    publish("lookups", facts, (title, ("", "median [min - max]"), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("lookups", __doc__, io=False)
    made.add_argument("--keys", type=positive, default=4096, help="(4096)")
    made.add_argument("--rounds", type=positive, default=15, help="(15)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("lookups", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
