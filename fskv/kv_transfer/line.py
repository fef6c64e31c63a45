"""Settings of vLLM that fskv refuses, or with which it does less. Pure.

`REFUSED` and `LESS` are the only list. The preflight and the workers refuse the settings that they can see.
`fskv doctor --config` reports those of a server's line. `make reference` writes them into docs/options.md.
fskv.engines.vllm.refusals has the settings that only vLLM can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
    less: str = "hint"  # how bad it is where the engine starts

    @property
    def refused(self) -> bool:
        """Return whether the engine must not start. With others it does, and fskv does less."""
        return self in REFUSED

    @property
    def level(self) -> str:
        """The severity of the finding: `problem`, `warning` or `hint`."""
        return "problem" if self.refused else self.less


def judge(settings: Settings, store: StoreConfig) -> Iterator[tuple[Row, str]]:
    """Yield the rows whose fault these settings have, each with a sentence."""
    for row in (*REFUSED, *LESS):
        if found := row.found(settings.get(row.setting), settings, store):
            yield row, f"option '{row.setting}': found {found}, expected {row.expected}"


def _is(
    bad: str,
    unless: Callable[[StoreConfig], object] = lambda _store: False,
    *,
    is_default: bool = False,
) -> Found:
    words = bad if bad in ("true", "false", "0") else f'"{bad}"'
    words += ", vLLM's default" if is_default else ""
    return lambda value, _, store: words if str(value).lower() == bad and not unless(store) else ""


def _adapters_trusted(store: StoreConfig) -> bool:
    return "lora" in store.trust


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


def _bound_of_a_consumer(_value: Any, settings: Settings, store: StoreConfig) -> str:
    is_one = settings.get("kv_role") == "kv_consumer" and store.max_bytes is not None
    return f"{store.max_bytes} beside kv_role" if is_one else ""


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
        _is("true"),
        "false: scales computed from the first requests differ between processes, so their KV cannot be "
        "shared",
    ),
    Row(
        "enable_return_routed_experts",
        _is("true"),
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
        _is("true", lambda store: store.weights_id),
        "false: a worker that is added has the weights of a running one, which need not be the checkpoint's",
        "remove it, or set the option 'weights_id' to a name",
    ),
)
# With these it starts, and fskv does nothing, or less than somebody may think.
LESS = (
    Row(
        "enable_prefix_caching",
        _is("false"),
        "true: without it fskv neither loads nor stores",
        "remove --no-enable-prefix-caching",
        "problem",
    ),
    Row(
        "enable_lora",
        _is("true", _adapters_trusted),
        "an option 'trust' with \"lora\": fskv neither loads nor stores for requests with an adapter",
        "set 'trust' to [\"lora\"] if an adapter's name never changes its weights",
    ),
    Row(
        "kv_role",
        _is("kv_consumer"),
        '"kv_both" where fskv is to store: with this role it only loads',
        'write "kv_both" unless other engines store',
    ),
    Row(
        "max_bytes",
        _bound_of_a_consumer,
        'none: an engine with kv_role "kv_consumer" stores nothing and keeps no bound',
        "remove it here, and give it to the engines that store",
        "warning",
    ),
    Row(
        "kv_role",
        _is("kv_producer"),
        '"kv_both" where fskv is to load: with this role it only stores',
        'write "kv_both" unless other engines load',
    ),
    Row(
        "kv_load_failure_policy",
        _is("fail", is_default=True),
        '"recompute": fskv sets it, and warns at each start',
        'write "kv_load_failure_policy": "recompute" beside "kv_connector"',
    ),
    Row(
        "shutdown_timeout",
        _is("0", is_default=True),
        "10: vLLM kills an engine that is stopped, and its last chunks are lost",
        "add --shutdown-timeout 10",
    ),
)
# The settings that are read of a line.
SETTINGS = (
    *{row.setting for row in (*REFUSED, *LESS)},
    *("kv_offloading_backend", "quantization", "block_size"),
)
