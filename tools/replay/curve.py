"""A simulated root: how many blocks of a trace would hit, and how many would be written, by its size.

The rules are those of fskv's engines and of the leader that prunes for them:

- A hit is a *prefix* hit: a request hits its blocks from the first on, up to the first that is missing.
- A request uses all its blocks at one time, and the deepest one counts as its oldest (fskv.offload.uses).
- Above the high mark the least recently used blocks go, down to the low mark (fskv.bounds.limits).

A slow writer is assumed: the marks are 1 % and 3 % below the size. An engine that writes much of its root in
a second leaves up to 12 % free. All requests come one after the other, and all stores are in time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from fskv.bounds.limits import Scope, Usage

from .trace import Request

_STEPS = 10  # sizes that are tried where nobody names any


@dataclass(frozen=True, slots=True)
class Point:
    """The outcome at one size of the root; None: there is no bound."""

    nbytes: int | None
    hits: int  # blocks
    written: int  # blocks


def simulate(requests: Sequence[Request], block_nbytes: int, nbytes: int | None = None) -> Point:
    """Replay a trace on a root that starts empty and may hold `nbytes`, in blocks of `block_nbytes`."""
    there: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits = written = 0
    for request in requests:
        ids = request.hash_ids
        hits += next((at for at, block in enumerate(ids) if block not in there), len(ids))
        for block in reversed(ids):
            if block in there:
                there.move_to_end(block)
            else:
                there[block] = None
                written += 1
        if nbytes is not None:
            used = len(there) * block_nbytes
            excess = Scope("root", None, nbytes, used).excess(Usage())
            for _ in range(-(-excess // block_nbytes)):
                there.popitem(last=False)
    return Point(nbytes, hits, written)


def usual_sizes(nbytes: int) -> list[int]:
    """Return the powers of two below `nbytes`, the largest ones: sizes to try for so many bytes of blocks."""
    top = (nbytes - 1).bit_length()
    return [1 << power for power in range(max(0, top - _STEPS), top)]


def telling(points: Sequence[Point]) -> list[Point]:
    """Return those of ascending sizes that hit more than the one before."""
    hits = [0, *(point.hits for point in points)]
    return [point for before, point in zip(hits, points, strict=False) if point.hits != before]
