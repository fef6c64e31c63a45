"""demo/engine.py with what vLLM's CPU build lacks for some kinds of models; what fskv sees is vLLM's own.

N-grams: vLLM imports numba for them; its functions are run as plain Python.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import places  # noqa: F401

from demo import engine


def numba() -> types.ModuleType:
    """Return a module with what vLLM's n-gram proposer takes from numba."""
    plain = types.ModuleType("numba")

    def decorate(*_: Any, **__: Any) -> Any:
        return lambda function: function

    plain.jit = plain.njit = decorate
    plain.prange = range
    plain.get_num_threads, plain.set_num_threads = (lambda: 1), (lambda _: None)
    return plain


def fill_gaps() -> None:
    sys.modules.setdefault("numba", numba())


if __name__ == "__main__":
    fill_gaps()
    sys.exit(engine.main(sys.argv[1:]))
