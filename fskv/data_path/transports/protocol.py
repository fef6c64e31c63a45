"""The protocol of transports, which move bytes: KV pages <-> staging slots <-> chunk files.

A transport owns the slots and is the only code that reads or writes chunk bytes. It knows no key, header or
check: the store does. All bytes pass through slots of fskv, because a read into live KV pages cannot be
abandoned at its deadline: the engine would give the pages to another request, and late bytes would corrupt
it.

The I/O threads of a JobRunner and the thread of its `wait` call use a transport. `SlotPool` gives a slot to
one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fskv.format.spans import SpanTable
from fskv.observe.state_log import Once

if TYPE_CHECKING:
    from fskv import _native

logger = logging.getLogger(__name__)

SlotT = TypeVar("SlotT")  # of a transport: it takes those of its own `new_slot` only
_SlotT_contra = TypeVar("_SlotT_contra", contravariant=True)


class Ready(Protocol):
    """The interface of an event of a device's stream, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the event has fired."""

    def synchronize(self) -> None:
        """Wait until the event has fired."""


class OpenChunk(Protocol[_SlotT_contra]):
    """An open chunk file; `nbytes` is its length when it was opened."""

    nbytes: int
    mtime: float

    def read_into(
        self, slot: _SlotT_contra, slot_offset: int, file_offset: int, nbytes: int
    ) -> None:
        """Read exactly `nbytes` (4096-aligned offsets and length); raises ChunkCorrupt when short."""

    def same_file(self, path: str, dir_fd: int | None = None) -> bool:
        """Return whether `path`, or its last name in `dir_fd`, still names this very file."""


@dataclass(frozen=True, slots=True)
class Native:
    """The parameters with which `fskv._native` moves a transport's chunks outside the interpreter."""

    pages: _native.Pages | None  # None: it moves none, and the transport's own methods do
    on_device: bool  # the pages: they may still be in use when a job is submitted
    open_flags: int = 0  # O_DIRECT or 0
    fsync: bool = False
    file_mode: int = 0o600


class Transport(Protocol[SlotT]):
    """The interface of an I/O layer, as the store and the jobs use it.

    Offsets and lengths are bytes.
    """

    slot_nbytes: int
    description: str  # for the start-up line: what is really used
    native: Native

    def enter_thread(self) -> None:
        """Called first by each thread that is fskv's own: makes the device of the KV current there.

        From then on nothing that this thread does spoils a graph that the engine captures.
        """

    def new_slot(self, index: int) -> SlotT: ...

    def gather(self, table: SpanTable, slot: SlotT, base: int) -> None:
        """Copy KV pages, which are complete, into the slot at `base`; returns when they are no longer read.

        `table` holds spans, see `ChunkPlan`; ValueError or IndexError when one is not inside its tensor.
        """

    def scatter(self, slot: SlotT, base: int, table: SpanTable) -> None:
        """Copy from the slot at `base` into KV pages that nothing uses; returns when they are complete."""

    def fill_zero(self, slot: SlotT, start: int, stop: int) -> None:
        """Zero the slot's bytes [start, stop)."""

    def put_header(self, slot: SlotT, header: bytes) -> None:
        """Copy the header to the slot's beginning."""

    def take_header(self, slot: SlotT, nbytes: int) -> bytes | memoryview:
        """Return the slot's first `nbytes` in host memory; valid until the slot is written again."""

    def row_digests(self, slot: SlotT, start: int, stop: int) -> bytes:
        """Return `fskv.format.integrity.xxh3_rows` of the slot's bytes [start, stop)."""

    def open(
        self, path: str, dir_fd: int | None = None
    ) -> contextlib.AbstractContextManager[OpenChunk[SlotT]]:
        """Open a chunk file for reading; raises a ChunkError. `dir_fd`: see chunk_fd."""

    def write_part(self, path: str, slot: SlotT, nbytes: int, dir_fd: int | None = None) -> None:
        """Create `path` exclusively with the slot's first `nbytes`; raises a ChunkError, leaving no file."""

    def close(self) -> None:
        """Release registered memory, but not that of parked slots. Never waits for a disk."""


class SlotPool(Generic[SlotT]):
    """The slots of one worker, made on first use, never more than `num_slots`.

    Of these `max_ahead` may be in use for what is gathered ahead of the I/O threads.
    """

    def __init__(self, transport: Transport[SlotT], num_slots: int, max_ahead: int = 0) -> None:
        self._transport = transport
        self._num_slots = num_slots
        self._max_ahead = max_ahead
        self._num_ahead = 0
        self._lock = threading.Lock()
        self._free: list[SlotT] = []
        self.num_made = 0
        self._num_used = 0
        self._say = Once().say
        self._no_device = False  # and it was said

    @property
    def num_used(self) -> int:
        return self._num_used

    def take(self) -> SlotT | None:
        """Return a slot, or None when all are used or there is no memory. Never waits."""
        with self._lock:
            if self._num_used >= self._num_slots:
                return None
            self._num_used += 1
            if self._free:
                return self._free.pop()
            index = self.num_made
            self.num_made += 1
        try:
            slot = self._transport.new_slot(index)
        except (MemoryError, OSError, RuntimeError) as error:  # also what pinning says
            with self._lock:
                self._num_used -= 1
                self.num_made -= 1
            self._say(f"no memory for a staging slot: {error}", logging.WARNING)
            return None
        return slot

    @contextlib.contextmanager
    def own(self) -> Iterator[OwnSlot[SlotT]]:
        """Yield the slot of an I/O thread for its life; without a device or memory it has none yet."""
        own: OwnSlot[SlotT] = OwnSlot(None, entered=False)
        self.complete(own)
        try:
            yield own
        finally:
            if own.slot is not None:
                self.give_back(own.slot)

    def complete(self, own: OwnSlot[SlotT]) -> bool:
        """Add the missing resources of the calling thread; False: the thread cannot work without its device.

        The thread lives on without its device: another thread in its place would fare no better.
        """
        if not own.entered:
            try:
                self._transport.enter_thread()
            except Exception as error:
                first, self._no_device = not self._no_device, True
                if first:
                    logger.error("fskv: the device cannot be made current: %s", error)
                return False
            own.entered, self._no_device = True, False
        if own.slot is None:
            own.slot = self.take()
        return True

    def take_ahead(self) -> SlotT | None:
        """Return one of the `max_ahead` slots for work ahead of the I/O threads, or None."""
        with self._lock:
            if self._num_ahead >= self._max_ahead:
                return None
            self._num_ahead += 1
        slot = self.take()
        if slot is None:
            with self._lock:
                self._num_ahead -= 1
        return slot

    def give_back_ahead(self, slot: SlotT) -> None:
        """Return a slot of `take_ahead`."""
        self.give_back(slot)
        with self._lock:
            self._num_ahead -= 1

    def give_back(self, slot: SlotT) -> None:
        """Return a slot whose I/O is over; a hung thread keeps its slot until then (parked)."""
        with self._lock:
            self._num_used -= 1
            self._free.append(slot)


class OwnSlot(Generic[SlotT]):
    """The slot of one I/O thread (None without memory), and whether the device is current there."""

    __slots__ = ("entered", "slot")

    def __init__(self, slot: SlotT | None, *, entered: bool = True) -> None:
        self.slot = slot
        self.entered = entered  # the device is the thread's

    @property
    def array(self) -> object:
        """The memory of a HostSlot, for fskv._native.Queue; None: it runs nothing without Python."""
        return getattr(self.slot, "array", None)
