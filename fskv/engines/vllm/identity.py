"""Derives groups, geometry and identity for fskv.namespace from a live vLLM.

Runs once per connector at start-up. The worker derives the identity, because only there the KV cache's
dtype, layout and page sizes are resolved; the scheduler receives it in the handshake.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from transformers import PretrainedConfig
from transformers import __version__ as transformers_version
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.model_executor.models import supports_multimodal
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from fskv.config import StoreConfig
from fskv.engines.vllm.loaded import (
    Loaded,
    check_unchanged,
    checkpoint_of,
    code_digests,
    loaded_files,
    modules_of,
)
from fskv.engines.vllm.refusals import check_draft, check_settings, name_of_load_format
from fskv.engines.vllm.settings import counting_settings
from fskv.errors import ConfigError, RestError
from fskv.hybrid_planner import GroupKind, GroupSpec
from fskv.identity.checkpoint_place import checkpoint_place, commit_of, model_name
from fskv.identity.fingerprint import kv_config, weights_fingerprint
from fskv.identity.rules import normal, shown
from fskv.kv_transfer.line import PICK_FILES
from fskv.namespace import GroupIdentity, Identity, Json, canonical_json
from fskv.root.key_file import keys_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RELEASE = re.compile(r"(\d+\.\d+\.\d+(\.post\d+)?)(\+(cpu|cu\d+|rocm[\d.]*|xpu|tpu|neuron))?")
# RoPE variants whose tables depend on the engine's max_model_len and not on the checkpoint alone.
_LENGTH_DEPENDENT_ROPE = ('"longrope"', '"su"', '"dynamic"')


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One offloaded KV group as fskv sees it; `layer_nbytes` is one block on a rank, un-padded, by layer."""

    spec: GroupSpec
    kind: str  # with dtype and variant, for the identity
    layer_nbytes: tuple[int, ...]
    layer_names: tuple[str, ...]

    @property
    def block_nbytes(self) -> int:
        return sum(self.layer_nbytes)

    @property
    def planned_nbytes(self) -> int:
        """The bytes of a block if all layers were like the first: vLLM's scheduler sees no others (0.32)."""
        return self.layer_nbytes[0] * len(self.layer_nbytes)

    def facts(
        self, page_nbytes: tuple[int, ...], layer_names: tuple[str, ...] | None = None
    ) -> GroupIdentity:
        """The facts about it in an identity, with the pages of a file; `layer_names` are its own if not
        given.
        """
        return GroupIdentity(
            self.spec.group_idx,
            self.kind,
            self.spec.window_tokens,
            self.spec.tokens_per_block,
            page_nbytes,
            self.layer_names if layer_names is None else layer_names,
        )


