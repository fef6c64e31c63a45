"""`python -m fskv.maintenance`: the process that keeps a root within its bounds (fskv.bounds.maintenance)."""

from __future__ import annotations

from fskv.bounds.maintenance import main

if __name__ == "__main__":
    main()
