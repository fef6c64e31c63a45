"""The planned engine: its files and hits, from the groups of a namespace, of vLLM or by arithmetic.

Chunks and which of them a hit needs are the planner's (`fskv.hybrid_planner`), lengths of files the format's
(`fskv.format.chunk_file`); here they are only added up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fskv.format.chunk_file import FileLayout
from fskv.format.spans import GroupLayout
from fskv.hybrid_planner import (
    GroupKind,
    GroupSpec,
    hit_cost,
    longest_hit,
    needed_chunks,
    plan_geometry,
)
from fskv.namespace import Identity
from fskv.types import Presence

from ..exits import UsageError
from ..explain.chunk_state import file_ranks
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
    """An engine as far as its chunks go. Sizes of files are with their headers."""

    source: str
    groups: tuple[Group, ...]
    blocks_per_chunk: int
    files_per_chunk: int
    retention_interval: int
    max_model_len: int | None  # None of a namespace
    dtype: str
    kv_cache_dtype: str
    warnings: tuple[str, ...] = ()  # of the planner
    notes: tuple[str, ...] = ()

    def file_nbytes(self, group: Group) -> int:
        return FileLayout(self.blocks_per_chunk, group.page_nbytes, bytes(16)).file_nbytes

    @property
    def kv_nbytes_per_token(self) -> float:
        """KV of one token in all groups that keep each token, on all ranks; states have no share in it."""
        return self.files_per_chunk * sum(
            sum(group.page_nbytes) / group.spec.tokens_per_block
            for group in self.groups
            if group.spec.kind is not GroupKind.STATE
        )

    def hit(self, prompt_tokens: int) -> tuple[int, int, int]:
        """Return the tokens that a prompt can hit at most, files that it reads and their bytes of KV."""
        specs = [group.spec for group in self.groups]
        bpc = self.blocks_per_chunk
        tokens = longest_hit(specs, bpc, prompt_tokens, 0, lambda _g, _c: Presence.HIT).tokens
        if not tokens:
            return 0, 0, 0
        layouts = [
            GroupLayout.of(group.spec.group_idx, bpc, list(enumerate(group.page_nbytes)))
            for group in self.groups
        ]
        files, nbytes = hit_cost(specs, layouts, bpc, tokens)
        return tokens, files * self.files_per_chunk, nbytes * self.files_per_chunk

    def stored(self, prompt_tokens: int, hit_tokens: int) -> tuple[int, int]:
        """Return how many files a prompt that shares nothing leaves at most, and their bytes on disk."""
        files = nbytes = 0
        for group in self.groups:
            count = prompt_tokens // (group.spec.tokens_per_block * self.blocks_per_chunk)
            if group.spec.kind in (GroupKind.SLIDING_WINDOW, GroupKind.STATE):
                interval = self.retention_interval
                boundaries = 1 + (prompt_tokens // interval if interval else 0)
                needed = needed_chunks(group.spec, self.blocks_per_chunk, hit_tokens)
                count = min(count, boundaries * len(needed))
            files += count * self.files_per_chunk
            nbytes += count * self.files_per_chunk * self.file_nbytes(group)
        return files, nbytes


def of_namespace(identity: Identity, retention_interval: int) -> Engine:
    """Return the engine that has recorded itself in a namespace. Raises UsageError."""
    if not all(group.page_nbytes for group in identity.groups):
        raise UsageError("the namespace.json has no sizes of pages: its engine has pipeline stages")
    return Engine(
        source="the engine's own namespace.json",
        groups=tuple(
            Group(spec, group.page_nbytes, group.layer_names)
            for spec, group in zip(specs(identity), identity.groups, strict=True)
        ),
        blocks_per_chunk=identity.blocks_per_chunk,
        files_per_chunk=len(file_ranks(identity)),
        retention_interval=retention_interval,
        max_model_len=None,
        dtype=identity.model_dtype,
        kv_cache_dtype=identity.kv_cache_dtype,
    )


def of_model(path: str, request: dict[str, Any], chunk_tokens: int | None) -> Engine:
    """Return the engine that vLLM makes of a config.json, or arithmetic where there is no vLLM.

    `request` holds options by their names in vLLM's EngineArgs, and the platform. Raises UsageError, and
    ConfigError as the engine does.
    """
    beside = os.path.join(os.path.dirname(path), "hf_quant_config.json")
    config, quant = _read(path), _read(beside) if os.path.exists(beside) else None
    if vllm_is_installed():
        source, answer = "vLLM's own class of the model", _ask_vllm(config, quant, request)
    else:
        source = "arithmetic from config.json; vLLM is not installed here"
        answer = arithmetic.groups_of(config, quant, request)
    groups = tuple(
        Group(GroupSpec(**(spec | {"kind": GroupKind(spec["kind"])})), tuple(pages), tuple(names))
        for spec, pages, names in answer["groups"]
    )
    retention_interval = request["prefix_cache_retention_interval"]
    geometry = plan_geometry(
        [group.spec for group in groups],
        [group.page_nbytes[0] * len(group.page_nbytes) for group in groups],
        hybrid_chunk_size=chunk_tokens or "auto",
        tokens_per_hash=answer["tokens_per_hash"],
        max_model_len=answer["max_model_len"],
        retention_interval=retention_interval,
    )
    notes = (_RULES,) * answer.get("by_rule", False)
    return Engine(
        source=source,
        groups=groups,
        blocks_per_chunk=geometry.blocks_per_chunk,
        warnings=tuple(geometry.warnings),
        files_per_chunk=request["tensor_parallel_size"],
        retention_interval=retention_interval,
        max_model_len=answer["max_model_len"],
        dtype=answer["dtype"],
        kv_cache_dtype=answer["kv_cache_dtype"],
        notes=notes + (_NO_CACHE,) * (not answer.get("prefix_caching", True)),
    )


def vllm_is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _read(path: str) -> dict[str, Any]:
    """Read a configuration as Python's json does, and so vLLM: Infinity is a number."""
    try:
        tree = json.loads(read_bytes(path, 16 << 20))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{show(path)}: no JSON: {error!s:.200}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{show(path)}: expected a JSON object")
    return tree


def _ask_vllm(config: dict[str, Any], quant: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `model_groups` in its own process. Raises UsageError with vLLM's reason."""
    own_code = config.pop("auto_map", None)
    with tempfile.TemporaryDirectory(prefix="fskv-plan-") as directory:
        files = {"config": config, "request": request, "hf_quant_config": quant}
        for name, tree in files.items():
            if tree is not None:
                Path(directory, f"{name}.json").write_text(json.dumps(tree))
        words = [sys.executable, "-P", "-m", "fskv.engines.vllm.model_groups", directory]
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
        limit = " (the checkpoint's own code, auto_map, never runs here)" * bool(own_code)
        raise UsageError(f"vLLM refuses this model: {reason:.300}{limit}")
    return answer
