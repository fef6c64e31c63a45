"""The checks of a chunk file's rows of 64 KiB: XXH3-64 of each, or its tag where the file is encrypted. Pure.

XXH3 finds damage, and no writer with intent: it has no key (docs/security.md). A tag finds both.
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
# Of an encrypted file: its seal, which is the key's id and random bytes, and the tag of each row.
ENCRYPTED = "aes-256-gcm"
KEY_ID_NBYTES = 16
SEAL_NBYTES = KEY_ID_NBYTES + 32
TAG_NBYTES = 16
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


def rows_nbytes(num_rows: int, *, encrypted: bool) -> int:
    """Return the length of a header's field `rows`: all digests, or the seal and all tags."""
    return SEAL_NBYTES + TAG_NBYTES * num_rows if encrypted else DIGEST_NBYTES * num_rows
