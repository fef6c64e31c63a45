"""Other values of fskv's constants, for a process of a test that cannot wait.

As a program it is demo/engine.py with them: python quick_constants.py '{"probe_s": 1}' REQUEST RESULT
"""

from __future__ import annotations

import json
import sys

from places import REPOSITORY

from fskv.data_path.breaker import Breaker
from fskv.index.presence import PresenceIndex


def set_constants(**values: float) -> None:
    """Set what a Breaker or a PresenceIndex takes where nothing is said, by the names of their parameters."""
    for name, value in values.items():
        (defaults,) = (
            made.__init__.__kwdefaults__
            for made in (Breaker, PresenceIndex)
            if name in made.__init__.__kwdefaults__
        )
        defaults[name] = value


if __name__ == "__main__":
    sys.path.append(str(REPOSITORY / "demo"))  # cpu_tiering
    from demo import engine

    set_constants(**json.loads(sys.argv[1]))
    sys.exit(engine.main(sys.argv[2:]))
