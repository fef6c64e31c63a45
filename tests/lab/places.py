"""Where the tree is, for tests and for the programs that they start.

A program of the lab imports this first: then it finds `faults`, `demo` and `trials` as a test does.
"""

from __future__ import annotations

import sys
from pathlib import Path

LAB = Path(__file__).resolve().parent
REPOSITORY = LAB.parents[1]
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

# Of this run of pytest, the same for all of its workers. Set by conftest.py; pytest keeps the last three.
run_directory: Path
