"""vLLM's TieringOffloadingSpec on a machine without a GPU, so that secondary tiers can be tested there.

vLLM 0.32 refuses its CPU tier where there is no GPU to copy from. All of it is used as it is (the spec, the
shared memory, the layout of rows, what is copied where, the tiering manager); only what copies is replaced:
memmove on the model's thread where vLLM has streams and events of a device. An engine imports this module by
`spec_module_path`. Not for production: it copies KV from host memory to host memory.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _PosesAsCuda(torch.Tensor):
    """A CPU tensor that poses as a CUDA one: vLLM asserts that one side of a copy is on a device."""

    is_cuda = True


def _nothing(*_: object) -> None:
    pass


def _event(**_: Any) -> Any:
    """Return an event that counts as reached: each copy is over before its event is made."""
    return types.SimpleNamespace(
        record=_nothing, query=lambda: True, synchronize=_nothing, elapsed_time=lambda _: 0.0
    )


def _stream(*_: object) -> Any:
    return types.SimpleNamespace(wait_stream=_nothing, wait_event=_nothing)


class _Platform:
    Stream = current_stream = staticmethod(_stream)
    stream = staticmethod(nullcontext)

    def __getattr__(self, name: str) -> Any:
        from vllm.platforms import current_platform

        return getattr(current_platform, name)


def _copy(source: Any, target: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:  # noqa: ARG001  vLLM's name
    for begin, end, nbytes in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(end, begin, nbytes)


def pretend(replace: Callable[[object, str, object], object] = setattr) -> None:
    """Replace streams, events and copies of vLLM's handlers by those above, in this process."""
    fake_torch = types.SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    fake_torch.Event = _event
    replace(gpu_worker, "torch", fake_torch)
    replace(gpu_worker, "current_platform", _Platform())
    replace(gpu_worker, "PIN_MEMORY", False)
    replace(gpu_worker, "ops", types.SimpleNamespace(swap_blocks_batch=_copy))


def posing(kv_caches: CanonicalKVCaches) -> CanonicalKVCaches:
    """Return the same tensors in a class that vLLM takes for CUDA tensors."""
    tensors = [
        CanonicalKVCacheTensor(t.tensor.as_subclass(_PosesAsCuda), t.page_size_bytes)
        for t in kv_caches.tensors
    ]
    return CanonicalKVCaches(tensors, kv_caches.group_data_refs)


class CpuTieringSpec(TieringOffloadingSpec):
    """A TieringOffloadingSpec that copies by memmove and needs no GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            pretend()
            self._worker = self.create_worker(posing(kv_caches))
        return self._worker
