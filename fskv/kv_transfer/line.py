"""Settings of vLLM that fskv refuses. Pure.

`REFUSED` is the only list. The preflight and the workers refuse the settings that they can see. `fskv doctor
--config` reports those of a server's line, and others with which fskv does less. `make reference` writes them
into docs/options.md. fskv.engines.vllm.refusals has the settings that only vLLM can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fskv.config import StoreConfig

Settings = Mapping[str, Any]  # by their names in Python; what is not known is not there, or None

# Those that load what vLLM's rule picks of a checkpoint's files.
PICK_FILES = {"auto", "hf", "safetensors", "mistral", "pt", "fastsafetensors", "instanttensor"}
# Not npcache (copies that may be older), ipc_cache (what a daemon has kept), modelexpress, tensorizer (a file
# of another place), nor what a plug-in brings.
_READ_THE_FILES = PICK_FILES | {
    *("dummy", "sharded_state", "runai_streamer", "runai_streamer_sharded", "gguf", "bitsandbytes")
}


# A row is told its setting's value, all settings and the store. It says in words what is wrong, or "".
Found = Callable[[Any, Settings, StoreConfig], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One setting; `expected` also says why."""

    setting: str
    found: Found
    expected: str
    do: str = "remove it"
    level: str = "problem"  # the severity; others are `warning` and `hint`


def judge(settings: Settings, store: StoreConfig, rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Yield the rows whose fault these settings have, each with a sentence."""
    for row in rows:
        if found := row.found(settings.get(row.setting), settings, store):
            yield row, f"option '{row.setting}': found {found}, expected {row.expected}"


def is_set(
    bad: str,
    unless: Callable[[StoreConfig], object] = lambda _store: False,
    *,
    is_default: bool = False,
) -> Found:
    """Return the judge of a setting that is `bad` as a word, `unless` the store makes up for it."""
    words = bad if bad in ("true", "false", "0") else f'"{bad}"'
    words += ", vLLM's default" if is_default else ""
    return lambda value, _, store: words if str(value).lower() == bad and not unless(store) else ""


def _offloading_size(value: Any, settings: Settings, _store: StoreConfig) -> str:
    # Of FskvTier the connector is vLLM's own, and stays.
    stays = settings.get("kv_connector") == "OffloadingConnector"
    stays = stays and settings.get("kv_offloading_backend") in (None, "native")
    return "" if value is None or stays else str(value)


def _plugins(value: Any, _settings: Settings, _store: StoreConfig) -> str:
    return "" if value is None or "fskv" in str(value).split(",") else f'"{value}"'


def _block_size(_value: Any, settings: Settings, store: StoreConfig) -> str:
    tokens, chunk = str(settings.get("block_size")), store.hybrid_chunk_size
    if not re.fullmatch("[1-9][0-9]{0,8}", tokens) or chunk == "auto" or chunk % int(tokens) == 0:
        return ""
    return f"{chunk} with blocks of {tokens} tokens"


def _load_format(value: Any, _settings: Settings, store: StoreConfig) -> str:
    name = str(value or "auto").lower()
    return f'"{name}"' if name not in _READ_THE_FILES and store.weights_id is None else ""


def _dummy(value: Any, settings: Settings, _store: StoreConfig) -> str:
    quantization = settings.get("quantization")
    is_dummy = str(value).lower() == "dummy"
    return f'"dummy" with quantization {quantization}' if is_dummy and quantization else ""


# With these an engine must not start.
REFUSED = (
    Row(
        "kv_offloading_size",
        _offloading_size,
        "nothing: vLLM puts a connector of its own in the place of fskv's",
        "remove it; docs/vllm.md says how CPU memory stands before files",
    ),
    Row(
        "VLLM_PLUGINS",
        _plugins,
        "a list with fskv: vLLM loads no other plug-ins than these",
        "add fskv to it, without a space",
    ),
    Row(
        "hybrid_chunk_size",
        _block_size,
        "a multiple of the engine's block size: a chunk is made of whole blocks",
        "write a multiple, or remove the option",
    ),
    Row(
        "calculate_kv_scales",
        is_set("true"),
        "false: scales computed from the first requests differ between processes, so their KV cannot be "
        "shared",
    ),
    Row(
        "enable_return_routed_experts",
        is_set("true"),
        "false: vLLM keeps these outputs in the process that computed them, and a hit of KV from files "
        "would end the engine",
    ),
    Row(
        "load_format",
        _load_format,
        "another one: the weights that it brings need not be those of the checkpoint's files",
        "remove it, or set the option 'weights_id' to a name",
    ),
    Row(
        "load_format",
        _dummy,
        "weights: quantised dummy weights are whatever was in memory, so their KV cannot be shared",
        "load the checkpoint",
    ),
    Row(
        "enable_elastic_ep",
        is_set("true", lambda store: store.weights_id),
        "false: a worker that is added has the weights of a running one, which need not be the checkpoint's",
        "remove it, or set the option 'weights_id' to a name",
    ),
)
