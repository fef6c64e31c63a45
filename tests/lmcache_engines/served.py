"""Child process of harness.py: what `vllm serve` runs, in LMCache's environment.

python served.py ARGUMENT...
"""

from __future__ import annotations

import runpy
import sys

from engine import numba_and_vllm

numba_and_vllm()

if __name__ == "__main__":  # the engine's own process imports this file again
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
