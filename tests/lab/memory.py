"""How much memory something takes."""

from __future__ import annotations

import contextlib
import tracemalloc


@contextlib.contextmanager
def bounded_memory(nbytes):
    """Fail if more than `nbytes` are allocated at a time inside."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak} bytes allocated, expected less than {nbytes}"
