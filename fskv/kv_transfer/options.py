"""Tells the options of fskv from those of vLLM that stand beside them in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fskv.config import StoreConfig
from fskv.errors import ConfigError

# They belong to vLLM's own offloading connector and pass through.
ENGINE_OPTIONS = frozenset({"offload_prompt_only", "self_describing_kv_events"})

# They would contradict fskv: name -> what to do instead.
_REFUSED = {
    "block_size": "set 'hybrid_chunk_size' (tokens per chunk) instead",
    "blocks_per_chunk": "set 'hybrid_chunk_size' (tokens per chunk) instead",
    "spec_name": "remove it: FskvConnector brings its own spec",
    "spec_module_path": "remove it: FskvConnector brings its own spec",
    "load_weight": "it belongs to a child of FskvMultiConnector",
    "cpu_bytes_to_use": "remove it: fskv keeps no CPU pool; see 'staging_bytes'",
}

# Good with one value only: name -> the values, and why.
_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    # A synchronous load is awaited inside the step (vLLM 0.33), so it could neither be abandoned at
    # its deadline nor turned into a recompute.
    "sync_load_budget_bytes": (
        (0, None),
        "0: fskv loads are asynchronous, because only those can be abandoned",
    ),
    "kv_load_failure_policy": (
        ("recompute",),
        '"recompute": a failed load costs a recompute and never fails a request',
    ),
}

# Of a tier's, what stands beside `secondary_tiers` and not in them.
_OF_THE_SPEC = ENGINE_OPTIONS | _REFUSED.keys() | {"canonical_layout", "eviction_policy"}
_OF_A_TIER = ("type", "module_path")  # which one it is


def store_config(options: Mapping[str, Any], role: str | None = None) -> StoreConfig:
    """Return fskv's options among these; raises ConfigError for options that vLLM and fskv cannot both have.

    `role` is vLLM's kv_role: a consumer stores nothing.
    """
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in _REFUSED:
            raise ConfigError(
                f"option '{name}': found {value!r}, but FskvConnector does not take it; {_REFUSED[name]}"
            )
        if name in _ONLY:
            good, expected = _ONLY[name]
            if value not in good:
                raise ConfigError(f"option '{name}': found {value!r}, expected {expected}")
        elif name not in ENGINE_OPTIONS:
            own[name] = value
    config = StoreConfig.from_mapping(own)
    return replace(config, store=False) if role == "kv_consumer" else config


def tier_config(options: Mapping[str, Any]) -> StoreConfig:
    """Return the options of fskv among those of a secondary tier; raises ConfigError."""
    for name in sorted(_OF_THE_SPEC & options.keys()):
        raise ConfigError(
            f"option '{name}': found {options[name]!r} among those of a secondary tier, expected it beside "
            "'secondary_tiers' in kv_connector_extra_config"
        )
    if "hybrid_chunk_size" in options:
        raise ConfigError(
            f"option 'hybrid_chunk_size': found {options['hybrid_chunk_size']!r}, expected nothing: FskvTier "
            "stores the chunks that vLLM makes; set 'block_size' beside 'secondary_tiers' instead"
        )
    own = {name: value for name, value in options.items() if name not in _OF_A_TIER}
    config = store_config(own)
    if config.load_budget != "off":
        raise ConfigError(
            f"option 'load_budget': found {config.load_budget!r}, expected \"off\": vLLM does not tell a "
            "tier what a recompute takes (FskvConnector takes others)"
        )
    if config.admission == "reused":
        raise ConfigError(
            'option \'admission\': found "reused", expected "all" or nothing: vLLM\'s CPU tier says what a '
            "tier stores"
        )
    return replace(config, admission="all")
