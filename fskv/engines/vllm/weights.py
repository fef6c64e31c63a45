"""The weights of one worker since its start: which updates they have had, and whose KV its pages may hold.

vLLM tells a connector nothing of updates. So the methods of a worker, its runner and its models that may
change weights are wrapped: each call is noted before it begins. A step of the engine carries the number of
vLLM's prefix cache, which a reset begins anew with no block in use. KV of a cache comes from its own steps
alone, so a cache whose steps all ran with the same weights is pure.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pkgutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import checkpoint_place, commit_of
from fskv.identity.fingerprint import changed_file, checkpoint_state, weights_fingerprint

logger = logging.getLogger(__name__)

# A method of a worker, its runner or its models may change weights if one of these words is in its name ...
_CHANGES = {"weight", "weights", "param", "params", "parameter", "parameters", "load", "reload"}
_CHANGES_OF_WORKERS = _CHANGES | {"apply", "sleep", "discard"}
_CHANGES_OF_MODULES = {"load_state_dict", "apply", "_apply"}  # torch's own
# ... and none of these.
_READS = {"get", "compute", "check", "checksum", "compare", "supports", "save", "shutdown"}
# Take the pages of the KV cache away.
_LOSE_PAGES = {"sleep", "discard"}

MODEL, DRAFT = "model", "draft"
Counts = tuple[int, int]  # calls that may have changed weights, and that took pages away
PRIVATE, UPDATE, CHECKPOINT = "private", "update", "checkpoint"  # kinds of sources


def parts_of(vllm_config: Any) -> tuple[str, ...]:
    """Return the parts of an engine's weights."""
    return (MODEL,) if vllm_config.speculative_config is None else (MODEL, DRAFT)


@dataclass(frozen=True)
class Part:
    """The last change of one part of the weights: of the model, or of the draft."""

    change: int = 0  # the number of the call
    kind: str = UPDATE
    name: str = ""  # the fingerprint of a checkpoint
    step: int = -1  # the first step with tokens after it


@dataclass(frozen=True)
class Served:
    """One rank's answer: the state of its weights in its last step, and the epoch that it serves; pickled."""

    rank: int
    cache: int = 0  # the number of vLLM's prefix cache
    is_pure: bool = True  # no KV of other weights, and no lost page, may be in it
    is_steady: bool = True  # no update is under way, and the last one did not fail
    num_changes: int = 0
    num_lost: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict)
    method: str = ""  # that changed the weights last
    epoch: int = 0

    @property
    def is_ready(self) -> bool:
        return self.is_pure and self.is_steady


