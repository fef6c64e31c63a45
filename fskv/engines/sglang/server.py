"""What a running SGLang tells of itself, and when it changes its weights.

Only this module and `storage` import SGLang.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

from fskv.engines.sglang.identity import ServerFacts
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import checkpoint_place

# Module, class, and how the methods begin that change weights or announce it.
_CHANGE_WEIGHTS = (
    (
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "WeightUpdater",
        ("update_weights", "load_weights", "receive_weights", "begin_weight", "end_weight"),
    ),
    (
        "sglang.srt.managers.scheduler_components.weight_updater",
        "SchedulerWeightUpdaterManager",
        ("resume_memory_occupation",),
    ),
    ("sglang.srt.utils.weight_checker", "WeightChecker", ("_reset_tensors",)),
)
# Whose method waits for the storage threads: when a cache is flushed, or a backend detached.
_STOP_THREADS = (
    ("sglang.srt.managers.cache_controller", "HiCacheController"),
    ("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller", "HybridCacheController"),
)
_updated: list[str] = []  # how weights were changed since this was imported
_listeners: list[Callable[[str], None]] = []
# Set while SGLang waits for its storage threads, 10 s for each; the scheduler ends if one is not done then.
stopping = threading.Event()


def gather_facts() -> ServerFacts:
    """Ask SGLang's runtime context and its model configuration; raises ConfigError where they do not tell."""
    try:
        return _gather()
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:  # other names
        line = str(error).partition("\n")[0]
        raise ConfigError(
            f"this SGLang does not tell its configuration ({type(error).__name__}: {line}), so FskvStorage "
            "cannot be used with it"
        ) from None


def _gather() -> ServerFacts:
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
            field.name: field.default
            if field.default is not msgspec.NODEFAULT
            else field.default_factory()
            for field in msgspec.structs.fields(type(server_args))
            if not field.required
        },
        environment=dict(os.environ),
        hf_config=json.loads(model.hf_config.to_json_string(use_diff=False)),
        model_dtype=str(model.dtype).removeprefix("torch."),
        is_multimodal=bool(model.is_multimodal),
        checkpoint=checkpoint_place(
            str(arguments["model_path"]), arguments["revision"], arguments["download_dir"]
        ),
        started_at=_started_at(),
    )


def _started_at() -> float:
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # since boot: proc(5), starttime
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _arch(device: str) -> str:
    if device == "cuda":
        import torch

        if torch.version.hip:
            return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{device}-{platform.machine()}"


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def watch_weights(listener: Callable[[str], None]) -> None:
    """Call `listener` before weights of this process are changed; raises ConfigError if they were before.

    SGLang tells a storage backend nothing of it, and flushes only its own caches.
    """
    for module, owner, prefixes in _CHANGE_WEIGHTS:
        kind = getattr(_imported(module), owner, None)
        names = [name for name in vars(kind) if name.startswith(prefixes)] if kind else []
        if not names:
            raise ConfigError(
                f"this SGLang does not tell when weights are changed ({owner} is not as expected), so "
                "FskvStorage cannot be used with it"
            )
        for name in names:
            method = getattr(kind, name)
            if not hasattr(method, "tells_fskv"):
                setattr(kind, name, _telling(name, method))
    if _updated:
        raise ConfigError(
            f"weights of this engine were changed ({_updated[0]}); expected a new start"
        )
    _listeners.append(listener)


def forget_weights(listener: Callable[[str], None]) -> None:
    """Do not call it any more."""
    if listener in _listeners:
        _listeners.remove(listener)


def _telling(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def tell(*args: Any, **kwargs: Any) -> Any:
        # Of what comes back after it was released: without this tag the weights had stayed.
        tags = getattr(args[1], "tags", None) if name.startswith("resume") and args[1:] else None
        if tags and "weights" not in tags:
            return method(*args, **kwargs)
        _updated.append(name)
        for listener in _listeners:
            listener(f"weights of the running engine are changed ({name})")
        return method(*args, **kwargs)

    tell.tells_fskv = True  # type: ignore[attr-defined]
    return tell


def watch_stops() -> None:
    """Have `stopping` set while SGLang waits for its storage threads to end."""
    for module, owner in _STOP_THREADS:
        kind: Any = getattr(_imported(module), owner, None)
        method = getattr(kind, "_stop_storage_threads", None)
        if method is not None and not hasattr(method, "tells_fskv"):
            kind._stop_storage_threads = _stopping(method)  # noqa: SLF001


def _stopping(method: Any) -> Any:
    @functools.wraps(method)
    def stop(*args: Any, **kwargs: Any) -> Any:
        stopping.set()
        try:
            return method(*args, **kwargs)
        finally:
            stopping.clear()

    stop.tells_fskv = True  # type: ignore[attr-defined]
    return stop
