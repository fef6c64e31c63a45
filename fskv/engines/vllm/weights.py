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
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import checkpoint_place, commit_of
from fskv.identity.fingerprint import checkpoint_state, weights_fingerprint

if TYPE_CHECKING:
    from fskv.root.root import NamespaceDir

logger = logging.getLogger(__name__)

# A method of a worker, its runner or its models may change weights if one of these words is in its name ...
_CHANGES = {"weight", "weights", "param", "params", "parameter", "parameters", "load", "reload"}
_CHANGES_OF_WORKERS = _CHANGES | {"apply", "sleep", "discard"}
_CHANGES_OF_MODULES = {"load_state_dict", "apply", "_apply"}  # torch's own
# ... and none of these.
_READS = {"get", "compute", "check", "checksum", "compare", "supports", "save", "shutdown"}
# Of vLLM's own methods these change parameters alone. All else may change what no checkpoint has.
_CHANGES_OF_PARAMETERS = {"weight", "weights", "sleep"}
_MORE = "*"  # that, among names of parameters
# Take the pages of the KV cache away.
_LOSE_PAGES = {"sleep", "discard"}

_Checkpoint = tuple[str, dict[str, tuple[int, ...]]]  # its place, and the states of its files
StepNumber = tuple[int, int]  # of the next step with tokens, maybe this one; and of all steps
Counts = tuple[int, int]  # calls that may have changed weights, and that took pages away

NOT_RESET = (
    "the weights may have changed, and vLLM's prefix cache was not reset since (beside other connectors with "
    "reset_connector)"
)


@dataclass(frozen=True)
class Served:
    """One rank's answer: the state of its weights in its last step, and the epoch that it serves; pickled."""

    cache: int = 0  # the number of vLLM's prefix cache
    doubt: str = ""  # why KV of other weights, or a lost page, may be in it; "": it is not
    counts: Counts = (0, 0)
    step: StepNumber = -1, 0  # the first after the last change; of none where nothing may name that
    epoch: int = 0
    namespace: NamespaceDir | None = None  # the epoch's; None: the start's
    checkpoint: str = ""  # see Weights


