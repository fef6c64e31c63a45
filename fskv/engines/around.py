"""Puts code of fskv around methods of an engine's classes, where the engine has no place for it.

Imports nothing, because the plug-in does so in every process of vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(cls: type, name: str, code: Callable[..., Any]) -> None:
    """Replace a class's method once, for good: each call becomes `code(method, self, ...)`.

    An engine without the method stays as it is.
    """
    of_engine = getattr(cls, name, None)
    if of_engine is None or hasattr(of_engine, "by_fskv"):
        return

    @functools.wraps(of_engine)
    def by_fskv(self: Any, *args: Any, **kwargs: Any) -> Any:
        return code(of_engine, self, *args, **kwargs)

    by_fskv.by_fskv = True  # type: ignore[attr-defined]
    setattr(cls, name, by_fskv)