def engine_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[EngineGroup]:
    """Describe the offloaded groups in vLLM's order (position in OffloadingConfig.groups).

    Raises RestError where one is of a kind that fskv does not know, there is none, KV behind a hit is not
    what a cold engine computes, or no request fills a block.
    """
    if any(_is_replayed(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        raise RestError(
            "option 'swa_bounded_replay': found true, expected false: after a hit vLLM computes a window "
            "anew without what is before it, so KV behind a hit is not what a cold engine computes"
        )
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    groups = []
    for group_idx in get_offloading_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_idx]
        if not group.layer_names:
            raise RestError(f"KV group {group_idx} has no layer on this pipeline stage")
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs = [of_layers.get(name, group.kv_cache_spec) for name in group.layer_names]
        kind, window, retained, text = _kind_of_all(specs)
        groups.append(
            EngineGroup(
                spec=GroupSpec(
                    group_idx=group_idx,
                    kind=kind,
                    tokens_per_block=_tokens_per_block(group.kv_cache_spec, dcp),
                    window_tokens=window,
                    extra_retained_tokens=retained,
                ),
                kind=text,
                layer_nbytes=tuple(map(_page_nbytes, specs)),
                layer_names=tuple(group.layer_names),
            )
        )
    if not groups:
        raise RestError("the engine has no KV that vLLM would use again")
    longest = vllm_config.model_config.max_model_len
    largest = max((group.spec for group in groups), key=lambda spec: spec.tokens_per_block)
    if largest.tokens_per_block >= longest:  # a hit leaves one token to compute
        # Without it vLLM makes one block of states of the longest request.
        off = "" if vllm_config.cache_config.enable_prefix_caching else "; prefix caching is off"
        raise RestError(
            f"option 'max_model_len': found {longest}, expected more than {largest.tokens_per_block}: no "
            f"request has a block of group {largest.group_idx} ({largest.kind.value}) to use again{off}"
        )
    return groups


def _is_replayed(spec: KVCacheSpec) -> bool:
    """Return whether vLLM does not cache a window, and computes it anew after a hit (DeepSeek V4.1)."""
    return any(getattr(each, "prefix_replay_tokens", 0) for each in iter_layer_specs(spec))


def by_layer(texts: Iterable[str]) -> str:
    """Join the texts of all layers, in their order: one text if all are the same."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return runs[0][0] if len(runs) == 1 else " + ".join(f"{n} * {text}" for text, n in runs)


def build_identity(
    vllm_config: VllmConfig,
    config: StoreConfig,
    groups: list[EngineGroup],
    pages: list[tuple[int, ...]],
    blocks_per_chunk: int,
    tokens_per_hash: int,
    layouts: dict[str, Json],
    canonical_format: str | None = None,
    loaded: Loaded | None = None,
) -> Identity:
    """Return the identity of this engine's KV; `pages[i]` are group i's un-padded page sizes in bytes.

    `layouts` is what page_layout.page_layouts found, `loaded` is what the worker has loaded (None where there
    is no engine).

    With `canonical_format` the pages have the same bytes in every topology, which then is not in the identity
    unless the KV that vLLM computes depends on it.

    Raises ConfigError where KV could be served wrongly: weights without a fingerprint, a hash seed
    that no other process has, settings that `refusals` names, a draft that writes over KV.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    check_settings(vllm_config, config)
    check_draft(vllm_config, groups)
    # With pipeline stages each rank has other layers; its own are in the layout digest of its files.
    one_stage = parallel.pipeline_parallel_size == 1
    in_manifest = {k: v for k, v in layouts.items() if one_stage or not k.startswith("group")}
    kv_dtype = str(cache.cache_dtype)
    kv_dtype = {"auto": _name(model.dtype), "fp8": "fp8_e4m3"}.get(kv_dtype, kv_dtype)
    layer_names = {name for group in groups for name in group.layer_names}
    modules = modules_of(loaded.model, layer_names, one_stage=one_stage) if loaded else []
    checkpoint = checkpoint_of(model, vllm_config.load_config)
    keys = keys_of(config.key_file)
    files = None
    if loaded is not None and config.weights_id is None:
        files = loaded_files(checkpoint, model, vllm_config.load_config, loaded.model)
    identity = Identity(
        engine="vllm",
        engine_version=version_text(vllm_version),
        arch=gpu_arch(),
        model_name=model_name(model.model),
        weights=weights_text(checkpoint, config),
        model_config=_model_config(model, modules),
        kv_cache_dtype=kv_dtype,
        model_dtype=_name(model.dtype),
        kv_cache_layout=str(cache.kv_cache_layout or "default"),
        attention_backend=_attention_backend(vllm_config),
        tokens_per_hash=tokens_per_hash,
        blocks_per_chunk=blocks_per_chunk,
        groups=tuple(
            group.facts(page_nbytes) if one_stage else group.facts((), ())
            for group, page_nbytes in zip(groups, pages, strict=True)
        ),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=_hash_seed(str(cache.prefix_caching_hash_algo)),
        topology={}
        if canonical_format and not _kv_depends_on_topology(groups)
        else {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "pcp": parallel.prefill_context_parallel_size,
            "dcp": parallel.decode_context_parallel_size,
            "cp_interleave": int(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
        },
        canonical_format=canonical_format,
        tenant=config.tenant,
        encryption=keys.encryption if keys is not None else None,
        model_runner="v2" if vllm_config.use_v2_model_runner else "v1",
        extra=_extra(vllm_config, config, loaded, layer_names)
        | (_model_extra(loaded.model, modules, config) if loaded else {})
        # Commits and fingerprints are of all files, and do not tell which of them are loaded.
        | ({"weight_files": [*files]} if files else {})
        | ({"page_layouts": in_manifest} if in_manifest else {}),
    )
    if loaded is not None and config.weights_id is None:
        check_unchanged(loaded, vllm_config)
    return identity


def weights_text(path: str, config: StoreConfig) -> str:
    """Return the name of the weights at `path`: the user's, the hub's commit, or a fingerprint of all files.

    Raises ConfigError where nothing names them.
    """
    commit = commit_of(path) if config.weights_id is None else None
    return weights_fingerprint(path, weights_id=config.weights_id, revision_commit=commit)


def version_text(version: str) -> str:
    """Return the part of vLLM's version that counts: of a release without its build ("0.32.1" of
    "0.32.1+cpu").

    A patch may mend what a model computes. A development build is itself, whole.
    """
    release = _RELEASE.fullmatch(version)
    return release[1] if release else version


def is_release(version: str) -> bool:
    """Return whether a version of vLLM names one state of its source code."""
    return _RELEASE.fullmatch(version) is not None


def reuses_kv(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM uses KV of one request for another in this engine; if not, fskv must not either.

    It turns that off for prompts that are not causal, and for pooling that needs all tokens; where a user
    turns it on for such pooling, the engine ends in an error.
    """
    model = vllm_config.model_config
    allowed = model.runner_type != "pooling" or model.is_prefix_caching_supported
    return bool(vllm_config.cache_config.enable_prefix_caching and allowed)


def _kv_depends_on_topology(groups: list[EngineGroup]) -> bool:
    """Return whether tensor parallelism changes KV by more than rounding.

    vLLM 0.32 on CPUs, MLA: with TP 2 the second layer's latents of the first prefill step differ by as much
    as their own size from those of TP 1 (seen without fskv: other tokens); with attention heads, by 1e-6.
    """
    mla = any(group.spec.kind is GroupKind.MLA for group in groups)
    return mla and bool(current_platform.is_cpu())


def gpu_arch() -> str:
    """Return sm_90, gfx942, cpu-x86_64...: from vLLM's platform, which needs no CUDA context."""
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        if capability is None:
            raise ConfigError("the GPU's compute capability is unknown; fskv keys KV by it")
        return f"sm_{capability.major}{capability.minor}"
    if current_platform.is_rocm():
        import torch

        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    return f"{current_platform.device_type}-{platform.machine()}"


def _kind_of_all(specs: Sequence[KVCacheSpec]) -> tuple[GroupKind, int | None, int, str]:
    """Return the `_kind` of all layers of a group; they must agree about the needs of a hit."""
    kinds, windows, retained, texts = zip(*map(_kind, specs), strict=True)
    (found, *others) = dict.fromkeys(zip(kinds, windows, retained, strict=True))
    if others and {*kinds} != {GroupKind.FULL, GroupKind.MLA}:  # these two are covered alike
        raise RestError(f"KV group of {by_layer(texts)}: fskv does not know how its KV is covered")
    return GroupKind.FULL if others else found[0], *found[1:], by_layer(texts)


def _kind(spec: KVCacheSpec) -> tuple[GroupKind, int | None, int, str]:
    """Return kind, window in tokens, extra retained tokens, and the kind with its variant as text."""
    if isinstance(spec, MambaSpec):
        dtypes = "+".join(_name(d) for d in spec.dtypes)
        state = getattr(spec.mamba_type, "name", str(spec.mamba_type)).lower()
        return GroupKind.STATE, None, 0, f"state/{state}/{spec.mamba_cache_mode}/{dtypes}"
    if not isinstance(spec, AttentionSpec):
        raise _unknown(spec)
    suffix = f"{_name(spec.dtype)}/{spec.kv_quant_mode.name.lower()}"
    if isinstance(spec, SlidingWindowSpec):
        retained = int(getattr(spec, "extra_retained_tokens", 0))
        kind = f"sliding_window/{type(spec).__name__}/{suffix}"
        return GroupKind.SLIDING_WINDOW, int(spec.sliding_window), retained, kind
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return GroupKind.CHUNKED_LOCAL, int(spec.attention_chunk_size), 0, f"chunked_local/{suffix}"
    if isinstance(spec, MLAAttentionSpec):
        return GroupKind.MLA, None, 0, f"mla/{type(spec).__name__}/{suffix}"
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL, None, 0, f"full/{type(spec).__name__}/{suffix}"
    raise _unknown(spec)


def _unknown(spec: KVCacheSpec) -> RestError:
    return RestError(
        f"KV group of kind {type(spec).__name__}: fskv does not know how its KV is covered"
    )


def _page_nbytes(spec: KVCacheSpec) -> int:
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(spec.real_page_size_bytes) if isinstance(spec, MambaSpec) else spec.page_size_bytes


def _tokens_per_block(spec: KVCacheSpec, dcp: int) -> int:
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    return int(resolve_dcp_kv_block_size(spec, dcp))


def _model_config(model: Any, modules: list[Any]) -> dict[str, Json]:
    """Return the configuration that shapes KV: after hf_overrides, and as the model's parts have it."""
    text = _config_dict(model.hf_text_config)
    result: dict[str, Json] = {"text": text}
    if model.hf_config is not model.hf_text_config:
        # Vision towers and what feeds the text model.
        result["whole"] = _config_dict(model.hf_config)
    # Copies that vLLM has changed are told only here.
    if resolved := _resolved_configs(modules):
        result["resolved"] = resolved
    if (quantization := getattr(model.hf_config, "quantization_config", None)) is not None:
        result["quantization_config"] = normal(quantization, "quantization_config")
    rope = json.dumps([text.get("rope_scaling"), text.get("rope_parameters")])
    if any(kind in rope for kind in _LENGTH_DEPENDENT_ROPE):
        result["max_model_len"] = int(model.max_model_len)
    return result


def _config_dict(hf_config: Any) -> dict[str, Json]:
    tree = kv_config(json.loads(hf_config.to_json_string(use_diff=False)))
    if tree.get("architectures") == ["MiniMaxM2ForCausalLM"]:
        tree.pop(
            "max_model_len", None
        )  # vLLM puts it there: the length of a table (minimax_m2.py:261)
    return cast("dict[str, Json]", tree)


def _resolved_configs(modules: list[Any]) -> list[Json]:
    """Return the distinct Hugging Face configurations that parts of the model were built with."""
    values = {id(value): value for module in modules for value in vars(module).values()}
    configs = [value for value in values.values() if isinstance(value, PretrainedConfig)]
    texts = {canonical_json(_config_dict(each)) for each in configs}
    return [json.loads(text) for text in sorted(texts)]


def _hash_seed(algorithm: str) -> str:
    """Return the seed of vLLM's block hashes, by vLLM's own rule (kv_cache_utils.resolve_none_hash_seed)."""
    seed = os.getenv("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED={seed}"
    if algorithm.startswith("xxhash"):
        raise ConfigError(
            f"option 'prefix_caching_hash_algo': found \"{algorithm}\" without PYTHONHASHSEED, so block "
            'hashes are different in every process; expected "sha256", or PYTHONHASHSEED set to one '
            "value everywhere"
        )
    return "default"


def _attention_backend(vllm_config: VllmConfig) -> str:
    """Return the backend the layers really use; on the worker they exist, and say so themselves."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    asked = [layer.get_attn_backend for layer in layers if hasattr(layer, "get_attn_backend")]
    return "+".join(sorted({str(backend().get_name()) for backend in asked})) or "unknown"


def _extra(
    vllm_config: VllmConfig, config: StoreConfig, loaded: Loaded | None, layer_names: set[str]
) -> dict[str, Json]:
    extra: dict[str, Json] = {}
    load = vllm_config.load_config
    load_format = name_of_load_format(vllm_config)
    # Those that load the files which vLLM's rule picks, and nothing else, are alike: see loaded_files.
    if load_format not in PICK_FILES:
        extra["load_format"] = load_format
        if load.model_loader_extra_config:
            extra["model_loader"] = shown(
                load.model_loader_extra_config, "model_loader_extra_config"
            )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        extra["pipeline_partition"] = os.getenv("VLLM_PP_LAYER_PARTITION", "default")
    speculative = vllm_config.speculative_config
    # Without KV of a draft's own its files are the model's alone: of suffixes, n-grams, Medusa.
    draft = getattr(speculative, "draft_model_config", None)
    own = draft is not None and draft is not speculative.target_model_config
    if own and (loaded is None or loaded.draft_has_kv(layer_names)):
        extra["speculative"] = {
            "method": str(speculative.method),
            "draft": weights_text(checkpoint_of(draft, load), config),
        }
    return extra | ({"settings": found} if (found := counting_settings(vllm_config)) else {})


def _model_extra(model: Any, modules: list[Any], config: StoreConfig) -> dict[str, Json]:
    """Return the facts of the loaded model beyond all configurations: its class, its code, its parts."""
    extra: dict[str, Json] = {"model_class": type(model).__qualname__}
    trusted = {"torch", "transformers"}
    if is_release(vllm_version):
        trusted.add("vllm")  # its version says it
    tops = {type(module).__module__.partition(".")[0] for module in modules}
    if "transformers" in tops or supports_multimodal(model):
        extra["transformers"] = transformers_version
    if code := code_digests(modules, trusted):
        extra["code"] = code
    # Weights that the model's class takes from elsewhere: an audio tower. The user vouches for all or none.
    secondary = getattr(model, "secondary_weights", ()) if config.weights_id is None else ()
    if secondary:
        extra["secondary_weights"] = [
            [
                source.prefix,
                getattr(source, "subfolder", None),
                weights_text(checkpoint_place(source.model_or_path, source.revision), config),
            ]
            for source in secondary
        ]
    return extra


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
