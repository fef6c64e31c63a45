"""Which weights are these? A short text that nodes derive alike from the same checkpoint.

A commit, where the engine knows one, is the whole answer. Otherwise the files of a local
checkpoint are sampled: names, sizes, configuration, safetensors headers, and 4 KiB at the start
and the middle of every tensor, because a fine-tuned model differs from its base in nothing else.
A 70B model (723 tensors) costs about 1500 reads, 6 MiB; no file costs more than 16 MiB.

What it cannot see: a change confined to bytes that are not sampled. Who edits single values
inside tensors, or wants certainty, sets the option `weights_id` to a name of their own.

Never part of it: absolute paths, mtimes, the order of a listing. Two copies of a directory on
two nodes agree. Every file is untrusted: sizes are checked before anything is allocated.

Touches the disk; called once per process at start-up, from a worker with a deadline.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fskv.errors import ConfigError

_VERSION = 1  # in the digest: another way to sample is another fingerprint

_SAMPLE_NBYTES = 4096
_MAX_TENSOR_SAMPLES = 4096  # per safetensors file
_OTHER_SAMPLES = 256  # per file without a header to guide the sampling
_MAX_HEADER_NBYTES = 100_000_000  # safetensors' own MAX_HEADER_SIZE: nobody loads a larger one
_MAX_JSON_NBYTES = 64 << 20

_COMMIT = re.compile("[0-9a-f]{40}")
_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
# What AWQ/GPTQ and ModelOpt checkpoints say about their scales outside config.json.
_SIDE_FILES = ("hf_quant_config.json", "quantize_config.json")
# Written by save_pretrained: where it was loaded from, and by which release.
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version"})
_OTHER_SUFFIXES = (".bin", ".gguf", ".pt", ".pth")


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def weights_fingerprint(model_path: str, *, revision_commit: str | None) -> str:
    """Return "commit:<40 hex>" if the commit is known, else "sampled:<sha256>" of local files.

    `model_path` is what the engine loaded: a checkpoint directory, a single weights file, or a
    hub id, which says nothing without a commit. Symbolic links are followed: a Hugging Face
    snapshot is made of them. Raises ConfigError that names the file, or the option `weights_id`
    where nothing local can be read. A change confined to unsampled bytes is not seen.
    """
    if revision_commit is not None and _COMMIT.fullmatch(revision_commit):
        return f"commit:{revision_commit}"
    with _errors_as_config_errors(model_path):
        if os.path.isdir(model_path):
            tree = _fingerprint_directory(model_path)
        elif os.path.isfile(model_path):
            # Its name is whatever the user called it; the directory case needs names, this not.
            tree = ["file", _fingerprint_file(model_path)]
        else:
            raise ConfigError(
                f"model {model_path!r}: found neither a commit nor a local directory or file, so"
                " nothing tells its weights from others; set the option 'weights_id' to a name"
            )
        text = json.dumps([_VERSION, tree], sort_keys=True, separators=(",", ":"))
    return f"sampled:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def _fingerprint_directory(path: str) -> list[Any]:
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    config = _read_json(f"{path}/{_CONFIG}") if _CONFIG in names else None
    index = _read_json(f"{path}/{_INDEX}") if _INDEX in names else None
    weight_map = _weight_map(index, f"{path}/{_INDEX}") if index is not None else {}
    # All formats that are there: which of them is loaded is the engine's choice (load_format).
    suffixes = (".safetensors", *_OTHER_SUFFIXES)
    shards = {name for name in names if name.endswith(suffixes)} | set(weight_map.values())
    if not shards:
        raise ConfigError(
            f"model {path}: no weights found (*.safetensors, *{', *'.join(_OTHER_SUFFIXES)});"
            " set the option 'weights_id' to a name"
        )
    return [
        "directory",
        _without_volatile(config),
        weight_map,
        [[name, _read_json(f"{path}/{name}")] for name in _SIDE_FILES if name in names],
        [[name, *_fingerprint_file(f"{path}/{name}")] for name in sorted(shards)],
    ]


def _weight_map(index: object, path: str) -> dict[str, str]:
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping under weight_map")
    for name in found.values():
        # Names come from a file: they may not lead out of the directory.
        if not isinstance(name, str) or not name or "\0" in name or name != os.path.basename(name):
            raise ConfigError(f"{path}: expected file names under weight_map, found {name!r}")
    return found


def _without_volatile(tree: object) -> object:
    if isinstance(tree, dict):
        kept = {key: item for key, item in tree.items() if key not in _VOLATILE_KEYS}
        return {key: _without_volatile(item) for key, item in kept.items()}
    if isinstance(tree, list):
        return [_without_volatile(item) for item in tree]
    return tree


# --- one weights file -------------------------------------------------------------------


def _fingerprint_file(path: str) -> list[int | str]:
    """Return [size, digest of what was read]."""
    digest = hashlib.sha256()
    with _open_regular(path) as fd:
        size = os.fstat(fd).st_size
        if path.endswith(".safetensors"):
            offsets = _hash_header(fd, size, path, digest)
        else:
            last = max(0, size - _SAMPLE_NBYTES)
            offsets = sorted({last * i // (_OTHER_SAMPLES - 1) for i in range(_OTHER_SAMPLES)})
        for offset in offsets:
            _hash_sample(fd, offset, path, digest)
    return [size, digest.hexdigest()]


def _hash_header(fd: int, size: int, path: str, digest: _Hash) -> list[int]:
    """Hash a safetensors header; return the offsets to sample.

    Layout: 8 bytes header length, little endian; the header, JSON; the tensors, at
    `data_offsets` counted from the header's end (the safetensors README).
    """
    length = int.from_bytes(_read(fd, 0, 8, path), "little")
    data_start = 8 + length
    if not 2 <= length <= min(_MAX_HEADER_NBYTES, size - 8):
        limit = min(_MAX_HEADER_NBYTES, max(0, size - 8))
        raise ConfigError(f"{path}: safetensors header says {length} bytes, at most {limit} can be")
    header = _read(fd, 8, length, path)
    digest.update(length.to_bytes(8, "little"))
    digest.update(header)
    tensors = _tensor_ranges(_parse_json(header, path), size - data_start, path)
    starts = {data_start + begin for begin, _ in tensors}
    middles = {data_start + begin + (end - begin) // 2 for begin, end in tensors}
    offsets = sorted(starts | middles)
    if len(offsets) > _MAX_TENSOR_SAMPLES:
        step = (len(offsets) - 1) / (_MAX_TENSOR_SAMPLES - 1)
        offsets = [offsets[round(i * step)] for i in range(_MAX_TENSOR_SAMPLES)]
    return [*offsets, max(data_start, size - _SAMPLE_NBYTES)]


def _tensor_ranges(header: object, data_nbytes: int, path: str) -> list[tuple[int, int]]:
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: expected a mapping as safetensors header")
    ranges = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        found = entry.get("data_offsets") if isinstance(entry, dict) else None
        match found:
            case [int(begin), int(end)] if 0 <= begin <= end <= data_nbytes:
                ranges.append((begin, end))
            case _:
                raise ConfigError(
                    f"{path}: tensor {name!r} has data_offsets {found!r},"
                    f" expected two within {data_nbytes} bytes"
                )
    return [(begin, end) for begin, end in ranges if begin < end]


def _hash_sample(fd: int, offset: int, path: str, digest: _Hash) -> None:
    """Hash an offset and up to 4 KiB there: fewer only at the end of the file."""
    with _errors_as_config_errors(path):
        sample = os.pread(fd, _SAMPLE_NBYTES, offset)
    digest.update(offset.to_bytes(8, "little") + len(sample).to_bytes(8, "little") + sample)


# --- files ------------------------------------------------------------------------------


@contextmanager
def _open_regular(path: str) -> Iterator[int]:
    with _errors_as_config_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{path}: expected a regular file")
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, offset: int, nbytes: int, path: str) -> bytes:
    """Read exactly `nbytes`, which the caller has bounded by the file's size."""
    pieces: list[bytes] = []
    got = 0
    while got < nbytes:
        with _errors_as_config_errors(path):
            piece = os.pread(fd, nbytes - got, offset + got)
        if not piece:
            raise ConfigError(
                f"{path}: ends after {offset + got} bytes, expected {offset + nbytes}"
            )
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


def _read_json(path: str) -> object:
    with _open_regular(path) as fd:
        size = os.fstat(fd).st_size
        if size > _MAX_JSON_NBYTES:
            raise ConfigError(f"{path}: {size} bytes, expected at most {_MAX_JSON_NBYTES}")
        return _parse_json(_read(fd, 0, size, path), path)


def _parse_json(content: bytes, path: str) -> object:
    try:
        parsed: object = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from error
    return parsed


@contextmanager
def _errors_as_config_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:  # JSON that parses may still be too deep to walk
        raise ConfigError(f"{path}: configuration nested too deep") from error
