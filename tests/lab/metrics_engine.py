"""A real engine that publishes its metrics: `metrics_engine.py PORT request.json result.json`.

The request is demo/engine.py's. vLLM's own server publishes the same registry.
"""

from __future__ import annotations

import sys

import places  # noqa: F401
from quick_constants import set_constants

from demo.engine import main

if __name__ == "__main__":
    from prometheus_client import start_http_server

    set_constants(positive_ttl_s=0.5)
    start_http_server(int(sys.argv[1]), "127.0.0.1")
    sys.exit(main(sys.argv[2:]))
