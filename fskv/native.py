"""The C extension `_native`, which engines need: it moves chunks and looks for them without the interpreter.

The command line does without it: nothing that a command reads a root with imports this module.
"""

from __future__ import annotations

from fskv.errors import ConfigError

try:
    from fskv import _native
except ImportError as error:
    raise ConfigError(
        f"fskv's C extension cannot be loaded ({error}), and an engine needs it: install a wheel of fskv for "
        "this Python, or install a C compiler and then fskv again (pip install --force-reinstall --no-deps)"
    ) from error

__all__ = ["_native"]
