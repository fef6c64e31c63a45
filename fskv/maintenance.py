"""`python -m fskv.maintenance`: the process that keeps a root within its bounds (fskv.bounds.maintenance)."""

from __future__ import annotations

import os

if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # so that it is no descendant of its engine: see fskv.bounds.process
    from fskv.bounds.serve import main

    main()
