"""Refuses a vLLM without what FskvMultiConnector builds on. Importing this module is the check."""

from __future__ import annotations

from fskv.engines.vllm.version import Needed, check

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NEEDED: Needed = (
    ("vllm.config", "KVTransferConfig", ""),
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", ""),
    (f"{_V1}", "KVConnectorRole", ""),
    (f"{_V1}.base", "KVConnectorHandshakeMetadata", ""),
    (f"{_V1}.metrics", "KVConnectorStats", ""),
    (f"{_V1}.multi_connector", "MultiConnector", ""),
    (f"{_V1}.multi_connector", "MultiKVConnectorMetadata", ""),
    (f"{_V1}.multi_connector", "MultiKVConnectorStats", ""),
)

check(needed=NEEDED)
