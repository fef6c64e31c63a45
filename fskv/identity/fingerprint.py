"""The fingerprint of a checkpoint's weights. A short text that nodes derive alike from the same checkpoint.

A commit, where the engine knows one, is the whole answer. Otherwise the files of a local checkpoint are read:

- Settings, whole: every `*.json` (its format, its key order and what `kv_config` drops do not count),
  `*.yaml`, `*.yml` and `*.toml`. A loader, or the processor of images, video and sound, may read any of them.
- Code, whole: `*.py`, which `trust_remote_code` runs, and what such code builds or loads: `*.cpp`, `*.cu`,
  `*.cuh`, `*.h`, `*.so`.
- Tokenizers in other formats, whole: `*.model`, `*.tiktoken`, `vocab.txt`, `merges.txt`. KV is named by token
  ids, but a multimodal processor asks its tokenizer which of them images take.
- Arrays that a processor keeps beside its settings (filters of sound), whole: `*.npy`, `*.npz`, `*.pkl`.
- Weights, sampled: fskv.identity.checkpoint_samples says where. Their names and sizes count.

Subfolders count like the directory itself, up to 16 deep, and links are followed. Left out is what can change
token ids only (`*.jinja`), what no engine loads (`*.onnx`, `*.h5`, `*.msgpack`), texts for people, names that
begin with a dot, `__pycache__`, folders that may not be listed, and all other files: a log that is written
beside the weights would make other weights of them at every start.

It cannot see a change confined to bytes that are not sampled, nor files of other names that code opens. The
option `weights_id`, a name of the user's own, is for those who edit single values inside tensors.

Never part of it: absolute paths, mtimes, the order of a listing. Two copies of a directory on two nodes
agree. Every file is untrusted: sizes are checked before anything is allocated, names that stand in files are
never opened, and more than a checkpoint has (folders, files, tensors, bytes) is refused.

Touches the disk; called once per process at start-up, from a worker with a deadline. Samples are read by
daemon threads of its own: a mount that hangs holds up neither the deadline nor the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fskv.errors import ConfigError
from fskv.identity.checkpoint_file import State, file_state, open_file, os_errors
from fskv.identity.checkpoint_samples import Samples, dense_samples, samples

_VERSION = 2  # in the digest: another way to sample is another fingerprint

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".tensors")
_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".model", ".tiktoken", ".npy", ".npz", ".pkl")
_CODE = (".py", ".cpp", ".cu", ".cuh", ".h", ".so")
_SETTING_NAMES = frozenset({"vocab.txt", "merges.txt"})
_CONFIG = "config.json"

_MAX_DEPTH = 16  # of subfolders
_MAX_ENTRIES = 100_000
_MAX_PARSED_NBYTES = 8 << 20  # larger JSON (vocabularies, indices) counts byte for byte
_MAX_JSON_DEPTH = 100
_MAX_WHOLE_NBYTES = 64 << 20  # larger settings are sampled
_MAX_SAMPLES = 8_000_000  # of all files: 128 MiB of offsets

_NUM_THREADS = 16
_BATCH_SAMPLES = 64  # one task of a thread
_QUIET_S = 3.0  # a fingerprint that takes longer says how far it is...
_PROGRESS_S = 5.0  # ...and not more often than this

_COMMIT = re.compile("[0-9a-f]{40}")

# Written by save_pretrained: where it was loaded from, and by which release. The commit is told elsewhere.
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
# See kv_config.
_PLAIN_DECODERS = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("DeepseekV2", "DeepseekV3", "Gemma2", "Gemma3", "Glm4Moe", "GptOss", "Granite", "Llama"),
        *("Mistral", "Mixtral", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
    )
)
_NOT_KV_OF_PLAIN_DECODERS = frozenset(
    (
        *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
        *("id2label", "label2id", "tie_word_embeddings", "use_cache"),
    )
)

logger = logging.getLogger(__name__)


def weights_fingerprint(
    model_path: str,
    *,
    weights_id: str | None = None,
    revision_commit: str | None = None,
) -> str:
    """Return "commit:<40 hex>" if the commit is known, else "sampled:<sha256>" of local files.

    With the option `weights_id` it is "named:" and that name, and no file is read.

    `model_path` is what the engine loaded: a checkpoint directory, a single weights file, or a hub id, which
    says nothing without a commit. Symbolic links are followed: a Hugging Face snapshot is made of them. Of a
    directory all weights files count; which of them the engine loads is not told.

    Raises ConfigError that names the file, or the option `weights_id` where nothing local can be read. A
    change confined to unsampled bytes is not seen. Costs two reads of 4 KiB a tensor, 16 at a time.
    """
    if weights_id is not None:
        return f"named:{weights_id}"
    if revision_commit is not None and _COMMIT.fullmatch(revision_commit):
        return f"commit:{revision_commit}"
    with os_errors(model_path):
        if os.path.isdir(model_path):
            tree = _fingerprint_directory(model_path)
        elif os.path.isfile(model_path):
            # Its name is whatever the user called it; the directory case needs names, this not.
            tree = ["file", _fingerprint_weights([model_path])]
        else:
            raise ConfigError(
                f"model {model_path!r}: found neither a commit nor a local directory or file, so"
                " nothing tells its weights from others; set the option 'weights_id' to a name"
            )
    return f"sampled:{hashlib.sha256(_canonical([_VERSION, tree])).hexdigest()}"


def checkpoint_state(model_path: str) -> dict[str, State]:
    """Return the state of every file that a fingerprint reads, by relative name.

    A state is (device, inode, size in bytes, mtime in ns, ctime in ns) of the file that links lead to, and ()
    where they lead nowhere. One taken before the engine loads the weights, equal to one taken after the
    fingerprint, says that nobody replaced a file in between. Lists directories and reads no file.

    Raises ConfigError where there is no local directory or file.
    """
    with os_errors(model_path):
        if not os.path.isdir(model_path):
            return {os.path.basename(model_path): file_state(os.stat(model_path))}
        states: dict[str, State] = {}
        for name in _names(model_path):
            try:
                states[name] = file_state(os.stat(f"{model_path}/{name}"))
            except OSError:  # a dangling link; the fingerprint says so if it has to read it
                states[name] = ()
    return states


def changed_file(model_path: str, before: Mapping[str, State]) -> str | None:
    """Return the first file whose state is another one than `before`, None where all are the same.

    Raises ConfigError as `checkpoint_state`, which `before` is of.
    """
    now = checkpoint_state(model_path)
    changed = (name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return min(changed, default=None)


def kv_config(tree: Mapping[str, object]) -> dict[str, object]:
    """Return a model's configuration without the fields that cannot touch KV at equal token ids.

    Dropped at every level of every configuration:

    - `_name_or_path`, `_commit_hash`: where it was loaded from. The weights have a fingerprint of their own.
    - `transformers_version`: who wrote the file.

    Dropped only from configurations of plain decoders (all of `architectures` among those whose code in vLLM
    0.32 was read, and no `auto_map`), at the top level. Other models do read them: n-gram embeddings and
    positions that start at the padding id, image processing in `dtype`, code that nobody has seen.

    - `bos_token_id`, `eos_token_id`, `pad_token_id`: what a prompt is built of and where generation ends; the
      prompt's ids are in the key of its KV.
    - `dtype`, `torch_dtype`: the engine's own, resolved from them, is a field of the identity.
    - `id2label`, `label2id`: names of classes.
    - `tie_word_embeddings`: which matrix turns the last hidden state into logits; no KV comes after it.
    - `use_cache`: how transformers itself generates.
    - `max_position_embeddings`: with plain RoPE (type absent or "default" everywhere, and no dual chunk
      attention) the length of a table whose entries do not depend on it. Variants scale by it.

    All else stays, `architectures` too: in doubt two namespaces are right. `tree` is parsed JSON, and is not
    changed. Raises ConfigError if it is nested deeper than 100.
    """
    dropped = _NOT_KV_OF_PLAIN_DECODERS if _is_plain(tree) else frozenset()
    if _is_plain(tree) and _has_plain_rope(tree):
        dropped |= {"max_position_embeddings"}
    kept = {key: item for key, item in tree.items() if key not in dropped}
    found = _without_volatile(kept, 0)
    assert isinstance(found, dict)
    return found


def _is_plain(config: Mapping[str, object]) -> bool:
    names = config.get("architectures")
    return (
        isinstance(names, list)
        and bool(names)
        and all(isinstance(name, str) and name in _PLAIN_DECODERS for name in names)
        and not config.get("auto_map")
    )


def _has_plain_rope(config: Mapping[str, object]) -> bool:
    rope = [config.get("rope_scaling"), config.get("rope_parameters")]
    if config.get("dual_chunk_attention_config"):
        return False
    while rope:
        item = rope.pop()
        if isinstance(item, list):
            return False
        if isinstance(item, Mapping):
            if any(item.get(key, "default") != "default" for key in ("rope_type", "type")):
                return False
            rope += item.values()
    return True


def _without_volatile(tree: object, depth: int) -> object:
    if depth > _MAX_JSON_DEPTH:
        raise ConfigError(f"configuration nested deeper than {_MAX_JSON_DEPTH}")
    if isinstance(tree, Mapping):
        kept = ((key, item) for key, item in tree.items() if key not in _VOLATILE_KEYS)
        return {key: _without_volatile(item, depth + 1) for key, item in kept}
    if isinstance(tree, list):
        return [_without_volatile(item, depth + 1) for item in tree]
    return tree


def _canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode("ascii")


# --- the directory ------------------------------------------------------------------------------------


def _fingerprint_directory(path: str) -> list[object]:
    names = list(_names(path))
    # All formats that are there: which of them is loaded is the engine's choice (load_format).
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    if not weights:
        raise ConfigError(
            f"model {path}: no weights found (*{', *'.join(_WEIGHTS)});"
            " set the option 'weights_id' to a name"
        )
    settings = [name for name in names if not name.endswith(_WEIGHTS)]
    digests = _fingerprint_weights([f"{path}/{name}" for name in weights])
    return [
        "directory",
        [[name, *_fingerprint_setting(path, name)] for name in settings],
        [[name, *digest] for name, digest in zip(weights, digests, strict=True)],
    ]


def _names(root: str) -> list[str]:
    """Return the sorted relative names of the files that count, "/" between their parts."""
    return sorted(_walk(root, "", (), [0]))


def _walk(
    root: str, prefix: str, above: tuple[tuple[int, int], ...], count: list[int]
) -> Iterator[str]:
    """Yield the files below root/prefix. `above`: device and inode of the directories it is in."""
    path = f"{root}/{prefix}"
    if len(above) > _MAX_DEPTH:
        raise ConfigError(
            f"{path}: more than {_MAX_DEPTH} subfolders deep in the model's directory"
        )
    with os_errors(path):
        own = os.stat(path)
        if (own.st_dev, own.st_ino) in above:  # a link to a directory that it is in
            return
        try:
            listing = os.scandir(path)
        except PermissionError:
            if not above:
                raise
            return  # lost+found: the engine, who is the same user, cannot read it either
        with listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    count[0] += len(entries)
    if count[0] > _MAX_ENTRIES:
        raise ConfigError(f"{root}: more than {_MAX_ENTRIES} files, not the directory of one model")
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.name.endswith((*_WEIGHTS, *_SETTINGS, *_CODE)) or entry.name in _SETTING_NAMES:
            yield name  # whatever it is: what is no regular file is an error when it is opened
        elif _is_directory(entry):
            yield from _walk(root, f"{name}/", (*above, (own.st_dev, own.st_ino)), count)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _fingerprint_setting(root: str, name: str) -> list[object]:
    """Return [how it was read, digest] of a file of settings or code."""
    path = f"{root}/{name}"
    with open_file(path) as file:
        if file.size > _MAX_WHOLE_NBYTES:
            plan = [_Planned(file.path, file.state, dense_samples(file))]
            return ["sampled", file.size, *_digests(plan, time.monotonic())]
        content = file.read(0, file.size)
    if name.endswith(".json"):
        try:
            return ["json", hashlib.sha256(_canonical(_parse(content, name))).hexdigest()]
        except (ConfigError, ValueError, RecursionError) as error:
            if name == _CONFIG:
                raise ConfigError(f"{path}: expected JSON: {error}") from error
    return ["bytes", hashlib.sha256(content).hexdigest()]


def _parse(content: bytes, name: str) -> object:
    if len(content) > _MAX_PARSED_NBYTES:
        raise ConfigError(f"{len(content)} bytes, expected at most {_MAX_PARSED_NBYTES}")
    tree: object = json.loads(content.decode("utf-8"))
    if os.path.basename(name) == _CONFIG and isinstance(tree, dict):
        return kv_config(tree)
    return _without_volatile(tree, 0)


# --- weights ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Planned:
    """A file, its state when its samples were chosen, and the samples."""

    path: str
    state: State
    samples: Samples

    def digest(self, first: int) -> bytes:
        """Return the digest of a batch of samples, from the number `first` on; up to 1 MiB at a time."""
        part = slice(first, first + _BATCH_SAMPLES)
        starts, ends = self.samples.starts[part], self.samples.ends[part]
        found = hashlib.sha256(struct.pack(f"<{2 * len(starts)}Q", *starts, *ends))
        with open_file(self.path) as file:
            # Device, inode, size and mtime. A backup's hard link changes the ctime and nothing else.
            if file.state[:4] != self.state[:4]:
                raise ConfigError(f"{file.path}: changed while it was read")
            with contextlib.suppress(OSError):  # advice only
                # Without it Linux reads ahead: 128 KiB for each 4.
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)
            for start, end in zip(starts, ends, strict=True):
                found.update(file.read(start, end - start))
        return found.digest()


def _fingerprint_weights(paths: list[str]) -> list[list[object]]:
    """Return [size in bytes, digest of the samples] of each file."""
    started_at = time.monotonic()
    plans: list[_Planned] = []
    num_samples = 0
    for path in paths:
        with open_file(path) as file:
            plans.append(_Planned(path, file.state, samples(file)))
        num_samples += len(plans[-1].samples.starts)
        if num_samples > _MAX_SAMPLES:
            raise ConfigError(f"{path}: more tensors in all files than a checkpoint has")
    digests = _digests(plans, started_at)
    return [[plan.state[2], digest] for plan, digest in zip(plans, digests, strict=True)]


def _digests(plans: list[_Planned], started_at: float) -> list[str]:
    """Read the samples in threads; return each file's digest, in hex.

    It is the digest of its batches' digests in their order, so the order of the threads does not matter.
    """
    batches = [
        (plan, first)
        for plan in plans
        for first in range(0, len(plan.samples.starts), _BATCH_SAMPLES)
    ]
    whole = {id(plan): hashlib.sha256() for plan in plans}
    for (plan, _), digest in zip(batches, _in_threads(batches, started_at), strict=True):
        whole[id(plan)].update(digest)
    return [whole[id(plan)].hexdigest() for plan in plans]


def _in_threads(batches: list[tuple[_Planned, int]], started_at: float) -> list[bytes]:
    """Return the batches' digests, read by up to 16 daemon threads; raise the first error."""
    digests = [b""] * len(batches)
    failed = threading.Event()
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for i in range(len(batches)):
        todo.put(i)

    def work() -> None:
        while not failed.is_set():
            try:
                i = todo.get_nowait()
                plan, first = batches[i]
                digests[i] = plan.digest(first)
                done.put(None)
            except queue.Empty:
                return
            except Exception as error:  # handed to the caller
                failed.set()
                done.put(error)

    for i in range(min(_NUM_THREADS, len(batches))):
        threading.Thread(target=work, name=f"fskv-fingerprint-{i}", daemon=True).start()
    say_at = started_at + _QUIET_S
    for num_left in reversed(range(len(batches))):
        if (error := done.get()) is not None:
            raise error
        now = time.monotonic()
        if now >= say_at and num_left:
            say_at = now + _PROGRESS_S
            percent = 100 - 100 * num_left // len(batches)
            logger.info("fskv: fingerprint: %d %% read, %.0f s", percent, now - started_at)
    return digests
