"""The CPUs near a PCI device: I/O threads on them do not cross the link between sockets.

Reads /sys; called at start-up and, `pin_thread`, at the start of each I/O thread. Never raises.
"""

from __future__ import annotations

import contextlib
import os
import re

SYS = "/sys"
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?", re.IGNORECASE)


def cpus_near(pci_bus_id: str, sys: str = SYS) -> frozenset[int] | None:
    """Return this process's CPUs on the device's NUMA node; None with one node, or when not known.

    `pci_bus_id` as CUDA prints it ("0000:C1:00.0", "00000000:C1:00.0").
    """
    match = _PCI.fullmatch(pci_bus_id.strip())
    if match is None or len(_nodes(sys)) < 2:
        return None
    address = f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.0".lower()
    node = _read(f"{sys}/bus/pci/devices/{address}/numa_node")
    if node is None or not node.isdecimal():  # "-1": the firmware does not say
        return None
    text = _read(f"{sys}/devices/system/node/node{node}/cpulist")
    if text is None:
        return None
    return parse_cpu_list(text) & frozenset(os.sched_getaffinity(0)) or None


def pin_thread(cpus: frozenset[int] | None) -> None:
    """Bind the calling thread to CPUs, if that is allowed."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def cuda_cpus(device_idx: int, sys: str = SYS) -> frozenset[int] | None:
    """Return the CPUs near a CUDA device, as `cpus_near`."""
    try:
        import torch

        found = torch.cuda.get_device_properties(device_idx)
        domain, bus, slot = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
    except Exception:  # no CUDA, or a torch that does not say: then threads run anywhere
        return None
    return cpus_near(f"{domain:04x}:{bus:02x}:{slot:02x}.0", sys)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of the kernel's list format, such as "0-3,8,10-11"; words that are no numbers are left
    out.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _nodes(sys: str) -> frozenset[int]:
    """Return the nodes that have CPUs or memory; a machine without NUMA has one, or no such file."""
    return parse_cpu_list(_read(f"{sys}/devices/system/node/online") or "")


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return None
