"""The digests of a chunk file's rows: XXH3-64 of each 64 KiB. Pure.

They find damage, and no writer with intent: XXH3 has no key (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

try:
    from fskv import _native
except ImportError:  # not built
    _native = None  # type: ignore[assignment]
# All rows in one call, where the last one is not too short for it.
_native_rows: Callable[[memoryview], bytes] | None = getattr(_native, "row_digests", None)

CHECKSUM = "xxh3-64"  # what the header calls them
DIGEST_NBYTES = 8
ROW_NBYTES = 65536  # one digest each: names the damaged place, and lets a partial load be checked
_PAGE_NBYTES = 4096


def xxh3_rows(payload: memoryview) -> bytes:
    """Return the digest of each 64 KiB row, 8 bytes a row; the last row may be short.

    The interpreter's lock is released meanwhile.
    """
    if _native_rows is not None and payload and len(payload) % _PAGE_NBYTES == 0:
        return _native_rows(payload)
    digest = xxhash.xxh3_64_digest  # canonical: big endian
    return b"".join(
        digest(payload[at : at + ROW_NBYTES]) for at in range(0, len(payload), ROW_NBYTES)
    )