class Weights:
    """Counts the calls that may change a worker's weights or take its pages. Wrapped once for all stores."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.num_lost = 0
        self.parts: dict[str, Part] = {}
        self.method = ""
        self._checkpoint: _Checkpoint | None = None  # of the reload under way
        # Names of parameters: of those that some update may have changed, and of all.
        self._loaded: set[str] = set()
        self._all_names: set[str] = set()
        self._num_running = 0
        self._failed = False
        self._worker: Any = None
        self._marks: list[int] = []
        self._lock = threading.Lock()

    @property
    def is_steady(self) -> bool:
        """Whether no update is under way, and the last one did not fail."""
        is_open = getattr(self._worker, "_weight_update_active", False)
        return not (self._num_running or self._failed or is_open)

    def watch(self, worker: Any, owners: list[Any], mark: str | None = None) -> None:
        """Note changes from now on.

        With each a byte is written to the file `mark`, for those who look from another process of this
        machine: "x" before it, then "." or, where it failed, "!". The file may be unlinked once this has
        returned. Raises OSError.
        """
        if mark is not None:
            self._marks.append(os.open(mark, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        if self._worker is not None:
            return
        self._worker = worker
        extension = getattr(worker.vllm_config.parallel_config, "worker_extension_cls", "")
        added = pkgutil.resolve_name(extension) if extension else None
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                self._all_names |= dict(owner.named_parameters()).keys()
            for name in changing_methods(type(owner), added):
                setattr(owner, name, self._noting(getattr(owner, name), name))

    def _noting(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._num_running += 1
                is_part = self._num_running > 1
            is_change = False
            try:
                is_change = not is_part and self._begin(name, args, kwargs)
                found = method(*args, **kwargs)
                if name == "load_weights":
                    self._note_loaded(found)
                if is_change:
                    self._end()
            except BaseException:
                self._fail(is_change=is_change, is_part=is_part)
                raise
            finally:
                with self._lock:
                    self._num_running -= 1
            return found

        return noting

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note a call before it begins; returns False where it leaves the weights as they are."""
        words = _words(name)
        self.num_lost += bool(words & _LOSE_PAGES)
        given = [*args, *kwargs.values()]
        if name == "sleep" and given in ([], [1]):
            return False
        if name == "discard" and given in ([("kv_cache",)], [["kv_cache"]]):
            return False
        self._count(name)
        kind, parts = self._source(name, args, kwargs)
        if kind != CHECKPOINT:
            self._loaded |= self._all_names
        for part in parts:
            self.parts[part] = Part(self.num_changes, kind)
        return True

    def _count(self, name: str) -> None:
        self.num_changes += 1
        self.method = name
        self._tell(b"x")

    def _end(self) -> None:
        part = self.parts.get(MODEL)
        if self._checkpoint is not None and part is not None and part.kind == CHECKPOINT:
            try:
                self.parts[MODEL] = replace(part, name=self._checkpoint.fingerprint())
            except (ConfigError, OSError) as error:
                logger.warning("fskv: the new weights have no name: %s", error)
                self.parts[MODEL] = replace(part, kind=PRIVATE)
        self._checkpoint, self._failed = None, False
        with suppress(OSError):
            self._tell(b".")

    def _fail(self, *, is_change: bool, is_part: bool) -> None:
        """Note that a call raised: nobody knows the weights."""
        self._failed = True
        self._loaded |= self._all_names
        if not (is_change or is_part):
            self._count(self.method)
        of_call = [part for part, last in self.parts.items() if last.change == self.num_changes]
        for part in of_call or parts_of(self._worker.vllm_config):
            self.parts[part] = Part(self.num_changes, PRIVATE)
        if not is_part:
            with suppress(OSError):
                self._tell(b"!")

    def _note_loaded(self, names: object) -> None:
        """Take the names of the parameters that a model has loaded.

        A checkpoint that leaves some that earlier updates may have changed does not name the weights.
        """
        part = self.parts.get(MODEL)
        loaded = names if isinstance(names, set) else set()
        if part is not None and part.kind == CHECKPOINT and not (loaded and loaded >= self._loaded):
            self.parts[MODEL] = replace(part, kind=PRIVATE)
        self._loaded |= loaded

    def _source(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, tuple[str, ...]]:
        """Return the kind of the new weights' source, and the parts that may change."""
        worker = self._worker
        if name == "reload_weights":
            asked = dict(zip(("weights_iterator", "weights_path"), args, strict=False)) | kwargs
            path = asked.pop("weights_path", None)
            if len(args) <= 2 and not any(asked.values()):
                try:
                    self._checkpoint = _Checkpoint(worker.vllm_config, path)
                    return CHECKPOINT, (MODEL,)
                except (ConfigError, OSError):
                    pass
            return PRIVATE, (MODEL,)
        is_session = name in ("update_weights", "finish_weight_update", "start_weight_update")
        if name == "start_draft_weight_update":
            return UPDATE, (DRAFT,)
        if is_session:
            is_open = getattr(worker, "_weight_update_active", False)
            is_draft = is_open and getattr(worker, "_weight_update_is_draft", False)
            transfer = getattr(worker.vllm_config, "weight_transfer_config", None)
            # A patch is added to weights that another engine may not have.
            is_patch = "sparse" in str(getattr(transfer, "backend", ""))
            kind = PRIVATE if is_patch else UPDATE
            return kind, (DRAFT if is_draft else MODEL,)
        # After these the weights are nothing that a version could name.
        is_loss = bool(_words(name) & {"sleep", "discard", "reset"})
        return PRIVATE if is_loss else UPDATE, parts_of(worker.vllm_config)

    def _tell(self, byte: bytes) -> None:
        for fd in self._marks:
            os.write(fd, byte)


class MarkedWeights:
    """The weights of workers in other processes, as they tell in a file (`Weights.watch`)."""

    num_lost = 0
    method = "in a worker"

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._fd = fd
        self._num_ranks = num_ranks
        self._told = b""

    def _read(self) -> bytes:
        size = os.fstat(self._fd).st_size
        if size != len(self._told):
            self._told = os.pread(self._fd, size, 0)
        return self._told

    @property
    def num_changes(self) -> int:
        return self._read().count(b"x")

    @property
    def parts(self) -> dict[str, Part]:
        num_changes = self.num_changes
        return {MODEL: Part(num_changes, PRIVATE)} if num_changes else {}

    @property
    def is_steady(self) -> bool:
        told = self._read()
        is_over = told.count(b"x") == told.count(b".") + told.count(b"!")
        since = told.rpartition(b"!")[2].count(b".")
        return is_over and (b"!" not in told or since >= self._num_ranks)


