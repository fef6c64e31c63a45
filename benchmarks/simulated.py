"""The simulated CUDA device of the tests, as the place of a rig's KV pages. Only in a checkout.

It shows what fskv's own code costs in the interpreter. Torch's own share is replaced by a stand-in, and
nothing here is as fast or as slow as a GPU: no figure of it is one's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.rig import BenchmarkError
from fskv.data_path.transports.protocol import Ready

if TYPE_CHECKING:
    import torch

_LAB = Path(__file__).resolve().parents[1] / "tests" / "lab"
_STEP_S = 0.002  # an engine's stream is so late, at most


class SimulatedDevice:
    """See the module docstring; `benchmarks.rig.Device`. For the life of the process."""

    def __init__(self) -> None:
        sys.path.append(str(_LAB))
        try:
            import cuda_sim  # type: ignore[import-not-found]
            import cuda_torch  # type: ignore[import-not-found]
        except ImportError as error:
            raise BenchmarkError(
                f"{error.name} is missing: the simulated device is in a checkout, with its environment"
            ) from error
        self._sim = cuda_sim.simulation()
        self._sim.reset(1, _STEP_S)
        self._gpu = cuda_torch.on_simulation(SimpleNamespace(setattr=setattr), self._sim).gpu(
            "cuda"
        )

    def tensors(
        self, num_tensors: int, num_blocks: int, page_nbytes: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return KV tensors on the device, and the same memory where a benchmark may look at it."""
        import torch

        closed = [self._gpu.tensor(num_blocks, page_nbytes) for _ in range(num_tensors)]
        opened = [torch.from_numpy(self._gpu.opened(one).view(np.int8)) for one in closed]
        return closed, opened

    def ready(self) -> Ready:
        """Return the event of a step of the engine: it fires late."""
        event: Ready = self._gpu.event()
        return event

    def check(self) -> None:
        """Raise BenchmarkError where the driver was misused: no figure is worth anything then."""
        if misuses := self._sim.misuses:
            raise BenchmarkError(f"the simulated driver was misused: {misuses[0]}")


def add_device(made: argparse.ArgumentParser) -> None:
    """Add the option that says where the KV pages are."""
    what = "in host memory, or on the simulated CUDA device of the tests, which is no GPU (host)"
    made.add_argument("--pages", choices=("host", "cuda"), default="host", help=what)


def device_of(pages: str) -> SimulatedDevice | None:
    """Return the device of the option --pages, None for host memory."""
    return None if pages == "host" else SimulatedDevice()
