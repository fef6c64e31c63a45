"""FskvAdapter: fskv's files as an L2 plug-in of LMCache's server (`"type": "plugin"`).

LMCache's controllers hand over tasks and never wait. A task is queued here, a thread of this module runs it
with a BlockingStore, and an event descriptor announces the result. An object is one chunk and one file; its
bytes go straight between LMCache's own memory and files. A store is good or bad as a whole task, a lookup and
a load by key. Locks are not kept: files may belong to other servers too, so an object that was pruned between
lookup and load is a failed load, and is computed.

After the constructor no call raises, and a hung disk costs a task its deadline. LMCache's locks on its memory
end by themselves (`--l1-read-ttl-seconds` 300, `--l1-write-ttl-seconds` 600) and the memory gets another
object: a task that waited too long for its turn no longer touches it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias

from lmcache import __version__ as lmcache_version
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from fskv.data_path.threads import FINGERPRINT_S, START_UP_S, call_with_deadline
from fskv.engines.lmcache.identity import (
    Model,
    ObjectKind,
    build_identity,
    chunk_of,
    object_nbytes,
    read_model,
    take_options,
)
from fskv.engines.lmcache.server import check_arguments
from fskv.engines.prometheus import Publisher
from fskv.errors import ConfigError
from fskv.observe.state_log import Once, refusals_said
from fskv.offload import BlockingStore, KvStore, Page
from fskv.root.root import Root
from fskv.types import ChunkId

logger = logging.getLogger(__name__)
_Call: TypeAlias = "Callable[[BlockingStore, Any], list[bool]]"
_Asked: TypeAlias = "Sequence[tuple[ObjectKind | None, Any]]"  # a page or a chunk

_WATCH_S = 5.0  # an engine takes longer to load weights
# So long after it was submitted a task may begin to touch LMCache's memory; it ends by its deadline then.
_BEGIN_S = 60.0
# So many times `lookup_timeout_s` after it was submitted a lookup may begin. So long after a namespace began
# to be opened lookups wait for it, all of them together.
_OPENING = 10
_END_S = 1.0  # close() waits so long for our threads, once all stores are closed
_MAX_KINDS = 16  # each has threads, staging memory and a maintenance process
# A call may last so much longer than its deadline: a grace, and another's step before it.
_MARGIN_S = 10.0
# Threads that wait for tasks: lookups are not behind loads, nor those behind stores.
_THREADS = {"store": 2, "lookup": 2, "load": 4}


class FskvAdapter(L2AdapterInterface):
    """LMCache's L2 plug-in over fskv's files. Controllers may call from any of their threads."""

    @refusals_said()
    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """Open the root and read the checkpoints of all models; raises FskvError with one sentence."""
        super().__init__()
        if not logger.hasHandlers():  # LMCache's server has some for its own names alone
            init_logger("fskv")
        self._config, models = take_options(params)
        if l1_memory_desc is None:
            raise ConfigError("LMCache gave no memory of its objects (L1), expected one")
        config = self._config
        check_arguments(sys.argv[1:], _BEGIN_S + config.deadline.max_s + _MARGIN_S)
        call_with_deadline(
            lambda: Root.of(config), START_UP_S, f"option 'root': {config.root} did not answer"
        )
        self._models = call_with_deadline(
            lambda: {n: read_model(n, entry) for n, entry in models.items()},
            FINGERPRINT_S,
            "a checkpoint could not be read for a fingerprint (see 'weights_id')",
        )
        self._address = int(l1_memory_desc.ptr)
        arena = (ctypes.c_char * int(l1_memory_desc.size)).from_address(self._address)
        self._memory = memoryview(arena).cast("B")
        self._lock = threading.Lock()  # guards all below
        self._task_ids = itertools.count()
        self._results: dict[str, dict[int, Any]] = {name: {} for name in _THREADS}
        self._events = {name: create_event_notifier() for name in _THREADS}
        self._stores: dict[ObjectKind, _Opening] = {}
        self._kinds: dict[tuple[str, int, int], ObjectKind] = {}  # the last one seen of each
        self._stopped: set[str] = set()  # models whose weights are in doubt
        self._say = Once().say
        self._closed = False
        self._ending = threading.Event()
        self._queues: dict[str, queue.SimpleQueue[Any]] = {n: queue.SimpleQueue() for n in _THREADS}
        self._threads = [
            _started(functools.partial(self._run, name), f"fskv-{name}")
            for name, number in _THREADS.items()
            for _ in range(number)
        ]
        self._threads += [  # one for each: a mount that hangs holds up no other model
            _started(functools.partial(self._watch, model), "fskv-watch")
            for model in [*self._models.values()]
            if model.checkpoint.watched
        ]

    # --- what LMCache calls -------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        until = time.monotonic() + _BEGIN_S

        def work() -> Any:
            good = self._move(BlockingStore.store, keys, objects, until)
            return L2StoreResult(
                all(good), sum(obj.get_size() for obj in objects) if all(good) else 0
            )

        return self._submit("store", work, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            ended, self._results["store"] = self._results["store"], {}
        return ended

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        layouts = dict(group_layout_descs)
        until = time.monotonic() + _OPENING * self._config.lookup_timeout_s
        return self._submit(
            "lookup", lambda: _bitmap(self._present(keys, layouts, until)), Bitmap(len(keys))
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing was locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        until = time.monotonic() + _BEGIN_S
        return self._submit(
            "load",
            lambda: _bitmap(self._move(BlockingStore.load, keys, objects, until)),
            Bitmap(len(keys)),
        )

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results["load"].pop(task_id, None)

    def get_usage(self) -> AdapterUsage:
        """Return the bytes of the namespaces in use, as last counted; fskv's own bounds hold them."""
        return AdapterUsage(sum(store.nbytes() for store in self._open_stores()), 0)

    def get_memory_tags(self) -> Any:
        """Return the kind of storage, as LMCache asks since 0.5.7: files, shared if it was told so."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        residency = MemoryResidency.REMOTE if self._shared else MemoryResidency.LOCAL
        return MemoryTags(MemorySegment.STORAGE, residency)

    def report_status(self) -> dict[str, Any]:
        stores = self._open_stores()
        return {
            "is_healthy": not (self._stopped or any(store.is_off() for store in stores)),
            "type": "FskvAdapter",
            "root": self._config.root,
            "namespaces": [store.namespace for store in stores],
            "stopped_models": sorted(self._stopped),
        }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ending.set()
        # This ends the calls of our threads. Beside one another: each may wait for a disk that hangs.
        closing = [_started(store.close, "fskv-close") for store in self._open_stores()]
        for thread in closing:
            thread.join()
        for name, number in _THREADS.items():
            for _ in range(number):
                self._queues[name].put(None)
        end = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            for event in self._events.values():
                event.close()

    # --- tasks --------------------------------------------------------------------------------

    def _submit(self, name: str, work: Callable[[], Any], otherwise: Any) -> int:
        task_id = next(self._task_ids)
        self._queues[name].put((task_id, work, otherwise))
        return task_id

    def _run(self, name: str) -> None:
        while (task := self._queues[name].get()) is not None:
            task_id, work, result = task
            try:
                result = work()
            except Exception as error:
                self._say(f"a {name} failed: {type(error).__name__}: {error}")
            with self._lock:
                if self._closed:  # the descriptors may be others' by now
                    return
                self._results[name][task_id] = result
                self._events[name].notify()

    def _present(self, keys: Sequence[Any], layouts: Mapping[int, Any], until: float) -> list[bool]:
        asked: list[tuple[ObjectKind | None, Any]] = []
        for key in keys:
            kind, layout = self._kinds.get(_series(key)), layouts.get(key.object_group_id)
            if layout is not None:
                kind = ObjectKind.of(key, layout.shapes, layout.dtypes)
            asked.append((kind, self._chunk(key)))
        wait_s = _OPENING * self._config.lookup_timeout_s
        return self._by_kind(BlockingStore.present, asked, wait_s, until)

    def _move(
        self, move: _Call, keys: Sequence[Any], objects: Sequence[Any], until: float
    ) -> list[bool]:
        """Store or load the objects that can begin in time; return the success of each object."""
        asked: list[tuple[ObjectKind | None, Any]] = []
        for key, obj in zip(keys, objects, strict=True):
            shapes, dtypes = obj.meta.shapes, obj.meta.dtypes
            kind = ObjectKind.of(key, shapes or [obj.get_shape()], dtypes or [obj.get_dtype()])
            self._kinds[_series(key)] = kind
            chunk, page = self._chunk(key), None
            # An object that was narrowed holds something else than its layout says.
            if chunk is not None and obj.get_size() == object_nbytes(kind):
                page = Page(chunk, int(obj.data_ptr) - self._address)
            asked.append((kind, page))
        return self._by_kind(move, asked, self._config.deadline.max_s, until)

    def _by_kind(self, call: _Call, asked: _Asked, wait_s: float, until: float) -> list[bool]:
        """Make one call for each kind of objects; return each object's answer, False if it came too late."""
        places: dict[ObjectKind, dict[int, Any]] = {}
        for place, (kind, one) in enumerate(asked):
            if kind is not None and one is not None:
                places.setdefault(kind, {})[place] = one
        good = [False] * len(asked)
        for kind, own in places.items():
            store = self._store_of(kind, wait_s)
            # After close() the memory is LMCache's alone.
            if store is not None and not self._closed and time.monotonic() < until:
                for place, found in zip(own, call(store, [*own.values()]), strict=True):
                    good[place] = found
                store.publisher.publish(store)
        return good

    def _chunk(self, key: Any) -> ChunkId | None:
        """Return the chunk of a key, None for one that may name several objects; says why."""
        try:
            return chunk_of(key)
        except ValueError as error:
            self._say(str(error))
            return None

    # --- namespaces ---------------------------------------------------------------------------

    def _store_of(self, kind: ObjectKind, wait_s: float) -> _Store | None:
        """Return the store of a kind of objects; None where there is none, or not yet.

        All who ask for it wait until `wait_s` after it began to be opened: an opening that hangs costs that
        once, and not each of them.
        """
        if kind.model not in self._models:
            if kind.model not in self._stopped:
                self._say(
                    f"option 'models': {kind.model!r} is not in it, so its KV is neither stored nor loaded"
                )
            return None
        with self._lock:
            opening = self._stores.get(kind)
            full = opening is None and len(self._stores) >= _MAX_KINDS
            if opening is None and not (full or self._closed):
                opening = self._stores[kind] = _Opening()
                arguments = (kind, len(self._stores) - 1, opening)
                _started(functools.partial(self._open, *arguments), "fskv-open")
        if full:
            self._say(
                f"there are {_MAX_KINDS} kinds of objects, so another one is neither stored nor loaded: "
                f"{kind.model!r}, world {kind.world_size}, group {kind.group}, shapes {kind.shapes}"
            )
        if opening is None:
            return None
        with suppress(TimeoutError):
            store = opening.result(max(0.0, opening.began + wait_s - time.monotonic()))
            return store if kind.model in self._models else None
        return None

    def _open(self, kind: ObjectKind, number: int, opening: _Opening) -> None:
        store = None
        try:
            store = self._opened(kind, number)
        except ConfigError as error:  # it stays wrong
            self._say(str(error))
        except Exception as error:  # a later task tries again
            self._say(f"a namespace could not be opened: {error}")
            with self._lock:
                del self._stores[kind]
        with self._lock:  # what came meanwhile has not seen this one, and no task may have it
            late = self._closed or kind.model not in self._models
            opening.set_result(None if late else store)
        if late and store is not None:
            store.close()

    def _opened(self, kind: ObjectKind, number: int) -> _Store | None:
        model = self._models.get(kind.model)
        if model is None:  # it was stopped meanwhile
            return None
        # Without a name for each, the first one has the health file.
        own_health = number == 0 or "{rank}" in (self._config.health_file or "")
        kv = KvStore(
            self._config,
            build_identity(model, kind, str(lmcache_version)),
            {kind.group: [self._memory]},
            anywhere=True,
            number=number if own_health else None,
        )
        return _Store(kv, kind)

    def _watch(self, model: Model) -> None:
        """Stop for good when files of a checkpoint change: an engine that starts now loads others.

        LMCache's own memory serves KV of the old ones on, also to that engine.
        """
        while not self._ending.wait(_WATCH_S):
            try:
                if not model.checkpoint.changed():
                    continue
                self._stopped.add(model.name)
                self._models.pop(model.name, None)  # none is opened any more, or handed out
                for store in self._open_stores():
                    if store.model == model.name:
                        store.stop(
                            f"the checkpoint of {model.name} was changed (stop its engines and this "
                            "server, then start both)"
                        )
                        store.publisher.publish(store, now=True)  # no transfer does it any more
                return
            except Exception:  # the next round tries again
                logger.exception("fskv: watching the checkpoint of %s", model.name)

    def _open_stores(self) -> list[_Store]:
        with self._lock:
            ended = [opening.result() for opening in self._stores.values() if opening.done()]
        return [store for store in ended if store is not None]


class _Opening(Future["_Store | None"]):
    """A store that is being opened, or is open; None: there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.monotonic()


class _Store(BlockingStore):
    """The store of one kind of objects, and its metrics."""

    def __init__(self, kv: KvStore, kind: ObjectKind) -> None:
        super().__init__(kv, object_nbytes(kind), num_storing=_THREADS["store"])
        self.namespace = kv.directory.path
        self.model = kind.model
        self._own = kv
        labels = {"model": kind.model, "world": str(kind.world_size), "group": str(kind.group)}
        self.publisher = Publisher("lmcache", labels)

    def nbytes(self) -> int:
        capacity = self._own.lookup.capacity
        return capacity.state.namespace_nbytes if capacity is not None else 0

    def is_off(self) -> bool:
        return bool(self._own.lookup.breaker.open or self._own.lookup.stopped)


def _started(call: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread


def _series(key: Any) -> tuple[str, int, int]:
    return key.model_name, key.kv_rank >> 24, key.object_group_id


def _bitmap(good: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(good))
    bitmap.batched_set([place for place, one in enumerate(good) if one])
    return bitmap
