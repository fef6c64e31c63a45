"""A KV store for an engine in one process: a namespace of a root, with its `Lookup` and its `Mover`.

An engine of several processes makes a Lookup beside its scheduler and a Mover in each worker, and carries the
movers' news itself (fskv.engines.vllm).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fskv.config import Deadline, StoreConfig
from fskv.data_path.job import FileMove, JobResult
from fskv.data_path.store import ChunkStore
from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.data_path.worker_keys import engine_keys
from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.format.spans import plan_at
from fskv.hybrid_planner import GroupLayout, plan_job
from fskv.index.presence import RankFiles
from fskv.namespace import Identity, Json, layout_digest
from fskv.observe.state_log import StateLog
from fskv.offload.lookup import Lookup, patience
from fskv.offload.mover import Memory, Mover, News, Opened
from fskv.offload.uses import Uses
from fskv.offload.watch import Watch
from fskv.root.key_file import hidden
from fskv.root.root import NamespaceDir, Root
from fskv.types import ChunkId, FileId, Use

logger = logging.getLogger(__name__)

# An engine says these by its identity, or does them itself, unless its adapter takes them.
_NOT_OURS = (
    *("hybrid_chunk_size", "canonical_layout", "load_budget", "weights_id", "weights_run"),
    "weights_fixed",
    "admission",
    "trust",
)


class KvStore:
    """A Lookup and a Mover in one. One thread calls. The constructor waits for a disk, `close` a moment."""

    def __init__(
        self,
        config: StoreConfig,
        identity: Identity,
        pages: Mapping[int, Sequence[Memory]],
        *,
        rank: int | None = None,
        anywhere: bool = False,
        clock: Callable[[], float] = time.monotonic,
        deadline: Deadline | None = None,
        patient: bool = False,
        quiet: bool = False,
        number: int | None = 0,
    ) -> None:
        """Open the root and the namespace of `identity`, and start the I/O; raises FskvError.

        `pages` holds the KV memory by group index, in the order of the group's `page_nbytes`: int8 (blocks,
        bytes of a page or more), or a memoryview of blocks without gaps. `rank` is in the names of this
        store's files, where an engine's ranks have a store each and other pages. With `anywhere` a chunk is
        one page that may begin at any byte of a memoryview, and a block id is that byte. `clock`: see Lookup.
        `deadline`, `patient`: see Mover. `quiet`: see Capacity. `number` is what `{rank}` in `health_file`
        stands for; with None another store of the engine writes that file.
        """
        if identity.tenant not in (None, config.tenant):
            raise ConfigError(
                f"option 'tenant': found {config.tenant!r}, expected {identity.tenant!r}, the identity's"
            )
        self._config = config
        self._keys = engine_keys(config)
        encryption = self._keys.encryption if self._keys is not None else None
        identity = replace(identity, tenant=config.tenant, encryption=encryption)
        self._identity = identity
        self._log = StateLog(root=config.root)
        self._rank = rank
        self._anywhere = anywhere
        self.deadline = deadline or config.deadline
        self.directory = call_with_deadline(
            lambda: Root.of(config).open_namespace(identity),
            START_UP_S,
            f"option 'root': {config.root} did not answer",
        )
        file_layouts: dict[int, FileLayout] = {}
        self._layouts: dict[int, GroupLayout] = {}
        self._strides: list[int] = []
        tensors: list[Memory] = []
        self._num_blocks: dict[int, int] = {}
        if strange := pages.keys() - {group.group_idx for group in identity.groups}:
            raise ConfigError(
                f"KV memory of group {min(strange)}: expected groups of the identity alone"
            )
        for group in identity.groups:
            own = pages.get(group.group_idx, ())
            if len(own) != len(group.page_nbytes):
                raise ConfigError(
                    f"KV memory of group {group.group_idx}: found {len(own)} tensors, expected "
                    f"{len(group.page_nbytes)}, one for each page of the identity"
                )
            refs = [(len(tensors) + i, nbytes) for i, nbytes in enumerate(group.page_nbytes)]
            layout = GroupLayout.of(group.group_idx, identity.blocks_per_chunk, refs)
            self._layouts[group.group_idx] = layout
            file_layouts[group.group_idx] = FileLayout(
                identity.blocks_per_chunk,
                group.page_nbytes,
                layout_digest(group, identity.blocks_per_chunk),
            )
            tensors += own
            found = [
                _stride_and_blocks(one, nbytes, group.group_idx, anywhere=anywhere)
                for one, nbytes in zip(own, group.page_nbytes, strict=True)
            ]
            self._strides += [stride for stride, _ in found]
            self._num_blocks[group.group_idx] = min(num for _, num in found)
        self.mover = Mover(
            config,
            self.directory,
            tensors,
            file_layouts,
            restore=lambda: Root.of(config, create=False).open_namespace(identity),
            deadline=self.deadline,
            patient=patient,
        )
        with contextlib.ExitStack() as made:  # a server goes on without it, and may try again
            made.callback(self.mover.close)
            per_chunk = [g.tokens_per_block * identity.blocks_per_chunk for g in identity.groups]
            self.lookup = Lookup(config, recompute_s=patience(per_chunk), clock=clock)
            made.callback(self.lookup.close)
            self._uses = Uses[ChunkId](lambda: self.lookup.touch_interval_s, self.lookup.is_storing)
            watched = config if number is not None else replace(config, health_file=None)
            self.watch = Watch(watched, self.lookup, engine_rank=number or 0)
            made.callback(self.watch.close)
            self.lookup.attach(
                [RankFiles(self.directory.path, rank, self.mover.file_nbytes)],
                dir_mode=self.directory.dir_mode,
                file_mode=self.directory.file_mode,
                quiet=quiet,
                health_file=self.watch.health_file,
            )
            made.pop_all()
        self.watch.namespace = os.path.relpath(self.directory.path, config.root)
        if not quiet:
            sizes = "+".join(str(nbytes) for nbytes in self.mover.file_nbytes.values())
            logger.info("fskv: namespace %s; a file has %s bytes", self.directory.path, sizes)

    def hidden(self, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Return chunks as the root knows them, where the engine's keys stay out of it."""
        return [hidden(self._keys, chunk) for chunk in chunks]

    def used(
        self, before: Sequence[ChunkId], chunks: Sequence[ChunkId], *, there: bool
    ) -> list[Use]:
        """Note a use of a prefix: its moved chunks in their order, and the chunks before them on disk.

        Returns the stamp of the moved chunks. They are `there` where they are loaded.
        """
        prefix = [*before, *chunks]
        if not prefix:
            return []
        begun, start = self._uses.begin(prefix, len(before) + there * len(chunks))
        first = min(start, len(before))
        uses = [self.mover.use(begun.number, depth) for depth in range(first, len(prefix))]
        due = [FileId(one.key_hash, one.group_idx, self._rank) for one in before[first:]]
        if due:
            self.mover.touch(list(zip(due, uses, strict=False)))
        return uses[len(due) :]

    def moves(
        self,
        chunk: ChunkId,
        block_ids: Sequence[int],
        first_block: int = 0,
        use: Use | None = None,
    ) -> list[FileMove]:
        """Return the moves of blocks [first_block, first_block + len(block_ids)) of a chunk.

        `block_ids` are their places in the group's KV memory. A store takes all blocks to the chunk's end.
        `use` is one of `used`.
        """
        layout = self._layouts.get(chunk.group_idx)
        if layout is None:
            raise ValueError(f"group {chunk.group_idx} is not in the identity")
        num_blocks = self._num_blocks[chunk.group_idx]
        if any(not 0 <= block < num_blocks for block in block_ids):
            raise ValueError(
                f"blocks {list(block_ids)} of group {chunk.group_idx}, whose memory has {num_blocks}"
            )
        if not block_ids or not 0 <= first_block <= layout.num_blocks - len(block_ids):
            raise ValueError(
                f"blocks {first_block} to {first_block + len(block_ids)} of a chunk of {layout.num_blocks}"
            )
        file = FileId(chunk.key_hash, chunk.group_idx, self._rank)
        if self._anywhere:
            return [FileMove(file, plan_at(layout, block_ids[0]), use)]
        plan = plan_job(
            [layout], self._strides, [1], list(block_ids), [len(block_ids)], [first_block]
        )
        return [FileMove(file, one, use) for one in plan.chunks]

    def step(self) -> list[JobResult]:
        """Return the jobs that ended, and tell the lookup the outcomes of their files. Call it often."""
        ended = self.mover.poll()
        self.take_news()
        self.lookup.end_step()
        return ended

    def take_news(self) -> News:
        """Hand the mover's news to the lookup and the watch, and return the news."""
        news = self.mover.take_news()
        self.watch.note(news)
        self.lookup.on_news(news)
        return news

    def drop(self) -> None:
        """Give up all jobs, touch their pages no more, and forget the index: the KV memory is given up."""
        self.mover.drop()
        self.take_news()
        self.lookup.forget()

    def stop(self) -> None:
        """End loads and stores for good: the KV may differ from the identity."""
        self.watch.in_doubt, self.watch.resting = True, ""
        self._halt()

    def rest(self, reason: str) -> None:
        """End loads and stores until `move`, for a `reason` in words: the weights change."""
        self.watch.resting = reason
        self._halt()
        self._log.say("weights_in_doubt", reason=reason)

    def opened(self, epoch: Mapping[str, Json]) -> Opened:
        """Open the namespace of new weights, for `move`. Any thread; raises FskvError. See Identity.epoch."""
        identity = replace(self._identity, epoch=epoch)
        return self.mover.opened(
            lambda: Root.of(self._config, create=False).open_namespace(identity)
        )

    def move(self, directory: NamespaceDir, store: ChunkStore[Any]) -> None:
        """Use another namespace from now on, which ends a rest."""
        self.mover.move_to(store)
        self.take_news()
        self.lookup.move([RankFiles(directory.path, self._rank, self.mover.file_nbytes)])
        self.directory = directory
        self.watch.epoch += 1
        self.watch.resting, self.lookup.stopped = "", False
        path = os.path.relpath(directory.path, self._config.root)
        self._log.say("weights_changed", epoch=self.watch.epoch, namespace=path)

    def _halt(self) -> None:
        self.lookup.stopped = True
        self.mover.stop()
        self.take_news()
        self.lookup.forget()

    def close(self) -> None:
        """Stop the threads; running stores get a moment to end."""
        self.watch.close()
        self.mover.close()
        self.lookup.close()


