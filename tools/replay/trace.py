"""Request traces in the Mooncake JSONL format, and what perfect caches would have hit on them.

Pure but for `read_trace`. The two simulators are what a replay on a real directory is compared with. They
share its rules:

- a hit is a *prefix* hit: a request hits its blocks from the first on, up to the first that is not there
  when the request starts; what comes after that one is a miss, also if it is there;
- afterwards all blocks of the request are there and were used, in the order of the request: the last block
  of a prompt is its most recently used one. A load sets the mtime of what it read, a store that of what
  it wrote or found there, so that is also the order on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TOKENS_PER_BLOCK = 512  # of a hash id; github.com/kvcache-ai/Mooncake, FAST25-release

_MAX_HASH_ID = 1 << 64
_MAX_BLOCKS = 1_000_000  # 512 million tokens: not a request


class TraceError(ValueError):
    """The trace cannot be replayed; the message names file, line, finding and expectation."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace: when it came, in ms, and the chained hashes of its prompt's blocks."""

    timestamp_ms: float
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests in the order of the file; `digest` stands for the content of that file."""

    requests: tuple[Request, ...]
    digest: bytes

    @property
    def num_blocks(self) -> int:
        return sum(len(request.hash_ids) for request in self.requests)


def read_trace(path: str, limit: int | None = None) -> Trace:
    """Read a trace, at most `limit` requests of it; raises OSError and TraceError."""
    with open(path, "rb") as file:
        content = file.read()
    return parse_trace(content, path, limit)


def parse_trace(content: bytes, name: str, limit: int | None = None) -> Trace:
    """Parse and check a trace; raises TraceError, which names the first bad line.

    Empty lines are passed over. The digest covers the whole content, whatever the limit: one trace is one
    set of keys.
    """
    requests: list[Request] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if limit is not None and len(requests) >= limit:
            break
        if line.strip():
            try:
                requests.append(_parse_line(line))
            except ValueError as error:
                raise TraceError(f"{name}, line {number}: {error}") from None
    if not requests:
        raise TraceError(f"{name}: found no request, expected a JSON object on each line")
    return Trace(tuple(requests), hashlib.sha256(content).digest())


def _parse_line(line: bytes) -> Request:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}: column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"found {_shown(found)}, expected a JSON object")  # noqa: TRY004
    timestamp: Any = found.get("timestamp")
    if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf:
        raise ValueError(f"'timestamp': found {_shown(timestamp)}, expected milliseconds from 0 on")
    ids = found.get("hash_ids")
    if not isinstance(ids, list) or len(ids) > _MAX_BLOCKS:
        raise ValueError(f"'hash_ids': found {_shown(ids)}, expected a list of block hashes")
    for hash_id in ids:
        if type(hash_id) is not int or not 0 <= hash_id < _MAX_HASH_ID:
            raise ValueError(
                f"'hash_ids': found {_shown(hash_id)} in it, expected whole numbers from 0 on"
            )
    return Request(float(timestamp), tuple(ids))


def _shown(value: object, most: int = 40) -> str:
    if value is None:
        return "nothing"
    text = ascii(value)
    return text if len(text) <= most else f"{text[:most]}..."


# --- keys and contents ------------------------------------------------------------------------

# A prime, so that neither two pages nor two rows of a large block hold the same bytes.
_PATTERN_NBYTES = 65521


def block_key(digest: bytes, hash_id: int) -> bytes:
    """Name a block of a trace: 32 bytes, as long as an engine's chained hash."""
    return hashlib.sha256(b"%s/%d" % (digest, hash_id)).digest()


def block_content(key: bytes, nbytes: int) -> bytes:
    """Return the bytes that stand for a block's KV; they follow from its key alone."""
    pattern = hashlib.shake_128(key).digest(min(nbytes, _PATTERN_NBYTES))
    return (pattern * -(-nbytes // len(pattern)))[:nbytes]


# --- simulators -------------------------------------------------------------------------------


def ideal_hits(requests: Iterable[Request]) -> list[int]:
    """Return each request's prefix hits in a cache that starts empty and never evicts."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        hits.append(_prefix(request.hash_ids, seen))
        seen.update(request.hash_ids)
    return hits


def lru_hits(requests: Iterable[Request], num_blocks: int) -> list[int]:
    """Return each request's prefix hits in an exact LRU cache of `num_blocks` blocks that starts empty."""
    cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits = []
    for request in requests:
        hits.append(_prefix(request.hash_ids, cached))
        for hash_id in request.hash_ids:
            if hash_id in cached:
                cached.move_to_end(hash_id)
            elif num_blocks > 0:
                if len(cached) >= num_blocks:
                    cached.popitem(last=False)
                cached[hash_id] = None
    return hits


def _prefix(hash_ids: Sequence[int], there: set[int] | OrderedDict[int, None]) -> int:
    for count, hash_id in enumerate(hash_ids):
        if hash_id not in there:
            return count
    return len(hash_ids)
