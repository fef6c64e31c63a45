"""The identity of KV in LMCache's objects: from its keys and layouts, and from options for the rest.

LMCache's server knows a model's name, how many ranks it has, and the shapes and dtypes of an object. It
knows nothing of weights, configuration, engine or settings, so the user names them for each model, and what
is not named is refused. LMCache's hash of a chunk is a chain over the token ids from the first on. An engine
may have several servers. LMCache numbers the ranks of each from 0 on, and does not tell which server it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fskv.config import StoreConfig
from fskv.errors import ConfigError
from fskv.hybrid_planner import GroupKind
from fskv.identity.checkpoint_place import checkpoint_place
from fskv.identity.fingerprint import checkpoint_state, kv_config, weights_fingerprint
from fskv.namespace import GroupIdentity, Identity, Json
from fskv.types import ChunkId

_REQUIRED = ("engine", "arch", "attention_backend", "settings", "server")
_OPTIONAL = ("checkpoint", "revision", "weights_id")
_MIN_HASH_NBYTES = 16  # Python's own hash has 8: two prompts may have the same, and it is seeded
_ONE_RANK = 0x01000100  # LMCache's kv_rank: world size, rank, and both again, of 8 bits each
_MAX_DEADLINE_S = 120.0  # with a task's wait well below LMCache's 300 s
_BYTES = ("uint8", "int8")  # what hides a dtype
_MEDIA = ("vision", "audio", "image", "video")  # in the names of what a configuration says of them


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of a model's KV beside the keys and layouts of its objects."""

    name: str
    weights: str
    model_config: Mapping[str, Json]
    engine: str  # and its version
    arch: str
    attention_backend: str
    settings: Mapping[str, Json]
    server: tuple[int, int]  # its index, and how many the engine has
    place: str  # of the checkpoint
    # Their state before the fingerprint; None: the user named the weights.
    files: Mapping[str, Any] | None

    def changed(self) -> bool:
        """Say whether files of the checkpoint are others now: an engine may have loaded those since."""
        if self.files is None:
            return False
        try:
            return checkpoint_state(self.place) != self.files
        except ConfigError:  # it cannot be read just now: what comes back is looked at
            return False


class ObjectKind(NamedTuple):
    """Objects of one model that are alike but for their keys: what gets a namespace of its own."""

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
    config = StoreConfig.from_mapping(own)
    if not config.weights_fixed:
        raise ConfigError(
            "option 'weights_fixed': found false, expected true: LMCache does not tell when an engine "
            "changes its weights while it runs, so you promise that none does"
        )
    if config.deadline.max_s > _MAX_DEADLINE_S:
        raise ConfigError(
            f"option 'deadline_max_s': found {config.deadline.max_s:g}, expected {_MAX_DEADLINE_S:g} at "
            "most: LMCache's locks on its memory end by themselves"
        )
    for name, value in (("lora", "off"), ("weights_id", None)):
        if (found := getattr(config, name)) != value:
            raise ConfigError(f"option '{name}': found {found!r}, expected nothing beside 'models'")
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
    if strange := sorted(set(entry) - {*_REQUIRED, *_OPTIONAL}):
        raise ConfigError(f"{where}: found '{strange[0]}', expected one of the known names")
    for name, value in entry.items():
        if name not in ("settings", "server") and (not isinstance(value, str) or not value):
            raise ConfigError(f"{where}: '{name}' is {value!r}, expected text")
    server = entry["server"]
    if (
        not isinstance(server, Sequence)
        or [type(number) for number in server] != [int, int]
        or not 0 <= server[0] < server[1]
    ):
        raise ConfigError(
            f"{where}: 'server' is {server!r}, expected [index, count] of this server in the engine's "
            "'lmcache.mp.server_urls', [0, 1] for one server"
        )
    settings = entry["settings"]
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: 'settings' is {settings!r}, expected an object, {{}} for none")
    if settings.get("enable_lora"):
        raise ConfigError(
            f"{where}: found 'enable_lora', expected none: LMCache's keys do not hold the adapter"
        )


def store_options(config: StoreConfig, number: int) -> StoreConfig:
    """Return the options of the store with this number, without those that are the identity's."""
    health_file = config.health_file
    if health_file is not None:
        health_file = (
            health_file.replace("{rank}", str(number))
            if number == 0 or "{rank}" in health_file
            else None
        )
    return replace(config, weights_fixed=False, media_keys="checked", health_file=health_file)


def read_model(name: str, entry: Mapping[str, Any], config: StoreConfig) -> Model:
    """Read a model's checkpoint for its configuration and a fingerprint; raises ConfigError."""
    place = checkpoint_place(entry.get("checkpoint", name), entry.get("revision"))
    weights_id = entry.get("weights_id")
    files = None
    if weights_id is None and os.path.exists(place):
        files = checkpoint_state(place)
    weights = (
        f"named:{weights_id}"
        if weights_id is not None
        else weights_fingerprint(place, revision_commit=None)
    )
    model_config: dict[str, Any] = {}
    path = os.path.join(place, "config.json")
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                model_config = kv_config(json.load(file))
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: {str(error).partition(chr(10))[0]}") from None
    media = [key for key in model_config if any(word in key for word in _MEDIA)]
    if media and config.media_keys == "checked":
        raise ConfigError(
            f"option 'media_keys': found \"checked\" for a model with '{media[0]}', expected \"trusted\": "
            "LMCache's keys hold the engine's own names of media"
        )
    facts = {**{each: entry[each] for each in _REQUIRED}, "server": tuple(entry["server"])}
    return Model(
        name=name, weights=weights, model_config=model_config, place=place, files=files, **facts
    )


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
    shapes = ",".join("x".join(map(str, shape)) for shape in kind.shapes)
    first = kind.shapes[0]
    name = (
        os.path.basename(os.path.abspath(model.name)) if os.path.exists(model.name) else model.name
    )
    dtypes = "+".join(sorted(set(kind.dtypes)))
    return Identity(
        engine="lmcache",
        engine_version=version,
        arch=model.arch,
        model_name=name or "model",
        weights=model.weights,
        model_config=model.model_config,
        kv_cache_dtype=str(model.settings.get("kv_cache_dtype", dtypes)),
        model_dtype=str(model.settings.get("dtype", dtypes)),
        kv_cache_layout="lmcache-object",
        attention_backend=model.attention_backend,
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
            "server": model.server[0],
            "servers": model.server[1],
        },
        lora="off",
        extra={"computed_by": model.engine, "settings": dict(model.settings)},
    )


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
