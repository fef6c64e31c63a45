"""Refuses, in one sentence, a vLLM with which fskv cannot work. Importing this module is the check.

A release before the oldest is refused by its number. Any other vLLM is judged by what it has, because builds
from source call themselves what they like.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import fields

from fskv._version import VLLM_NEWEST, VLLM_OLDEST
from fskv.errors import ConfigError

logger = logging.getLogger(__name__)

_RESULTS = "KVConnectorTransferResults"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
# What the adapters import and cannot do without, and what the lack of it means.
Needed = tuple[tuple[str, str, str], ...]
_NEEDED: Needed = (
    # Without it a file that cannot be loaded fails the request, or the engine.
    (f"{_CONNECTOR}.base", _RESULTS, "a connector cannot report failed loads"),
    (f"{_CONNECTOR}.metrics", "KVConnectorStats", ""),
    (f"{_CONNECTOR}.multi_connector", "MultiConnector", ""),
    (f"{_CONNECTOR}.multi_connector", "MultiKVConnectorMetadata", ""),
    (f"{_CONNECTOR}.multi_connector", "MultiKVConnectorStats", ""),
    (f"{_CONNECTOR}.offloading_connector", "OffloadingConnector", ""),
    (f"{_CONNECTOR}.offloading.common", "OffloadingWorkerMetadata", ""),
    (f"{_CONNECTOR}.offloading.metrics", "OffloadingConnectorStats", ""),
    (f"{_CONNECTOR}.offloading.scheduler", "OffloadingConnectorScheduler", ""),
    (f"{_CONNECTOR}.offloading.canonical_mapping", "canonical_format_id", ""),
    ("vllm.v1.kv_offload.base", "OffloadingManager", ""),
    ("vllm.v1.kv_offload.base", "OffloadingWorker", ""),
    ("vllm.v1.kv_offload.base", "OffloadingHistogramMetadata", ""),
    ("vllm.v1.kv_offload.base", "ScheduleEndContext", ""),
    ("vllm.v1.kv_offload.base", "OffloadingMetricMetadata", ""),
    ("vllm.v1.kv_offload.base", "RequestOffloadingContext", ""),
    ("vllm.v1.kv_offload.base", "Locality", ""),
    ("vllm.v1.kv_offload.base", "Medium", ""),
    ("vllm.v1.kv_offload.config", "OffloadingConfig", ""),
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource", ""),
)

_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+((rc|\.post)\d+)?(\+.*)?")


def check(
    load: Callable[[str], object] = importlib.import_module, needed: Needed = _NEEDED
) -> None:
    """Raise ConfigError unless the installed vLLM is new enough and has what fskv builds on."""
    if _is_too_old():
        raise _refusal("fskv does not support older releases")
    for module, name, meaning in needed:
        try:
            found = getattr(load(module), name, None)
        except ImportError as error:
            raise _lacking(meaning or f"{module} cannot be imported ({error})") from None
        except Exception as error:  # an import may raise whatever it likes
            raise _lacking(f"{module} cannot be imported ({error!r:.100})") from None
        if found is None or (name == _RESULTS and "failed_recving" not in _fields(found)):
            raise _lacking(meaning or f"{module} lacks {name}")


def _is_too_old() -> bool:
    """Whether this is a release before the oldest, whatever it has.

    In 0.30 a cache_salt and an adapter's name give one block hash, so the KV of one is served for the other.
    """
    from vllm import __version__

    release = _RELEASE.fullmatch(__version__)
    oldest = tuple(map(int, VLLM_OLDEST.split(".")))
    return release is not None and (int(release[1]), int(release[2])) < oldest


def _fields(cls: object) -> set[str]:
    try:
        return {field.name for field in fields(cls)}  # type: ignore[arg-type]
    except TypeError:
        return set()


def _lacking(what: str) -> ConfigError:
    return _refusal(f"in this one {what}")


def _refusal(why: str) -> ConfigError:
    from vllm import __version__

    message = f"found vLLM {__version__}, expected {VLLM_OLDEST} to {VLLM_NEWEST}: {why}"
    logger.error("fskv: %s", message)
    return ConfigError(message)


check()
