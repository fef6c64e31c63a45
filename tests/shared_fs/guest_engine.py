"""demo/engine.py on a User-Mode-Linux node: `python guest_engine.py REQUEST RESULT`."""

from __future__ import annotations

import sys

from vllm.utils import cpu_resource_utils

from demo import engine

# Its kernel has no cpusets, so /proc/PID/status names no nodes of memory, and vLLM needs one.
cpu_resource_utils.get_memory_affinity = lambda pid=0: [0]

if __name__ == "__main__":
    sys.exit(engine.main(sys.argv[1:]))
