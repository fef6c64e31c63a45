"""Run a module where there is a GPU: `python -m benchmarks.gpu.on_device [--busy] [--gpus 2] MODULE ...`.

With --busy beside a thread that launches small kernels as an eager engine does; how many a second it gets
through, alone and beside the module, is a line of JSON. With --gpus N, on how many of them a process was: one
is right. Where there are fewer GPUs the step is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.gpu.steps import SKIPPED

_ALONE_S = 2.0
_LOOK_S = 3.0
_LAUNCHES = 32  # between two waits


class Busy:
    """The thread, and the rate since it was asked last."""

    def __init__(self) -> None:
        import torch

        self._ones = torch.ones(4096, dtype=torch.float32, device="cuda")
        self._num = 0
        self._since = (0, time.perf_counter())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        import torch

        while True:
            for _ in range(_LAUNCHES):
                self._ones.mul_(1.0)
            torch.cuda.current_stream().synchronize()
            self._num += _LAUNCHES

    def rate(self) -> float:
        now = (self._num, time.perf_counter())
        num, seconds = (new - old for new, old in zip(now, self._since, strict=True))
        self._since = now
        return num / seconds


def need_gpus(num: int = 1) -> None:
    """Skip the step where there are fewer."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < num:
        print(f"torch sees {there} CUDA devices, this needs {num}", file=sys.stderr)
        sys.exit(SKIPPED)


class Watch:
    """On which GPUs each process computes, by nvidia-smi, every few seconds."""

    def __init__(self) -> None:
        self.gpus: dict[str, set[str]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            while True:
                done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
                for line in done.stdout.splitlines():
                    pid, _, gpu = line.partition(", ")
                    self.gpus.setdefault(pid, set()).add(gpu)
                time.sleep(_LOOK_S)


def main(arguments: Sequence[str]) -> None:
    made = argparse.ArgumentParser(prog="benchmarks.gpu.on_device", description=__doc__)
    made.add_argument("--busy", action="store_true")
    made.add_argument("--gpus", type=int, default=1)
    made.add_argument("command", nargs=argparse.REMAINDER)
    options = made.parse_args(arguments)
    need_gpus(options.gpus)
    watch = Watch() if options.gpus > 1 else None
    busy = None
    if options.busy:
        busy = Busy()
        busy.rate()
        time.sleep(_ALONE_S)
        alone = busy.rate()
    sys.argv = options.command
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if busy:
            print(json.dumps({"kernels/s alone": alone, "kernels/s beside": busy.rate()}))
        if watch:
            most = max(map(len, watch.gpus.values()), default="no process was seen")
            print(json.dumps({"GPUs of one process": most}))
            if most not in (1, "no process was seen"):
                sys.exit("a process is on several GPUs")


if __name__ == "__main__":
    main(sys.argv[1:])
