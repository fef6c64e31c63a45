"""FskvStorage: fskv's files as a storage backend of SGLang's HiCache (`--hicache-storage-backend dynamic`).

SGLang keeps pages of KV in host memory and asks from threads of its own which pages are stored, has them
written into its pool, and hands pages over to be stored; each call waits for its outcome. A page is one
chunk and one file: SGLang names a page by the hash of all tokens up to its end, asks for any number of them
from the first on, and does not say where in the prompt a page is.

After the host pools are registered no call raises: what cannot be done is False, and SGLang computes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.engines.prometheus import Publisher
from fskv.engines.sglang.host_pool import HostPages, host_pages
from fskv.engines.sglang.identity import build_identity, file_rank, store_options, take_options
from fskv.engines.sglang.server import forget_weights, gather_facts, watch_weights
from fskv.errors import ConfigError, FskvError
from fskv.offload import BlockingStore, KvStore, Page
from fskv.types import ChunkId

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_FINGERPRINT_S = 300.0  # a few thousand small reads, perhaps on a slow mount
_PUBLISH_S = 1.0


class FskvStorage(HiCacheStorage):
    """See the module docstring. `register_mem_pool_host` opens the store."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        """Raises ConfigError for options that cannot work."""
        self._ranks = storage_config
        self._config = _said(lambda: take_options(storage_config.extra_config or {}))
        self._store: BlockingStore | None = None
        self._page_size = 0
        self._publisher: Publisher | None = None
        if storage_config.enable_storage_metrics:
            names = ("tp_rank", "pp_rank", "dp_rank")
            self._publisher = Publisher(
                "sglang", {n: str(getattr(storage_config, n)) for n in names}
            )
        self._publish_at = 0.0

    # --- start-up, and the end ----------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the namespace of this pool's pages; raises FskvError with one sentence."""
        super().register_mem_pool_host(mem_pool_host)
        self._store = _said(lambda: self._open(host_pages(mem_pool_host)))

    def _open(self, pages: HostPages) -> BlockingStore:
        config = self._config
        facts = gather_facts()
        watch_weights(self._doubt_weights)
        identity = call_with_deadline(
            lambda: build_identity(facts, config, self._ranks, pages),
            _FINGERPRINT_S,
            "the checkpoint's files could not be read for a fingerprint (see option 'weights_id')",
        )
        kv = call_with_deadline(
            lambda: KvStore(
                store_options(config, self._ranks),
                identity,
                {0: pages.memory},
                rank=file_rank(self._ranks),
            ),
            START_UP_S,
            f"option 'root': {config.root} did not answer",
        )
        self._page_size = pages.page_size
        page_nbytes = sum(pages.page_nbytes)
        logger.info(
            "fskv: namespace %s; a page of %d tokens is one file of %d bytes%s",
            kv.directory.path,
            pages.page_size,
            kv.mover.file_nbytes[0],
            f" on each of {self._ranks.tp_size} ranks" if self._ranks.tp_size > 1 else "",
        )
        return BlockingStore(kv, config.deadline, page_nbytes, 2 * config.io_threads)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._stop(_other_pools([host_pool_name]))

    def on_host_pools_registered(self) -> None:
        """Raises ConfigError where a model keeps more than KV: parts of it alone cannot be restored."""
        pools = getattr(self, "registered_pools", {})
        if others := [name for name in pools if name != PoolName.KV]:
            _said(lambda: _raise(_other_pools(others)))
        if pools and pools[PoolName.KV] is not self.mem_pool_host:
            _said(lambda: _raise("SGLang registered two host pools of KV, expected one"))

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

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        store = self._store
        if store is None:
            return 0
        return _safe(lambda: store.count_present([_chunk(key) for key in keys]), 0)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._move(BlockingStore.load, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._move(BlockingStore.store, keys, host_indices)

    def _move(
        self,
        move: Callable[[BlockingStore, Sequence[Page]], list[bool]],
        keys: Sequence[str],
        host_indices: torch.Tensor,
    ) -> list[bool]:
        store, nothing = self._store, [False] * len(keys)
        if store is None:
            return nothing
        return _safe(lambda: move(store, self._pages(keys, host_indices)), nothing)

    def _pages(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[Page]:
        """Return which block each key's tokens are; raises ValueError where they are no whole blocks."""
        rows = host_indices.reshape(len(keys), self._page_size)
        firsts = rows[:, 0]
        steps = rows - firsts[:, None] - torch.arange(self._page_size)
        if bool(steps.any()) or bool((firsts % self._page_size).any()):
            raise ValueError("host indices that are not whole pages")
        blocks = (firsts // self._page_size).tolist()
        return [Page(_chunk(key), block) for key, block in zip(keys, blocks, strict=True)]

    def get_stats(self) -> None:
        """Publish fskv's metrics, at most once a second; SGLang counts its prefetches and backups itself."""
        store, publisher = self._store, self._publisher
        if store is not None and publisher is not None and time.monotonic() >= self._publish_at:
            self._publish_at = time.monotonic() + _PUBLISH_S
            _safe(lambda: store.with_store(publisher.publish), None)

    # --- what SGLang may ask and fskv does not do ----------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return PoolTransferResult.empty()

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return self.batch_get_v2(transfers)

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


def _chunk(key: str) -> ChunkId:
    return ChunkId(bytes.fromhex(key), 0)


def _other_pools(names: Sequence[Any]) -> str:
    listed = ", ".join(str(getattr(name, "value", name)) for name in names)
    return f"this model has host pools beside its KV ({listed}), expected none: fskv does not store them"


def _raise(message: str) -> None:
    raise ConfigError(message)


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
