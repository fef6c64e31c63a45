"""The identity of SGLang's KV: from the host pool, the server's resolved arguments, the model and the ranks.

SGLang's own key of a page is a SHA-256 chain over token ids, begun with the request's extra key (adapter,
salt) where it has one. The key covers nothing of the model, so the identity does. Unknown facts are refused.
fskv.engines.sglang.server gathers `ServerFacts`; this module imports no SGLang.
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
from fskv.identity.checkpoint_place import Checkpoint, model_name
from fskv.identity.fingerprint import kv_config, weights_fingerprint
from fskv.identity.rules import environment, settings
from fskv.namespace import GroupIdentity, Identity, Json
from fskv.offload.kv_store import options_of

# Formats that load what stands in the checkpoint.
_LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "mistral", "fastsafetensors")
# Settings that bring other weights under such a format: another process's, separate experts, scales of KV,
# weights that ModelOpt restores or makes at the start.
_OTHER_WEIGHTS = (
    *("weight_cache_mode", "kt_weight_path", "quantization_param_path", "modelopt_quant"),
    *("modelopt_checkpoint_restore_path", "modelopt_checkpoint_save_path", "modelopt_export_path"),
)
_CALIBRATED = ("modelopt", "modelopt_fp8")  # --quantization, of a checkpoint that is not quantised
# With a second of grace below the 10 s that SGLang waits for each of its storage threads. Then it ends.
_MAX_DEADLINE_S = 7.0
# Where an algorithm has no draft model, its KV is the target's alone.
_SPECULATIVE = (None, "NGRAM")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The facts of an engine that the scheduler's process knows."""

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

    def argument(self, name: str) -> Any:
        """Return an argument of the server; raises ConfigError for one that this SGLang has not."""
        if name not in self.arguments:
            raise ConfigError(
                f"this SGLang has no server argument '{name}', so FskvStorage cannot be used with it"
            )
        return self.arguments[name]


def take_options(extra_config: Mapping[str, Any]) -> StoreConfig:
    """Return fskv's options of `--hicache-storage-backend-extra-config`; raises ConfigError."""
    loaded_by = ("backend_name", "module_path", "class_name")
    own = {name: value for name, value in extra_config.items() if name not in loaded_by}
    if own.pop("interface_v1", 0) not in (1, True):
        raise ConfigError(
            "option 'interface_v1': expected 1 beside \"module_path\": without it SGLang copies each page"
        )
    return options_of(own, ours=("weights_id", "trust"), most_deadline_s=_MAX_DEADLINE_S)


def call_deadline(config: StoreConfig) -> Deadline:
    """Return how long a call may take: as the options say, and no longer than SGLang waits for it."""
    deadline = config.deadline
    return replace(deadline, max_s=min(deadline.max_s, _MAX_DEADLINE_S))


