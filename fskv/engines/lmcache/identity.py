"""The identity of KV in LMCache's objects: from its keys and layouts, and from options for the rest.

LMCache's server knows a model's name, the number of its ranks, and the shapes and dtypes of an object. It
knows no weights, configuration, engine or settings. The user names them for each model; a missing name is
refused. LMCache's hash of a chunk is a chain over the token ids from the first on. An engine may have several
servers. LMCache numbers the ranks of each from 0 on, and does not say which server it is.

Under a request's key LMCache also stores KV that vLLM found in its own prefix cache. So settings that make
prompts equal for vLLM but different for LMCache are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from fskv.config import StoreConfig
from fskv.engines.vllm.harmless import HARMLESS_OPTIONS
from fskv.errors import ConfigError
from fskv.hybrid_planner import GroupKind
from fskv.identity.checkpoint_place import Checkpoint, model_name
from fskv.identity.fingerprint import kv_config, weights_fingerprint
from fskv.identity.rules import settings
from fskv.namespace import GroupIdentity, Identity, Json
from fskv.offload.kv_store import options_of
from fskv.types import ChunkId


def _is_server(value: Any) -> bool:
    if not isinstance(value, Sequence) or [type(number) for number in value] != [int, int]:
        return False
    return bool(0 <= value[0] < value[1])


_REQUIRED = ("engine", "arch", "attention_backend", "block_size", "settings", "media", "server")
_OPTIONAL = ("isa", "checkpoint", "revision", "weights_id")
# Of each word of a model: whether a value is good, and what is expected.
_WORDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (*_REQUIRED, *_OPTIONAL), (lambda value: isinstance(value, str) and value != "", "text")
    ),
    "block_size": (
        lambda value: type(value) is int and value > 0,
        "tokens, a number above 0",
    ),
    "settings": (lambda value: isinstance(value, Mapping), "an object, {} for none"),
    "media": (
        lambda value: value in ("none", "trusted"),
        '"none", if no request has any, or "trusted"',
    ),
    "server": (
        _is_server,
        "[index, count] of this server in the engine's 'lmcache.mp.server_urls', [0, 1] for one server",
    ),
}
# Settings, as `normal` spells them, under which one key stands for more than one KV.
_REFUSED = {
    "enable_lora": "LMCache's keys do not hold the adapter",
    "enable_prompt_embeds": "LMCache's keys hold token ids, and those of all embeddings are zeros",
    "calculate_kv_scales": "each engine takes the scales of KV from what it was first asked",
    "prefix_caching_hash_algo": "prompts can be made that vLLM's own cache takes for one another, and "
    "LMCache stores what vLLM has found there under the key of the prompt that asked",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "LMCache stores KV of a second request with one id under the "
    "keys of the first",
}
_STRONG_HASHES = ("sha256", "sha256_cbor")  # of `prefix_caching_hash_algo`
_MIN_HASH_NBYTES = 16  # Python's own hash has 8: two prompts may have the same, and it is seeded
_ONE_RANK = 0x01000100  # LMCache's kv_rank: world size, rank, and both again, of 8 bits each
# 120 s for the largest load, which is with a task's wait well below LMCache's 300 s.
_MAX_DEADLINE_S = 8.0
_BYTES = ("uint8", "int8")  # what hides a dtype
# In the names of what a configuration says of media, at the beginning of a word: `intermediate_size` is none.
_MEDIA = re.compile(r"(^|_)(vision|visual|audio|image|img_|video|media|speech|mm_|multi_?modal)")
_CONFIGS = ("config.json", "params.json")  # the second is Mistral's own
_ON_CPUS = "cpu"  # how such an `arch` begins


@dataclass(frozen=True, kw_only=True)
class Model:
    """The facts of a model's KV beside the keys and layouts of its objects."""

    name: str
    entry: Mapping[str, Any]  # the user's words
    settings: Mapping[str, Json]  # of those, by their normal names
    weights: str
    model_config: Mapping[str, Json]
    checkpoint: Checkpoint  # before the fingerprint; watched unless the user named the weights


class ObjectKind(NamedTuple):
    """The kind of objects that share a namespace: all of one model that differ only in their keys."""

    model: str
    world_size: int
    group: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, key: Any, shapes: Sequence[Any], dtypes: Sequence[Any]) -> ObjectKind:
        """Return the kind of an ObjectKey's object with these torch sizes and dtypes."""
        return cls(
            key.model_name,
            key.kv_rank >> 24,
            key.object_group_id,
            tuple(tuple(int(n) for n in shape) for shape in shapes),
            tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        )


