"""What the tests of several roots share."""

from __future__ import annotations

import pathlib
from typing import Any

import engine_lab as lab

FAST, SLOW = "fast", "slow"
CPU_POOL = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}


def child(root: str, model: lab.Model, **options: Any) -> dict[str, Any]:
    return lab.connector(root, **{**lab.options_for(model.name), **options})


def multi(*children: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "FskvMultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children), **options},
    }


def two_roots(tmp_path: pathlib.Path) -> tuple[str, str]:
    for name in (FAST, SLOW):
        (tmp_path / name).mkdir()
    return str(tmp_path / FAST), str(tmp_path / SLOW)


def loads(step: dict[str, Any]) -> dict[str, float]:
    """Return by child how many requests were loaded from it, of a metrics step; without zeros."""
    return {
        m["labels"]["connector"]: m["value"]
        for m in step["metrics"]
        if m["name"] == "vllm:fskv_multi_loads" and m["value"]
    }
