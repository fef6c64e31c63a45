"""A KV store for an engine in one process: a namespace of a root, with its `Lookup` and its `Mover`.

An engine of several processes makes a Lookup beside its scheduler and a Mover in each worker, and carries the
movers' news itself (fskv.engines.vllm).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove, JobResult
from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.format.mac import INTEGRITY
from fskv.hybrid_planner import GroupLayout, plan_job
from fskv.index.presence import RankFiles
from fskv.namespace import Identity, layout_digest
from fskv.offload.lookup import Lookup
from fskv.offload.mover import Memory, Mover
from fskv.root.root import Root
from fskv.types import ChunkId, FileId


class KvStore:
    """See the module docstring. One thread calls; no call but the constructor waits for a disk."""

    def __init__(
        self,
        config: StoreConfig,
        identity: Identity,
        pages: Mapping[int, Sequence[Memory]],
        *,
        clock: Callable[[], float] = time.monotonic,
        patient: bool = False,
        quiet: bool = False,
    ) -> None:
        """Open the root and the namespace of `identity`, and start the I/O; raises FskvError.

        `pages` holds the KV memory by group index, in the order of the group's `page_nbytes`: int8 (blocks,
        bytes of a page or more), or a memoryview of blocks without gaps. `clock`: see Lookup. `patient`,
        `quiet`: see Capacity.
        """
        if config.mac_key_file is not None:
            identity = replace(identity, integrity=INTEGRITY)
        root = Root.open(
            config.root, create=True, dir_mode=config.dir_mode, file_mode=config.file_mode
        )
        self.directory = root.open_namespace(identity)
        self.file_layouts: dict[int, FileLayout] = {}
        self._layouts: dict[int, GroupLayout] = {}
        self._strides: list[int] = []
        tensors: list[Memory] = []
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
            self.file_layouts[group.group_idx] = FileLayout(
                identity.blocks_per_chunk,
                group.page_nbytes,
                layout_digest(group, identity.blocks_per_chunk),
            )
            tensors += own
            self._strides += [
                nbytes if isinstance(one, memoryview) else one.stride(0)
                for one, nbytes in zip(own, group.page_nbytes, strict=True)
            ]
        self.mover = Mover(
            config,
            self.directory,
            tensors,
            self.file_layouts,
            restore=lambda: Root.open(config.root, create=False).open_namespace(identity),
        )
        self.lookup = Lookup(config, clock=clock)
        self.lookup.attach(
            [RankFiles(self.directory.path, None, self.mover.file_nbytes)],
            dir_mode=self.directory.dir_mode,
            file_mode=self.directory.file_mode,
            patient=patient,
            quiet=quiet,
        )

    def moves(
        self, chunk: ChunkId, block_ids: Sequence[int], first_block: int = 0
    ) -> list[FileMove]:
        """Return what stores or loads blocks [first_block, first_block + len(block_ids)) of a chunk.

        `block_ids` are their places in the group's KV memory. A store takes all blocks to the chunk's end.
        """
        layout = self._layouts[chunk.group_idx]
        plan = plan_job(
            [layout], self._strides, [1], list(block_ids), [len(block_ids)], [first_block]
        )
        return [FileMove(FileId(chunk.key_hash, chunk.group_idx), one) for one in plan.chunks]

    def step(self) -> list[JobResult]:
        """Return the jobs that ended, and let the lookup know what became of their files. Call it often."""
        ended = self.mover.poll()
        self.lookup.on_news(self.mover.take_news())
        self.lookup.end_step()
        return ended

    def close(self) -> None:
        """Stop the threads; what is being written gets a moment to end."""
        self.mover.close()
        self.lookup.close()


def open_store(
    options: Mapping[str, Any],
    identity: Identity,
    pages: Mapping[int, Sequence[Memory]],
) -> KvStore:
    """Open a store with `options` as docs/vllm.md names them, of which `root` is the only one needed."""
    return KvStore(StoreConfig.from_mapping(dict(options)), identity, pages)
