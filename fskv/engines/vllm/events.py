"""Events for KV-aware routers: the chunks that became visible on the root, and those that are gone.

vLLM publishes the events (kv_events_config, medium STORAGE); this module decides when. A chunk is announced
at most once until its removal is, and only with proof that every rank's file was there: all ranks have
published it, or a probe has just found it. Announced chunks are remembered, because the pruner knows only the
names of files. When memory is full the oldest are announced as removed, so that no router believes in them
for ever.

Called on the scheduler's thread. Exists only where the engine publishes events. Memory: see MAX_ANNOUNCED.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import groupby, islice

from vllm.v1.kv_offload.base import (
    Medium,
    OffloadingEvent,
    OffloadingKVEventsConfig,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

from fskv.namespace import chunk_name
from fskv.root.key_file import KeySet, hidden
from fskv.types import ChunkId

# 213 bytes each (measured with tracemalloc for keys of 32 bytes): 53 MB.
MAX_ANNOUNCED = 250_000
# With self_describing_kv_events vLLM keeps the tokens of every announced chunk, 40 bytes a token: 336 MB.
MAX_ANNOUNCED_TOKENS = 8 << 20
# VLLM takes 8 us for each on the scheduler's thread: 2 s for all, after each reset of its prefix cache.
_AGAIN_IN_A_STEP = 2048
_PAYLOADS_SLACK = 4096  # payloads that vLLM may keep in vain

_Name = bytes  # of a chunk's file: 16 bytes of digest and 4 of the group


class KvEvents:
    """The announced chunks of an engine, and the news for its router. Scheduler's thread."""

    def __init__(self, max_announced: int = MAX_ANNOUNCED) -> None:
        self._max_announced = max_announced
        self._announced: OrderedDict[_Name, OffloadKey] = OrderedDict()  # least recently seen first
        # In the order in which it happened; taken in every step, so it never holds more than one step's news.
        self._news: list[tuple[bool, OffloadKey]] = []  # (removed, key)
        self.keys: KeySet | None = None  # that hide chunks
        self._asked: OrderedDict[ChunkId, OffloadKey] = OrderedDict()  # where they do, lately
        self._again: Iterator[_Name] = iter(())  # to be said again, if they are still announced

    @classmethod
    def enabled_by(cls, config: OffloadingKVEventsConfig, tokens_per_chunk: int) -> KvEvents | None:
        """Return the `KvEvents` of this engine, or None if it publishes no events."""
        if not config.enable_kv_cache_events:
            return None
        if not config.self_describing_kv_events:
            return cls()
        return cls(min(MAX_ANNOUNCED, max(1, MAX_ANNOUNCED_TOKENS // tokens_per_chunk)))

    def asked(self, chunk: ChunkId, key: OffloadKey) -> None:
        """Remember the key of a hidden chunk, of which alone `stored` will be told."""
        self._asked[chunk] = key
        if len(self._asked) > self._max_announced:
            self._asked.popitem(last=False)

    def stored(self, chunk: ChunkId) -> None:
        """Announce a chunk with visible files of all ranks, unless it was announced before."""
        name = _name(chunk)
        if name in self._announced:
            self._announced.move_to_end(name)
            return
        key: OffloadKey | None = make_offload_key(chunk.key_hash, chunk.group_idx)
        if self.keys is not None and (key := self._asked.get(chunk)) is None:
            return
        self._announced[name] = key
        self._news.append((False, key))
        if len(self._announced) > self._max_announced:
            self._take_back(next(iter(self._announced)))

    def removed(self, chunk: ChunkId) -> None:
        """Take back the announcement of a chunk: one of its files is gone or worthless."""
        self._take_back(_name(chunk))

    def removed_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        """Take back the announcements of removed chunks, named by (16-byte digest, group index)."""
        for digest, group_idx in names:
            self._take_back(digest + group_idx.to_bytes(4, "big"))

    def forget(self) -> None:
        """Forget all announcements after a reset of the cache: vLLM's AllBlocksCleared makes a router do the
        same.
        """
        self._news.clear()
        self._announced.clear()
        self._again = iter(())

    def remove_all(self) -> None:
        """Take all announcements back before a reset of the cache; vLLM sends no event for it."""
        for name in list(self._announced):
            self._take_back(name)

    def say_again(self) -> None:
        """Announce all chunks again, some in each step, because a router was told to forget them."""
        self._news = [(True, key) for removed, key in self._news if removed]
        self._again = iter(list(self._announced))

    def take(self) -> Iterator[OffloadingEvent]:
        """Yield the news since the last call, oldest first, neighbours of one kind together."""
        news, self._news = self._news, []
        again = (self._announced.get(name) for name in islice(self._again, _AGAIN_IN_A_STEP))
        news += [(False, key) for key in again if key is not None]
        for removed, members in groupby(news, key=lambda item: item[0]):
            yield OffloadingEvent(
                keys=[key for _, key in members],
                medium=Medium.STORAGE,
                removed=removed,
                removal_expected=True,
            )

    def trim(self, payloads: MutableMapping[OffloadKey, object]) -> None:
        """Drop the oldest of vLLM's payloads, after taking back their announcements, by every block.

        vLLM keeps a payload until it was removed from the CPU tier, which fskv does not have, and so for ever
        (0.32 and 0.33: residency (CPU, None) in events.py).
        """
        if len(payloads) > self._max_announced + 2 * _PAYLOADS_SLACK:
            for key in list(islice(payloads, _PAYLOADS_SLACK)):
                name = _name(hidden(self.keys, to_chunk(key)))
                if name in self._announced:
                    self._take_back(name)  # its payload goes the next time
                else:
                    del payloads[key]

    def _take_back(self, name: _Name) -> None:
        key = self._announced.pop(name, None)
        if key is not None:
            self._news.append((True, key))


def to_chunk(key: OffloadKey) -> ChunkId:
    return ChunkId(get_offload_block_hash(key), get_offload_group_idx(key))


def _name(chunk: ChunkId) -> _Name:
    return bytes.fromhex(chunk_name(chunk.key_hash)) + chunk.group_idx.to_bytes(4, "big")
