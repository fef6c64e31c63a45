"""The way from the scheduler's side to the engine's workers, which vLLM gives neither a connector nor a tier.

It is found among the callers: whatever builds or resets a connector's scheduler side is called by the engine
core, which has the executor. `executor` is for the scheduler's thread, `connectors` for what was sent to a
worker; that runs in its process, on its own thread, between two steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


def executor() -> Any:
    """Return the executor of the engine core that is calling; None if no caller is one."""
    frame = inspect.currentframe()
    while frame is not None:
        found = getattr(frame.f_locals.get("self"), "model_executor", None)
        if hasattr(found, "collective_rpc"):
            return found
        frame = frame.f_back
    return None


def connectors() -> Iterator[OffloadingConnector]:
    """In a worker: yield its connectors of vLLM's offloading kind; inside a MultiConnector too."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    yield from _within(get_kv_transfer_group())


def _within(connector: Any) -> Iterator[OffloadingConnector]:
    if isinstance(connector, OffloadingConnector):
        yield connector
    for child in getattr(connector, "_connectors", ()):  # vLLM's MultiConnector
        yield from _within(child)
