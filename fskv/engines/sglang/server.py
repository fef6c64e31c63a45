"""Facts of a running SGLang, and updates of its weights.

A store rests from the beginning of an update until SGLang's own caches were reset after it: before that they
may hold KV of other weights. Only this module and `storage` import SGLang.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from fskv.engines.around import around
from fskv.engines.sglang.identity import ServerFacts
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import checkpoint_place, process_started_at
from fskv.offload import BlockingStore

_Code: TypeAlias = "Callable[..., Any]"

_BEGIN, _END, _STOP = "begin_weight", "end_weight", ("_stop_storage_threads",)
# They rest while weights are updated, or, where the value is False, stop for good.
stores: WeakKeyDictionary[BlockingStore, bool] = WeakKeyDictionary()
# Set while SGLang waits for its storage threads, 10 s for each; the scheduler ends if one is not done then.
stopping = threading.Event()


class Updates:
    """The updates of this process's weights. SGLang makes them, and resets its caches, on one thread."""

    def __init__(self) -> None:
        self.method = ""  # that began the last one
        self._num_running = 0
        self._sessions: set[int] = set()  # under way, by the id of their updater
        self._failed = False

    @property
    def _is_whole(self) -> bool:
        return not (self._num_running or self._sessions or self._failed)

    def update(self, method: _Code, updater: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of SGLang's that may change weights."""
        self.method = name = method.__name__
        self._num_running += 1
        self._rest()
        succeeded = False
        try:
            found = method(updater, *args, **kwargs)
            succeeded = not (isinstance(found, tuple) and found[:1] == (False,))
        finally:
            self._num_running -= 1
            if name.startswith(_BEGIN):  # SGLang has given up what it had begun
                self._sessions.discard(id(updater))
            # A part of a session does not make up for another one.
            is_end = name.startswith(_END)
            is_part = bool(self._num_running or self._sessions) or is_end
            self._failed = not succeeded or (self._failed and is_part)
            if succeeded and name.startswith(_BEGIN):
                self._sessions.add(id(updater))
            if succeeded and is_end:
                self._sessions.discard(id(updater))
            self._rest()
        return found

    def on_reset(self) -> None:
        """SGLang holds no KV of before."""
        if self._is_whole:
            for store in list(stores):
                store.renew()

    def _rest(self) -> None:
        reason = "the weights were updated, and SGLang's caches were not flushed since"
        if not self._is_whole:
            reason = f"an update of the weights is under way, or failed ({self.method})"
        for store, goes_on in list(stores.items()):
            if goes_on:
                store.rest(reason)
            else:
                store.stop(f"weights of the running engine are changed ({self.method})")


updates = Updates()


@contextlib.contextmanager
def _as_expected() -> Iterator[None]:
    """Raise ConfigError for whatever another SGLang's names raise."""
    try:
        yield
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise ConfigError(
            f"this SGLang is not as expected ({type(error).__name__}: {line}), so FskvStorage cannot be used "
            "with it"
        ) from None


@_as_expected()
def gather_facts() -> ServerFacts:
    """Ask SGLang's runtime context and its model configuration; raises ConfigError where they do not tell."""
    import msgspec
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_context
    from sglang.version import __version__

    context = get_context()
    server_args = context.server_args
    model = ModelConfig.from_server_args(server_args)
    arguments = context.resolved_server_args_dict()
    return ServerFacts(
        version=str(__version__),
        arch=_arch(str(arguments["device"])),
        arguments=arguments,
        defaults={
            one.name: one.default_factory() if one.default is msgspec.NODEFAULT else one.default
            for one in msgspec.structs.fields(type(server_args))
            if not one.required
        },
        environment=dict(os.environ),
        hf_config=json.loads(model.hf_config.to_json_string(use_diff=False)),
        model_dtype=str(model.dtype).removeprefix("torch."),
        is_multimodal=bool(model.is_multimodal),
        checkpoint=checkpoint_place(
            str(arguments["model_path"]), arguments["revision"], arguments["download_dir"]
        ),
        started_at=process_started_at(),
    )


def _arch(device: str) -> str:
    if device == "cuda":
        import torch

        if torch.version.hip:
            return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{device}-{platform.machine()}"


@_as_expected()
def watch() -> None:
    """Have `stores` follow the updates of this process's weights, and `stopping` set while SGLang waits.

    Raises ConfigError if weights were changed before. SGLang tells a storage backend nothing of either.
    """
    for module, owner, prefixes, code in _WATCHED:
        kind = getattr(importlib.import_module(f"sglang.srt.{module}"), owner)
        names = [name for name in vars(kind) if name.startswith(prefixes)]
        if not names:
            raise AttributeError(f"{owner} has no {prefixes}")
        for name in names:
            around(kind, name, code)
    if updates.method:
        raise ConfigError(
            f"weights of this engine were changed ({updates.method}); expected a new start"
        )


def _update(*args: Any, **kwargs: Any) -> Any:
    return updates.update(*args, **kwargs)


def _resume(method: _Code, *args: Any, **kwargs: Any) -> Any:
    # Of what comes back after it was released: without this tag the weights had stayed.
    tags = getattr(args[1], "tags", None) if args[1:] else None
    if tags and "weights" not in tags:
        return method(*args, **kwargs)
    return _update(method, *args, **kwargs)


def _reset(method: _Code, tree: Any) -> None:
    method(tree)
    if getattr(tree, "cache_controller", None) is not None:  # then host memory was cleared, too
        updates.on_reset()


def _stop(method: _Code, *args: Any, **kwargs: Any) -> Any:
    stopping.set()
    try:
        return method(*args, **kwargs)
    finally:
        stopping.clear()


# Module, class, how methods begin, and the code around them.
_WATCHED: tuple[tuple[str, str, tuple[str, ...], _Code], ...] = (
    (
        "model_executor.model_runner_components.weight_updater",
        "WeightUpdater",
        ("update_weights", "load_weights", "receive_weights", _BEGIN, _END),
        _update,
    ),
    (
        "managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        ("resume_memory_occupation",),
        _resume,
    ),
    ("utils.weight_checker", "WeightChecker", ("_reset_tensors",), _update),
    ("mem_cache.unified_radix_cache", "UnifiedRadixCache", ("reset",), _reset),
    ("managers.cache_controller", "HiCacheController", _STOP, _stop),
    ("mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController", _STOP, _stop),
)
