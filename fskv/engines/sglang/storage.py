"""FskvStorage: fskv's files as a storage backend of SGLang's HiCache (`--hicache-storage-backend dynamic`).

SGLang keeps pages of KV in host memory and asks from threads of its own which pages are stored, has them
written into its pool, and hands pages over to be stored; each call waits for its outcome. A page is one
chunk and one file: SGLang names a page by the hash of all tokens up to its end, asks for any number of them
from the first on, and does not say where in the prompt a page is. A hybrid has other pools beside its KV
(a sliding window, states); they are groups of the same namespace, and a prefix is there if all pools have it.

After the host pools are registered no call raises: what cannot be done is False, and SGLang computes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.engines.prometheus import Publisher
from fskv.engines.sglang.host_pool import HostPages, host_pages
from fskv.engines.sglang.identity import (
    build_identity,
    call_deadline,
    file_rank,
    store_options,
    take_options,
)
from fskv.engines.sglang.server import (
    forget_weights,
    gather_facts,
    stopping,
    watch_stops,
    watch_weights,
)
from fskv.errors import ConfigError, FskvError
from fskv.offload import BlockingStore, KvStore, Page
from fskv.types import ChunkId

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Move: TypeAlias = "Callable[[BlockingStore, Sequence[Page], Sequence[ChunkId]], list[bool]]"

_MAX_BEFORE = 16_384  # pages of a prefix that are told anew with each batch: 4 ms
_FINGERPRINT_S = 300.0  # a few thousand small reads, perhaps on a slow mount
_PUBLISH_S = 1.0
# In this order they are the groups of a namespace.
_SERVED = tuple(str(name) for name in (PoolName.KV, PoolName.SWA, PoolName.MAMBA))


class FskvStorage(HiCacheStorage):
    """See the module docstring. `on_host_pools_registered` opens the store."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Raises ConfigError for options that cannot work."""
        self._ranks = storage_config
        self._config = _said(lambda: take_options(storage_config.extra_config or {}))
        self._store: BlockingStore | None = None
        self._groups: dict[str, tuple[int, int]] = {}  # of a pool: its group, indices of a page
        self._publisher: Publisher | None = None
        if storage_config.enable_storage_metrics:
            names = ("tp_rank", "pp_rank", "dp_rank")
            self._publisher = Publisher(
                "sglang", {n: str(getattr(storage_config, n)) for n in names}
            )
        self._publish_at = 0.0

    # --- start-up, and the end ----------------------------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._groups and str(host_pool_name) not in self._groups:
            self._stop(f"SGLang has another host pool by now, {host_pool_name}")

    def on_host_pools_registered(self) -> None:
        """Open the namespace of all pools' pages; raises FskvError with one sentence."""
        named = {str(name): pool for name, pool in getattr(self, "registered_pools", {}).items()}
        kv = named.pop(str(PoolName.KV), self.mem_pool_host)
        self._store = _said(lambda: self._open(_pools({str(PoolName.KV): kv, **named})))

    def _open(self, pools: dict[str, HostPages]) -> BlockingStore:
        config = self._config
        facts = gather_facts()
        watch_weights(self._doubt_weights)
        watch_stops()
        identity = call_with_deadline(
            lambda: build_identity(facts, config, self._ranks, pools),
            _FINGERPRINT_S,
            "the checkpoint's files could not be read for a fingerprint (see option 'weights_id')",
        )
        kv = call_with_deadline(
            lambda: KvStore(
                store_options(config, self._ranks),
                identity,
                {number: pages.memory for number, pages in enumerate(pools.values())},
                rank=file_rank(self._ranks),
                deadline=call_deadline(config),
            ),
            START_UP_S,
            f"option 'root': {config.root} did not answer",
        )
        for number, (name, pages) in enumerate(pools.items()):
            self._groups[name] = number, pages.page_size
            logger.info(
                "fskv: namespace %s; a page of %s is one file of %d bytes%s",
                kv.directory.path,
                f"{pages.page_size} tokens" if number == 0 else f"pool {name}",
                kv.mover.file_nbytes[number],
                f" on each of {self._ranks.tp_size} ranks" if self._ranks.tp_size > 1 else "",
            )
        page_nbytes = max(sum(pages.page_nbytes) for pages in pools.values())
        return BlockingStore(kv, page_nbytes)

    def close(self) -> None:
        forget_weights(self._doubt_weights)
        if self._store is not None:
            self._store.close()

    def _doubt_weights(self, what: str) -> None:
        self._stop(what)

    def _stop(self, what: str) -> None:
        if self._store is not None:
            self._store.stop(what)

    # --- pages ------------------------------------------------------------------------------

    def _usable(self) -> BlockingStore | None:
        """Return the store, None while SGLang waits for its threads: they may have many calls to go."""
        return None if stopping.is_set() else self._store

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        store = self._usable()
        if store is None:
            return 0
        return _safe(lambda: store.count_present([_chunk(key) for key in keys]), 0)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._move(BlockingStore.load, str(PoolName.KV), keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._move(BlockingStore.store, str(PoolName.KV), keys, host_indices, extra_info)

    def _move(
        self,
        move: _Move,
        pool: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        store, nothing = self._usable(), [False] * len(keys)
        if store is None or host_indices is None or pool not in self._groups:
            return nothing
        before = getattr(extra_info, "prefix_keys", None) or ()  # where SGLang is to pass them
        if len(before) > _MAX_BEFORE:
            before = ()

        def moved() -> list[bool]:
            pages = self._pages(pool, keys, host_indices)
            return move(store, pages, [_chunk(key, self._groups[pool][0]) for key in before])

        return _safe(moved, nothing)

    def _pages(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor) -> list[Page]:
        """Return which block each key's indices are; raises ValueError where they are no whole blocks."""
        group, page_size = self._groups[pool]
        rows = host_indices.reshape(len(keys), page_size)
        firsts = rows[:, 0]
        steps = rows - firsts[:, None] - torch.arange(page_size)
        if bool(steps.any()) or bool((firsts % page_size).any()):
            raise ValueError("host indices that are not whole pages")
        blocks = (firsts // page_size).tolist()
        return [Page(_chunk(key, group), block) for key, block in zip(keys, blocks, strict=True)]

    def get_stats(self) -> None:
        """Publish fskv's metrics, at most once a second; SGLang counts its prefetches and backups itself."""
        store, publisher = self._store, self._publisher
        if store is not None and publisher is not None and time.monotonic() >= self._publish_at:
            self._publish_at = time.monotonic() + _PUBLISH_S
            _safe(lambda: store.with_store(publisher.publish), None)

    # --- pools beside the KV ------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes all pools can restore, and the longest of them as the hit."""
        return _safe(
            lambda: self._restorable(keys, pool_transfers or []), PoolTransferResult.empty()
        )

    def _restorable(
        self, keys: Sequence[str], transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        store = self._usable()
        if store is None:
            return PoolTransferResult.empty()
        num = store.count_present([_chunk(key) for key in keys])
        restorable = list(range(1, num + 1))
        hits: dict[str, int] = {PoolName.KV: num} if num else {}
        for transfer in transfers:
            there: list[bool] = []
            if str(transfer.name) in self._groups and self._usable():
                group, _ = self._groups[str(transfer.name)]
                there = store.present([_chunk(key, group) for key in keys[:num]])
            found = _prefixes(there, transfer)
            if found:
                hits[transfer.name] = max(found)
            restorable = [pages for pages in restorable if pages in found]
        return PoolTransferResult(max(restorable, default=0), hits, restorable)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return self._move_all(BlockingStore.load, transfers)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return self._move_all(BlockingStore.store, transfers)

    def _move_all(self, move: _Move, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        return {
            each.name: self._move(move, str(each.name), each.keys or (), each.host_indices)
            for each in transfers
        }

    # --- what SGLang may ask and fskv does not do ----------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return False

    def clear(self) -> None:
        """Remove nothing: the files may be other engines' too."""
        if self._store is not None:
            logger.warning("fskv: files are not removed from here; use `fskv rm` or `fskv prune`")


def _chunk(key: str, group: int = 0) -> ChunkId:
    return ChunkId(bytes.fromhex(key), group)


def _pools(named: dict[str, Any]) -> dict[str, HostPages]:
    """Describe host pools, KV's first; raises ConfigError for one that fskv does not store."""
    if others := [name for name in named if name not in _SERVED]:
        raise ConfigError(
            f"this model has host pools beside its KV ({', '.join(others)}), expected {', '.join(_SERVED)}: "
            "fskv does not store them"
        )
    return {name: host_pages(named[name]) for name in _SERVED if name in named}


def _prefixes(there: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """Return the lengths of prefixes in pages for which a pool has what its policy asks for."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        needed = len(there)
    elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        needed = max(1, len(transfer.keys or ()))
    else:
        return set()
    found, run = set(), 0
    for end, here in enumerate(there, 1):
        run = run + 1 if here else 0
        if run >= min(needed, end):
            found.add(end)
    return found


def _said(call: Callable[[], _T]) -> _T:
    """Return call(); what it refuses is logged as one sentence, which a traceback of SGLang's would bury."""
    try:
        return call()
    except FskvError as error:
        logger.error("fskv: %s", error)
        raise


def _safe(call: Callable[[], _T], otherwise: _T) -> _T:
    """Return call(), or `otherwise` for whatever it raises: SGLang's threads do not all survive it."""
    try:
        return call()
    except Exception:
        logger.exception("fskv: a call failed, so its pages are computed")
        return otherwise
