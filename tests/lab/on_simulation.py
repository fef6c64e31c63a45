"""Run a program as if there were a GPU: `python tests/lab/on_simulation.py [--no-waits] -m MODULE ...`.

Each `torch.cuda` call goes to the simulated driver. In the end its misuses are printed, and are an error.
With --no-waits events have always fired: the control of what tests of order see.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
LATE_S = 0.002


def main(arguments):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    repository = os.path.dirname(os.path.dirname(HERE))
    sys.path[:0] = [repository]
    if HERE not in sys.path:
        sys.path.append(HERE)
    from cuda_sim import OF_KVIKIO, SimEvent, simulation
    from cuda_torch import LEFT_OUT, on_simulation

    sim = simulation()
    sim.reset(1, LATE_S)
    cuda = on_simulation(SimpleNamespace(setattr=setattr), sim)
    if arguments[0] == "--no-waits":
        SimEvent.query, SimEvent.synchronize = (lambda self: True), (lambda self: None)
        arguments = arguments[1:]
    assert arguments[0] == "-m"
    sys.argv = arguments[1:]
    if sys.argv[0] == "pytest":
        for name in LEFT_OUT:
            sys.argv += ["--deselect", f"tests/unit/test_gpu.py::{name}"]
    code = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    known = {OF_KVIKIO} if "kvikio" in sys.modules else set()
    wrong = sorted({*sim.misuses, *cuda.errors} - known)
    for line in wrong:
        print(f"on_simulation: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or bool(wrong))  # streams' threads never end


if __name__ == "__main__":
    main(sys.argv[1:])
