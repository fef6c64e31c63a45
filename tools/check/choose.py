"""Which files' rows are read: all, a part, a share, or as many as fit a number of bytes. Pure.

A choice depends on names and the seed alone, so that it is the same in a run that goes on where another one
stopped. Names are hashes of keys: any of their digits are as good as random.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..exits import UsageError
from ..terminal import show, size_option

# Of files by their draw, while a share is looked for that fits a number of bytes.
NUM_BUCKETS = 1 << 16
_MAX_PARTS = 1_000_000
_PART = re.compile(r"(\d{1,7})/(\d{1,7})", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Subset:
    """A choice of files. `nbytes`: the share is not known yet, see `fit`."""

    part: int = 1
    parts: int = 1
    num_buckets: int = NUM_BUCKETS  # files whose draw is in the buckets below it
    nbytes: int | None = None
    seed: int = 0

    @property
    def is_random(self) -> bool:
        return self.num_buckets < NUM_BUCKETS or self.nbytes is not None

    def holds(self, digest16: str, name: str) -> bool:
        """Whether the file `name` (<32 hex>.g...) of that namespace is chosen; with parts all ranks' are."""
        if self.parts > 1 and int(name[16:32], 16) % self.parts != self.part - 1:
            return False
        return self.num_buckets == NUM_BUCKETS or self.bucket(digest16, name) < self.num_buckets

    def bucket(self, digest16: str, name: str) -> int:
        """Draw a number below NUM_BUCKETS for a file."""
        text = f"{self.seed}/{digest16}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=2).digest(), "big")

    def fit(self, nbytes_by_bucket: Sequence[int]) -> Subset:
        """Return the largest share of these files that has no more than `nbytes`."""
        assert self.nbytes is not None
        left = self.nbytes
        for bucket, nbytes in enumerate(nbytes_by_bucket):
            left -= nbytes
            if left < 0:
                return Subset(num_buckets=bucket, seed=self.seed)
        return Subset(seed=self.seed)


EVERYTHING = Subset()


def parse(text: str, seed: int) -> Subset:
    """Read `1/8`, `5%` or `50GiB`; raises UsageError."""
    option = "--read-data-subset"
    if match := _PART.fullmatch(text.strip()):
        part, parts = int(match[1]), int(match[2])
        if not 1 <= part <= parts <= _MAX_PARTS:
            raise UsageError(f"{option}: found {text}, expected a part such as 1/8")
        return Subset(part, parts)
    if match := _SHARE.fullmatch(text.strip()):
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise UsageError(f"{option}: found {text}, expected more than 0% and at most 100%")
        return Subset(num_buckets=max(1, round(share * NUM_BUCKETS)), seed=seed)
    try:
        return Subset(nbytes=size_option(option, text), seed=seed)
    except UsageError:
        raise UsageError(
            f"{option}: found '{show(text)}', expected a part (1/8), a share (5%) or a size (50GiB)"
        ) from None
