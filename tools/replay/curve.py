"""A simulated root: how many blocks of a trace would hit, and how many would be written, by its size.

The rules are those of fskv's engines and of the leader that prunes for them:

- A hit is a *prefix* hit: a request hits its blocks from the first on, up to the first that is missing.
- A request uses all its blocks at one time, and the deepest one counts as its oldest (fskv.offload.uses).
- The option `admission` says which blocks are written (fskv.bounds.admission).
- Above the high mark the least recently used blocks go, down to the low mark (fskv.bounds.limits).

A slow writer is assumed: the marks are 1 % and 3 % below the size. An engine that writes much of its root in
a second leaves up to 12 % free. All requests come one after the other, and all stores are in time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from fskv.bounds.admission import Admission, Mode, at_first_sight
from fskv.bounds.limits import Scope, Usage

from .trace import Request

MODES: tuple[Mode, ...] = ("all", "reused", "auto")
_STEPS = 10  # sizes that are tried where nobody names any


@dataclass(frozen=True, slots=True)
class Point:
    """The outcome at one size of the root; None: there is no bound."""

    nbytes: int | None
    mode: Mode
    hits: int  # blocks
    written: int  # blocks


def simulate(
    requests: Sequence[Request], block_nbytes: int, nbytes: int | None = None, mode: Mode = "all"
) -> Point:
    """Replay a trace on a root that starts empty and may hold `nbytes`, in blocks of `block_nbytes`.

    `mode` is the engine's `admission`.
    """
    there: OrderedDict[int, None] = OrderedDict()  # least recently used first
    admission = Admission(mode)
    admission.resize(None if nbytes is None else nbytes // block_nbytes)
    hits = written = 0
    for number, request in enumerate(requests):
        ids = request.hash_ids
        names = [_scattered(block) for block in ids]
        admission.use(names, number)
        admission.first_sight = at_first_sight(admission.first_sight, [admission.hits])
        new = [name for block, name in zip(ids, names, strict=True) if block not in there]
        admitted = {name for name in new if admission.admits(name, number)}
        hits += next((at for at, block in enumerate(ids) if block not in there), len(ids))
        for block, name in zip(reversed(ids), reversed(names), strict=True):
            if block in there:
                there.move_to_end(block)
            elif name in admitted:
                there[block] = None
                written += 1
        if nbytes is not None:
            used = len(there) * block_nbytes
            excess = Scope("root", None, nbytes, used).excess(Usage())
            for _ in range(-(-excess // block_nbytes)):
                there.popitem(last=False)
    return Point(nbytes, mode, hits, written)


def _scattered(block: int) -> int:
    """Return a name for a block: traces number them, and engines have hashes."""
    return (block + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1


def usual_sizes(nbytes: int) -> list[int]:
    """Return sizes to try for `nbytes` of blocks: the largest powers of two below that number."""
    top = (nbytes - 1).bit_length()
    return [1 << power for power in range(max(0, top - _STEPS), top)]


def telling(rows: Sequence[list[Point]]) -> list[list[Point]]:
    """Return the rows whose hits differ from the row before, in any mode; sizes ascend."""
    hits = [[0] * len(MODES), *([point.hits for point in row] for row in rows)]
    return [row for before, now, row in zip(hits, hits[1:], rows, strict=False) if now != before]
