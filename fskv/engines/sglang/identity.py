"""The identity of SGLang's KV: from the host pool, the server's resolved arguments, the model and the ranks.

SGLang's own key of a page is a SHA-256 chain over token ids, begun with the request's extra key (adapter,
salt) where it has one. It says nothing of the model, so all of that is here. What cannot be found out is
refused. `ServerFacts` is gathered by fskv.engines.sglang.server; all here is without SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fskv.config import Deadline, StoreConfig
from fskv.engines.sglang.harmless import HARMLESS_ARGUMENTS, HARMLESS_VARIABLES, VARIABLES
from fskv.engines.sglang.host_pool import HostPages
from fskv.errors import ConfigError
from fskv.hybrid_planner import GroupKind
from fskv.identity.checkpoint_place import model_name
from fskv.identity.fingerprint import checkpoint_state, kv_config, weights_fingerprint
from fskv.identity.rules import environment, settings
from fskv.namespace import GroupIdentity, Identity, Json

# Arguments of the server without which nothing can be said.
_NEEDED = (
    *("model_path", "kv_cache_dtype", "quantization_param_path", "enable_lora"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("speculative_algorithm", "hicache_storage_backend"),
)
# Formats that load what stands in the checkpoint.
_LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "mistral", "fastsafetensors")
# What brings others under such a format: another process's, experts of their own, what ModelOpt restores or
# makes at the start.
_OTHER_WEIGHTS = (
    *("weight_cache_mode", "kt_weight_path", "modelopt_quant", "modelopt_checkpoint_restore_path"),
    *("modelopt_checkpoint_save_path", "modelopt_export_path"),
)
_CALIBRATED = ("modelopt", "modelopt_fp8")  # --quantization, of a checkpoint that is not quantised
# With a second of grace below the 10 s that SGLang waits for each of its storage threads.
_MAX_DEADLINE_S = 7.0
# Where an algorithm has no draft model, its KV is the target's alone.
_SPECULATIVE = (None, "NGRAM")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What the scheduler's process knows of its engine."""

    version: str
    arch: str  # as Identity.arch
    arguments: Mapping[str, Any]  # of the server, as resolved
    defaults: Mapping[str, Any]
    environment: Mapping[str, str]
    hf_config: Mapping[str, Any]  # of the model, with overrides
    model_dtype: str
    is_multimodal: bool
    checkpoint: str  # a directory, a file, or a name where there is neither
    started_at: float  # when this process was, in seconds of the clock that files have


def take_options(extra_config: Mapping[str, Any]) -> StoreConfig:
    """Return fskv's options of `--hicache-storage-backend-extra-config`; raises ConfigError."""
    own = dict(extra_config)
    for name in ("backend_name", "module_path", "class_name"):
        own.pop(name, None)
    if own.pop("interface_v1", 0) not in (1, True):
        raise ConfigError(
            "option 'interface_v1': expected 1 beside \"module_path\": without it SGLang copies each page"
        )
    config = StoreConfig.from_mapping(own)
    if config.load_deadline_s > _MAX_DEADLINE_S:
        raise ConfigError(
            f"option 'load_deadline_s': found {config.load_deadline_s:g}, expected {_MAX_DEADLINE_S:g} at "
            "most: when SGLang flushes its cache it waits 10 s for a call, and then the server ends"
        )
    return config


def call_deadline(config: StoreConfig) -> Deadline:
    """Return how long a call may take: as the options say, and no longer than SGLang waits for it."""
    deadline = config.deadline
    return replace(deadline, max_s=min(deadline.max_s, _MAX_DEADLINE_S))


def store_options(config: StoreConfig, ranks: Any) -> StoreConfig:
    """Return the options of this rank's store, without those that have become a part of the identity.

    Of the ranks that answer together the first one writes the health file.
    """
    health_file = config.health_file
    if health_file is not None:
        first = not (ranks.tp_rank or ranks.pp_rank or ranks.attn_cp_rank)
        health_file = health_file.replace("{rank}", str(ranks.dp_rank)) if first else None
    return replace(config, weights_id=None, trust=(), health_file=health_file)


