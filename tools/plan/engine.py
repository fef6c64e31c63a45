"""The engine that is planned: its KV groups as a namespace's manifest, vLLM or arithmetic gives them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fskv.hybrid_planner import GroupKind, GroupSpec
from fskv.namespace import Identity

from ..exits import UsageError
from ..explain.prompt import specs
from ..json_file import read_bytes
from ..terminal import show
from . import arithmetic

_VLLM_S = 300  # a build on meta takes seconds, the imports before it up to a minute
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
_RULES = (
    "this vLLM is built for CPUs; by rule for CUDA: blocks of 16 tokens, of 64 with MLA (a GPU's attention "
    "backend may choose others: --block-size), states in the model's own dtype, the KV dtype of Hopper"
)
_NO_CACHE = "vLLM turns prefix caching off for this model there: fskv stores nothing"


@dataclass(frozen=True)
class Group:
    """One KV group; `page_nbytes` has one block of each layer, in one file of a chunk."""

    spec: GroupSpec
    page_nbytes: tuple[int, ...]
    layer_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine, as far as its chunks go."""

    source: str
    groups: tuple[Group, ...]
    files_per_chunk: int
    tokens_per_hash: int
    max_model_len: int | None
    dtype: str
    kv_cache_dtype: str
    blocks_per_chunk: int | None = None  # of a namespace; None where the planner chooses
    notes: tuple[str, ...] = ()


def of_namespace(identity: Identity) -> Engine:
    """Return the engine that has recorded itself in a namespace. Raises UsageError."""
    if not all(group.page_nbytes for group in identity.groups):
        raise UsageError("the namespace.json has no sizes of pages: its engine has pipeline stages")
    files = math.prod(identity.topology.get(name, 1) for name in ("tp", "pp", "pcp"))
    if identity.canonical_format is not None:
        files = int(identity.canonical_format.rpartition("/")[2])
    return Engine(
        source="the engine's own namespace.json",
        groups=tuple(
            Group(spec, group.page_nbytes, group.layer_names)
            for spec, group in zip(specs(identity), identity.groups, strict=True)
        ),
        files_per_chunk=files,
        tokens_per_hash=identity.tokens_per_hash,
        max_model_len=None,
        dtype=identity.model_dtype,
        kv_cache_dtype=identity.kv_cache_dtype,
        blocks_per_chunk=identity.blocks_per_chunk,
    )


def of_model(path: str, request: dict[str, Any]) -> Engine:
    """Return the engine that vLLM makes of a config.json, or arithmetic where there is no vLLM.

    `request` holds options by their names in vLLM's EngineArgs, and the platform. Raises UsageError.
    """
    beside = os.path.join(os.path.dirname(path), "hf_quant_config.json")
    config, quant = _read(path), _read(beside) if os.path.exists(beside) else None
    if not vllm_is_installed():
        source = "arithmetic from config.json; vLLM is not installed here"
        answer = arithmetic.groups_of(config, quant, request)
    else:
        source = "vLLM's own class of the model"
        answer = _ask_vllm(config, quant, request)
    notes = (_RULES,) * answer.pop("by_rule", False)
    notes += (_NO_CACHE,) * (not answer.pop("prefix_caching", True))
    groups = []
    for one in answer.pop("groups"):
        pages, names = tuple(one.pop("page_nbytes")), tuple(one.pop("layer_names"))
        groups.append(Group(GroupSpec(**(one | {"kind": GroupKind(one["kind"])})), pages, names))
    files = request["tensor_parallel_size"]
    return Engine(source=source, groups=tuple(groups), files_per_chunk=files, notes=notes, **answer)


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _read(path: str) -> dict[str, Any]:
    """Read a configuration as Python's json does, and so vLLM: Infinity is a number."""
    try:
        tree = json.loads(read_bytes(path, 16 << 20))
    except RecursionError:
        raise UsageError(f"{show(path)}: nested too deep") from None
    except ValueError as error:
        raise UsageError(f"{show(path)}: no JSON: {error!s:.200}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{show(path)}: expected a JSON object")
    return tree


def _ask_vllm(config: dict[str, Any], quant: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return what `vllm_groups` answers in a process of its own. Raises UsageError with vLLM's reason."""
    config.pop("auto_map", None)  # names the checkpoint's own code
    files = {"config": config, "request": request, "hf_quant_config": quant}
    with tempfile.TemporaryDirectory(prefix="fskv-plan-") as directory:
        for name, tree in files.items():
            if tree is not None:
                Path(directory, f"{name}.json").write_text(json.dumps(tree), "utf-8")
        words = [sys.executable, "-m", f"{__package__}.vllm_groups", directory]
        try:
            done = subprocess.run(
                words, env=os.environ | _QUIET, capture_output=True, timeout=_VLLM_S, check=False
            )
            answer: dict[str, Any] = json.loads(Path(directory, "answer.json").read_bytes())
        except subprocess.TimeoutExpired:
            raise UsageError(f"vLLM did not build this model in {_VLLM_S} s") from None
        except FileNotFoundError:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            answer = {"refused": last or f"its process ended with {done.returncode}"}
    if "refused" in answer:
        reason = show(" ".join(answer["refused"].split()))
        raise UsageError(f"vLLM refuses this model: {reason:.600}")
    return answer
