"""What the tests of several roots share: configurations, and engines with a protection taken out."""

from __future__ import annotations

import pathlib
from typing import Any

import engine_lab as lab
from places import LAB

from fskv.format import chunk_file

ENGINE = str(LAB / "multi_engine.py")
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


class VariantEngine:
    """An engine of multi_engine.py, with what `engine_lab.Conversation` needs of a handle."""

    def __init__(self, variant: str, request: dict[str, Any], directory: pathlib.Path) -> None:
        self._engine = lab.start_engine(request, directory, program=ENGINE, arguments=[variant])

    @property
    def running(self) -> bool:
        return self._engine.running

    def wait(self) -> dict[str, Any]:
        """Return the result; the engine must not have failed."""
        result = self._engine.wait()
        assert result["exit_code"] == 0, result.get("error")
        return result


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