def _stride_and_blocks(
    memory: Memory, page_nbytes: int, group_idx: int, *, anywhere: bool
) -> tuple[int, int]:
    """Return the bytes from block to block and how many there are; raises ConfigError."""
    where = f"KV memory of group {group_idx}"
    if isinstance(memory, memoryview):
        if memory.ndim != 1 or memory.itemsize != 1 or memory.readonly or not memory.contiguous:
            raise ConfigError(
                f"{where}: found a memoryview that is read-only, has gaps, or items or rows of its own; "
                "expected a flat and writable one of bytes"
            )
        if anywhere:
            return 1, memory.nbytes - page_nbytes + 1
        num_blocks, rest = divmod(memory.nbytes, page_nbytes)
        if rest or not num_blocks:
            raise ConfigError(
                f"{where}: found {memory.nbytes} bytes, expected blocks of {page_nbytes} without gaps"
            )
        return page_nbytes, num_blocks
    if anywhere or not callable(getattr(memory, "stride", None)):
        raise ConfigError(
            f"{where}: found a {type(memory).__name__}, expected a torch tensor of int8 or a memoryview"
        )
    return memory.stride(0), memory.shape[0]


def open_store(
    options: Mapping[str, Any],
    identity: Identity,
    pages: Mapping[int, Sequence[Memory]],
) -> KvStore:
    """Open a store with `options` as docs/options.md names them, of which `root` is the only one needed."""
    return KvStore(options_of(options), identity, pages)


def options_of(
    options: Mapping[str, Any], ours: Collection[str] = (), most_deadline_s: float = math.inf
) -> StoreConfig:
    """Return the options of a store; raises ConfigError for vLLM's alone, except those in `ours`.

    An engine waits no longer for a call than a `load_deadline_s` of `most_deadline_s` allows.
    """
    config = StoreConfig.from_mapping(options)
    usual = StoreConfig(root=config.root)
    for name in _NOT_OURS:
        if name not in ours and (found := getattr(config, name)) != getattr(usual, name):
            raise ConfigError(
                f"option '{name}': found {found!r}, expected nothing: it is for vLLM's adapter"
            )
    if config.load_deadline_s > most_deadline_s:
        raise ConfigError(
            f"option 'load_deadline_s': found {config.load_deadline_s:g}, expected {most_deadline_s:g} at "
            "most: the engine waits no longer for a call"
        )
    return config
