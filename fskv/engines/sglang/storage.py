"""FskvStorage: fskv's files as a storage backend of SGLang's HiCache (`--hicache-storage-backend dynamic`).

SGLang keeps pages of KV in host memory. Its own threads ask for stored pages, have them written into its
pool, and hand pages over to be stored; each call waits for its outcome. A page is one chunk and one file.
SGLang names a page by the hash of all tokens up to its end and asks for any number of them from the first on.
It does not give the place of a page in the prompt. A hybrid has more pools (a sliding window, states). They
are groups of the same namespace, and a prefix needs all pools.

After the host pools are registered no call raises: a failure is False, and SGLang computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from sglang.srt.mem_cache import hicache_storage as hicache

from fskv.data_path.threads import FINGERPRINT_S, call_with_deadline
from fskv.engines.prometheus import Publisher
from fskv.engines.sglang import server
from fskv.engines.sglang.host_pool import HostPages, host_pages
from fskv.engines.sglang.identity import build_identity, call_deadline, file_rank, take_options
from fskv.errors import ConfigError
from fskv.observe.state_log import refusals_said
from fskv.offload import BlockingStore, KvStore, Page
from fskv.types import ChunkId

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Move: TypeAlias = "Callable[[BlockingStore, Sequence[Page], Sequence[ChunkId]], list[bool]]"

_KV = str(hicache.PoolName.KV)
# In this order they are the groups of a namespace.
_SERVED = (_KV, str(hicache.PoolName.SWA), str(hicache.PoolName.MAMBA))


class FskvStorage(hicache.HiCacheStorage):
    """SGLang's storage of pages in fskv's files; `on_host_pools_registered` opens it."""

    @refusals_said()
    def __init__(self, storage_config: hicache.HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Raises ConfigError for options that cannot work."""
        self._ranks = storage_config
        self._config = take_options(storage_config.extra_config or {})
        self._store: BlockingStore | None = None
        self._groups: dict[str, tuple[int, int]] = {}  # of a pool: its group, indices of a page
        names = ("tp_rank", "pp_rank", "dp_rank")
        self._publisher = Publisher("sglang", {n: str(getattr(storage_config, n)) for n in names})

    # --- start-up, and the end ----------------------------------------------------------------

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._store is not None and str(host_pool_name) not in self._groups:
            self._store.stop(f"SGLang has another host pool by now, {host_pool_name}")

    @refusals_said()
    def on_host_pools_registered(self) -> None:
        """Open the namespace of all pools' pages; raises FskvError with one sentence."""
        named = {str(name): pool for name, pool in getattr(self, "registered_pools", {}).items()}
        pools = _pools({_KV: self.mem_pool_host, **named})
        config, ranks = self._config, self._ranks
        server.watch()
        facts = server.gather_facts()
        identity = call_with_deadline(
            lambda: build_identity(facts, config, ranks, pools),
            FINGERPRINT_S,
            "the checkpoint's files could not be read for a fingerprint (see option 'weights_id')",
        )
        # Of the ranks that answer together the first one writes the health file.
        first = not (ranks.tp_rank or ranks.pp_rank or ranks.attn_cp_rank)
        kv = KvStore(
            config,
            identity,
            {number: pages.memory for number, pages in enumerate(pools.values())},
            rank=file_rank(ranks),
            deadline=call_deadline(config),
            number=ranks.dp_rank if first else None,
        )
        self._groups = {
            name: (number, pages.page_size) for number, (name, pages) in enumerate(pools.items())
        }
        self._store = BlockingStore(kv, max(sum(pages.page_nbytes) for pages in pools.values()))
        # Of old weights: what an encoder has kept, and what another server has sent. And ranks that use the
        # same files would need one name for them.
        goes_on = not (
            facts.is_multimodal
            or facts.argument("disaggregation_mode") == "decode"
            or (ranks.is_mla_model and ranks.tp_size > 1)
        )
        server.stores[self._store] = goes_on

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _usable(self) -> BlockingStore | None:
        """Return the store; None while SGLang waits for its threads, as these may make many more calls."""
        return None if server.stopping.is_set() else self._store

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move(BlockingStore.load, _KV, keys, host_indices, extra_info)

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move(BlockingStore.store, _KV, keys, host_indices, extra_info)

    def _move(
        self, move: _Move, pool: str, keys: Sequence[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        store, nothing = self._usable(), [False] * len(keys)
        if store is None or host_indices is None or pool not in self._groups:
            return nothing
        before = getattr(extra_info, "prefix_keys", None) or ()  # where SGLang is to pass them

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
        if self._store is not None and self._ranks.enable_storage_metrics:
            self._publisher.publish(self._store)

    # --- pools beside the KV ------------------------------------------------------------------

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return which prefixes all pools can restore, and the longest of them as the hit."""
        found = _safe(lambda: self._restorable(keys, pool_transfers or ()), None)
        return found or hicache.PoolTransferResult.empty()

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        store = self._usable()
        if store is None:
            return None
        num = store.count_present([_chunk(key) for key in keys])
        restorable = set(range(1, num + 1))
        hits: dict[str, int] = {hicache.PoolName.KV: num} if num else {}
        for transfer in transfers:
            there: list[bool] = []
            if str(transfer.name) in self._groups and self._usable():
                group, _ = self._groups[str(transfer.name)]
                there = store.present([_chunk(key, group) for key in keys[:num]])
            found = _prefixes(there, transfer)
            if found:
                hits[transfer.name] = max(found)
            restorable &= found
        return hicache.PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_all(BlockingStore.load, transfers)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_all(BlockingStore.store, transfers)

    def _move_all(self, move: _Move, transfers: Sequence[Any]) -> dict[str, list[bool]]:
        return {
            each.name: self._move(move, str(each.name), each.keys or (), each.host_indices)
            for each in transfers
        }

    # --- what SGLang may ask and fskv does not do ----------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [None] * len(keys)

    def set(
        self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def clear(self) -> None:
        """Remove no file, since other engines may use the same files."""
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


def _prefixes(there: Sequence[bool], transfer: hicache.PoolTransfer) -> set[int]:
    """Return the lengths of prefixes, in pages, at which a pool has the pages that its policy needs."""
    policy = hicache.PoolHitPolicy
    needed = {policy.ALL_PAGES: len(there), policy.TRAILING_PAGES: len(transfer.keys or ()) or 1}
    if transfer.hit_policy not in needed:
        return set()
    found, run = set(), 0
    for end, here in enumerate(there, 1):
        run = run + 1 if here else 0
        if run >= min(needed[transfer.hit_policy], end):
            found.add(end)
    return found


def _safe(call: Callable[[], _T], otherwise: _T) -> _T:
    """Return call(), or `otherwise` for whatever it raises: SGLang's threads do not all survive it."""
    try:
        return call()
    except Exception:
        logger.exception("fskv: a call failed, so its pages are computed")
        return otherwise
