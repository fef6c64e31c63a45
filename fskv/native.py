"""The C extension `_native`, which engines need. Importing this module is the check.

It moves chunks and looks for them without the interpreter. Commands that read a root do without it.
"""

from __future__ import annotations

from fskv.errors import ConfigError

try:
    from fskv import _native
except ImportError as error:
    raise ConfigError(
        f"fskv's C extension cannot be loaded ({error}), and whatever moves chunks needs it: install a wheel "
        "of fskv for this Python, or a C compiler and fskv again (pip install --force-reinstall --no-deps)"
    ) from error

__all__ = ["_native"]
