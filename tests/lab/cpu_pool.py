"""vLLM's own CPU pool as a child, on a machine without a GPU: its spec and manager, with plain copies.

vLLM refuses its pool's worker on CPUs, because its copies are CUDA's; nothing else of it needs a GPU. So this
replaces those copies, and all that decides what is stored, kept and loaded is vLLM's. Its spec keeps its
name: beside one that it does not know, fskv refuses to store.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def replace_copies() -> None:
    """Give vLLM's pool plain copies, in this process."""

    def get_worker(self: CPUOffloadingSpec, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return CopyWorker(kv_caches, self.num_chunks)

    assert callable(CPUOffloadingSpec.get_worker)
    CPUOffloadingSpec.get_worker = get_worker


class CopyWorker(OffloadingWorker):
    """Each job is over when it is submitted."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._caches = kv_caches
        self._pools = [
            each.tensor.new_empty((num_chunks, each.tensor.shape[1])) for each in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, is_load=False)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, is_load=True)

    def _copy(self, job_id: int, pages: Any, chunks: Any, *, is_load: bool) -> bool:
        at = nbytes = 0
        for group_idx, size in enumerate(pages.group_sizes):
            for block, chunk in zip(
                pages.block_ids[at : at + size], chunks[at : at + size], strict=True
            ):
                for ref in self._caches.group_data_refs[group_idx]:
                    page = self._caches.tensors[ref.tensor_idx].tensor[int(block)]
                    kept = self._pools[ref.tensor_idx][int(chunk)]
                    page, kept = page[: ref.page_size_bytes], kept[: ref.page_size_bytes]
                    page.copy_(kept) if is_load else kept.copy_(page)
                    nbytes += ref.page_size_bytes
            at += size
        self._done.append(
            TransferResult(job_id=job_id, success=True, transfer_size=nbytes, transfer_time=1e-6)
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        pass
