"""The identity of KV, which interchangeable KV has in common, and the names that follow from it.

The digest of an `Identity` names the directory of the chunks. Two engines share a directory only if every
field is equal. This module opens no file: `fskv.root.root` writes and compares `namespace.json`, `engines/`
derives the fields from a live engine.

Invariants: every dataclass field of `Identity` enters the digest; a field with the default None enters only
when it is set, so that a later format-1 field does not rename old directories. Equality, digest and `diff`
are one relation (canonical JSON): 1, 1.0 and true are three values.

Pure, and safe on any thread. Manifests and file names are untrusted input.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, TypeAlias, cast

import xxhash

from fskv.errors import ConfigError, IdentityMismatch

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

FORMAT = 1

MAX_TENANT = 200  # characters

_MAX_DEPTH = 32  # HF configs nest 3-4 deep; a manifest deeper than this is an attack on the stack
_MAX_INT = 1 << 256  # int -> str is refused by Python above 4300 digits; no config needs this
_MAX_MODEL_NBYTES = 120  # + "@" + 16 hex: well under the 255-byte limit of a name
_MAX_ARCH_NBYTES = 40
_MAX_INDEX = 999_999  # group and rank in a chunk name: at most 6 digits
# The limits of a chunk file's name and header: readers refuse all else (docs/format.md).
_BOUNDS = {
    "blocks_per_chunk": (1, 1 << 31),
    "group_idx": (0, _MAX_INDEX),
    "page_nbytes": (1, (1 << 40) - 1),
}


# --- identity ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """One KV group: layers that share a block table.

    `page_nbytes` are the un-padded bytes of one block of each tensor, `window_tokens` is None
    for attention that sees everything.
    """

    group_idx: int
    kind: str
    window_tokens: int | None
    tokens_per_block: int
    page_nbytes: tuple[int, ...]
    layer_names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_fields(self, "group")


def layout_digest(group: GroupIdentity, blocks_per_chunk: int, inside: Json = None) -> bytes:
    """Return 16 bytes over everything beyond the namespace that must agree for pages to be interchangeable.

    `inside` describes the layout inside of pages where the namespace lacks it: with pipeline stages.
    """
    facts: dict[str, Json] = {
        "group": group.group_idx,
        "kind": group.kind,
        "tokens_per_block": group.tokens_per_block,
        "blocks": blocks_per_chunk,
        "pages": list(group.page_nbytes),
        "layers": list(group.layer_names),
    }
    if inside is not None:
        facts["inside"] = inside
    return hashlib.sha256(canonical_json(facts)).digest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class Identity:
    """Everything that must be equal for KV to be interchangeable.

    Construction copies and checks each field; ConfigError names the first that is wrong.
    The mappings are private copies: read them, do not write to them.
    """

    format: int = FORMAT
    engine: str  # "vllm"
    engine_version: str  # "0.32.1"; of a development build all of it
    arch: str  # "sm_90", "gfx942", "cpu-x86_64"
    model_name: str
    weights: str  # fskv.identity.fingerprint.weights_fingerprint, or the option weights_id
    model_config: Mapping[str, Json]  # what shapes KV: RoPE, hf_overrides, quantisation
    kv_cache_dtype: str  # as the worker resolved it, never "auto"
    model_dtype: str
    kv_cache_layout: str
    attention_backend: str
    tokens_per_hash: int
    blocks_per_chunk: int
    groups: tuple[GroupIdentity, ...]
    hash_algorithm: str
    hash_seed: str
    topology: Mapping[str, int]  # tp, pp, pcp, dcp sizes

    # Optional: in the digest only when set. Defaults must be None.
    canonical_format: str | None = None
    tenant: str | None = None
    model_runner: str | None = None
    extra: Mapping[str, Json] | None = None  # an empty mapping is the same as None
    # "aes-256-gcm/" and the id of the key that hides chunks' names; None: files are in clear.
    encryption: str | None = None
    # The weights since an update of the running engine; None: those of its start. {"private": <32 hex
    # digits>} is known to one engine alone; else the sources of the "model" and of the "draft".
    epoch: Mapping[str, Json] | None = None

    def __post_init__(self) -> None:
        _check_fields(self, "identity")
        for name in ("extra", "epoch"):
            if not getattr(self, name):
                object.__setattr__(self, name, None)
        if self.tenant is not None and len(self.tenant) > MAX_TENANT:
            raise _wrong("identity.tenant", f"at most {MAX_TENANT} characters", self.tenant)
        order = [group.group_idx for group in self.groups]
        if order != sorted(set(order)):
            raise _wrong("identity.groups", "ascending, distinct group_idx", order)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the canonical JSON: 32 bytes, the namespace digest of every chunk header."""
        return hashlib.sha256(canonical_json(self.to_manifest())).digest()

    @property
    def is_private(self) -> bool:
        """Whether only the engine that made the namespace can ever use it."""
        return bool(self.epoch and "private" in self.epoch)

    @property
    def digest16(self) -> str:
        """The first 16 hex digits of the digest: the end of the directory's name."""
        return self.digest.hex()[:16]

    def to_manifest(self) -> dict[str, Json]:
        """Return the fields as a fresh JSON tree, keys sorted, unset optional fields left out."""
        manifest: dict[str, Json] = {}
        for name in sorted(field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_FIELDS:
                continue
            if name == "groups":
                value = [{f.name: getattr(g, f.name) for f in fields(g)} for g in value]
            manifest[name] = _json(value, name)
        return manifest

    @classmethod
    def from_manifest(cls, manifest: object) -> Identity:
        """Rebuild the identity that `to_manifest` described.

        The manifest is untrusted: whatever is wrong with it raises IdentityMismatch, which
        names the field. A field unknown to this version is wrong too: it can not be compared.
        """
        if not isinstance(manifest, Mapping):
            raise IdentityMismatch(f"manifest: expected a mapping, found {_show(manifest)}")
        found = manifest.get("format")
        if type(found) is not int or found != FORMAT:
            raise IdentityMismatch(f"manifest: format is {_show(found)}, this fskv reads {FORMAT}")
        required = {f.name for f in fields(cls)} - _OPTIONAL_FIELDS
        if wrong := _unfit_keys(manifest, required, _OPTIONAL_FIELDS):
            raise IdentityMismatch(f"manifest: {wrong}")
        if nulls := sorted(n for n in _OPTIONAL_FIELDS & manifest.keys() if not manifest[n]):
            raise IdentityMismatch(f"manifest: {nulls[0]} is present but empty")
        try:
            values = {**manifest, "groups": _groups_from_manifest(manifest["groups"])}
            return cls(**values)
        except ConfigError as error:
            raise IdentityMismatch(f"manifest: {error}") from error


_OPTIONAL_FIELDS = frozenset(f.name for f in fields(Identity) if f.default is None)


def canonical_json(tree: Json) -> bytes:
    """Serialise with sorted keys, no white space, ASCII only and no NaN: one text per value."""
    return json.dumps(
        tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def parse_json(content: bytes | str) -> Json:
    """Parse strictly; ValueError, in a few words, for what two readers could understand differently."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        parsed: Json = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"no JSON: {error.msg}: {where}") from None
    return parsed


def _distinct(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key occurs twice")
    return tree


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _groups_from_manifest(value: object) -> tuple[GroupIdentity, ...]:
    if not isinstance(value, list):
        raise _wrong("groups", "a list", value)
    required = {f.name for f in fields(GroupIdentity)}
    groups = []
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise _wrong(f"groups[{i}]", "a mapping", item)
        if wrong := _unfit_keys(item, required, frozenset()):
            raise ConfigError(f"groups[{i}]: {wrong}")
        try:
            groups.append(GroupIdentity(**item))
        except ConfigError as error:
            raise ConfigError(f"groups[{i}]: {error}") from error
    return tuple(groups)


def _unfit_keys(
    found: Mapping[object, object], required: set[str], optional: frozenset[str]
) -> str | None:
    """Say which key is missing or unknown, or return None."""
    if missing := sorted(required - found.keys()):
        return f"field {missing[0]} is missing"
    if unknown := [key for key in found if key not in required and key not in optional]:
        return f"field {_show(unknown[0])} is unknown to this version of fskv"
    return None


# --- checks: one per annotation, shared by the constructor and the manifest reader ------


def _check_fields(instance: GroupIdentity | Identity, where: str) -> None:
    for field in fields(instance):
        # Annotations are text here (PEP 563); one without a check is our bug: KeyError at once.
        check = _CHECKS[cast("str", field.type)]
        value = check(getattr(instance, field.name), f"{where}.{field.name}")
        if (bounds := _BOUNDS.get(field.name)) is not None:
            for number in value if isinstance(value, tuple) else (value,):
                if not bounds[0] <= cast("int", number) <= bounds[1]:
                    raise _wrong(f"{where}.{field.name}", "{} to {}".format(*bounds), number)
        object.__setattr__(instance, field.name, value)


def _wrong(where: str, want: str, found: object) -> ConfigError:
    return ConfigError(f"{where}: expected {want}, found {_show(found)}")


def _show(value: object) -> str:
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _text(value: object, where: str) -> str:
    # Empty is never meant: a fingerprint or tenant that was not found must not be an identity.
    if not isinstance(value, str) or not value:
        raise _wrong(where, "non-empty text", value)
    return _unicode(value, where)


def _unicode(text: str, where: str) -> str:
    # Surrogates come from names of files that are no UTF-8; in JSON two of them would become one character.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "text in Unicode", text) from None
    return str.__str__(text)  # an Enum that is a str becomes its value


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_INT:
        raise _wrong(where, "an integer >= 0", value)
    return int(value)


def _each(check: Callable[[object, str], object]) -> Callable[[object, str], object]:
    def check_each(value: object, where: str) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise _wrong(where, "a sequence", value)
        return tuple(check(item, f"{where}[{i}]") for i, item in enumerate(value))

    return check_each


def _or_none(check: Callable[[object, str], object]) -> Callable[[object, str], object]:
    return lambda value, where: None if value is None else check(value, where)


def _group(value: object, where: str) -> GroupIdentity:
    if not isinstance(value, GroupIdentity):
        raise _wrong(where, "a GroupIdentity", value)
    return value


def _counts(value: object, where: str) -> dict[str, int]:
    tree = _json_map(value, where)
    return {key: _count(item, _join(where, key)) for key, item in tree.items()}


def _json_map(value: object, where: str) -> dict[str, Json]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "a mapping", value)
    return cast("dict[str, Json]", _json(value, where))


def _json(value: object, where: str, depth: int = 0) -> Json:
    """Copy `value` as plain JSON types: sequences become lists, integer keys become text."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where}: nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _unicode(value, where)
    if isinstance(value, int):
        if abs(value) >= _MAX_INT:
            raise _wrong(where, "an integer below 2**256", "a larger one")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _wrong(where, "a finite number", value)
        return float(value)
    if isinstance(value, list | tuple):
        return [_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        tree: dict[str, Json] = {}
        for key, item in value.items():
            # HF configs hold maps with integer keys (id2label); their JSON files hold text.
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise _wrong(where, "text keys", key)
            name = _unicode(key, where) if isinstance(key, str) else str(int(key))
            if name in tree:
                raise ConfigError(f"{where}: key {_show(name)} occurs twice")
            tree[name] = _json(item, _join(where, name), depth + 1)
        return dict(sorted(tree.items()))
    raise _wrong(where, "a JSON value", value)


_CHECKS: dict[str, Callable[[object, str], object]] = {
    "int": _count,
    "int | None": _or_none(_count),
    "str": _text,
    "str | None": _or_none(_text),
    "tuple[int, ...]": _each(_count),
    "tuple[str, ...]": _each(_text),
    "tuple[GroupIdentity, ...]": _each(_group),
    "Mapping[str, int]": _counts,
    "Mapping[str, Json]": _json_map,
    "Mapping[str, Json] | None": _or_none(_json_map),
}


# --- why do these two not share? --------------------------------------------------------


class Absent(Enum):
    """Stands for a value that one side does not have; null is a value."""

    ABSENT = "absent"


class FieldDifference(NamedTuple):
    """One place where two identities differ, as a dotted path into the manifest."""

    path: str
    a: Json | Absent
    b: Json | Absent


def diff(a: Identity, b: Identity) -> list[FieldDifference]:
    """List where two identities differ, down to the leaves; empty exactly if digests are equal."""
    return list(_differences("", a.to_manifest(), b.to_manifest()))


def explain(differences: list[FieldDifference], a: str = "a", b: str = "b") -> list[str]:
    """Say each difference in one printable line; `a` and `b` name the two sides."""
    lines = []
    for difference in differences:
        left, right = _clip(_render(difference.a), _render(difference.b))
        lines.append(f"{difference.path}: {left} in {a}, {right} in {b}")
    return lines


def _differences(path: str, a: Json | Absent, b: Json | Absent) -> Iterator[FieldDifference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            sides = a.get(key, Absent.ABSENT), b.get(key, Absent.ABSENT)
            yield from _differences(_join(path, key), *sides)
    elif isinstance(a, list) and isinstance(b, list) and _itemwise(a, b):
        for i, sides in enumerate(zip_longest(a, b, fillvalue=Absent.ABSENT)):
            yield from _differences(f"{path}[{i}]", *sides)
    elif _render(a) != _render(b):
        yield FieldDifference(path, a, b)


def _itemwise(a: list[Json], b: list[Json]) -> bool:
    # One missing layer name would shift all that follow: such lists are shown whole.
    return len(a) == len(b) or any(isinstance(item, dict) for item in (*a, *b))


def _join(path: str, key: str) -> str:
    plain = re.fullmatch(r"[A-Za-z0-9_-]+", key) is not None
    return ".".join(filter(None, (path, key if plain else ascii(key))))


def _render(value: Json | Absent) -> str:
    if isinstance(value, Absent):
        return "absent"
    return canonical_json(value).decode("ascii")  # printable


def _clip(a: str, b: str, width: int = 100) -> tuple[str, str]:
    """Shorten two long texts to the window around their first difference."""
    if max(len(a), len(b)) <= width:
        return a, b
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    start = max(0, (min(len(a), len(b)) if first is None else first) - width // 4)
    return _window(a, start, width), _window(b, start, width)


def _window(text: str, start: int, width: int) -> str:
    end = start + width
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


# --- names on disk ----------------------------------------------------------------------

CHUNK_DIR = "chunks"  # of a namespace


class ChunkName(NamedTuple):
    """The facts in a chunk file's path."""

    name: str
    group_idx: int
    rank: int | None


def directory(identity: Identity) -> str:
    """Name the namespace's directory relative to the root: `<arch>/<model>@<digest16>`."""
    arch = sanitise(identity.arch, _MAX_ARCH_NBYTES, "unknown")
    model = sanitise(_readable_model(identity.model_name), _MAX_MODEL_NBYTES, "model")
    return f"{arch}/{model}@{identity.digest16}"


def sanitise(text: str, limit: int, fallback: str) -> str:
    """Reduce `text` to [A-Za-z0-9._-], no leading dot or dash, its last `limit` bytes.

    Not injective: where two texts must not meet, a digest stands next to the name.
    """
    # Accents go, the letter under them stays; the rest of Unicode becomes "_". By data that are the same in
    # every Python: with those of its own version one identity would have two directories.
    data = unicodedata.ucd_3_2_0
    decomposed = data.normalize("NFKD", text[-4 * limit :])
    bare = "".join(char for char in decomposed if not data.combining(char))
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", bare)[-limit:]
    return safe.lstrip("._-").rstrip("_") or fallback


def _readable_model(model_name: str) -> str:
    parts = [part for part in re.split(r"[/\\]", model_name) if part.strip(".")]
    # A Hugging Face cache path ends in models--org--name/snapshots/<commit>.
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--")
    return "--".join(parts[-2:])


def chunk_name(key_hash: bytes) -> str:
    """Hash the engine's key to 32 hex digits; the header holds the full key against collisions."""
    return xxhash.xxh3_128_hexdigest(key_hash)


def chunk_path(key_hash: bytes, group_idx: int, rank: int | None) -> str:
    """Name a chunk's file relative to the namespace; `rank` is None where all ranks share it."""
    assert 0 <= group_idx <= _MAX_INDEX, group_idx
    assert rank is None or 0 <= rank <= _MAX_INDEX, rank
    name = chunk_name(key_hash)
    return path_of_file(chunk_file(name, group_idx, rank))


def chunk_file(name: str, group_idx: int, rank: int | None) -> str:
    """Name a chunk's file in its directory; the arguments are those of a `ChunkName`."""
    suffix = "" if rank is None else f".r{rank}"
    return f"{name}.g{group_idx}{suffix}.kv"


def path_of_file(file: str) -> str:
    """Return where a chunk file of that name has to stand, relative to its namespace."""
    # 4096 directories in one level: two levels of 256 wrote 3-5x slower at 64 KiB (measured).
    return f"{CHUNK_DIR}/{file[:3]}/{file}"


_INDEX = r"(0|[1-9][0-9]{0,5})"
_CHUNK_FILE = re.compile(rf"([0-9a-f]{{32}})\.g{_INDEX}(?:\.r{_INDEX})?\.kv")


def parse_chunk_path(path: str) -> ChunkName | None:
    """Parse the output of `chunk_path`; None for anything else, which is then a foreign file."""
    file = path.rpartition("/")[2]
    return parse_chunk_file(file) if path == path_of_file(file) else None


def parse_chunk_file(file: str) -> ChunkName | None:
    """Parse the output of `chunk_file`; None for anything else."""
    match = _CHUNK_FILE.fullmatch(file)
    if match is None:
        return None
    name, group_idx, rank = match.groups()
    return ChunkName(name, int(group_idx), None if rank is None else int(rank))
