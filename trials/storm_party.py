"""One process's part in the storm: the data path of an engine's worker over KV memory that others can see.

`Party` opens root and namespace as an engine does and makes everything that it uses as `rig.open_runner`
does. `break_safety` takes a safety away for a negative control; it patches this process's modules, because
the product has no such option.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import rig
from fskv.config import StoreConfig
from fskv.data_path import store
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileMove
from fskv.format import chunk_file
from fskv.format.chunk_file import ChunkHeader, FileLayout
from fskv.index.presence import Findings, Key, PresenceIndex, RankFiles, probe_chunks
from fskv.plan.spans import GroupLayout, plan_job
from fskv.root.root import NamespaceDir
from fskv.types import ChunkId, FileId, Presence
from trials.storm_content import (
    BLOCKS_PER_CHUNK,
    PAGES_NBYTES,
    Pages,
    key_hash,
)

SAFETIES = ("checks", "ending")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a process of the storm is told when it starts."""

    root: str
    pages_path: str
    num_places: int
    num_chunks: int  # numbers that writers and readers draw
    seed: int
    native: bool  # outside the interpreter, or file by file in Python
    direct_io: str
    ends_at: float  # time.monotonic(): from then on the process ends by itself
    deadline_s: float = 20.0
    lookup_timeout_s: float = 0.5
    failures: int = 8
    probe_s: float = 0.2
    broken: str | None = None  # a name of SAFETIES

    @property
    def config(self) -> StoreConfig:
        return StoreConfig.from_mapping(
            {
                "root": self.root,
                "io_threads": 2,
                "staging_bytes": 4 << 20,
                "direct_io": self.direct_io,
                "load_deadline_s": self.deadline_s,
                "lookup_timeout_s": self.lookup_timeout_s,
            }
        )

    def new_breaker(self) -> Breaker:
        return Breaker(failures=self.failures, probe_s=self.probe_s)


def open_namespace(root: str) -> NamespaceDir:
    """Open the storm's one namespace as every engine would; made if need be."""
    return rig.open_namespace(root, "storm", PAGES_NBYTES, BLOCKS_PER_CHUNK, create=True)


class Party:
    """Pages, runner and presence index of one process. One thread, the engine's."""

    def __init__(self, setting: Setting) -> None:
        if setting.broken:
            break_safety(setting.broken)
        # Files are damaged all the time, and each would be a line.
        logging.getLogger("fskv").setLevel(logging.CRITICAL)
        self.setting = setting
        self.pages = Pages(setting.pages_path, setting.num_places)
        self.tally = self.pages.tally
        directory = open_namespace(setting.root)
        tensors = []
        for tensor_idx, nbytes in enumerate(PAGES_NBYTES):
            flat = np.frombuffer(self.pages.tensor(tensor_idx), np.int8)
            blocks = flat.reshape(self.pages.num_blocks, self.pages.strides[tensor_idx])
            tensors.append(torch.from_numpy(blocks)[:, :nbytes])
        self._layout = GroupLayout.of(0, BLOCKS_PER_CHUNK, list(enumerate(PAGES_NBYTES)))
        self._file_layout = FileLayout(BLOCKS_PER_CHUNK, PAGES_NBYTES, bytes(16))
        self._directory = directory
        config = setting.config
        self.breaker = setting.new_breaker()
        self.runner = rig.open_runner(
            tensors,
            self._file_layout,
            directory,
            config,
            breaker=self.breaker,
            native=setting.native and setting.broken is None,  # the patches are of Python
        )
        # The scheduler's half: a breaker of its own, as in an engine.
        self.index_breaker = setting.new_breaker()
        self.index = PresenceIndex(
            self._probe,
            lookup_timeout_s=config.lookup_timeout_s,
            positive_ttl_s=config.lookup_timeout_s,
            negative_ttl_s=config.lookup_timeout_s,
            quarantine_s=config.lookup_timeout_s,
            breaker=self.index_breaker,
        )

    def chunk(self, number: int) -> ChunkId:
        return ChunkId(key_hash(number), 0)

    def evict(self, number: int) -> None:
        """Remove a chunk's file, as whoever keeps a cache small does."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._directory.chunk_path(key_hash(number), 0, None))

    def requests(self, numbers: Sequence[int], places: Sequence[int]) -> list[FileMove]:
        """Plan a job over these chunks, each in its place, as a worker does."""
        blocks = [block for place in places for block in self.pages.blocks(place)]
        plan = plan_job(
            [self._layout],
            self.pages.strides,
            [len(numbers)],
            blocks,
            [len(blocks)],
            [0],
            complete_tail=True,
        )
        return [FileMove(FileId(*self.chunk(numbers[part.key_idx])), part) for part in plan.chunks]

    def lookup(self, number: int) -> Presence:
        """Ask the index, and count the answer if it is one."""
        presence, reason = self.index.lookup(self.chunk(number))
        if presence is Presence.HIT:
            self.tally.add("lookup.hit")
        elif presence is Presence.MISS:
            self.tally.add(f"lookup.{reason.value}")
        return presence

    def settle(self, timeout_s: float) -> bool:
        """Poll until no chunk is on its way and no slot is used; False if that takes too long."""
        end = time.monotonic() + timeout_s
        while self._is_busy():
            if time.monotonic() > end:
                return False
            self.runner.poll()
            self.runner.take_outcomes()
            time.sleep(0.002)
        return True

    def _is_busy(self) -> bool:
        runner: Any = self.runner
        return bool(
            runner.num_slots_used or runner.num_threads_hung or runner._pool.queue.running()  # noqa: SLF001
        )

    def state(self) -> dict[str, Any]:
        """Return what is in use and which breaker is open."""
        return {
            "slots": self.runner.num_slots_used,
            "hung": self.runner.num_threads_hung,
            "breaker_open": self.breaker.open,
            "index_breaker_open": self.index_breaker.open,
        }

    def close(self) -> int:
        """End as an engine does and return the slots that are still in use; the rest shows from outside."""
        if self.setting.broken == "ending":  # negative control of the accounts
            runner: Any = self.runner
            runner._slots.take()  # noqa: SLF001
            os.open(self.setting.pages_path, os.O_RDONLY)
            return self.runner.num_slots_used
        self.runner.shutdown(5.0)
        self.index.close()
        end = time.monotonic() + 10.0  # threads end by themselves, and their slots with them
        while self.runner.num_slots_used and time.monotonic() < end:
            time.sleep(0.002)
        return self.runner.num_slots_used

    def _probe(self, chunks: Sequence[Key], missed_before: bytes) -> Findings:
        files = RankFiles(self._directory.path, None, {0: self._file_layout.file_nbytes})
        return probe_chunks([files], chunks, missed_before)


def break_safety(name: str) -> None:
    """Take one safety away from this process's Python path, for a negative control."""

    def nothing(*_: Any) -> None:
        return

    patches: dict[str, list[tuple[Any, str, Any]]] = {
        "checks": [
            (chunk_file, "parse_header", lambda *_: _BELIEVED),
            (chunk_file, "check_digests", nothing),
            (store.ChunkStore, "_compare", nothing),
        ],
        "ending": [],  # see Party.close
    }
    for owner, attribute, substitute in patches[name]:
        setattr(owner, attribute, substitute)


_BELIEVED = ChunkHeader(
    key_hash=b"",
    group_idx=0,
    rank=0,
    namespace_digest=b"",
    layout_digest=b"",
    num_blocks=BLOCKS_PER_CHUNK,
    page_nbytes=PAGES_NBYTES,
    first_block=0,
    payload_nbytes=0,
    row_digests=b"",
    creator="",
    written_at_ms=0,
)
