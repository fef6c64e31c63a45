"""Run a module where there is a GPU: `python -m benchmarks.gpu.on_device [--busy] MODULE ...`.

With --busy beside a thread that keeps all multiprocessors busy with large products, as a prefill does. Lines
of JSON say how many products a second it gets through, and how long a decode step's small kernel and its copy
of 4 bytes to the host take: alone, and beside the module. Without a GPU the step is skipped.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.gpu.steps import SKIPPED

_ALONE_S = 2.0
_LAUNCHED = 4  # products that wait in the stream


class Busy:
    """The thread, its rate since it was asked last, and the time of a step that samples a token meanwhile."""

    def __init__(self, size: int) -> None:
        import torch

        self._matrix = torch.ones((size, size), dtype=torch.bfloat16, device="cuda")
        self._product = torch.zeros((size, size), dtype=torch.bfloat16, device="cuda")
        self._token = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._num = 0
        self._steps_s: list[float] = []
        self._since = (0, time.perf_counter())
        for run in (self._multiply, self._sample):
            threading.Thread(target=run, daemon=True).start()

    def _multiply(self) -> None:
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while True:
                for _ in range(_LAUNCHED):
                    self._product.addmm_(self._matrix, self._matrix, beta=0)
                stream.synchronize()
                self._num += _LAUNCHED

    def _sample(self) -> None:
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):
            while True:
                begin = time.perf_counter()
                self._token.add_(1)
                self._token.cpu()
                self._steps_s.append(time.perf_counter() - begin)
                time.sleep(0.001)

    def figures(self, when: str) -> dict[str, float]:
        """Return what there was since the last call."""
        now = (self._num, time.perf_counter())
        num, seconds = (new - old for new, old in zip(now, self._since, strict=True))
        self._since = now
        steps_s, self._steps_s = self._steps_s, []
        return {
            f"products/s {when}": num / seconds,
            f"a small step {when}, ms": 1e3 * statistics.median(steps_s or [0.0]),
        }


def need_gpus() -> None:
    """Skip the step where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        sys.exit(SKIPPED)


def main(arguments: Sequence[str]) -> None:
    made = argparse.ArgumentParser(prog="benchmarks.gpu.on_device", description=__doc__)
    made.add_argument("--busy", action="store_true")
    made.add_argument("--size", type=int, default=8192, help="of the matrices")
    made.add_argument("command", nargs=argparse.REMAINDER)
    options = made.parse_args(arguments)
    need_gpus()
    busy = None
    if options.busy:
        busy = Busy(options.size)
        time.sleep(_ALONE_S)
        print(json.dumps(busy.figures("alone")))
    sys.argv = options.command
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if busy:
            print(json.dumps(busy.figures("beside")))


if __name__ == "__main__":
    main(sys.argv[1:])
