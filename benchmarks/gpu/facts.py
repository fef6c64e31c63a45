"""What the machine is: GPU, driver, versions, bus, disk and mount, as one line of JSON."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys

from fskv.root.mounts import mount_of

_PACKAGES = ("fskv", "torch", "triton", "kvikio-cu12", "kvikio-cu13", "vllm", "pytest")
_OF_GPU = (
    *("name", "driver_version", "compute_cap", "memory.total", "pcie.link.gen.current"),
    *("pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)
_LONG_S = 20.0


def _said_by(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONG_S, check=True)
        return done.stdout.strip()
    return "-"


def _driver() -> str:
    from fskv.data_path.transports import cuda

    version, number = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL(cuda.LIBCUDA)
        code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number))
        driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return str(error)
    cuda_ = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return f"{cuda_}, {number.value} devices" + (f", error {code}" if code else "")


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "-"


def _cuda_of_torch() -> str:
    try:
        import torch

        if not torch.cuda.is_available():
            return f"{torch.version.cuda}: no device"
        found = torch.cuda.get_device_properties(0)
        kind = f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} SMs"
    except Exception as error:  # without a driver, without CUDA, without torch
        return str(error)
    return f"{torch.version.cuda}: {kind}"


def main(directory: str) -> None:
    with open("/proc/self/mountinfo") as file:
        mount = mount_of(directory, file.read())
    room = os.statvfs(directory)
    facts = {
        "libcuda": _driver(),
        "torch's CUDA": _cuda_of_torch(),
        "nvidia-smi": _said_by(
            "nvidia-smi", f"--query-gpu={','.join(_OF_GPU)}", "--format=csv,noheader"
        ),
        "nvidia-fs": " ".join(glob.glob("/dev/nvidia-fs*")) or "-",
        "gdscheck": _said_by("gdscheck", "-p").partition("\n")[0],
        "CPUs": f"{len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.1f}",
        "kernel": f"{platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "fskv._native": "there" if importlib.util.find_spec("fskv._native") else "missing",
        "commit": _said_by("git", "rev-parse", "--short", "HEAD"),
        "mount": f"{mount.point} ({mount.kind})" if mount else "-",
        "free": f"{room.f_bavail * room.f_frsize / 1e9:.0f} GB",
    } | {name: _version(name) for name in _PACKAGES}
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
