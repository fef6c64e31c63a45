"""The files and the code that an engine has really loaded, and whether they are still the same.

vLLM hands a connector the requested configuration, which may differ from the loaded model. Configurations are
copied and changed while a model is built, `auto` picks one of two sets of weights, and a checkpoint may be
replaced while it is read. So the plug-in notes every worker before it loads (`note_worker`), and the identity
is derived from its model.
"""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.dynamic_module_utils import get_relative_import_files

from fskv.engines.vllm.weights import Weights
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import checkpoint_place
from fskv.identity.fingerprint import changed_file, checkpoint_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fskv.namespace import Json


@dataclass
class Loaded:
    """The model of one worker, noted before the worker loads it."""

    worker: Any  # a weak reference
    before: dict[str, dict[str, tuple[int, ...]] | str] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)

    @property
    def model(self) -> Any:
        """The model, a torch module; raises ConfigError before it is loaded."""
        worker = self.worker()
        runner = getattr(worker, "model_runner", None)
        if runner is None:
            raise ConfigError("this vLLM does not tell which model its worker has loaded")
        return runner.get_model()

    @property
    def draft(self) -> Any:
        """The model that proposes tokens, a torch module; None without one, and where it is not told."""
        return getattr(self.worker(), "get_draft_model", lambda: None)()

    def draft_has_kv(self, layer_names: set[str]) -> bool:
        """Return whether some of these KV layers are the draft's; true where the draft is not told."""
        worker, draft = self.worker(), self.draft
        if not isinstance(draft, torch.nn.Module):
            return True
        parts = {id(module) for module in draft.modules()}
        layers = worker.vllm_config.compilation_config.static_forward_context
        return any(id(layers.get(name)) in parts for name in layer_names)

    def watch_weights(self, mark: str | None = None) -> None:
        """Note changes of the weights from now on; see Weights.watch. Raises OSError."""
        worker = self.worker()
        owners = worker, worker.model_runner, self.model, self.draft
        self.weights.watch(worker, [one for one in owners if one is not None], mark)


_loaded: list[Loaded] = []  # of this process; in tests many engines live in one


def note_worker(init: Any, worker: Any, vllm_config: VllmConfig, *args: Any, **more: Any) -> None:
    """Make a worker, and note it before it loads weights: around WorkerBase.__init__, by the plug-in."""
    init(worker, vllm_config, *args, **more)
    if vllm_config.kv_transfer_config is None:
        return
    loaded = Loaded(weakref.ref(worker))
    for path in _checkpoints(vllm_config):
        try:
            loaded.before[path] = checkpoint_state(path)
        except ConfigError as error:  # for the one who asks: without fskv's connector nobody does
            loaded.before[path] = str(error)
    _loaded.append(loaded)
    weakref.finalize(worker, _loaded.remove, loaded)


def _checkpoints(vllm_config: VllmConfig) -> Iterator[str]:
    """Yield where the checkpoints of an engine are on this machine: the model's, and the draft model's."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model in (vllm_config.model_config, draft):
        path = None if model is None else checkpoint_of(model, vllm_config.load_config)
        if path is not None and os.path.exists(path):
            yield path


def find_loaded(vllm_config: VllmConfig) -> Loaded:
    """Return the `Loaded` of this engine's worker in this process; raises ConfigError if none was noted."""
    for loaded in _loaded:
        worker = loaded.worker()
        if worker is not None and worker.model_config is vllm_config.model_config:
            return loaded
    raise ConfigError(
        "fskv was not there when this worker began to load its weights: vLLM's plug-ins are loaded first, "
        "and VLLM_PLUGINS, if it is set, must contain fskv"
    )


