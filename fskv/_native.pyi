# The C extension in csrc/: see there. Queue and Guard have twins in fskv/threads.py.

from collections.abc import Sequence
from typing import Any, Self

def row_digests(payload: Any) -> bytes: ...
def copy_spans(pages: Pages, spans: Any, slot: Any, base: int, to_slot: bool) -> None: ...

class Pages:
    def __new__(cls, tensors: Sequence[Any]) -> Self: ...

class Guard:
    abandoned: bool
    def enter(self) -> bool: ...
    def leave(self) -> None: ...
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
        file_mode: int,
        dir_mode: int,
        touch_interval_s: float,
    ) -> Self: ...

class Transfer:
    owner: Any
    native: Layout | None
    started_at: float | None
    gathered: bool
    checked: bool
    old_mtime: bool
    tried: bool
    def __new__(
        cls,
        owner: Any,
        is_load: bool,
        layout: Layout | None = None,
        pages: Pages | None = None,
        guard: Any = None,
        path: bytes = ...,
        part: bytes = ...,
        key: bytes = ...,
        spans: Any = None,
        first_block: int = 0,
        num_blocks: int = 0,
        replace: bool = False,
    ) -> Self: ...
    def use_slot(self, slot: Any) -> None: ...
    def write(self, slot: Any) -> int: ...

class Queue:
    @property
    def num_idle(self) -> int: ...
    @property
    def num_hung(self) -> int: ...
    @property
    def wants_thread(self) -> bool: ...
    def __new__(cls, max_stores_beside_loads: int) -> Self: ...
    def push(self, tasks: list[Any]) -> bool: ...
    def cancel(self, task: Any) -> bool: ...
    def hasten(self, task: Any) -> None: ...
    def write_off(self, task: Any) -> bool: ...
    def take(self, context: Any) -> Any: ...
    def finish(self, task: Any) -> bool: ...
    def running(self) -> list[Any]: ...
    def take_events(self) -> list[tuple[Any, int, float]]: ...
    def close(self) -> None: ...
