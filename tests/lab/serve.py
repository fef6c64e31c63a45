"""Child process of test_engine_serve: the program behind `vllm serve`, with fskv as an installation has it.

python serve.py ARGUMENT...
"""

from __future__ import annotations

import runpy
import sys

import places  # noqa: F401

sys.argv[0] = "vllm"
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
