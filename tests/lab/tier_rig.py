"""FskvTier behind rows of vLLM's own CPU tier, without an engine: real files, faults on a script.

Rows are filled and emptied by vLLM's CPUOffloadingWorker (with memmove for its streams: demo/cpu_tiering.py);
what a file must hold is put together here, from the tensors on the other side.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import warnings
from types import SimpleNamespace

import numpy as np
from world import make_identity, returns_in_time, wait_for

from fskv.root.key_file import keys_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from demo import cpu_tiering
    from fskv.engines.vllm.files import own_files
    from fskv.engines.vllm.identity import EngineGroup
    from fskv.engines.vllm_tier import tier, workers
    from fskv.engines.vllm_tier.tier import FskvTier
    from fskv.engines.vllm_tier.workers import Report, combine
    from fskv.hybrid_planner import GroupKind, GroupSpec


POISON = 0xB3
NUM_ROWS = 12
PADDED = (40960, 24576)  # of a block in each tensor, on every rank
# By group: (tensor, bytes without padding). The second group has a part of one tensor only, as states have.
REFS = (((0, 40000), (1, 24000)), ((0, 30001),))
TOKENS_PER_BLOCK = 16
KINDS = (GroupKind.FULL, GroupKind.SLIDING_WINDOW)
REQUEST = ReqContext("request")
STEP = ScheduleEndContext((), ())


def groups(kinds=KINDS):
    return [
        EngineGroup(
            GroupSpec(i, kind, TOKENS_PER_BLOCK, 16 if kind is GroupKind.SLIDING_WINDOW else None),
            f"kind{i}",
            (sum(n for _, n in refs),),
            (f"layer{i}",),
        )
        for i, (kind, refs) in enumerate(zip(kinds, REFS, strict=True))
    ]


def caches(tensors, refs=REFS, mapping=None):
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
        [[CanonicalKVCacheRef(t, n, mapping and mapping(n)) for t, n in of] for of in refs],
    )


def placed(*places, blocks=1):
    """Tensors of a row, by where they begin and their bytes of a block."""
    row = torch.zeros(262144, dtype=torch.int8)
    return [row[at : at + blocks * n].view(blocks, n) for at, n in places]


def report(rank, tensors, row_nbytes, refs=REFS, num_ranks=2, **changes):
    """A worker's answer that has these tensors in a row: (blocks, bytes) each."""
    file_rank = rank if num_ranks > 1 else None
    files = own_files(groups(), len(tensors[0]), caches(tensors, refs), file_rank)
    fields = {
        "rank": rank,
        "identity": make_identity(),
        "groups": groups(),
        "files": workers.placements_of(files),
        "row_nbytes": row_nbytes,
        "prefix_caching": True,
        "max_model_len": 1024,
        "tokens_per_step": 64,
    }
    return Report(**{**fields, **changes})


