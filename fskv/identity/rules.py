"""The rule for settings: each setting enters the identity, except those on a list of harmless ones.

A setting without an entry splits namespaces, also one of a later version. So two engines may fail to share,
and never share wrongly. Each adapter lists the harmless settings of its engine; this module lists those of
common libraries.

Many users can read a manifest. A number enters it as it is, another value as a digest beside its name. A
secret stays out. A setting with a name like a secret's enters as a digest without the name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

from fskv.errors import RestError
from fskv.namespace import Json, canonical_json

_MAX_DEPTH = 16
_MAX_ITEMS = 100_000  # of one value
_MAX_INT = 1 << 64
_MAX_FILES, _MAX_NBYTES = 10_000, 256 << 20  # of what a setting's path leads to
_CHUNK_NBYTES = 1 << 20

# How variables begin that libraries below an engine read: which kernels, of which precision.
_LIBRARIES = (
    *("AITER_", "ATEN_", "B12X_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "DG_", "DNNL_", "FLA_"),
    *("FLASHINFER_", "FLASH_ATTENTION_", "FLYDSL_", "FORCE_NUM_KV_SPLITS", "GDN_", "HIPBLASLT_"),
    *("HIP_ONLINE_TUNING", "INKLING_", "LAMPORT_", "MIOPEN_", "NVIDIA_TF32_OVERRIDE", "ONEDNN_"),
    *("PT_HPU_", "ROCBLAS_", "ROCM_QUICK_REDUCE_", "TENSILE_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_"),
    *("TRITON_", "TRTLLM_", "USE_DEFAULT_FLA_NORM", "USE_FLAGOS", "XHS_VIDEO_"),
    "XPU_USE_TRITON_KERNEL",
)
# Kubernetes sets these for a service, and so for one that is called as an engine or a library.
_OF_A_SERVICE = re.compile(r"\w+_SERVICE_(HOST|PORT)\w*|\w+_PORT_\d+_(TCP|UDP)\w*")
# Of the libraries' own: places, versions, compilers, logs, debugging, servers of that name.
_HARMLESS_OF_LIBRARIES = re.compile(
    r"\w+_(DIR|HOME|ROOT|\w*PATH|URL|HOST|PORT|VERSION|VERBOSE|NVCC\w*|ARCH|ARCHS|REBUILD)$"
    r"|\w+_LOG(GING|LEVEL|INFO|DEST)?(_\w+)?$"
    r"|DG_(JIT_|PRINT_)\w+|FLA_(CI_ENV|CACHE\w*)"
    r"|FLASHINFER_(WORKSPACE_BASE|CUBIN\w*|CUDA_ARCH_LIST|LOG\w*|DISABLE_VERSION_CHECK|EXTRA_\w*FLAGS|JIT_\w+)"
    r"|MIOPEN_(FIND_MODE|DISABLE_CACHE)|ROCBLAS_LAYER$|TRTLLM_ENABLE_PDL$"
    r"|TRITON_(CACHE_|DUMP_|PRINT_|SERVER_|MODEL_|INFERENCE_|BUILD_|KERNEL_DUMP)\w*"
    r"|TRITON_(DEBUG|ALWAYS_COMPILE)$"
)
# A text of such a name is a secret ...
_SECRET = re.compile(
    r"(api|access|auth|hf|hub|secret|private|bearer|session|encryption)[_-]?(key|token)|secret|passw"
    r"|credential",
    re.IGNORECASE,
)
# ... and of such a name it may be one.
_LIKE_SECRET = re.compile(r"(^|[^a-z])(keys?|token)([^a-z]|$)", re.IGNORECASE)
# The same of an item inside of a value.
_SECRET_INSIDE = re.compile(
    rf"{_SECRET.pattern}|auth|token|pwd|bearer|cookie|header|(^|[^a-z])key$", re.IGNORECASE
)
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]*@")


class Names:
    """The names of harmless settings in groups; each group has one reason why it is harmless."""

    def __init__(self, names: Collection[str]) -> None:
        self._exact = frozenset(name for name in names if not name.endswith("*"))
        self._starts = tuple(name[:-1] for name in names if name.endswith("*"))

    @classmethod
    def of(cls, groups: Mapping[str, Mapping[str, str]]) -> Names:
        """Read {reason: {part: names}}; the names are in one text, and a final "*" stands for any end."""
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
    """Return the settings of an engine that count, as a tree by the parts of their dotted names.

    `values` are as the engine has resolved them. A setting counts where it is not harmless and not its
    default. Raises RestError, with its name, for one whose value cannot be compared.
    """
    found: dict[str, Json] = {}
    for name, value in sorted(values.items()):
        if name in harmless:
            continue
        with _named(name):
            if name not in defaults or not _same(value, defaults[name], name):
                _tell(found, name, value)
    return found


def environment(
    variables: Mapping[str, str], known: Collection[str], harmless: Names
) -> dict[str, Json]:
    """Return the variables that count and are set, also to their default: some then choose other kernels.

    `known` are the engine's own, by name or by how they begin with a "*" behind. Raises RestError.
    """
    own, found = Names(known), dict[str, Json]()
    for name, value in sorted(variables.items()):
        if name in harmless or _OF_A_SERVICE.match(name):
            continue
        of_library = name.startswith(_LIBRARIES) and not _HARMLESS_OF_LIBRARIES.match(name)
        if name in own or of_library:
            with _named(name):
                _tell(found, name, _number(value))
    return found


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Make a RestError of whatever a value raises: it may be of any class."""
    try:
        yield
    except RestError:
        raise
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise RestError(
            f"setting {name!a}: its value cannot be read ({type(error).__name__}: {line:.100})"
        ) from error


