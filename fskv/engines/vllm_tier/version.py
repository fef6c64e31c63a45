"""Refuses a vLLM without what FskvTier builds on. Importing this module is the check."""

from __future__ import annotations

from fskv.engines.vllm.version import Needed, check

_BASE = "vllm.v1.kv_offload.base"
_TIERING = "vllm.v1.kv_offload.tiering.base"
NEEDED: Needed = (
    (_TIERING, "SecondaryTierManager", "no tiers stand behind its CPU cache"),
    (_TIERING, "TransferJob", ""),
    (_TIERING, "JobResult", ""),
    ("vllm.v1.kv_offload.tiering.spec", "TieringOffloadingSpec", ""),
    (_BASE, "Locality", ""),
    (_BASE, "Medium", ""),
    (_BASE, "OffloadingMetricMetadata", ""),
    (_BASE, "RequestOffloadingContext", ""),
)

check(needed=NEEDED)
