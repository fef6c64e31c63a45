"""Reads a file that the command line names, no more of it than fits into memory.

A fifo, a device or a directory is refused instead of waited for.
"""

from __future__ import annotations

import sys

from fskv.root.files import read_small

from .exits import UsageError
from .terminal import show


def read_bytes(path: str, limit: int) -> bytes:
    """Return a regular file's content. Raises UsageError."""
    try:
        return read_small(path, limit, follow=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{show(path)}: {reason}") from None


def read_input(option: str, path: str, limit: int) -> bytes:
    """As `read_bytes`; "-" is stdin."""
    if path != "-":
        return read_bytes(path, limit)
    content = sys.stdin.buffer.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{option}: expected at most {limit} bytes, found more")
    return content
