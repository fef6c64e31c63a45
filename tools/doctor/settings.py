"""Settings of vLLM with which an engine starts, and fskv does less than somebody may think. Pure."""

from __future__ import annotations

from typing import Any

from fskv.config import StoreConfig
from fskv.kv_transfer.line import REFUSED, Row, Settings, is_set


def _bound_of_a_consumer(_value: Any, settings: Settings, store: StoreConfig) -> str:
    is_one = settings.get("kv_role") == "kv_consumer" and store.max_bytes is not None
    return f"{store.max_bytes} beside kv_role" if is_one else ""


LESS = (
    Row(
        "enable_prefix_caching",
        is_set("false"),
        "true: without it fskv neither loads nor stores",
        "remove --no-enable-prefix-caching",
        "problem",
    ),
    Row(
        "enable_lora",
        is_set("true", lambda store: "lora" in store.trust),
        "an option 'trust' with \"lora\": fskv neither loads nor stores for requests with an adapter",
        "set 'trust' to [\"lora\"] if an adapter's name never changes its weights",
        "hint",
    ),
    Row(
        "kv_role",
        is_set("kv_consumer"),
        '"kv_both" where fskv is to store: with this role it only loads',
        'write "kv_both" unless other engines store',
        "hint",
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
        is_set("kv_producer"),
        '"kv_both" where fskv is to load: with this role it only stores',
        'write "kv_both" unless other engines load',
        "hint",
    ),
    Row(
        "kv_load_failure_policy",
        is_set("fail", is_default=True),
        '"recompute": fskv sets it, and warns at each start',
        'write "kv_load_failure_policy": "recompute" beside "kv_connector"',
        "hint",
    ),
    Row(
        "shutdown_timeout",
        is_set("0", is_default=True),
        "10: vLLM kills an engine that is stopped, and its last chunks are lost",
        "add --shutdown-timeout 10",
        "hint",
    ),
)
# The settings that are read of a line.
SETTINGS = (
    *{row.setting for row in (*REFUSED, *LESS)},
    *("kv_offloading_backend", "quantization", "block_size"),
)
