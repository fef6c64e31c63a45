"""Refuses settings, options and a root that cannot work while vLLM still builds its configuration.

This happens in the process of `vllm serve`, seconds after its start. The engine would find the same faults
only after it has read the weights. vLLM asks for a connector's class then and hands over no configuration, so
this module looks for the configuration among the callers. If they do not have it, only the engine's own
check is left.
"""

from __future__ import annotations

import logging
from typing import Any

from fskv.config import StoreConfig
from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.data_path.worker_keys import WorkerKeys
from fskv.engines.vllm.quirks import configuration_being_built
from fskv.engines.vllm.refusals import check_settings
from fskv.errors import FskvError
from fskv.kv_transfer.multi import stores_of
from fskv.observe.health_file import check_directory
from fskv.root.root import Root

logger = logging.getLogger(__name__)


def check_configured(config: Any = None) -> None:
    """Check a configuration, or the one that a caller is building, if one is; raises FskvError."""
    config = config or configuration_being_built()
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None:
        return
    try:
        names = ("kv_connector", "kv_role", "kv_connector_extra_config")
        for store in stores_of({name: getattr(transfer, name, None) for name in names}):
            check_settings(config, store)
            if _runs_here(config.parallel_config):
                check_root(store)
    except FskvError as error:
        logger.error("fskv: %s", error)
        raise


def check_root(config: StoreConfig) -> None:
    """Open root and key file as the engine will, and look where the health file goes; raises FskvError."""
    call_with_deadline(
        lambda: Root.of(config),
        START_UP_S,
        f"option 'root': {config.root} did not answer",
    )
    call_with_deadline(
        lambda: check_directory(config.health_file),
        START_UP_S,
        f"option 'health_file': {config.health_file} did not answer",
    )
    WorkerKeys.of(config.key_file)


def _runs_here(parallel: Any) -> bool:
    """Return whether all of the engine runs on this node: another one's mounts are not seen from here."""
    size = getattr(parallel, "data_parallel_size", 1)
    return (
        getattr(parallel, "nnodes", 1) == 1
        and getattr(parallel, "distributed_executor_backend", None) in (None, "mp", "uni")
        and getattr(parallel, "data_parallel_size_local", size) == size
    )
