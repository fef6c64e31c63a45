"""Build fskv._native with the C compiler alone where it is missing or old, and copy bytes with it."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig

from benchmarks.gpu.busy import need_gpu

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
_SLOT = 2 << 20


def build() -> str | None:
    """Build it into the checkout; return why that did not work."""
    target = f"fskv/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    command = [os.environ.get("CC", "cc"), *_FLAGS, include, *sorted(glob.glob("fskv/csrc/*.c"))]
    try:
        done = subprocess.run(
            [*command, "-o", f"{target}.part"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    if done.returncode:
        return f"{command[0]} failed: {done.stderr.strip()[-200:]}"
    os.replace(f"{target}.part", target)
    return None


def main() -> str | None:
    """Return why the extension is of no use here."""
    there = importlib.util.find_spec("fskv._native")
    newest = max(os.path.getmtime(path) for path in glob.glob("fskv/csrc/*.[ch]"))
    built = there is None or os.path.getmtime(str(there.origin)) < newest
    if built and (why := build()):
        return f"fskv's C extension cannot be built: {why}"
    need_gpu()
    import torch

    from fskv.data_path.transports.cuda import CudaDevice
    from fskv.data_path.transports.cuda_native import NativeCuda

    tensor = torch.zeros((64, 64 << 10), dtype=torch.int8, device="cuda")
    native = NativeCuda(CudaDevice([tensor]), _SLOT, 1, num_lanes=1)  # it tries its copies
    kernel = bool(native._device.uses_kernel)  # noqa: SLF001  the engine needs it nowhere
    native.close()
    if not kernel:
        return "the driver cannot load fskv's copy kernel"
    print(json.dumps({"extension": "built" if built else "was there", "copy kernel": "used"}))
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        sys.exit(f"fskv's C extension does not work here: {error}")
