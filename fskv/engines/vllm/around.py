"""Puts code of fskv around methods of vLLM's classes, where vLLM has no place for it.

Imports nothing, because the plug-in does so in every process of vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(cls: type, name: str, code: Callable[..., Any]) -> None:
    """Replace a class's method once, for good: each call becomes `code(method, self, ...)`.

    A vLLM without the method stays as it is.
    """
    of_vllm = getattr(cls, name, None)
    if of_vllm is None or hasattr(of_vllm, "by_fskv"):
        return

    @functools.wraps(of_vllm)
    def by_fskv(self: Any, *args: Any, **kwargs: Any) -> Any:
        return code(of_vllm, self, *args, **kwargs)

    by_fskv.by_fskv = True  # type: ignore[attr-defined]
    setattr(cls, name, by_fskv)