def take_options(params: Mapping[str, Any]) -> tuple[StoreConfig, dict[str, Mapping[str, Any]]]:
    """Return fskv's options of `adapter_params`, and those of each model; raises ConfigError."""
    own = dict(params)
    models = own.pop("models", None)
    if not isinstance(models, Mapping) or not models:
        raise ConfigError(
            f"option 'models': found {models!r}, expected an object with an entry for each model, "
            "by the name that its engine was started with"
        )
    config = options_of(own, ours=("weights_fixed",), most_deadline_s=_MAX_DEADLINE_S)
    if not config.weights_fixed:
        raise ConfigError(
            "option 'weights_fixed': found false, expected true: LMCache does not tell when an engine "
            "changes its weights while it runs, so you promise that none does"
        )
    for name, entry in models.items():
        _check_entry(f"option 'models': {name!r}", entry)
    return config, dict(models)


def _check_entry(where: str, entry: Any) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: found {entry!r}, expected an object")
    if missing := [name for name in _REQUIRED if name not in entry]:
        raise ConfigError(
            f"{where}: '{missing[0]}' is missing: LMCache does not tell it to a plug-in"
        )
    for name, value in entry.items():
        if name not in _WORDS:
            raise ConfigError(f"{where}: found '{name}', expected one of the known names")
        is_good, expected = _WORDS[name]
        if not is_good(value):
            raise ConfigError(f"{where}: '{name}' is {value!r}, expected {expected}")
    if entry["arch"].startswith(_ON_CPUS) != ("isa" in entry):
        raise ConfigError(
            f"{where}: 'isa' is {entry.get('isa')!r} with 'arch' {entry['arch']!r}, expected it with a CPU's "
            "alone, whose pages are packed for its instructions"
        )
    names = [normal(name) for name in entry["settings"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: '{twice[0]}' is in 'settings' twice, expected one spelling")
    for name, value in entry["settings"].items():
        if value and value not in _STRONG_HASHES and (reason := _REFUSED.get(normal(name))):
            raise ConfigError(f"{where}: found '{name}', expected none: {reason}")


def normal(name: str) -> str:
    """Return one spelling of a setting, of those that vLLM takes: `--enable-lora` is `enable_lora`."""
    return name.lstrip("-").replace("-", "_")


def read_model(name: str, entry: Mapping[str, Any]) -> Model:
    """Read a model's checkpoint for its configuration and a fingerprint; raises ConfigError."""
    weights_id = entry.get("weights_id")
    checkpoint = Checkpoint(
        entry.get("checkpoint", name), entry.get("revision"), watched=weights_id is None
    )
    place = checkpoint.place
    weights = weights_fingerprint(place, weights_id=weights_id)
    found = {each: _json_of(os.path.join(place, each)) for each in _CONFIGS}
    media = sorted(
        {key for config in found.values() for key in _keys(config) if _MEDIA.search(key)}
    )
    if media and entry["media"] == "none":
        raise ConfigError(
            f"option 'models': {name!r}: 'media' is \"none\" for a model with '{media[0]}' in its "
            "configuration, expected \"trusted\": LMCache's keys hold the engine's own names of media"
        )
    return Model(
        name=name,
        entry=entry,
        settings={normal(each): value for each, value in entry["settings"].items()},
        weights=weights,
        model_config=cast("dict[str, Json]", kv_config(found["config.json"])),
        checkpoint=checkpoint,
    )


def _json_of(path: str) -> dict[str, Any]:
    """Return the content of a file of settings, empty if there is none; raises ConfigError."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: found a {type(found).__name__}, expected an object")
    return found


def _keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Return the keys of a configuration, at any depth, in small letters."""
    left: list[Any] = [config]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from (key.lower() for key in value)
            left += value.values()
        elif isinstance(value, list):
            left += value


def build_identity(model: Model, kind: ObjectKind, version: str) -> Identity:
    """Return the identity of a kind of objects; `version` is LMCache's. Raises ConfigError."""
    if len(kind.dtypes) == 1 and kind.dtypes[0] in _BYTES and len(kind.shapes[0]) == 1:
        raise ConfigError(
            "objects are flat bytes, expected KV: fskv does not store what a 'serde' has made of it"
        )
    hidden = [dtype for dtype in kind.dtypes if dtype in _BYTES]
    for name in ("kv_cache_dtype", "dtype"):
        if hidden and name not in model.settings:
            raise ConfigError(
                f"option 'models': {model.name!r}: '{name}' is not in 'settings', and objects of {hidden[0]} "
                "do not tell it"
            )
    if version == "unknown":
        raise ConfigError("this LMCache does not tell its version, expected an installed one")
    _check_isa(model, kind)
    shapes = ",".join("x".join(map(str, shape)) for shape in kind.shapes)
    first = kind.shapes[0]
    told = settings(model.settings, {}, HARMLESS_OPTIONS)
    dtypes = "+".join(sorted(set(kind.dtypes)))
    return Identity(
        engine="lmcache",
        engine_version=version,
        arch=model.entry["arch"],
        model_name=model_name(model.name),
        weights=model.weights,
        model_config=model.model_config,
        kv_cache_dtype=str(model.settings.get("kv_cache_dtype", dtypes)),
        model_dtype=str(model.settings.get("dtype", dtypes)),
        kv_cache_layout="lmcache-object",
        attention_backend=model.entry["attention_backend"],
        # LMCache's objects have tokens second to last; the whole shape is in the group.
        tokens_per_hash=first[-2] if len(first) > 2 else 1,
        blocks_per_chunk=1,
        groups=(
            GroupIdentity(
                group_idx=kind.group,
                kind=f"{GroupKind.FULL.value}/object/{'+'.join(kind.dtypes)}/{shapes}",
                window_tokens=None,  # LMCache knows of windows, and asks for what it needs
                tokens_per_block=first[-2] if len(first) > 2 else 1,
                page_nbytes=(object_nbytes(kind),),
                layer_names=(f"object-group.{kind.group}",),
            ),
        ),
        hash_algorithm="lmcache-chunk-hash",
        hash_seed="none",
        topology={
            "world": kind.world_size,  # of one server
            "server": model.entry["server"][0],
            "servers": model.entry["server"][1],
        },
        extra={
            "computed_by": model.entry["engine"],
            **({"settings": told} if told else {}),
            **{name: model.entry[name] for name in ("block_size", "isa") if name in model.entry},
        },
    )


def _check_isa(model: Model, kind: ObjectKind) -> None:
    """Raise ConfigError for an `isa` that vLLM does not choose: a server shares its engine's machine.

    vLLM's rule is `_get_attn_isa` of its cpu_attn (0.32). Only what is sure is judged here.
    """
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    isa, block_size = model.entry.get("isa"), model.entry["block_size"]
    if isa not in ("amx", "vec") or not model.entry["engine"].startswith("vllm"):
        return
    where = f"option 'models': {model.name!r}: 'isa' is {isa!r}"
    if block_size % 32:
        raise ConfigError(f"{where} with a 'block_size' of {block_size}, expected \"vec16\"")
    if has_amx is None or platform.machine() != "x86_64":
        return
    if not has_amx() if isa == "amx" else has_amx() and "bfloat16" in kind.dtypes:
        raise ConfigError(f"{where} for {kind.dtypes[0]}, expected what vLLM chooses on this CPU")


def object_nbytes(kind: ObjectKind) -> int:
    """Return the bytes of an object of this kind."""
    import torch

    return sum(
        math.prod(shape) * int(getattr(torch, dtype).itemsize)
        for shape, dtype in zip(kind.shapes, kind.dtypes, strict=True)
    )


def chunk_of(key: Any) -> ChunkId:
    """Return the chunk of an ObjectKey: its hash, with salt and rank where there are any.

    Raises ValueError for a hash that is too short to tell prompts apart, and for a rank whose parts overlap.
    """
    found: bytes = key.chunk_hash
    if len(found) < _MIN_HASH_NBYTES:
        raise ValueError(
            f"a chunk hash of {len(found)} bytes, expected {_MIN_HASH_NBYTES} or more: use LMCache's "
            "--hash-algorithm blake3"
        )
    if key.kv_rank >> 32:
        raise ValueError(
            "a rank of more than 32 bits, expected 255 ranks or less: LMCache's overlap"
        )
    if key.cache_salt or key.kv_rank != _ONE_RANK:
        told = f"lmcache {key.kv_rank:08x} {key.cache_salt}\0".encode()
        found = hashlib.sha256(told + found).digest()
    return ChunkId(found, key.object_group_id)
