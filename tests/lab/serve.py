"""Child process of test_engine_serve: what `vllm serve` runs.

python serve.py ARGUMENT...

vLLM's command itself asks for a distribution called vllm, which its CPU build is not.
"""

from __future__ import annotations

import runpy
import sys

import places  # noqa: F401

if __name__ == "__main__":  # the engine's own process imports this file again
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
