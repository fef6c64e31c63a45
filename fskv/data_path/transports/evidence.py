"""The evidence that cuFile moved bytes between storage and GPU.

cuFile falls back to a copy through host memory without an error. So a probe file is written and read, and
counters are compared before and after: kvikio's own (calls that went to cuFile) and those of the nvidia-fs
kernel module (direct transfers). `describe` turns the facts into one sentence, and calls direct only what a
counter shows. At start-up only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

NVIDIA_FS_STATS = "/proc/driver/nvidia-fs/stats"
# "Reads : n=12 ok=12 err=0 ...": n and ok are only there while the module counts.
_COUNTS = re.compile(r"^(Reads|Writes)\s*:.*?\bok=(\d+)", re.MULTILINE)


class NvidiaFs(NamedTuple):
    """The counters of the kernel module, for all processes of the machine; None where it does not count."""

    reads: int | None
    writes: int | None


class Facts(NamedTuple):
    """The findings around one probe write and one probe read."""

    prefers_compat: bool | None = None  # kvikio, before any file is opened
    num_posix: int | None = None  # kvikio's transfers without cuFile; None: not counted
    num_cufile: int | None = None
    before: NvidiaFs | None = None  # None: no such module
    after: NvidiaFs | None = None


def bounces(facts: Facts) -> bool:
    """Return whether kvikio copied the probe's bytes through host memory, which the host path does better."""
    if facts.num_cufile is None:
        return bool(facts.prefers_compat)
    return facts.num_cufile == 0 and bool(facts.num_posix)


def describe(facts: Facts) -> str:
    """Name in one phrase the path of the bytes and the evidence for it."""
    if bounces(facts):
        counted = f"{facts.num_posix} transfers without cuFile and none with it"
        why = "prefers it here" if facts.num_cufile is None else f"counted {counted}"
        return f"cuFile compat (POSIX bounce: kvikio {why})"
    if facts.before is None or facts.after is None:
        return (
            "unknown: nvidia-fs is not loaded, and cuFile shows no counter that would tell PCI P2PDMA "
            "from its own bounce buffers"
        )
    if None in (*facts.before, *facts.after):
        return (
            "unknown: nvidia-fs counts no transfers; write 1 to "
            "/sys/module/nvidia_fs/parameters/rw_stats_enabled to know"
        )
    reads = (facts.after.reads or 0) - (facts.before.reads or 0)
    writes = (facts.after.writes or 0) - (facts.before.writes or 0)
    if reads > 0 or writes > 0:
        return f"direct GDS (nvidia-fs: +{reads} reads, +{writes} writes)"
    return (
        "unknown: nvidia-fs is loaded and counted none of the probe's transfers; PCI P2PDMA or cuFile's "
        "own bounce buffers"
    )


def collect(probe: Callable[[], None], stats_path: str = NVIDIA_FS_STATS) -> Facts:
    """Run `probe`, one write and one read through kvikio, and return the counters' facts.

    Raises what `probe` raises.
    """
    prefers_compat: bool | None = None
    monitor: Any = None
    with contextlib.suppress(Exception):  # each of these is missing in some version
        import kvikio
        import kvikio.defaults

        prefers_compat = bool(kvikio.defaults.is_compat_mode_preferred())
        monitor = kvikio.SummaryMonitor()  # 26.10
    before = _nvidia_fs(stats_path)
    num_posix = num_cufile = None
    try:
        probe()
    finally:
        with contextlib.suppress(Exception):
            counted = monitor.get().by_backend
            num_posix, num_cufile = counted["POSIX"]["num_ops"], counted["GDS"]["num_ops"]
            monitor.stop()
    return Facts(prefers_compat, num_posix, num_cufile, before, _nvidia_fs(stats_path))


def _nvidia_fs(path: str) -> NvidiaFs | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return parse_stats(file.read(1 << 16))
    except OSError:
        return None


def parse_stats(text: str) -> NvidiaFs:
    """Read the two counters out of the module's statistics."""
    counts = {name: int(number) for name, number in _COUNTS.findall(text)}
    return NvidiaFs(counts.get("Reads"), counts.get("Writes"))
