"""SGLang imports FskvStorage from here, as users write: `"module_path": "fskv.engines.sglang"`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the modules that need SGLang on demand: the identity is derived and tested without SGLang."""
    if name == "FskvStorage":
        from fskv.engines.sglang.storage import FskvStorage

        return FskvStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
