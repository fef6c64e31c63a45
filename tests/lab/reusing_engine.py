"""demo/engine.py with fskv's rule left out that it rests where vLLM does not use KV again.

vLLM 0.32 turns prefix caching off for MLA on CPUs; this is how the files of MLA are seen there all the same.
"""

from __future__ import annotations

import sys

import places  # noqa: F401

from demo.engine import main

if __name__ == "__main__":
    from fskv.engines.vllm.manager import FskvManager

    assert callable(FskvManager.turn_off)
    FskvManager.turn_off = lambda self, reason: None
    sys.exit(main(sys.argv[1:]))