class _Checkpoint:
    """The checkpoint of a reload: the engine's own, or that of a path. Raises ConfigError."""

    def __init__(self, vllm_config: Any, path: object) -> None:
        model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
        revision = None if path else getattr(model, "revision", None)
        self._asked = str(path or model.model), revision, getattr(load, "download_dir", None)
        self._place = checkpoint_place(*self._asked)
        self._before = checkpoint_state(self._place)

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights that were loaded since; raises ConfigError."""
        begin = time.monotonic()
        found = weights_fingerprint(self._place, revision_commit=commit_of(self._place))
        is_same = checkpoint_place(*self._asked) == self._place
        if not is_same or changed_file(self._place, self._before) is not None:
            raise ConfigError(f"checkpoint {self._place}: it changed while the engine loaded it")
        took_s = time.monotonic() - begin
        logger.info("fskv: the fingerprint of %s took %.1f s", self._place, took_s)
        return found


class Purity:
    """Follows the steps of one store in a worker: which of vLLM's prefix caches may hold other KV."""

    def __init__(self, weights: Weights | MarkedWeights, rank: int, *, fixed: bool) -> None:
        """`fixed`: the user vouches that weights never change."""
        self._weights = weights
        self._fixed = fixed
        self._rank = rank
        self._cache = 0
        self._seen = self.counts
        self._is_pure = True
        self.epoch = 0  # that is served
        self._served_changes = self._num_changes
        self._parts: dict[str, Part] = {}
        self._told = self.served()

    @property
    def _num_changes(self) -> int:
        return 0 if self._fixed else self._weights.num_changes

    @property
    def counts(self) -> Counts:
        return self._num_changes, self._weights.num_lost

    @property
    def weight_counts(self) -> Counts:
        """The counts of the worker, whatever the user vouches for."""
        return self._weights.num_changes, self._weights.num_lost

    @property
    def _is_steady(self) -> bool:
        return self._fixed or self._weights.is_steady

    def on_step(self, cache: int, step: int) -> None:
        """Begin a step with vLLM's prefix cache number `cache`; `step` counts the steps with tokens."""
        if cache != self._cache:
            self._cache, self._seen, self._is_pure = cache, self.counts, True
        if self.counts != self._seen or not self._is_steady:
            self._seen, self._is_pure = self.counts, False
        for name, part in self._weights.parts.items() if not self._fixed else ():
            if part.change != self._parts.get(name, Part()).change:
                self._parts[name] = replace(part, step=step)

    @property
    def refuses(self) -> bool:
        """Whether a page may hold KV of other weights than those that the namespace names."""
        is_same = self._num_changes == self._served_changes and self.counts == self._seen
        return not (is_same and self._is_pure and self._is_steady)

    def is_of(self, num_changes: int) -> bool:
        """Return whether the weights are still those of so many changes."""
        return num_changes == self._num_changes

    def serve(self, epoch: int, num_changes: int) -> None:
        """Serve an epoch from now on, that of the weights after so many changes."""
        self.epoch, self._served_changes = epoch, num_changes

    def served(self) -> Served:
        """Return the state of the last step."""
        changes, lost = self._seen
        return Served(
            self._rank,
            self._cache,
            self._is_pure and self.counts == self._seen,
            self._is_steady,
            changes,
            lost,
            dict(self._parts),
            self._weights.method,
            self.epoch,
        )

    def take_news(self) -> Served | None:
        """Return the state if it is not the one that was told last."""
        now = self.served()
        if now == self._told:
            return None
        self._told = now
        return now


def changing_methods(cls: type, extension: type | None = None) -> list[str]:
    """Return the methods of a class that may change weights; private ones too.

    They are chosen by their names. Of a model, which has methods for each request ("apply_pooling"), fewer
    words count than of a worker. Of a worker's `extension`, which is the user's, all methods count.
    """
    is_model = issubclass(cls, torch.nn.Module)
    changes = _CHANGES if is_model else _CHANGES_OF_WORKERS
    own = set(dir(torch.nn.Module)) if is_model else set()
    added = dir(extension) if extension in cls.__mro__ else ()
    found = {name for name in added if not name.startswith("__")}
    for name in dir(cls):
        words = _words(name)
        is_named = name in _CHANGES_OF_MODULES if name in own else words & changes
        if is_named and not words & _READS:
            found.add(name)
    return [name for name in sorted(found) if callable(inspect.getattr_static(cls, name))]


def _words(name: str) -> set[str]:
    return set(name.split("_"))
