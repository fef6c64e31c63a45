"""The differences of two identities in words, with the remedies.

Pure: `fskv.namespace.diff` finds the differences, this room knows what each field means to an operator. Every
field of an identity has an entry (tests/tools/test_diff.py holds that), so a new one cannot go unexplained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fskv import namespace
from fskv.namespace import Absent, FieldDifference, Identity, Json

_MAX_VALUE_CHARS = 30  # of a headline; the whole values stand below it
_MAX_EPOCH_CHARS = 100


# Why a field matters, and how to share nevertheless. Causes of other differences come before what follows.
MEANINGS: dict[str, str] = {
    "format": (
        "Readers of one format refuse the files of another. Run the same version of fskv on both."
    ),
    "tenant": (
        "Tenants are kept apart on purpose. Give both the same option `tenant`, or neither one."
    ),
    "engine": "Each engine lays KV out in its own way. They cannot share.",
    "engine_version": (
        "From one version to the next an engine may change how it lays KV out, hashes blocks or computes. "
        "Run the same version on both (how it was built, as in `+cpu`, does not matter)."
    ),
    "arch": (
        "Kernels of other architectures round differently and lay KV out differently. They cannot share; "
        "nodes of one architecture can."
    ),
    "model_name": (
        "The name says which model the KV is of. Start both with the same name; a local copy is called as "
        "its directory."
    ),
    "weights": (
        "KV of other weights is other KV, even if the name of the model is the same. Use the same revision, "
        "and get it in the same way (a hub name has a commit, a local copy a digest of its files); or vouch "
        "for it with the option `weights_id` on both."
    ),
    "epoch": (
        "The weights of one were updated while its engine ran, and KV of other weights is other KV. Engines "
        "that started with these weights do not use it. Engines share an epoch where its update names the "
        "same source (run and version, or checkpoint); a private epoch is of the engine that made it alone."
    ),
    "model_config": (
        "The configuration shapes KV (RoPE, quantisation, overrides, image processing). Use the same "
        "config.json, `--hf-overrides` and quantisation on both."
    ),
    "model_dtype": "Every value of the KV depends on it. Start both with the same `--dtype`.",
    "kv_cache_dtype": (
        "The bytes of the pages mean something else. Start both with the same `--kv-cache-dtype`."
    ),
    "attention_backend": (
        "Backends lay keys and values out differently inside a page. Start both with the same "
        "`--attention-backend`, if both GPUs have it."
    ),
    "kv_cache_layout": (
        "Heads and tokens lie in another order inside a page. Set the same VLLM_KV_CACHE_LAYOUT on both, or "
        "on neither."
    ),
    "canonical_format": (
        "One stores KV heads in files of their own, the other each rank's pages. Set the option "
        "`canonical_layout` on both, or on neither."
    ),
    "topology": (
        "A file holds the KV heads or layers of one rank, and these two cut the model differently. Use the "
        "same parallel sizes; or set `canonical_layout` to true on both, if the model allows it (tensor "
        "parallelism alone)."
    ),
    "model_runner": (
        "The runners of vLLM allocate and fill KV differently. Use the same one (VLLM_USE_V2_MODEL_RUNNER)."
    ),
    "blocks_per_chunk": (
        "Chunks of other lengths end at other tokens, so files of one are useless to the other. Set the "
        'option `hybrid_chunk_size` to the same number of tokens on both ("auto" depends on '
        "`--max-model-len` and on the tensor-parallel size)."
    ),
    "tokens_per_hash": (
        "Block hashes are taken over other numbers of tokens, so equal prompts have other keys. Start both "
        "with the same `--block-size`."
    ),
    "hash_algorithm": (
        "Equal prompts have other keys. Start both with the same `--prefix-caching-hash-algo`."
    ),
    "hash_seed": (
        "Block hashes begin with it, so equal prompts have other keys. Set PYTHONHASHSEED to the same value "
        "in the environment of both, or unset it on both."
    ),
    "groups": (
        "Layers, windows, block or page sizes differ, so the files have other contents or lengths. Usually "
        "follows from another difference; otherwise the same `--block-size`, `--max-model-len` and "
        "speculative decoding on both."
    ),
    "extra": (
        "Settings of the engine change what the pages hold. Start both with the same loader, speculative "
        "decoding and pipeline partition."
    ),
}

# The same of known parts of `extra`.
_EXTRA: dict[str, str] = {
    "page_layouts": (
        "On CPUs the engine lays keys and values out for the instruction set of the node. They cannot "
        "share; nodes with the same instruction set can."
    ),
    "speculative": (
        "A draft model has KV of its own in the same groups. Use the same `--speculative-config` on both, "
        "or none."
    ),
    "load_format": "The weights come out of another loader. Use the same `--load-format`.",
    "model_class": (
        "Another implementation rounds otherwise, or computes something else. Use the same `--model-impl`, "
        "plug-ins and class overrides on both."
    ),
    "code": (
        "Source code that neither vLLM nor transformers brings differs. Use one version of the checkpoint's "
        "code, or of the plug-in, on both."
    ),
    "settings": (
        "These may quantise, choose other kernels, or read other files. Start both with the same settings; "
        "docs/sharing.md says what counts."
    ),
    "pipeline_partition": (
        "The stages hold other layers. Set the same VLLM_PP_LAYER_PARTITION on both."
    ),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why two identities do not share: a field, or a part of `extra`."""

    field: str
    meaning: str
    brief: str  # for the headline
    differences: tuple[FieldDifference, ...]