def file_rank(ranks: Any) -> int | None:
    """Return the rank in the names of files; None where all ranks have the same bytes.

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
    pages = next(iter(pools.values()))
    _check(facts, config, ranks, pools)
    kv_dtype = str(facts.argument("kv_cache_dtype"))
    if kv_dtype == "auto":
        if pages.dtype in ("uint8", "int8"):
            raise ConfigError(
                f'--kv-cache-dtype: found "auto" with a host pool of {pages.dtype}, expected the type by name'
            )
        kv_dtype = pages.dtype
    told = {
        "settings": settings(facts.arguments, facts.defaults, HARMLESS_ARGUMENTS),
        "environment": environment(facts.environment, VARIABLES, HARMLESS_VARIABLES),
        "storage_format": pages.storage_format,
    }
    return Identity(
        engine="sglang",
        engine_version=facts.version,
        arch=facts.arch,
        model_name=model_name(str(facts.argument("model_path"))),
        weights=_weights(facts, config),
        model_config=cast("dict[str, Json]", kv_config(facts.hf_config)),
        kv_cache_dtype=kv_dtype,
        model_dtype=facts.model_dtype,
        kv_cache_layout=pages.layout,
        attention_backend=_attention(facts),
        tokens_per_hash=pages.page_size,
        blocks_per_chunk=1,
        groups=tuple(
            _group(number, name, pool, facts, ranks, pages.page_size)
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
        extra={name: value for name, value in told.items() if value},
    )


def _group(
    number: int, name: str, pool: HostPages, facts: ServerFacts, ranks: Any, page_tokens: int
) -> GroupIdentity:
    """Return the group of a pool: its kind, and its window if the configuration has one."""
    kind, window = GroupKind.STATE, None
    told = facts.hf_config.get("sliding_window")
    if name == "kv":
        kind = GroupKind.MLA if ranks.is_mla_model else GroupKind.FULL
    elif name == "swa" and isinstance(told, int) and told > 0:
        kind, window = GroupKind.SLIDING_WINDOW, told
    prefix = "layers" if number == 0 else f"{name}.layers"
    return GroupIdentity(
        group_idx=number,
        kind=f"{kind.value}/{pool.kind}/{pool.dtype}/{'x'.join(map(str, pool.shape))}",
        window_tokens=window,
        tokens_per_block=page_tokens,
        page_nbytes=pool.page_nbytes,
        layer_names=tuple(f"{prefix}.{layer}" for layer in range(*pool.layers)),
    )


def _check(
    facts: ServerFacts, config: StoreConfig, ranks: Any, pools: Mapping[str, HostPages]
) -> None:
    if facts.argument("enable_lora") and "lora" not in config.trust:
        raise ConfigError(
            "option 'trust': found no \"lora\" in an engine that takes adapters, expected one: SGLang's "
            "key of a page has an adapter's name and path, not its weights"
        )
    if facts.is_multimodal and "media" not in config.trust:
        raise ConfigError(
            "option 'trust': found no \"media\" for a model that takes media, expected one: "
            "SGLang's key of a page has its own short names of them"
        )
    if (algorithm := facts.argument("speculative_algorithm")) not in _SPECULATIVE:
        raise ConfigError(
            f"--speculative-algorithm: found {algorithm!r}, expected none or NGRAM: fskv does not store "
            "the KV of a draft model"
        )
    if facts.argument("hicache_storage_backend") != "dynamic":
        raise ConfigError(
            "fskv was attached to a running engine, whose weights may have been changed before; expected "
            "--hicache-storage-backend dynamic at the start"
        )
    if ranks.should_split_heads:
        raise ConfigError("option 'tp_lcm_size': expected none: fskv stores whole pages")
    if len(pools) > 1 and ranks.is_mla_model and ranks.tp_size > 1:
        raise ConfigError(
            "this model has latents that are the same on all ranks and other pools that are not, expected "
            "--tp-size 1: fskv does not store it"
        )


def _weights(facts: ServerFacts, config: StoreConfig) -> str:
    """Return the name of the weights; raises ConfigError where they may not be the checkpoint's."""
    if config.weights_id is not None:
        return weights_fingerprint(facts.checkpoint, weights_id=config.weights_id)
    load_format = str(facts.argument("load_format"))
    if load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"--load-format: found {load_format!r}, expected one of {', '.join(_LOAD_FORMATS)}, or the "
            "option 'weights_id' set to a name"
        )
    others = (*_OTHER_WEIGHTS, *(["quantization"] if _is_calibrated(facts) else []))
    for name in others:
        value = facts.arguments.get(name)
        if value and value != "off":
            raise ConfigError(
                f"--{name.replace('_', '-')}: found {value!r}, which brings weights that are not the "
                "checkpoint's; expected none, or the option 'weights_id' set to a name for these weights"
            )
    fingerprint = weights_fingerprint(facts.checkpoint)
    # KV of the file before would be stored under the name of what lies there now. SGLang tells nobody when it
    # begins to load, and by a hub's name it fetches files itself. A process of Ray's may be much older.
    is_older = not facts.arguments.get("use_ray") and os.path.exists(facts.argument("model_path"))
    late = Checkpoint(facts.checkpoint).changed_after(facts.started_at) if is_older else None
    if late is not None:
        raise ConfigError(
            f"checkpoint {facts.checkpoint}: {late} was changed after this process had started, so "
            "nobody knows which weights it has; start the engine again, or set the option 'weights_id'"
        )
    return fingerprint


def _is_calibrated(facts: ServerFacts) -> bool:
    """Return whether ModelOpt quantises the checkpoint at the start, from statistics of some texts."""
    quantised = ("quantization_config", "compression_config")
    return (
        facts.arguments.get("quantization") in _CALIBRATED
        and not any(facts.hf_config.get(name) for name in quantised)
        and not os.path.exists(os.path.join(facts.checkpoint, "hf_quant_config.json"))
    )


def _attention(facts: ServerFacts) -> str:
    names = [facts.argument(f"{stage}attention_backend") for stage in ("", "prefill_", "decode_")]
    if names[0] is None and None in names[1:]:
        raise ConfigError(
            "--attention-backend: SGLang does not tell which it has chosen, expected one by name"
        )
    return "+".join(str(name or names[0]) for name in names[1:])
