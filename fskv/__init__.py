"""fskv: a file-system KV-cache store for LLM inference engines.

Importing this package imports neither torch, vLLM nor kvikio.
"""

from fskv._version import __version__

__all__ = ["__version__"]
