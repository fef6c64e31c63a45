"""Request traces in the Mooncake JSONL format."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..exits import UsageError

TOKENS_PER_BLOCK = 512  # of a hash id; github.com/kvcache-ai/Mooncake, FAST25-release

_MAX_HASH_ID = 1 << 64
_MAX_BLOCKS = 1_000_000  # 512 million tokens: not a request


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace: when it came, in ms, and the chained hashes of its prompt's blocks."""

    timestamp_ms: float
    hash_ids: tuple[int, ...]


def read_trace(path: str) -> list[Request]:
    """Read a trace, also one of gzip; raises OSError and UsageError."""
    with open(path, "rb") as file:
        lines = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        try:
            return parse_trace(lines, path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(f"{path}: damaged gzip: {error}") from None


def parse_trace(lines: Iterable[bytes], name: str) -> list[Request]:
    """Parse and check the lines of a trace; raises UsageError, which names the first bad one.

    Empty lines are passed over.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_parse_line(line))
            except ValueError as error:
                raise UsageError(f"{name}, line {number}: {error}") from None
    if not requests:
        raise UsageError(f"{name}: found no request, expected a JSON object on each line")
    return requests


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
