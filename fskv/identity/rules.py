"""The rule for settings: each one that is set counts, but those that a list names as harmless.

A setting that no list names splits by itself, also one of a later version. So two engines may have namespaces
of their own where they could share, and never one where they must not. Each adapter lists what is harmless of
its engine. The libraries that all engines stand on are here.

A manifest is read by many. A number enters it as it is, other values as a digest beside their name. Names of
secrets do not enter it, and nor do their values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

from fskv.errors import RestError
from fskv.namespace import Json, canonical_json

_MAX_DEPTH = 16
_MAX_FILES, _MAX_NBYTES = 10_000, 256 << 20  # of what a setting's path leads to
_CHUNK_NBYTES = 1 << 20

# How variables begin that libraries below an engine read: which kernels, of which precision.
_LIBRARIES = (
    *("AITER_", "ATEN_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "DG_", "DNNL_", "FLA_", "FLASHINFER_"),
    *("FLASH_ATTENTION_", "FORCE_NUM_KV_SPLITS", "GDN_", "HIPBLASLT_", "HIP_ONLINE_TUNING"),
    *("INKLING_", "MIOPEN_", "NVIDIA_TF32_OVERRIDE", "ONEDNN_", "ROCBLAS_", "ROCM_QUICK_REDUCE_"),
    *("TORCH_ALLOW_TF32_", "TORCH_BLAS_", "TRITON_", "TRTLLM_", "USE_DEFAULT_FLA_NORM"),
    *("USE_FLAGOS", "XHS_VIDEO_", "XPU_USE_TRITON_KERNEL"),
)
# Of those: where caches and compilers are, what is logged, what Kubernetes sets for a service of such a name.
_HARMLESS_OF_LIBRARIES = re.compile(
    r"AITER_(LOG_|JIT_DIR$)|CUDNN_(LOG|PATH$|LIBRARY$|INCLUDE)|DG_(CACHE_DIR|JIT_(CACHE_DIR|DEBUG))"
    r"|(DNNL|ONEDNN)_VERBOSE|FLA_(CI_ENV|CACHE)"
    r"|FLASHINFER_(WORKSPACE_BASE|CACHE_DIR|CUBIN|CUDA_ARCH_LIST|LOG|DISABLE_VERSION_CHECK)"
    r"|MIOPEN_(USER_DB_PATH|CUSTOM_CACHE_DIR|LOG_|ENABLE_LOGGING)|ROCBLAS_(LOG_|TENSILE_LIBPATH$|LAYER$)"
    r"|TRITON_(HOME$|CACHE_|DUMP_|OVERRIDE_DIR$|PRINT_|SERVER_|\w+_PATH$)|TRTLLM_ENABLE_PDL$"
    r"|\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))|\w+_PORT$"
)
_SECRET = re.compile(r"(^|[^a-z])(keys?|secrets?|token|passwords?|credentials?)$", re.IGNORECASE)
# Of an item inside of a value, where "key" and "token" are usual words.
_SECRET_INSIDE = re.compile(
    r"(api|access|secret|private|auth)_?key|secret|password|credential|(auth|access|hf|api)_?token",
    re.IGNORECASE,
)
_LIKE_SECRET = re.compile(r"(^|[^a-z])(key|secret|token|password)([^a-z]|$)", re.IGNORECASE)


class Names:
    """Names of settings in groups: `of` gives each group one reason why its names are harmless."""

    def __init__(self, names: Collection[str]) -> None:
        self._exact = frozenset(name for name in names if not name.endswith("*"))
        self._starts = tuple(name[:-1] for name in names if name.endswith("*"))

    @classmethod
    def of(cls, groups: Mapping[str, Mapping[str, str]]) -> Names:
        """Read {reason: {part: names}}; names are in one text, "*" ends what stands for all that begin so."""
        return cls(
            [
                f"{part}.{name}".lstrip(".")
                for parts in groups.values()
                for part, names in parts.items()
                for name in names.split()
            ]
        )

    def __contains__(self, name: str) -> bool:
        return name in self._exact or name.startswith(self._starts)


def settings(
    values: Mapping[str, Any], defaults: Mapping[str, Any], harmless: Names
) -> dict[str, Json]:
    """Return what counts of an engine's settings, as a tree by the parts of their dotted names.

    `values` are as the engine has resolved them. A setting counts where it is not harmless and not its
    default. Raises RestError, with its name, for one whose value cannot be compared.
    """
    found: dict[str, Json] = {}
    for name, value in sorted(values.items()):
        if name in harmless or (name in defaults and _same(value, defaults[name], name)):
            continue
        if _is_secret(name, value):
            continue
        _put(found, name, shown(value, name))
    return found


def _put(tree: dict[str, Json], name: str, value: Json) -> None:
    part, dot, rest = name.partition(".")
    inner = tree.setdefault(part, {}) if dot else None
    if isinstance(inner, dict):
        _put(inner, rest, value)
    else:
        tree[name] = value


def environment(
    variables: Mapping[str, str], known: Collection[str], harmless: Names
) -> dict[str, Json]:
    """Return what counts of the variables that are set, to their default too: some then choose other kernels.

    `known` are the engine's own, by name or by how they begin with a "*" behind.
    """
    own = Names(known)
    return {
        name: shown(_number(value), name)
        for name, value in sorted(variables.items())
        if name in own or name.startswith(_LIBRARIES)
        if name not in harmless and not _HARMLESS_OF_LIBRARIES.match(name)
        if not _is_secret(name, _number(value))
    }


def fields_of(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values and the defaults of a dataclass and of those inside it, by dotted names."""
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, value, default in _leaves(config, ""):
        values[name] = value
        if default is not dataclasses.MISSING:
            defaults[name] = default
    return values, defaults


