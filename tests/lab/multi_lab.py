"""What the tests of several roots share: configurations, and engines with a protection taken out."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import engine_lab as lab
from places import LAB

from demo.engine import ENV_DEFAULTS
from fskv import chunk_file

ENGINE = str(LAB / "multi_engine.py")
FAST, SLOW = "fast", "slow"
CPU_POOL = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "CpuPoolSpec",
        "spec_module_path": "cpu_pool",
    },
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


class VariantEngine:
    """An engine of multi_engine.py, with what `engine_lab.Conversation` needs of a handle."""

    def __init__(self, variant: str, request: dict[str, Any], directory: pathlib.Path) -> None:
        directory.mkdir()
        self._result = directory / "result.json"
        (directory / "request.json").write_text(json.dumps(request))
        self.log_path = directory / "engine.log"
        env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, ENGINE, variant, directory / "request.json", self._result],
                env={**env, **ENV_DEFAULTS, **(request["env"] or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> dict[str, Any]:
        """Return the result; the engine must not have failed."""
        try:
            self._process.wait(lab.ENGINE_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
        result = json.loads(self._result.read_text())
        assert self._process.returncode == 0, result.get("error")
        return {**result, "log_path": str(self.log_path)}


def payloads(root: str) -> dict[str, bytes]:
    """Return the KV of every chunk file by path, without the header: that has the time of writing."""
    return {
        path: content[chunk_file.parse_header(content).header_nbytes :]
        for path, content in lab.snapshot(root).items()
    }


def is_whole(path: str) -> bool:
    """Whether the file has all blocks of its chunk: those that slid out of a window are in no later store."""
    return chunk_file.parse_header(pathlib.Path(path).read_bytes()).first_block == 0


def loads(step: dict[str, Any]) -> dict[str, float]:
    """Return by child how many requests were loaded from it, of a metrics step; without zeros."""
    return {
        m["labels"]["connector"]: m["value"]
        for m in step["metrics"]
        if m["name"] == "vllm:fskv_multi_loads" and m["value"]
    }
