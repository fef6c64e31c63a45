"""LMCache imports FskvAdapter from here, as users write: `"module_path": "fskv.engines.lmcache"`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the modules that need LMCache on demand: the identity is derived and tested without LMCache."""
    if name == "FskvAdapter":
        from fskv.engines.lmcache.adapter import FskvAdapter

        return FskvAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