def _leaves(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        name = f"{prefix}{field.name}"
        if _is_part(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value, _default(field)


def _is_part(value: Any) -> bool:
    """Whether a value only holds fields. A model's configuration is a dataclass too, with a way to JSON."""
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_dataclass and not hasattr(value, "to_dict")


def _default(field: dataclasses.Field[Any]) -> Any:
    given: Any = field.default
    factory: Any = field.default_factory
    if hasattr(given, "default_factory"):  # pydantic's own
        given, factory = given.default, given.default_factory or dataclasses.MISSING
    if factory is not dataclasses.MISSING:
        return factory()
    is_missing = type(given).__name__ == "PydanticUndefinedType"
    return dataclasses.MISSING if is_missing else given


def _same(value: Any, default: Any, name: str) -> bool:
    if value is default:
        return True
    return canonical_json(normal(value, name)) == canonical_json(normal(default, name))


def _is_secret(name: str, value: Any) -> bool:
    """Whether a text is a secret, by its name. Raises RestError where it may be one or not."""
    if value is None or isinstance(value, bool | int | float):
        return False
    own = name.rpartition(".")[2]
    if not _SECRET.search(own) and _LIKE_SECRET.search(own):
        raise RestError(
            f"setting '{name}': fskv does not know whether it changes KV, and its name is one of secrets, "
            "which fskv does not write down; expected it unset"
        )
    return bool(_SECRET.search(own))


def _number(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


def shown(value: Any, name: str) -> Json:
    """Return what a manifest says of a value: words of the engine's own code and numbers as they are."""
    plain = normal(value, name)
    if plain is None or isinstance(plain, bool | int | float) or _is_word(value):
        return plain
    return f"sha256:{hashlib.sha256(canonical_json(plain)).hexdigest()[:16]}"


def _is_word(value: Any) -> bool:
    return isinstance(value, Enum) or type(value).__module__ == "torch"


def normal(value: Any, name: str, depth: int = 0) -> Json:
    """Return a value as JSON that is the same in every process, and a path as what lies there.

    Raises RestError, with the setting's name, where there is no such text: an object of which only an address
    in memory is known, a file that cannot be read.
    """
    if depth > _MAX_DEPTH:
        raise _unknown(value, name)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str | os.PathLike):
        return _text(os.fspath(value), name)
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        named = {str(key): item for key, item in value.items()}
        kept = {key: item for key, item in named.items() if not _SECRET_INSIDE.search(key)}
        return {key: normal(item, name, depth + 1) for key, item in sorted(kept.items())}
    if isinstance(value, set | frozenset):
        return sorted((normal(item, name, depth + 1) for item in value), key=canonical_json)
    if isinstance(value, list | tuple):
        return [normal(item, name, depth + 1) for item in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        where = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        if "<" in where:  # made inside of a function: another one may have the name
            raise _unknown(value, name)
        return where
    inner = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "__dict__", None)
    if not inner:
        raise _unknown(value, name)
    return normal(inner, name, depth + 1)


def _text(text: str, name: str) -> str:
    if "/" not in text or not os.path.exists(text):
        return text
    digest = hashlib.sha256()
    left = [_MAX_FILES, _MAX_NBYTES]
    try:
        for path in _files(text):
            digest.update(f"{os.path.relpath(path, text)}\0".encode(errors="surrogateescape"))
            left[0] -= 1
            with open(path, "rb") as file:
                while piece := file.read(_CHUNK_NBYTES):
                    left[1] -= len(piece)
                    digest.update(piece)
                    if min(left) < 0:
                        raise RestError(
                            f"setting '{name}': {text} has more than fskv reads to tell it from others; "
                            "expected a file or a small directory"
                        )
    except OSError as error:
        raise RestError(f"setting '{name}': {text}: {error.strerror or error}") from None
    return f"content:{digest.hexdigest()[:16]}"


def _files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    if not os.path.isdir(path):
        raise OSError(f"{path} is neither a file nor a directory")
    for directory, inner, names in os.walk(path):
        inner.sort()
        yield from (os.path.join(directory, name) for name in sorted(names))


def _unknown(value: Any, name: str) -> RestError:
    return RestError(
        f"setting '{name}': found {type(value).__name__}, expected text, numbers, lists or mappings: fskv "
        "cannot tell it from another one"
    )