def file_rank(ranks: Any) -> int | None:
    """Return what stands for a rank in the names of files; None where all ranks have the same bytes.

    `ranks` is SGLang's HiCacheStorageConfig. Latents (MLA) are the same on all ranks of a tensor-parallel
    group; the first of them stores. Under context parallelism each rank has a part of each page.
    """
    own, num = (0, 1) if ranks.is_mla_model else (ranks.tp_rank, ranks.tp_size)
    rank, size = ranks.attn_cp_rank * num + own, ranks.attn_cp_size * num
    return int(rank) if size > 1 else None


def build_identity(
    facts: ServerFacts, config: StoreConfig, ranks: Any, pools: Mapping[str, HostPages]
) -> Identity:
    """Return the identity of the pages of all pools, KV's first and a group for each in their order.

    Raises ConfigError where KV could be served wrongly.
    """
    arguments = facts.arguments
    needed = (*_NEEDED, "load_format") if config.weights_id is None else _NEEDED
    if missing := [name for name in needed if name not in arguments]:
        raise ConfigError(
            f"this SGLang has no server argument '{missing[0]}', so FskvStorage cannot be used with it"
        )
    _check(facts, config, ranks)
    pages = next(iter(pools.values()))
    if len(pools) > 1 and ranks.is_mla_model and ranks.tp_size > 1:
        raise ConfigError(
            "this model has latents that are the same on all ranks and other pools that are not, expected "
            "--tp-size 1: fskv does not store it"
        )
    kv_dtype = str(arguments["kv_cache_dtype"])
    if kv_dtype == "auto":
        if pages.dtype in ("uint8", "int8"):
            raise ConfigError(
                f'--kv-cache-dtype: found "auto" with a host pool of {pages.dtype}, expected the type by name'
            )
        kv_dtype = pages.dtype
    kinds = {name: _kind(name, facts, ranks) for name in pools}
    return Identity(
        engine="sglang",
        engine_version=facts.version,
        arch=facts.arch,
        model_name=model_name(str(arguments["model_path"])),
        weights=_weights(facts, config),
        model_config=cast("dict[str, Json]", kv_config(facts.hf_config)),
        kv_cache_dtype=kv_dtype,
        model_dtype=facts.model_dtype,
        kv_cache_layout=pages.layout,
        attention_backend=_attention(arguments),
        tokens_per_hash=pages.page_size,
        blocks_per_chunk=1,
        groups=tuple(
            GroupIdentity(
                group_idx=number,
                kind=f"{kinds[name][0].value}/{pool.kind}/{pool.dtype}/{'x'.join(map(str, pool.shape))}",
                window_tokens=kinds[name][1],
                tokens_per_block=pages.page_size,
                page_nbytes=pool.page_nbytes,
                layer_names=tuple(
                    f"layers.{layer}" if number == 0 else f"{name}.layers.{layer}"
                    for layer in range(*pool.layers)
                ),
            )
            for number, (name, pool) in enumerate(pools.items())
        ),
        hash_algorithm="sglang-sha256",
        hash_seed="none",
        topology={
            "tp": ranks.tp_size,
            "cp": ranks.attn_cp_size,
            "pp": ranks.pp_size,
            # Stages have other layers, so each has a namespace of its own.
            **({"pp_rank": ranks.pp_rank} if ranks.pp_size > 1 else {}),
        },
        lora=config.lora_policy,
        extra=_extra(facts, pages),
    )


def _kind(pool: str, facts: ServerFacts, ranks: Any) -> tuple[GroupKind, int | None]:
    """Return what a pool remembers, and its window in tokens where the configuration tells it."""
    if pool == "kv":
        return GroupKind.MLA if ranks.is_mla_model else GroupKind.FULL, None
    window = facts.hf_config.get("sliding_window")
    if pool == "swa" and isinstance(window, int) and window > 0:
        return GroupKind.SLIDING_WINDOW, window
    return GroupKind.STATE, None


