"""Child process of test_engine_resting: demo/engine.py with KV that fskv does not know.

`strange` of the request: "layer" (the second layer has no `impl`, as indexers of sparse attention have none)
or "kind" (every KV group is of a kind that is new).
"""

from __future__ import annotations

import sys
from typing import Any

from places import REPOSITORY

from demo import engine

sys.path.insert(0, str(REPOSITORY / "demo"))  # where tier_lab says that vLLM's tiering is


class Child(engine.Child):
    def _start(self) -> None:
        if self.request["strange"] == "kind":
            _new_kinds()
        elif self.request["strange"] == "layer":
            without_impl()
        super()._start()


class _Bare:
    """A layer without an `impl`."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        if name == "impl":
            raise AttributeError(f"'{type(self._layer).__name__}' object has no attribute 'impl'")
        return getattr(self._layer, name)


def without_impl() -> None:
    """From now on layer 1 shows fskv none, in this process."""
    from fskv.engines.vllm.page_layout import _Pages

    inside = _Pages.inside

    def of_bare_layer(self: Any, name: str, layer: Any, *args: Any, **kwargs: Any) -> str:
        return inside(self, name, _Bare(layer) if ".1." in name else layer, *args, **kwargs)

    _Pages.inside = of_bare_layer


def _new_kinds() -> None:
    from fskv.engines.vllm import identity

    def unknown(spec: Any) -> Any:
        raise identity._unknown(spec)

    identity._kind = unknown


if __name__ == "__main__":
    engine.Child = Child
    sys.exit(engine.main(sys.argv[1:]))
