"""What the chunks of these tests hold, known without fskv."""

from __future__ import annotations

import functools

import numpy as np

PAGES = (40000, 24000)  # bytes; 4 blocks of them are 4 rows, and no block begins where a row does
NUM_BLOCKS = 4
NBYTES = NUM_BLOCKS * sum(PAGES)
POISON = 0x5A  # what the pages hold before a load


@functools.cache
def content(number: int) -> bytes:
    """Return the KV of chunk `number`: block after block, page after page."""
    return np.random.default_rng(number).bytes(NBYTES)


def untouched() -> bytes:
    return bytes([POISON]) * NBYTES
