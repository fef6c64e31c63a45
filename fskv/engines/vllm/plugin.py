"""The entry point that tells vLLM where fskv's connectors and tier live.

Imports nothing heavy of fskv, and nothing of vLLM that a process which serves does not import anyway.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from fskv.engines.around import around

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CONNECTORS = {
    "FskvConnector": "fskv.engines.vllm.connector",
    "FskvMultiConnector": "fskv.engines.vllm_multi.connector",
}


def register() -> None:
    """Register the names of connectors and tier; vLLM calls this in every process, maybe more than once."""
    _log_with_vllm()
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase

    from fskv.engines.vllm.loaded import note_worker

    around(WorkerBase, "__init__", note_worker)
    around(VllmConfig, "_post_init_kv_transfer_config", _refuse_replacements)
    around(VllmConfig, "_resolve_mm_embedding_inputs", _keep_embeddings_out)
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # _registry: vLLM offers no public look-up, registering a name twice raises, and its own loader checks
    # nothing.
    for name in _CONNECTORS:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001
            KVConnectorFactory._registry[name] = functools.partial(_load, name)  # noqa: SLF001
    with contextlib.suppress(ImportError):  # a vLLM without tiers, or with others
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        if "FskvTier" not in SecondaryTierFactory._registry:  # noqa: SLF001
            SecondaryTierFactory.register_tier("FskvTier", "fskv.engines.vllm_tier", "FskvTier")


def _load(name: str) -> Any:
    """Return a connector's class. Raises FskvError where the configuration that asks for it cannot work."""
    from fskv.engines.vllm.version import refusing

    with refusing():
        module = importlib.import_module(_CONNECTORS[name])
        from fskv.engines.vllm.preflight import check_configured
    check_configured()
    return getattr(module, name)


def _refuse_replacements(replace: Any, config: VllmConfig) -> None:
    """Refuse a configuration whose connector vLLM is about to replace by its own (`--kv-offloading-size`)."""
    if getattr(config.cache_config, "kv_offloading_size", None) is not None:
        from fskv.engines.vllm.preflight import check_configured

        check_configured(config)
    replace(config)


def _keep_embeddings_out(resolve: Any, config: VllmConfig) -> None:
    """Leave `--enable-mm-embeds` as the user has it where fskv alone brings KV.

    VLLM turns it on for each engine that consumes KV, and takes embeddings without their tensor: another
    engine is to bring the KV that was computed from them. From fskv none comes, and such a request ends vLLM.
    """
    media = getattr(config.model_config, "multimodal_config", None)
    written = getattr(media, "enable_mm_embeds", False)
    resolve(config)
    if media is not None and config.ec_transfer_config is None and _is_alone(config):
        media.enable_mm_embeds = written
        media.allow_missing_mm_embeddings = False


def _is_alone(config: VllmConfig) -> bool:
    """Return whether the engine's KV comes from fskv and from nowhere else but itself."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return False
    if transfer.kv_connector == "FskvConnector":
        return True
    tiers = transfer.kv_connector_extra_config.get("secondary_tiers")
    kinds = [tier.get("type") for tier in tiers or () if isinstance(tier, dict)]
    return transfer.kv_connector == "OffloadingConnector" and kinds == ["FskvTier"]


def _log_with_vllm() -> None:
    """Make fskv's log a part of vLLM's: vLLM configures only its own logger, and ours would lose INFO."""
    logging.getLogger("fskv").parent = logging.getLogger("vllm")
