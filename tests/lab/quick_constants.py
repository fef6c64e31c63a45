"""Other values of fskv's constants, for a process of a test that cannot wait."""

from __future__ import annotations

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
