"""One transport for loads and another for stores, as one: each was found faster in one direction.

A slot is a pair, so that either direction finds its own memory in it. Threads: as the two have it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fskv.gds_io import Native, OpenChunk, Transport
from fskv.span_plan import SpanTable


@dataclass(slots=True)
class SplitSlot:
    """A slot of each; `stores` says which one is filled, and belongs to the thread that has the slot."""

    index: int
    for_load: Any
    for_store: Any
    stores: bool = False


class _SplitChunk:
    def __init__(self, file: OpenChunk) -> None:
        self._file = file
        self.nbytes = file.nbytes
        self.mtime = file.mtime
        self.touch = file.touch
        self.same_file = file.same_file

    def read_into(self, slot: SplitSlot, slot_offset: int, file_offset: int, nbytes: int) -> None:
        slot.stores = False
        self._file.read_into(slot.for_load, slot_offset, file_offset, nbytes)


class SplitTransport:
    """See the module docstring."""

    def __init__(self, load: Transport, store: Transport) -> None:
        self.native: Native | None = None  # a pair of slots is not its
        self.load = load
        self.store = store
        self.slot_nbytes = load.slot_nbytes
        self.description = f"load: {load.description}; store: {store.description}"

    def new_slot(self, index: int) -> SplitSlot:
        for_load = self.load.new_slot(index)
        try:
            for_store = self.store.new_slot(index)
        except BaseException:
            self.load.drop_slot(for_load)
            raise
        return SplitSlot(index, for_load, for_store)

    def drop_slot(self, slot: SplitSlot) -> None:
        self.load.drop_slot(slot.for_load)
        self.store.drop_slot(slot.for_store)

    def gather(self, table: SpanTable, slot: SplitSlot, base: int, ready: Any) -> None:
        slot.stores = True
        self.store.gather(table, slot.for_store, base, ready)

    def scatter(self, slot: SplitSlot, base: int, table: SpanTable, ready: Any) -> None:
        self.load.scatter(slot.for_load, base, table, ready)

    def fill_zero(self, slot: SplitSlot, start: int, stop: int) -> None:
        slot.stores = True
        self.store.fill_zero(slot.for_store, start, stop)

    def put_header(self, slot: SplitSlot, header: bytes) -> None:
        self.store.put_header(slot.for_store, header)

    def take_header(self, slot: SplitSlot, nbytes: int) -> bytes | memoryview:
        return self.load.take_header(slot.for_load, nbytes)

    def row_digests(self, slot: SplitSlot, start: int, stop: int) -> bytes:
        if slot.stores:
            return self.store.row_digests(slot.for_store, start, stop)
        return self.load.row_digests(slot.for_load, start, stop)

    @contextlib.contextmanager
    def open(self, path: str, dir_fd: int | None = None) -> Iterator[OpenChunk]:
        with self.load.open(path, dir_fd) as file:
            yield _SplitChunk(file)

    def write_part(
        self, path: str, slot: SplitSlot, nbytes: int, dir_fd: int | None = None
    ) -> None:
        self.store.write_part(path, slot.for_store, nbytes, dir_fd)

    def close(self) -> None:
        self.load.close()
        self.store.close()
