# The C extension in csrc/: see there.

from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

_OwnerT = TypeVar("_OwnerT")

def row_digests(payload: Any) -> bytes: ...

# `slot` is a buffer of the host, or (address, bytes) on the pages' device.
def copy_spans(pages: Pages, spans: Any, slot: Any, base: int, to_slot: bool) -> None: ...

# Open libcrypto by that name; whether it can be used.
def load_crypto(library: str, /) -> bool: ...

# See csrc/crypto.h; `keys` has 16 bytes of an id and 32 of its key, each. `seal` has room for all tags.
def crypt_rows(
    keys: bytes,
    context: bytes,
    key: bytes,
    first_block: int,
    rows: memoryview,
    first_row: int,
    seal: bytearray,
    encrypt: bool,
    /,
) -> int: ...

# Look at a batch: 32 digits of each chunk, and its group's position in `files`, which has (suffix, size) of
# each rank's file, group after group. Returns a byte for each chunk, 1 if it is there; how many cannot be
# looked at, and the first errno; the seconds it took.
def probe_chunks(
    directory: bytes,
    names: bytes,
    groups: bytes,
    missed_before: bytes,
    files: tuple[tuple[bytes, int], ...],
    num_ranks: int,
    /,
) -> tuple[bytes, int, int, float]: ...

# Give a file the time of a use: csrc/chunk_io.h. `use` has 8 bytes, 0 at first, and is not resized.
def stamp_use(directory_fd: int, name: str, use: bytearray, depth: int, fresh: bool, /) -> None: ...

class Device:
    uses_kernel: bool
    num_lanes: int
    # `bounce_nbytes` of device memory a lane; 0: spans go one by one, or slots are on the device.
    def __new__(
        cls, library: str, device_idx: int, bounce_nbytes: int, num_lanes: int, /
    ) -> Self: ...
    def register(self, memory: Any, /) -> None: ...
    def allocate(self, nbytes: int, /) -> int: ...
    def release(self, address: int, /) -> None: ...
    def close(self) -> None: ...

class Pages:
    # Buffers, or with a device (address, bytes).
    def __new__(cls, tensors: Sequence[Any], device: Device | None = None) -> Self: ...

# See fskv.format.spans.Placement. ValueError for a page that is outside its tensor.
class Placement:
    def __new__(cls, pages: Pages, places: Sequence[tuple[int, int, int, int]], /) -> Self: ...

# The gate before a job's KV pages, shut while the device still uses them.
class Guard:
    abandoned: bool
    def __new__(cls, is_open: bool, /) -> Self: ...
    def open(self) -> None: ...
    def abandon(self) -> None: ...

class Layout:
    def __new__(
        cls,
        *,
        head: bytes,
        middle: bytes,
        rows: bytes,
        tail: bytes,
        header_nbytes: int,
        payload_nbytes: int,
        content_nbytes: int,
        block_nbytes: int,
        num_blocks: int,
        format_version: int,
        open_flags: int,
        fsync: bool,
        touch: bool,
        file_mode: int,
        dir_mode: int,
        touch_interval_s: float,
        root_nbytes: int,
        directory: bytes,
        suffix: bytes,
        keys: bytes | None,
        context: bytes,
    ) -> Self: ...

# One chunk on its way between KV pages and a file.
class Transfer(Generic[_OwnerT]):
    owner: _OwnerT | None  # None once it has ended
    layout: Layout | None  # None: every step is Python's
    state: int  # see fskv.data_path.job.State
    started_at: float | None
    at_disk_since: float
    waited_s: float
    old_mtime: bool
    # `name` is the key's `chunk_name`; `part` names the file that a store writes, None for a load. What
    # follows is a ChunkPlan's.
    def __new__(
        cls,
        owner: _OwnerT,
        is_load: bool,
        guard: Guard,
        layout: Layout = ...,
        placement: Placement = ...,
        key: bytes = ...,
        name: str = ...,
        part: str | None = None,
        first_block: int = 0,
        num_blocks: int = 0,
        block_ids: Sequence[int] = ...,
        base: int = 0,
        replace: bool = False,
        use: bytearray | None = None,
        depth: int = 0,
        /,
    ) -> Self: ...
    def gather(self, slot: Any, /) -> bool: ...

# The queue of I/O threads: loads before stores, at most `max_at_disk` at once.
class Queue:
    @property
    def num_idle(self) -> int: ...
    @property
    def num_hung(self) -> int: ...
    @property
    def wants_thread(self) -> bool: ...
    def __new__(cls, max_at_disk: int, max_stores_beside_loads: int, /) -> Self: ...
    def push(
        self, transfers: list[Transfer[Any]], *, parked: bool = False, first: bool = False
    ) -> bool: ...
    def cancel(self, transfer: Transfer[Any], /) -> bool: ...
    def release(self, transfers: list[Transfer[Any]], /) -> bool: ...
    def enter(self, transfer: Transfer[Any], /) -> bool: ...
    def leave(self, transfer: Transfer[Any], /) -> None: ...
    def write_off(self, transfer: Transfer[Any], /) -> bool: ...
    def take(self, own: object, /) -> Transfer[Any] | None: ...
    def finish(self, transfer: Transfer[Any], /) -> bool: ...
    def running(self) -> list[Transfer[Any]]: ...
    def take_events(self) -> list[tuple[object, int, float]]: ...
    def close(self) -> None: ...
