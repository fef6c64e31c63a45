"""Words shared by every layer. Standard library only; no behaviour beyond naming."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

# No number of bytes or files that anybody counts is larger: whatever a root holds, sums fit into 64 bits.
MAX_COUNT = (1 << 62) - 1
# A file's mtime is its last use, as exact as this: the root may ask for less (fskv.bounds.limits.Usage).
MAX_TOUCH_INTERVAL_S = 600


class Status(Enum):
    """The outcome of a chunk operation. The values are the metric labels."""

    OK = "ok"
    EXISTS = "exists"  # store: a good file was already there
    SKIPPED = "skipped"  # a store not attempted (queue full, pages needed), or a load given up
    MISSING = "absent"
    STALE = "stale"
    CORRUPT = "corrupt"
    NO_KEY = "no_key"  # encrypted with a key that the engine has not, or no more
    TIMED_OUT = "timed_out"
    DENIED = "denied"  # permissions, or a read-only mount; the disk answers
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    BREAKER = "breaker"  # not attempted: the root's circuit breaker is open
    QUARANTINED = "quarantined"  # lookup: a load of it failed a short while ago

    @property
    def good(self) -> bool:
        """True if the chunk's bytes are where the caller wanted them."""
        return self in (Status.OK, Status.EXISTS)


class Presence(Enum):
    """The known presence of a chunk, without touching the disk."""

    HIT = "hit"
    MISS = "miss"
    UNKNOWN = "unknown"


class ChunkId(NamedTuple):
    """Names one chunk of one KV group: the engine's key hash and the group's original index."""

    key_hash: bytes
    group_idx: int


class FileId(NamedTuple):
    """Names one file of a chunk: `rank` is the rank in the file's name, None for a name without one."""

    key_hash: bytes
    group_idx: int
    rank: int | None = None

    @property
    def chunk(self) -> ChunkId:
        return ChunkId(self.key_hash, self.group_idx)


class Use(NamedTuple):
    """The time that a file gets when its prefix is used: see stamp_use in csrc/chunk_io.h."""

    stamp: bytearray  # of 8, shared by all of them
    depth: int  # of the chunk in its prefix
