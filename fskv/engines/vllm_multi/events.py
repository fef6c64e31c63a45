"""KV events of several connectors as those of one: a block is gone when no child has it any more.

Children of one medium announce the same blocks. A router that hears "removed" from one of them would forget
what the other still has. Called on the scheduler's thread. Memory: an entry for each announced block, as long
as the children remember them (FskvConnector: 250,000 chunks each).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent


class MergedEvents:
    """See the module docstring."""

    def __init__(self) -> None:
        self._holders: dict[tuple[Any, ...], int] = {}  # block -> a bit for each child

    def forget(self) -> None:
        """The children were reset: vLLM's CPU tier does not announce that its blocks are gone (0.32)."""
        self._holders.clear()

    def pass_on(self, child: int, events: Iterable[KVCacheEvent]) -> Iterator[KVCacheEvent]:
        """Yield of one child's news what is news about all of them."""
        for event in events:
            if isinstance(event, BlockStored):
                for key in _keys(event):
                    self._holders[key] = self._holders.get(key, 0) | 1 << child
                yield event  # said twice does no harm, and the second may say more of the block
            elif isinstance(event, BlockRemoved):
                gone = [
                    block
                    for block, key in zip(event.block_hashes, _keys(event), strict=True)
                    if self._drop(key, child)
                ]
                if gone:
                    left = copy.copy(event)
                    left.block_hashes = gone
                    yield left
            elif isinstance(event, AllBlocksCleared):
                self._holders.clear()  # it names no child and no medium
                yield event
            else:
                yield event

    def _drop(self, key: tuple[Any, ...], child: int) -> bool:
        """Note that the child has it no more; True if nobody has."""
        left = self._holders.pop(key, 0) & ~(1 << child)
        if left:
            self._holders[key] = left
        return not left


def _keys(event: BlockStored | BlockRemoved) -> list[tuple[Any, ...]]:
    return [(event.medium, event.group_idx, block) for block in event.block_hashes]