class Weights:
    """Counts the calls that may change a worker's weights or take its pages. Wrapped once for all stores."""

    def __init__(self) -> None:
        self.counts: Counts = 0, 0
        self.method = ""  # that changed the weights last
        self.has_name = False  # whether a version or a checkpoint may name the last change
        self.checkpoint = ""  # the fingerprint of the one that tells the weights; "": none does
        # Names of parameters: of all, of those that changes may have changed, and that the last one loaded.
        self._parameters: set[str] = set()
        self._changed: set[str] = set()
        self._added: set[str] = set()  # methods of the user's
        self._loaded: set[str] = set()
        self.before_loss: list[Callable[[], object]] = []  # what ends all use of the pages
        self._num_running = 0
        self._is_open = False  # whether the last change has not ended, or failed
        self._has_failed = False  # whether a change has, since a checkpoint told the weights
        self._config: Any = None  # vLLM's, of the worker
        self._worker: Callable[[], Any] = lambda: None  # weak: an engine may end before its process
        self._marks: dict[int, int] = {}  # by descriptor, each "x" that has no "." yet
        self._lock = threading.Lock()

    @property
    def is_steady(self) -> bool:
        """Whether no update is under way, and the last one did not fail."""
        is_session = getattr(self._worker(), "_weight_update_active", False)
        return not (self._num_running or self._is_open or is_session)

    def watch(self, worker: Any, owners: list[Any], mark: str | None = None) -> None:
        """Note changes from now on.

        With each a byte is written to the file `mark`, for those who look from another process of this
        machine: "x" before it, and a "." for each "x" when one has ended well; "y" before pages are lost.
        The file may be unlinked once this has returned. Raises OSError.
        """
        if mark is not None:
            self._marks[os.open(mark, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)] = 0
        if self._config is not None:
            return
        self._config, self._worker = worker.vllm_config, weakref.ref(worker)
        extension = getattr(self._config.parallel_config, "worker_extension_cls", "")
        added = pkgutil.resolve_name(extension) if extension else None
        self._added = set(dir(added))
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                self._parameters |= dict(owner.named_parameters()).keys()
            for name in changing_methods(type(owner), added):
                setattr(owner, name, self._noting(getattr(owner, name), name))

    def _noting(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def noting(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if _words(name) & _LOSE_PAGES:
                    self._lose_pages()
                is_inner = self._num_running > 0
                is_change = not is_inner and self._begin(name, [*args, *kwargs.values()])
                # Another thread may begin a change while a call that is none runs.
                num_changes = int(is_inner or is_change)
                self._num_running += num_changes
            is_good, before = False, None
            try:
                if is_change and name == "reload_weights":
                    before = self._checkpoint(*args, **kwargs)
                found = method(*args, **kwargs)
                if name == "load_weights" and isinstance(found, set):
                    self._loaded |= found
                if before is not None and self._loaded:
                    self._name(before, lambda: self._checkpoint(*args, **kwargs))
                elif is_change:
                    self._changed = self._changed | self._parameters | self._loaded
                is_good = True
            finally:
                with self._lock:
                    self._num_running -= num_changes
                    self._end(name, is_change=is_change, is_good=is_good)
            return found

        return noting

    def _begin(self, name: str, given: list[Any]) -> bool:
        """Note a call before it begins; returns False where it leaves the weights as they are."""
        if name == "sleep" and given in ([], [1]):
            return False
        if name == "discard" and given in ([("kv_cache",)], [["kv_cache"]]):
            return False
        config = self._config
        # A name may not tell a draft's weights. A patch is added to weights that another engine may not
        # have. After the words here the weights are nothing that has a name.
        transfer = getattr(config, "weight_transfer_config", None)
        is_patch = "sparse" in str(getattr(transfer, "backend", ""))
        is_loss = _words(name) & {"sleep", "discard", "reset"}
        if name in self._added or not _words(name) & _CHANGES_OF_PARAMETERS:
            self._changed = self._changed | {_MORE}
        self._change(name, has_name=not (config.speculative_config or is_patch or is_loss))
        return True

    def _change(self, method: str, *, has_name: bool) -> None:
        self.counts = self.counts[0] + 1, self.counts[1]
        self.method, self.has_name = method, has_name
        self.checkpoint, self._loaded = "", set()
        self._is_open = True
        for fd in self._marks:
            os.write(fd, b"x")
            self._marks[fd] += 1

    def _lose_pages(self) -> None:
        self.counts = self.counts[0], self.counts[1] + 1
        for fd in self._marks:
            os.write(fd, b"y")
        for each in self.before_loss:
            each()

    def _end(self, name: str, *, is_change: bool, is_good: bool) -> None:
        if not is_good:  # nobody knows the weights
            self._changed = self._changed | self._parameters | self._loaded
            self._has_failed = True
            self._change(name, has_name=False)
        elif is_change:
            self._has_failed &= not self.checkpoint
            self.has_name &= not self._has_failed
            self._is_open = False
        if not self._is_open:
            with suppress(OSError):  # then with the next call
                for fd, num in self._marks.items():
                    self._marks[fd] -= os.write(fd, b"." * num)

    def _checkpoint(
        self, weights_iterator: Any = None, weights_path: Any = None, *more: Any, **options: Any
    ) -> _Checkpoint | None:
        """Return what `reload_weights` loads, the engine's own checkpoint or that of a path; None: none."""
        config = self._config
        name, revision = weights_path, None
        if not name:
            name, revision = config.model_config.model, config.model_config.revision
            if getattr(config.model_config, "model_weights", None):
                return None  # they are elsewhere
        with suppress(ConfigError, OSError):
            if not (weights_iterator or more or any(options.values())):
                place = checkpoint_place(str(name), revision, config.load_config.download_dir)
                return place, checkpoint_state(place)
        return None

    def _name(self, before: _Checkpoint, now: Callable[[], _Checkpoint | None]) -> None:
        """Name the weights by the checkpoint that they were loaded from, if it tells them.

        One that lacks what earlier changes may have changed does not.
        """
        is_told = self.has_name and self._loaded >= self._changed
        self._changed = self._changed | self._loaded
        if not is_told:
            return
        begin, (place, _) = time.monotonic(), before
        try:
            found = weights_fingerprint(place, revision_commit=commit_of(place))
        except (ConfigError, OSError) as error:
            logger.warning("fskv: the new weights have no name: %s", error)
            return
        if now() == before:
            self.checkpoint = found
        told = self.checkpoint or "changed while it was loaded"
        took_s = time.monotonic() - begin
        logger.info("fskv: the fingerprint of %s took %.1f s: %s", place, took_s, told)


class MarkedWeights:
    """The weights of workers in other processes, as they tell in a file (`Weights.watch`)."""

    method = "in a worker"
    has_name = False
    checkpoint = ""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._told = b""

    def _count(self, byte: bytes) -> int:
        size = os.fstat(self._fd).st_size
        if size != len(self._told):
            self._told = os.pread(self._fd, size, 0)
        return self._told.count(byte)

    @property
    def counts(self) -> Counts:
        return self._count(b"x"), self._count(b"y")

    @property
    def is_steady(self) -> bool:
        return self._count(b"x") == self._count(b".")


class Purity:
    """Follows the steps of one store in a worker: whether vLLM's prefix cache may hold other KV."""

    def __init__(self, weights: Weights | MarkedWeights, *, fixed: bool) -> None:
        """`fixed`: the user vouches that weights never change."""
        self.weights = weights
        self._fixed = fixed
        self._is_pure = True
        self.state = Served(counts=self.counts)  # of the last step
        self._num_served = self.counts[0]  # the changes whose weights the epoch is of
        self._told = Served()

    @property
    def counts(self) -> Counts:
        """The counts of the weights; of no change where the user vouches, but of lost pages."""
        found = self.weights.counts
        return (0, found[1]) if self._fixed else found

    @property
    def _is_steady(self) -> bool:
        return self._fixed or self.weights.is_steady

    def on_step(self, cache: int, step: StepNumber) -> None:
        """Begin a step with vLLM's prefix cache number `cache`."""
        last, counts = self.state, self.counts
        self._is_pure = not self.doubt if cache == last.cache else self._is_steady
        if counts[0] == last.counts[0]:
            step = last.step
        self.state = replace(last, cache=cache, counts=counts, step=step)

    @property
    def doubt(self) -> str:
        """Why a page may hold KV of other weights than those of now, in words; "": none does."""
        if not self._is_steady:
            return f"an update of the weights is under way, or failed ({self.weights.method})"
        return "" if self._is_pure and self.counts == self.state.counts else NOT_RESET

    @property
    def refuses(self) -> bool:
        """Whether a page may hold KV of other weights than those that the namespace names."""
        return self.counts[0] != self._num_served or bool(self.doubt)

    def serve(self, epoch: int, num_changes: int, namespace: NamespaceDir) -> None:
        """Serve an epoch from now on, that of the weights after so many changes."""
        self._num_served = num_changes
        self.state = replace(self.state, epoch=epoch, namespace=namespace)

    def take_news(self) -> Served | None:
        """Return the state of the last step if it is not the one that was told last."""
        step = self.state.step if self.weights.has_name else Served.step
        checkpoint = self.weights.checkpoint
        now = replace(self.state, doubt=self.doubt, step=step, checkpoint=checkpoint)
        told, self._told = self._told, now
        return None if told == now else now


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