def check_unchanged(loaded: Loaded, vllm_config: VllmConfig) -> None:
    """Raise ConfigError if files of a checkpoint are other ones than before the worker loaded them.

    Of a different inode, size or time: their KV would be stored under the name of what lies there now.
    """
    after = set(_checkpoints(vllm_config))
    for path, before in loaded.before.items():
        if path not in after:  # the hub's name leads to another snapshot than before
            raise ConfigError(
                f"checkpoint {path}: another one took its place while the engine loaded it, so nobody knows "
                "which weights it has; start the engine again"
            )
        if isinstance(before, str):
            raise ConfigError(before)
        if (changed := changed_file(path, before)) is not None:
            raise ConfigError(
                f"checkpoint {path}: {changed or 'the file'} changed while the engine loaded it, so nobody "
                "knows which weights it has; start the engine again"
            )


# --- files and code ---------------------------------------------------------------------------


def checkpoint_of(model_config: Any, load_config: Any = None) -> str:
    """Return where a model's files are, or its name as it stands; see `checkpoint_place`."""
    return checkpoint_place(
        str(model_config.model),
        getattr(model_config, "revision", None),
        getattr(load_config, "download_dir", None),
    )


def loaded_files(path: str, model_config: Any, load_config: Any, model: Any) -> list[str] | None:
    """Return the names of the weights files that vLLM's own rule picks of the checkpoint at `path`.

    None where the loader has no such rule, or where there is no directory to pick from.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = get_model_loader(load_config)
    if type(loader) is not DefaultModelLoader or not os.path.isdir(path):
        return None
    try:
        _, paths, *_ = loader._prepare_weights(  # noqa: SLF001
            path,
            None,
            model_config.revision,
            getattr(model, "fall_back_to_pt_during_load", True),
            getattr(model, "allow_patterns_overrides", None),
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        line = str(error).partition("\n")[0]
        raise ConfigError(
            f"checkpoint {path}: this vLLM does not tell which of its files it loads ({line})"
        ) from None
    return sorted(os.path.relpath(each, path) for each in paths)


def modules_of(model: Any, layer_names: set[str], *, one_stage: bool) -> list[Any]:
    """Return the parts of the model to derive an identity from: all of them.

    With pipeline stages each rank has other parts, and only those around the KV layers have counterparts.
    """
    if one_stage:
        return list(model.modules())
    return [
        module
        for name, module in model.named_modules()
        if not name or any(layer.startswith(f"{name}.") for layer in layer_names)
    ]


def code_digests(modules: list[Any], trusted: set[str]) -> dict[str, Json]:
    """Return digests of the source code, by package, of parts whose top-level package is not `trusted`.

    A checkpoint's own code, and models that plug-ins bring: nothing else tells one version from the next. Of
    a plug-in's package all code counts.
    """
    files: dict[str, set[tuple[str, str]]] = {}
    for name in {type(module).__module__ for module in modules}:
        package = name.partition(".")[0]
        if package not in trusted:
            files.setdefault(package, set()).update(_code_files(package, name))
    return {package: _digest(sorted(files[package])) for package in sorted(files)}


def _code_files(package: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield (name inside the package, path) of its code; of a checkpoint's code, the files that module `name`
    needs.

    A tokenizer's code may lie beside that: if some process has loaded it.
    """
    if package == "transformers_modules":
        file = str(sys.modules[name].__file__)
        needed = filter(os.path.isfile, get_relative_import_files(file))
        yield from (
            (os.path.relpath(path, os.path.dirname(file)), path) for path in (file, *needed)
        )
        return
    module = sys.modules[package]
    if not hasattr(module, "__path__") and getattr(module, "__file__", None):
        yield package, str(module.__file__)
    for folder in getattr(module, "__path__", ()):
        for directory, _, names in os.walk(folder):
            paths = [f"{directory}/{each}" for each in names if each.endswith((".py", ".so"))]
            yield from ((os.path.relpath(path, folder), path) for path in paths)


def _digest(files: list[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        try:
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"code of the model, {path}: {error.strerror}") from None
        digest.update(f"{name}:{content}\n".encode())
    return digest.hexdigest()[:16]