def _tell(found: dict[str, Json], name: str, value: Any) -> None:
    """Write a setting down: without its name where it may be a secret, and not at all where it is one."""
    own = name.rpartition(".")[2]
    name.encode("ascii")  # raises for a name that is no text
    if isinstance(value, str | bytes | os.PathLike) and _SECRET.search(own):
        return
    if isinstance(value, str | bytes | os.PathLike) and _LIKE_SECRET.search(own):
        unnamed = found.setdefault("unnamed", [])
        assert isinstance(unnamed, list)
        unnamed.append(shown([name, value], name))
    else:
        _put(found, name, shown(value, name))


def _put(tree: dict[str, Json], name: str, value: Json) -> None:
    part, dot, rest = name.partition(".")
    inner = tree.setdefault(part, {}) if dot else None
    if isinstance(inner, dict):
        _put(inner, rest, value)
    else:
        tree[name] = value


def fields_of(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values and the defaults of a dataclass and of those inside it, by dotted names."""
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, value, default in _leaves(config, "", 0):
        values[name] = value
        if default is not dataclasses.MISSING:
            defaults[name] = default
    return values, defaults


def _leaves(config: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        name = f"{prefix}{field.name}"
        if _is_part(value) and depth < _MAX_DEPTH:
            yield from _leaves(value, f"{name}.", depth + 1)
        else:
            yield name, value, _default(field)


def _is_part(value: Any) -> bool:
    """Return whether a value only holds fields; a model's configuration is a dataclass with a way to JSON."""
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_dataclass and not hasattr(value, "to_dict")


def _default(field: dataclasses.Field[Any]) -> Any:
    given: Any = field.default
    factory: Any = field.default_factory
    if hasattr(given, "default_factory"):  # pydantic's own
        given, factory = given.default, given.default_factory or dataclasses.MISSING
    if factory is not dataclasses.MISSING:
        try:
            return factory()
        except Exception:  # whatever it is: without a default the value counts
            return dataclasses.MISSING
    is_missing = type(given).__name__ == "PydanticUndefinedType"
    return dataclasses.MISSING if is_missing else given


def _same(value: Any, default: Any, name: str) -> bool:
    if value is default:
        return True
    return canonical_json(normal(value, name)) == canonical_json(normal(default, name))


def _number(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else text


def shown(value: Any, name: str) -> Json:
    """Return the form of a value in a manifest: words of the engine's own code and numbers as they are."""
    plain = normal(value, name)
    is_word = isinstance(value, Enum) or _is_of_torch(value)
    if is_word or plain is None or isinstance(plain, bool | int | float):
        return plain
    return f"sha256:{hashlib.sha256(canonical_json(plain)).hexdigest()[:16]}"


def _is_of_torch(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in {"dtype", "device"}


def normal(value: Any, name: str) -> Json:
    """Return a value as JSON that is the same in every process, and a path as its content.

    Raises RestError, with the setting's name, where there is no such text: an object of which only an address
    in memory is known, a file that cannot be read.
    """
    return _normal(value, name, 0, [_MAX_ITEMS])


def _normal(value: Any, name: str, depth: int, left: list[int]) -> Json:
    left[0] -= 1
    if depth > _MAX_DEPTH or left[0] < 0:
        raise _unknown(value, name)

    def inside(item: Any) -> Json:
        return _normal(item, name, depth + 1, left)

    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) >= _MAX_INT:
            raise _unknown(value, name)
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if text.lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                return inside(json.loads(text))
        return _text(text, name)
    if _is_of_torch(value):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        named = {str(key): item for key, item in value.items()}
        return {
            key: inside(item)
            for key, item in sorted(named.items())
            if not (isinstance(item, str | bytes) and _SECRET_INSIDE.search(key))
        }
    if isinstance(value, set | frozenset):
        return sorted(map(inside, value), key=canonical_json)
    if isinstance(value, list | tuple):
        return [*map(inside, value)]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        where = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        if "<" in where:  # made inside of a function: another one may have the name
            raise _unknown(value, name)
        return where
    fields = value.to_dict() if hasattr(value, "to_dict") else getattr(value, "__dict__", None)
    if not fields:
        raise _unknown(value, name)
    return inside(fields)


def _text(text: str, name: str) -> str:
    """Return a text without a user's name and password, or a path's content.

    A relative one is a path where it leads to a file: a name of the hub has a "/" too.
    """
    is_path = os.path.exists(text) if os.path.isabs(text) else "/" in text and os.path.isfile(text)
    if not is_path:
        return _USER_OF_URL.sub("", text)
    digest = hashlib.sha256()
    files, nbytes = 0, 0
    try:
        for path in _files(text):
            digest.update(f"{os.path.relpath(path, text)}\0".encode(errors="surrogateescape"))
            files += 1
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                while piece := file.read(_CHUNK_NBYTES):
                    nbytes += len(piece)
                    digest.update(piece)
                    if files > _MAX_FILES or nbytes > _MAX_NBYTES:
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
        raise OSError("it is neither a file nor a directory")
    for directory, inner, names in os.walk(path):
        inner.sort()
        paths = (os.path.join(directory, name) for name in sorted(names))
        yield from filter(os.path.isfile, paths)


def _unknown(value: Any, name: str) -> RestError:
    return RestError(
        f"setting '{name}': found {type(value).__name__}, expected text, numbers, lists or mappings: fskv "
        "cannot tell it from another one"
    )
