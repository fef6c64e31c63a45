"""test_gpu.py over the simulated driver: it contains nothing that cannot pass.

The tests are the same, and fskv's code; torch.cuda is `cuda_torch`, libcuda `cuda_sim`, kvikio the real one.
What this cannot show is `cuda_torch.LEFT_OUT`, a real driver's behaviour, and any speed.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from places import LAB, REPOSITORY

TESTS = REPOSITORY / "tests" / "unit" / "test_gpu.py"
QUICK = "(host] or gds]) and not complete or longer or in_gpu_memory or slots or kernel"


def over_the_simulation(*arguments):
    """Return the exit code and the output of test_gpu.py, or of some of it."""
    command = [sys.executable, str(LAB / "on_simulation.py"), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-rs", str(TESTS))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "some",
    [pytest.param(("-k", QUICK), id="some"), pytest.param((), id="all", marks=pytest.mark.slow)],
)
def test_the_tests_of_a_gpu_can_pass(some):
    code, said = over_the_simulation(*PYTEST, *some)
    assert code == 0, said[-4000:]
    assert int(re.search(r"(\d+) passed", said)[1]) >= 5


def test_negative_control_where_nobody_waits_the_tests_of_order_fail():
    only = "store_waits_for_the_kernels and (host] or host-buffered])"
    code, said = over_the_simulation("--no-waits", *PYTEST, "-k", only)
    assert code == 1
    assert "2 failed" in said, said[-4000:]
