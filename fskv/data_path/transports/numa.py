"""The CPUs near a GPU: I/O threads on them do not cross the link between sockets.

Reads /sys; called at start-up and, `pin_thread`, at the start of each I/O thread. Never raises.
"""

from __future__ import annotations

import contextlib
import os

SYS = "/sys"


def cpus_near(pci_address: str, sys: str = SYS) -> frozenset[int] | None:
    """Return this process's CPUs near a device ("0000:c1:00.0"); None: that is all of them, or not known."""
    try:
        with open(f"{sys}/bus/pci/devices/{pci_address}/local_cpulist", encoding="ascii") as file:
            parts = [part.partition("-") for part in file.read(4096).split(",")]  # "0-3,8,10-11"
        near = {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return None
    own = os.sched_getaffinity(0)
    return frozenset(own & near) or None if own - near else None


def pin_thread(cpus: frozenset[int] | None) -> None:
    """Bind the calling thread to CPUs, if that is allowed."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def cuda_cpus(device_idx: int) -> frozenset[int] | None:
    """Return the CPUs near a CUDA device, as `cpus_near`."""
    try:
        import torch

        found = torch.cuda.get_device_properties(device_idx)
        domain, bus, slot = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
    except Exception:  # no CUDA, or a torch that does not say: then threads run anywhere
        return None
    return cpus_near(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
