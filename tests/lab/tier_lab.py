"""What the tests of FskvTier share: vLLM's tiering, as far as it runs without a GPU (demo/cpu_tiering.py)."""

from __future__ import annotations

from typing import Any

CPU_BYTES = 64 << 20
# Empties vLLM's CPU tier with its prefix cache, or nothing would be asked of the files.
RESET = {"reset_prefix_cache": True, "connector": True}


def tiering(
    tiers: list[dict[str, Any]], *, cpu_bytes: int = CPU_BYTES, **extra: Any
) -> dict[str, Any]:
    """Return the kv_transfer_config of an engine with vLLM's tiering and these secondary tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",  # beside demo/engine.py
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": tiers,
            **extra,
        },
    }


def fskv_tier(root: str, **options: Any) -> dict[str, Any]:
    return {
        "type": "FskvTier",
        "module_path": "fskv.engines.vllm_tier",
        "root": root,
        **options,
    }


def transfer(root: str, *, extra: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the kv_transfer_config with FskvTier alone; `extra` stands beside `secondary_tiers`.

    The files of a busy machine are waited for.
    """
    return tiering([fskv_tier(root, **{"lookup_timeout_s": 10, **options})], **(extra or {}))
