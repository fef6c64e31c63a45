"""Run a module where there is a GPU: `python -m benchmarks.gpu.busy no|quick|yes MODULE ...`.

With "yes" a stream of matmuls holds the multiprocessors meanwhile, as a prefill does. Another stream does the
end of a decode step: a small kernel, and 4 bytes to the host. Lines of JSON say how fast both are, alone and
beside the module. "quick" is the same with small matrices.
"""

from __future__ import annotations

import json
import runpy
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from benchmarks.gpu.steps import SKIPPED

_ALONE_S = 2.0
_SIZE, _QUICK_SIZE = 8192, 64
_AHEAD = 2  # matmuls that are launched before one is waited for: the device never idles


class Busy:
    """The two threads, and what they did since they were asked last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num = 0
        self._steps: list[float] = []
        self._since = time.perf_counter()
        for run in (self._multiply, self._decode):
            threading.Thread(target=run, daemon=True).start()

    def _multiply(self) -> None:
        import torch

        stream, events = torch.cuda.Stream(), []
        shape = (self._size, self._size)
        left, right, out = (
            torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3)
        )
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            while True:
                out.addmm_(left, right, beta=0)
                events.append(stream.record_event())
                if len(events) > _AHEAD:
                    events.pop(0).synchronize()
                    self._num += 1

    def _decode(self) -> None:
        import torch

        stream = torch.cuda.Stream()
        tokens = torch.zeros(4096, dtype=torch.uint8, device="cuda")
        host = torch.empty(4, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            while True:
                begin = time.perf_counter()
                tokens.add_(1)
                host.copy_(tokens[:4], non_blocking=True)
                stream.synchronize()
                self._steps.append(time.perf_counter() - begin)

    def found(self, when: str) -> dict[str, float]:
        now, num, steps = time.perf_counter(), self._num, self._steps
        passed, self._since, self._num, self._steps = now - self._since, now, 0, []
        figures = {f"matmuls, TFLOP/s, {when}": 2e-12 * num * self._size**3 / passed}
        if len(steps) > 1:
            percentiles = statistics.quantiles(steps, n=100)
            figures[f"decode step, median us, {when}"] = percentiles[49] * 1e6
            figures[f"decode step, 99 % us, {when}"] = percentiles[98] * 1e6
        return figures


def need_gpu() -> None:
    """Skip the step where there is none."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        sys.exit(SKIPPED)


def main(arguments: Sequence[str]) -> None:
    side, *sys.argv = arguments
    need_gpu()
    if side != "no":
        busy = Busy(_SIZE if side == "yes" else _QUICK_SIZE)
        time.sleep(_ALONE_S)  # cuBLAS is loaded
        busy.found("")
        time.sleep(_ALONE_S)
        print(json.dumps(busy.found("alone")))
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:
        if side != "no":
            print(json.dumps(busy.found("beside")))


if __name__ == "__main__":
    main(sys.argv[1:])