def epoch_words(identity: Identity) -> str:
    """Name an epoch: `private`, or the source of each part, as `model run r7 version 42`; "" for none."""
    if identity.is_private:
        return "private"
    words = []
    for part, source in (identity.epoch or {}).items():
        facts = source.items() if isinstance(source, dict) else [("", source)]
        words += [part, *(f"{name} {_value(value)}".strip() for name, value in facts)]
    return _clipped(" ".join(words), _MAX_EPOCH_CHARS)


def reasons(a: Identity, b: Identity) -> list[Reason]:
    """List why two identities do not share, causes first; empty if they are one namespace."""
    found: dict[str, list[FieldDifference]] = {}
    for difference in _parted(namespace.diff(a, b)):
        found.setdefault(_place(difference.path), []).append(difference)
    order = {field: at for at, field in enumerate(MEANINGS)}
    places = sorted(found, key=lambda place: (order[place.partition(".")[0]], place))
    whys = [_reason(place, found[place]) for place in places]
    epochs = f"epoch {epoch_words(a) or 'none'} / {epoch_words(b) or 'none'}"
    return [replace(why, brief=epochs) if why.field == "epoch" else why for why in whys]


def _parted(differences: Iterable[FieldDifference]) -> Iterator[FieldDifference]:
    """Take `extra` apart where only one side has any."""
    for each in differences:
        whole = each.a if isinstance(each.b, Absent) else each.b
        if each.path == "extra" and isinstance(whole, dict):
            for part, value in whole.items():
                sides = (value, each.b) if isinstance(each.b, Absent) else (each.a, value)
                yield FieldDifference(f"extra.{part}", *sides)
        else:
            yield each


def headline(found: Iterable[Reason]) -> str:
    """Say it in one sentence."""
    return "these two do not share because: " + "; ".join(reason.brief for reason in found)


def _place(path: str) -> str:
    """Return the field that a path is in; of `extra` the part."""
    parts = re.match(r"([A-Za-z_]+)(?:\.([A-Za-z0-9_-]+))?", path)
    assert parts is not None, path
    field, part = parts.groups()
    return f"extra.{part}" if field == "extra" and part else field


def _reason(place: str, differences: list[FieldDifference]) -> Reason:
    field, _, part = place.partition(".")
    meaning = _EXTRA.get(part, MEANINGS[field])
    paths = [each.path.removeprefix(place).lstrip(".") for each in differences]
    values = differences[0][1:]
    if len(differences) == 1 and not any(isinstance(value, dict | list) for value in values):
        brief = f"{paths[0]} {' / '.join(map(_value, values))}".strip()
    else:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        brief = f"({', '.join(paths[:3])}{more})" if any(paths) else ""
    label = (part or field).replace("_", " ")
    return Reason(place, meaning, f"{label} {brief}".strip(), tuple(differences))


def _value(value: Json | Absent) -> str:
    if isinstance(value, Absent):
        return "none"
    text = value if isinstance(value, str) else namespace.canonical_json(value).decode("ascii")
    return _clipped(text, _MAX_VALUE_CHARS)


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
