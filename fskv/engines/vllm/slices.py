"""One rank's several files of a chunk behind the interface of a store of one: for `canonical_layout`.

`JobRunner` moves files and knows one per ChunkId. Here each file has a ChunkId of its own, made of the
chunk's and the file's place (`file_id`), and SlicedStore sends every call to the store of that file.
`StoreTally` puts together what became of a chunk whose files end one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fskv.data_path.store import ChunkStore, Directory
from fskv.data_path.threads import Task
from fskv.format.chunk_file import FileLayout
from fskv.format.mac import MacKeys
from fskv.plan.spans import ChunkPlan
from fskv.transports.protocol import Transport
from fskv.types import ChunkId, Status

if TYPE_CHECKING:
    from fskv import _native

_MAX_FILES = 1 << 12  # of a chunk on one rank: more than any model has KV heads


def file_id(chunk: ChunkId, file_idx: int) -> ChunkId:
    assert 0 <= file_idx < _MAX_FILES, file_idx
    return ChunkId(chunk.key_hash, chunk.group_idx * _MAX_FILES + file_idx)


def chunk_of(file: ChunkId) -> tuple[ChunkId, int]:
    """Undo `file_id`."""
    group_idx, file_idx = divmod(file.group_idx, _MAX_FILES)
    return ChunkId(file.key_hash, group_idx), file_idx


class SlicedStore(ChunkStore):
    """See the module docstring; every `chunk` here is a `file_id`."""

    def __init__(
        self,
        directory: Directory,
        layouts: Mapping[int, FileLayout],
        transport: Transport,
        *,
        file_ranks: Sequence[int | None],
        touch_interval_s: float,
        restore: Callable[[], object] | None = None,
        keys: Callable[[], MacKeys] | None = None,
    ) -> None:
        """`layouts` by group index: a group's files are all alike. Files share I/O, not suspects."""
        super().__init__(
            directory,
            layouts,
            transport,
            rank=file_ranks[0],
            touch_interval_s=touch_interval_s,
            restore=restore,
            keys=keys,
        )
        self._stores = [
            ChunkStore(
                directory,
                layouts,
                transport,
                rank=file_rank,
                touch_interval_s=touch_interval_s,
                restore=restore,
                keys=keys,
            )
            for file_rank in file_ranks
        ]

    def layout(self, group_idx: int) -> FileLayout:
        return self._layouts[group_idx // _MAX_FILES]

    def path(self, chunk: ChunkId) -> str:
        chunk, file_idx = chunk_of(chunk)
        return self._stores[file_idx].path(chunk)

    def transfer(
        self, owner: object, chunk: ChunkId, plan: ChunkPlan, guard: object, *, is_load: bool
    ) -> Task | _native.Transfer:
        chunk, file_idx = chunk_of(chunk)
        return self._stores[file_idx].transfer(owner, chunk, plan, guard, is_load=is_load)

    def touch(self, chunk: ChunkId) -> None:
        chunk, file_idx = chunk_of(chunk)
        self._stores[file_idx].touch(chunk)

    def replaced(self, chunk: ChunkId) -> None:
        chunk, file_idx = chunk_of(chunk)
        self._stores[file_idx].replaced(chunk)

    def get(
        self,
        chunk: ChunkId,
        first_block: int,
        num_blocks: int,
        slot: Any,
        deliver: Callable[[], object] = lambda: None,
    ) -> Status:
        chunk, file_idx = chunk_of(chunk)
        return self._stores[file_idx].get(chunk, first_block, num_blocks, slot, deliver)

    def put(self, chunk: ChunkId, first_block: int, slot: Any) -> Status:
        chunk, file_idx = chunk_of(chunk)
        return self._stores[file_idx].put(chunk, first_block, slot)


class StoreTally:
    """How the files of the chunks on their way ended so far: an entry lives as long as its stores."""

    def __init__(self, files_per_chunk: int) -> None:
        self._files_per_chunk = files_per_chunk
        self._open: dict[ChunkId, int] = {}  # files without an outcome
        self._bad: dict[ChunkId, Status] = {}  # the first bad outcome

    def begin(self, chunk: ChunkId) -> None:
        self._open[chunk] = self._open.get(chunk, 0) + self._files_per_chunk

    def end(self, chunk: ChunkId, status: Status) -> Status | None:
        """Note one file's outcome; return the chunk's once all its files have one: good only if all are."""
        if not status.good:
            self._bad.setdefault(chunk, status)
        left = self._open.pop(chunk, 1) - 1
        if left:
            self._open[chunk] = left
            return None
        return self._bad.pop(chunk, Status.OK)
