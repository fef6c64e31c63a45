"""A worker of fskv for an engine with one KV group: one block a chunk, all in one tensor."""

from __future__ import annotations

import warnings

from world import make_identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    from fskv.engines.vllm.files import own_files
    from fskv.engines.vllm.identity import EngineGroup
    from fskv.engines.vllm.weights import Purity, Weights
    from fskv.engines.vllm.worker import FskvWorker
    from fskv.hybrid_planner import GroupKind, GroupSpec
    from fskv.root.root import Root

PAGE = 8192


def worker_of(config, tensor, purity=None):
    """Make the worker of such an engine; the tensor has PAGE bytes of each block."""
    group = EngineGroup(GroupSpec(0, GroupKind.FULL, 16, None), "full", PAGE, ("layer",))
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]]
    )

    def open_namespace(epoch):
        root = Root.open(config.root, create=True)
        return root.open_namespace(make_identity(epoch=epoch))

    return FskvWorker(
        config,
        [group],
        own_files([group], 1, caches, None),
        open_namespace({}),
        open_namespace=open_namespace,
        purity=purity or Purity(Weights(), fixed=True),
        rank=0,
        world_size=1,
    )
