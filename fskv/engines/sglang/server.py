"""Facts of a running SGLang, and changes of its weights.

Only this module and `storage` import SGLang.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import platform
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from fskv.engines.sglang.identity import ServerFacts
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import checkpoint_place, process_started_at
from fskv.offload import BlockingStore

_STOP = "_stop_storage_threads"
# Module, class, and how the methods begin that change weights or announce it, or wait for storage threads.
_WATCHED = (
    (
        "model_executor.model_runner_components.weight_updater",
        "WeightUpdater",
        ("update_weights", "load_weights", "receive_weights", "begin_weight", "end_weight"),
    ),
    (
        "managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        ("resume_memory_occupation",),
    ),
    ("utils.weight_checker", "WeightChecker", ("_reset_tensors",)),
    ("managers.cache_controller", "HiCacheController", (_STOP,)),
    ("mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController", (_STOP,)),
)
_updated: list[str] = []  # how weights were changed since this was imported
# Stopped when weights change.
stores: WeakSet[BlockingStore] = WeakSet()
# Set while SGLang waits for its storage threads, 10 s for each; the scheduler ends if one is not done then.
stopping = threading.Event()


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
    """Have `stores` stopped before weights of this process change, and `stopping` set while SGLang waits.

    Raises ConfigError if weights were changed before. SGLang tells a storage backend nothing of either.
    """
    for module, owner, prefixes in _WATCHED:
        kind = getattr(importlib.import_module(f"sglang.srt.{module}"), owner)
        names = [name for name in vars(kind) if name.startswith(prefixes)]
        if not names:
            raise AttributeError(f"{owner} has no {prefixes}")
        for name in names:
            if not hasattr(getattr(kind, name), "tells_fskv"):
                setattr(kind, name, _telling(getattr(kind, name), name))
    if _updated:
        raise ConfigError(
            f"weights of this engine were changed ({_updated[0]}); expected a new start"
        )


def _telling(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def tell(*args: Any, **kwargs: Any) -> Any:
        # Of what comes back after it was released: without this tag the weights had stayed.
        tags = getattr(args[1], "tags", None) if name.startswith("resume") and args[1:] else None
        if name == _STOP:
            stopping.set()
        elif not tags or "weights" in tags:
            _updated.append(name)
            for store in list(stores):
                store.stop(f"weights of the running engine are changed ({name})")
        try:
            return method(*args, **kwargs)
        finally:
            if name == _STOP:
                stopping.clear()

    tell.tells_fskv = True  # type: ignore[attr-defined]
    return tell