def _check(facts: ServerFacts, config: StoreConfig, ranks: Any) -> None:
    arguments = facts.arguments
    if arguments["enable_lora"] and "lora" not in config.trust:
        raise ConfigError(
            "option 'trust': found no \"lora\" in an engine that takes adapters, expected one: SGLang's "
            "key of a page has an adapter's name and path, not its weights"
        )
    if facts.is_multimodal and "media" not in config.trust:
        raise ConfigError(
            "option 'trust': found no \"media\" for a model that takes media, expected one: "
            "SGLang's key of a page has its own short names of them"
        )
    if arguments["speculative_algorithm"] not in _SPECULATIVE:
        raise ConfigError(
            f"--speculative-algorithm: found {arguments['speculative_algorithm']!r}, expected none or "
            "NGRAM: fskv does not store the KV of a draft model"
        )
    if arguments["quantization_param_path"] is not None:
        raise ConfigError(
            f"--quantization-param-path: found {arguments['quantization_param_path']!r}, expected none: "
            "scales of KV are to be in the checkpoint"
        )
    if arguments["hicache_storage_backend"] != "dynamic":
        raise ConfigError(
            "fskv was attached to a running engine, whose weights may have been changed before; expected "
            "--hicache-storage-backend dynamic at the start"
        )
    if ranks.should_split_heads:
        raise ConfigError(
            f"option 'tp_lcm_size': found {ranks.tp_lcm_size}, expected none: fskv stores whole pages"
        )


def _weights(facts: ServerFacts, config: StoreConfig) -> str:
    if config.weights_id is not None:
        return weights_fingerprint(facts.checkpoint, weights_id=config.weights_id)
    load_format = str(facts.arguments["load_format"])
    if load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"--load-format: found {load_format!r}, expected one of {', '.join(_LOAD_FORMATS)}, or the "
            "option 'weights_id' set to a name"
        )
    for name in _OTHER_WEIGHTS:
        value = facts.arguments.get(name)
        if value and value != "off":
            raise _not_the_checkpoints(f"--{name.replace('_', '-')}", value)
    if _is_calibrated(facts):
        raise _not_the_checkpoints("--quantization", facts.arguments["quantization"])
    fingerprint = weights_fingerprint(facts.checkpoint)
    _check_unchanged(facts)
    return fingerprint


def _not_the_checkpoints(argument: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{argument}: found {value!r}, which brings weights that are not the checkpoint's; expected none, or "
        "the option 'weights_id' set to a name for these weights"
    )


def _is_calibrated(facts: ServerFacts) -> bool:
    """Say whether ModelOpt quantises the checkpoint at the start, by what it has computed of some texts."""
    quantised = ("quantization_config", "compression_config")
    return (
        facts.arguments.get("quantization") in _CALIBRATED
        and not any(facts.hf_config.get(name) for name in quantised)
        and not os.path.exists(os.path.join(facts.checkpoint, "hf_quant_config.json"))
    )


def _check_unchanged(facts: ServerFacts) -> None:
    """Raise ConfigError if a file of the checkpoint is younger than this process, which has loaded it.

    KV of the file before it would be stored under the name of what lies there now. SGLang tells nobody when
    it begins to load, and by a hub's name it fetches files itself. A process of Ray's may be much older.
    """
    if facts.arguments.get("use_ray") or not os.path.exists(str(facts.arguments["model_path"])):
        return
    for name, state in checkpoint_state(facts.checkpoint).items():
        if state and state[-1] / 1e9 > facts.started_at:
            raise ConfigError(
                f"checkpoint {facts.checkpoint}: {name} was changed after this process had started, so "
                "nobody knows which weights it has; start the engine again, or set the option 'weights_id'"
            )


def _attention(arguments: Mapping[str, Any]) -> str:
    names = [arguments[f"{stage}attention_backend"] for stage in ("", "prefill_", "decode_")]
    if names[0] is None and None in names[1:]:
        raise ConfigError(
            "--attention-backend: SGLang does not tell which it has chosen, expected one by name"
        )
    return "+".join(str(name or names[0]) for name in names[1:])


def _extra(facts: ServerFacts, pages: HostPages) -> dict[str, Json]:
    extra: dict[str, Json] = {}
    if told := settings(facts.arguments, facts.defaults, HARMLESS_ARGUMENTS):
        extra["settings"] = told
    if variables := environment(facts.environment, VARIABLES, HARMLESS_VARIABLES):
        extra["environment"] = variables
    if pages.storage_format is not None:
        extra["storage_format"] = pages.storage_format
    return extra
