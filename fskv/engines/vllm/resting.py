"""What an engine does whose KV fskv does not know: it runs, and nothing is stored or loaded.

Where it cannot be told how a layer's KV lies, or which blocks a hit needs, one rank that finds so raises
RestError. It tells the scheduler with its handshake, the scheduler's manager is turned off, and its log says
once why. Settings that a user can change are no such case: they are refused with ConfigError.
"""

from __future__ import annotations

from fskv.errors import FskvError


class RestError(FskvError):
    """KV that fskv does not know; the message says whose, and what is not known of it."""