class Rig:
    """`num_ranks` workers of vLLM with a CPU tier that they share, and FskvTier behind it."""

    def __init__(self, root, monkeypatch, *, num_ranks=1, bpc=1, **options):
        self.bpc, self.num_ranks = bpc, num_ranks
        cpu_tiering.pretend(monkeypatch.setattr)
        engine_id = f"fskv-test-{os.getpid()}-{secrets.token_hex(4)}"
        page = sum(PADDED) * bpc
        self.row_nbytes = -(-page * num_ranks // 4096) * 4096
        place = {
            "num_chunks": NUM_ROWS,
            "kv_bytes_per_chunk": self.row_nbytes,
            "cpu_page_size": page,
        }
        self.region = SharedOffloadRegion(engine_id, rank=None, **place)
        self.gpu = [
            [torch.zeros((24, padded), dtype=torch.int8) for padded in PADDED]
            for _ in range(num_ranks)
        ]
        self.workers, reports = [], []
        keys = keys_of(options.get("key_file"))
        identity = make_identity(encryption=keys.encryption if keys is not None else None)
        for rank, tensors in enumerate(self.gpu):
            region = SharedOffloadRegion(engine_id, rank=rank, **place)
            worker = CPUOffloadingWorker(cpu_tiering.posing(caches(tensors)), bpc, NUM_ROWS, region)
            self.workers.append(worker)
            row = [t[0].view(bpc, -1) for t in worker._store_handler.dst_tensors]
            reports.append(
                report(rank, row, self.row_nbytes, num_ranks=num_ranks, identity=identity)
            )
        self.view = self.region.create_kv_memoryview()
        self.rows = np.frombuffer(self.region.mmap_obj, np.uint8).reshape(NUM_ROWS, -1)
        workers = combine(reports, num_ranks, self.row_nbytes)
        resting = options.pop("resting", None)
        monkeypatch.setattr(tier, "ask_workers", resting or (lambda *_: workers))
        os.makedirs(root, exist_ok=True)
        self.root = str(root)
        index = options.pop("data_parallel_index", 0)
        parallel = SimpleNamespace(data_parallel_index=index, world_size=1)
        spec = SimpleNamespace(
            config=SimpleNamespace(parallel=parallel),
            kv_events_config=SimpleNamespace(
                enable_kv_cache_events=options.pop("events", False),
                self_describing_kv_events=False,
            ),
        )
        options = {"maintenance": "off", "weights_fixed": True, **options}
        self.tier = FskvTier(spec, self.view, "FskvTier", root=self.root, **options)
        self.tier.on_new_request(REQUEST)
        self.num_jobs = 0
        self.results = {}

    def close(self):
        self.tier.shutdown()
        for worker in self.workers:
            worker.shutdown()
        del self.rows
        self.view.release()  # as vLLM does: it raises while somebody holds the buffer
        self.region.cleanup()

    # --- between GPU and row: vLLM's part ---------------------------------------------------

    def keys(self, number):
        """Return the keys of the number-th chunk of both groups."""
        return [make_offload_key(bytes([number]) * 32, group) for group in (0, 1)]

    def _specs(self, blocks, rows):
        """Blocks [blocks, blocks + bpc) of the GPU <-> a row for each group."""
        ids = list(range(blocks, blocks + self.bpc))
        gpu = GPULoadStoreSpec(ids * 2, group_sizes=[self.bpc] * 2, block_indices=[0, 0])
        return gpu, CPULoadStoreSpec(list(rows))

    def fill_rows(self, blocks, rows, seed):
        """Put random pages on the GPUs and have vLLM copy both groups' chunks to rows; return the pages.

        By (rank, group): the bytes that a file must hold, put together block by block and page by page.
        """
        random = np.random.default_rng(seed)
        self.rows[list(rows)] = POISON
        wanted = {}
        gpu, cpu = self._specs(blocks, rows)
        for rank, tensors in enumerate(self.gpu):
            for tensor in tensors:
                noise = random.integers(-128, 128, (self.bpc, tensor.shape[1]), np.int8)
                tensor[blocks : blocks + self.bpc] = torch.from_numpy(noise)
            assert self.workers[rank].submit_store(1, gpu, cpu)
            for group, refs in enumerate(REFS):
                wanted[rank, group] = self._pages(tensors, refs, blocks)
        return wanted

    def _pages(self, tensors, refs, blocks):
        """Return the pages of a chunk, block by block."""
        return b"".join(
            tensors[t][block, :n].numpy().tobytes()
            for block in range(blocks, blocks + self.bpc)
            for t, n in refs
        )

    def pages_of_rows(self, blocks, rows):
        """Have vLLM copy rows to the GPUs' blocks and return what is there, as fill_rows does."""
        gpu, cpu = self._specs(blocks, rows)
        found = {}
        # Groups share a tensor: one after the other, or the second would overwrite the first.
        for group, refs in enumerate(REFS):
            for rank, tensors in enumerate(self.gpu):
                for tensor in tensors:
                    tensor[blocks : blocks + self.bpc] = 0
                assert self.workers[rank].submit_load(1, cpu, gpu)
                if group == 0:  # what group 1 wrote over it is taken from the row again
                    sizes = [self.bpc, 0]
                    only = GPULoadStoreSpec(gpu.block_ids[: self.bpc].tolist(), sizes, [0, 0])
                    one = CPULoadStoreSpec([int(cpu.chunk_ids[0])])
                    assert self.workers[rank].submit_load(2, one, only)
                found[rank, group] = self._pages(tensors, refs, blocks)
        return found

    @property
    def transport(self):
        return self.tier._worker.mover._transport

    # --- the tier ---------------------------------------------------------------------------

    def submit(self, keys, rows, *, load):
        self.num_jobs += 1
        job = TransferJob(self.num_jobs, keys, np.array(rows, np.int32), load, REQUEST)
        call = self.tier.submit_load if load else self.tier.submit_store
        returns_in_time(lambda: call(job) or 1)
        return self.num_jobs

    def poll(self):
        for result in returns_in_time(lambda: list(self.tier.get_finished_jobs())):
            assert result.job_id not in self.results, "reported twice"
            self.results[result.job_id] = result
        return self.results

    def finish(self, job):
        wait_for(lambda: job in self.poll())
        return self.results[job]

    def store(self, numbers, seed=0):
        """Store chunks of both groups and wait for the files; return pages by (number, rank, group)."""
        wanted = {}
        for number in numbers:
            rows = (2 * number, 2 * number + 1)
            for place, pages in self.fill_rows(0, rows, seed + number).items():
                wanted[(number, *place)] = pages
            assert self.finish(self.submit(self.keys(number), rows, load=False)).success
        wait_for(lambda: self.poll() is None or len(self.files()) == len(wanted))
        wait_for(lambda: self.poll() is None or not self.tier._manager.chunks.storing)
        return wanted

    def files(self):
        return sorted(
            str(path) for path in pathlib.Path(self.root).rglob("*.kv") if ".g" in path.name
        )

    def path(self, key, rank=0):
        chunk = self.tier._manager.chunk_of(key)
        from fskv.namespace import chunk_path

        rank_in_name = rank if self.num_ranks > 1 else None
        name = os.path.basename(chunk_path(*chunk, rank_in_name))
        (path,) = [path for path in self.files() if path.endswith(name)]
        return path

    def lookup(self, key, request=REQUEST):
        found = []

        def known():
            self.tier.on_schedule_end(STEP)
            found.append(self.tier.lookup(key, request))
            return found[-1] is not LookupResult.RETRY

        wait_for(known)
        return found[-1]

    def counted(self):
        """Return counters since the last call, by (name, label)."""
        stats = self.tier.get_stats()
        return {} if stats is None else stats.data
