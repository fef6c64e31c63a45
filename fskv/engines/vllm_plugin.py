"""The entry point that tells vLLM where FskvConnector lives. Imports nothing heavy."""

from __future__ import annotations

import logging


def register() -> None:
    """Register the connector's name; vLLM calls this in every process, maybe more than once."""
    _log_with_vllm()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # _registry: vLLM offers no public look-up, and registering a name twice raises.
    if "FskvConnector" not in KVConnectorFactory._registry:  # noqa: SLF001
        KVConnectorFactory.register_connector(
            "FskvConnector", "fskv.engines.vllm_connector", "FskvConnector"
        )


def _log_with_vllm() -> None:
    """Make fskv's log a part of vLLM's: vLLM configures only its own logger, and ours would lose INFO."""
    logging.getLogger("fskv").parent = logging.getLogger("vllm")
