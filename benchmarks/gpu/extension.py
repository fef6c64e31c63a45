"""Build fskv._native for this Python where it is missing: in a checkout that was not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from benchmarks.gpu.steps import SKIPPED

if __name__ == "__main__":
    if importlib.util.find_spec("fskv._native"):
        print("it is there", file=sys.stderr)
        sys.exit(SKIPPED)
    code = "from setuptools import setup; setup()"
    # Not from the network: the C compiler and setuptools that are here.
    sys.exit(subprocess.call([sys.executable, "-c", code, "build_ext", "--inplace"]))
