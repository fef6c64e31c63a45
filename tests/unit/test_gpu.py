"""The transports on a real CUDA device: byte exactness, stream order, checks on the GPU, timeouts, speed.

What carries the bytes of the GDS transport (direct, or a bounce of kvikio's or cuFile's) is the machine's
choice; the promises are the same. `pytest -m gpu -s` prints the start-up line and the throughput.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

import gds_lab  # noqa: E402
import numpy as np  # noqa: E402

from fskv.config import Deadline  # noqa: E402
from fskv.data_path.breaker import Breaker  # noqa: E402
from fskv.data_path.job import FileMove, JobResult  # noqa: E402
from fskv.data_path.runner import JobRunner  # noqa: E402
from fskv.data_path.store import ChunkStore  # noqa: E402
from fskv.data_path.transports import kernels, numa  # noqa: E402
from fskv.data_path.transports.choice import open_transport  # noqa: E402
from fskv.data_path.transports.cuda import CudaDevice  # noqa: E402
from fskv.data_path.transports.cuda_native import NativeCuda  # noqa: E402
from fskv.data_path.transports.host import HostTransport  # noqa: E402
from fskv.format import chunk_file  # noqa: E402
from fskv.format.chunk_file import FileLayout  # noqa: E402
from fskv.format.integrity import xxh3_rows  # noqa: E402
from fskv.format.spans import GroupLayout, plan_job  # noqa: E402
from fskv.gds_io import GdsTransport  # noqa: E402
from fskv.root.root import NamespaceDir  # noqa: E402
from fskv.types import FileId, Status  # noqa: E402

BLOCKS_PER_CHUNK, PAGE, NUM_CHUNKS = 4, 65536, 16


TRANSPORTS = ["host", "host-buffered", "gds"]


def make_transport(kind: str, tensors: list, slot_nbytes: int, probe_dir: str):
    if kind != "gds":
        direct_io = "off" if kind == "host-buffered" else "auto"
        return HostTransport(
            tensors, slot_nbytes, probe_dir=probe_dir, direct_io=direct_io, num_slots=16
        )
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is not installed: pip install 'fskv[gds]'")
    device = CudaDevice(tensors)
    copies = NativeCuda(device, slot_nbytes, None, num_lanes=4, slots_on_device=True)
    return GdsTransport(device, copies.pages, slot_nbytes, direct_io=True)


class Rig:
    """Two KV tensors of a hybrid-looking cache on the device, and the runner over a directory."""

    def __init__(self, path: str, kind: str, deadline_s: float = 30) -> None:
        os.makedirs(f"{path}/tmp")
        os.mkdir(f"{path}/chunks")
        self.num_blocks = 2 * NUM_CHUNKS * BLOCKS_PER_CHUNK
        # Padded pages: the second tensor's blocks are farther apart than their bytes.
        self.tensors = [
            torch.zeros((self.num_blocks, PAGE), dtype=torch.int8, device="cuda"),
            torch.zeros((self.num_blocks, 2 * PAGE), dtype=torch.int8, device="cuda")[:, :PAGE],
        ]
        self.layout = GroupLayout.of(0, BLOCKS_PER_CHUNK, [(0, PAGE), (1, PAGE - 512)])
        pages = tuple(page.nbytes for page in self.layout.pages)
        files = FileLayout(BLOCKS_PER_CHUNK, pages, bytes(16))
        directory = NamespaceDir(path, b"gpu" * 8, 0o700, 0o600)
        self.files = files
        self.transport = make_transport(kind, self.tensors, files.file_nbytes, f"{path}/tmp")
        transport = self.transport
        store = ChunkStore(directory, {0: files}, transport, touch_interval_s=600)
        self.breaker = Breaker()
        self.runner = JobRunner(
            store,
            transport,
            num_threads=4,
            num_slots=16,
            max_queued_chunks=64,
            deadline=Deadline(deadline_s, 0, deadline_s),
            breaker=self.breaker,
        )
        self.chunks = [FileId(b"chunk%d" % i, 0) for i in range(NUM_CHUNKS)]
        self.source = torch.randperm(self.num_blocks // 2).tolist()
        self.target = [self.num_blocks // 2 + block for block in self.source]

    def requests(self, blocks: list[int]) -> list[FileMove]:
        strides = [tensor.stride(0) for tensor in self.tensors]
        plan = plan_job([self.layout], strides, [NUM_CHUNKS], blocks, [len(blocks)], [0])
        return [FileMove(self.chunks[part.key_idx], part) for part in plan.chunks]

    def drain(self) -> list[Status]:
        statuses: list[Status] = []
        while len(statuses) < NUM_CHUNKS:
            self.runner.poll()
            statuses += [outcome.status for outcome in self.runner.take_outcomes()]
        return statuses

    def finish(self, job_id: int) -> JobResult:
        """Wait for this job: the result of one before it may be there as well."""
        while True:
            for result in self.runner.poll():
                if result.job_id == job_id:
                    return result

    def store_random_pages(self) -> None:
        for tensor in self.tensors:
            tensor[: self.num_blocks // 2].random_(-128, 128)
        ready = torch.cuda.current_stream().record_event()
        self.runner.submit_store(1, self.requests(self.source), ready)
        assert set(self.drain()) == {Status.OK}

    def halves_equal(self) -> bool:
        half = self.num_blocks // 2
        first = torch.equal(self.tensors[0][:half], self.tensors[0][half:])
        return first and torch.equal(
            self.tensors[1][:half, : PAGE - 512], self.tensors[1][half:, : PAGE - 512]
        )


@pytest.fixture(params=TRANSPORTS)
def rig(request, tmp_path):
    made = Rig(str(tmp_path), request.param)
    yield made
    made.runner.shutdown(5)
    made.transport.close()


@pytest.fixture
def gds_rig(tmp_path):
    made = Rig(str(tmp_path), "gds", deadline_s=10)  # the first use opens cuFile's driver
    made.lab = gds_lab.Kvikio(made.transport)
    yield made
    made.runner.shutdown(5)
    made.transport.close()


def test_every_byte_of_every_page_comes_back(rig):
    half = rig.num_blocks // 2
    rig.store_random_pages()
    rig.runner.submit_load(2, rig.requests(rig.target), None)
    assert set(rig.drain()) == {Status.OK}
    assert rig.halves_equal()
    assert not rig.tensors[1][half:, PAGE - 512 :].any(), "padding must not be written"


def _store_while_producing(rig, ready_of) -> bool:
    """Store pages whose producing kernels still run; return whether the files hold the produced bytes."""
    half = rig.num_blocks // 2
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # a few hundred milliseconds of a running forward
        for tensor in rig.tensors:
            tensor[:half].fill_(77)
        event = stream.record_event()
    rig.runner.submit_store(1, rig.requests(rig.source), ready_of(event))
    assert set(rig.drain()) == {Status.OK}
    torch.cuda.synchronize()
    rig.runner.submit_load(2, rig.requests(rig.target), None)
    assert set(rig.drain()) == {Status.OK}
    return rig.halves_equal()


def test_a_store_waits_for_the_kernels_that_produce_the_pages(rig):
    assert _store_while_producing(rig, lambda event: event)


def test_negative_control_without_the_event_unproduced_pages_are_stored(rig):
    assert not _store_while_producing(rig, lambda event: None)


def test_a_step_longer_than_the_deadline_costs_no_store(tmp_path):
    rig = Rig(str(tmp_path), "host", deadline_s=1)
    try:
        torch.cuda._sleep(6_000_000_000)  # three seconds, on what there is today
        event = torch.cuda.current_stream().record_event()
        assert not event.query()
        rig.runner.submit_store(1, rig.requests(rig.source), event)
        assert set(rig.drain()) == {Status.OK}
        assert rig.breaker.num_openings == 0
    finally:
        rig.runner.shutdown(5)
        rig.transport.close()


def test_a_load_is_complete_when_it_is_reported(rig):
    half = rig.num_blocks // 2
    rig.store_random_pages()
    for job_id in range(2, 22):
        for tensor in rig.tensors:
            tensor[half:] = 0
        torch.cuda.synchronize()
        rig.runner.submit_load(job_id, rig.requests(rig.target), None)
        rig.finish(job_id)
        # Read on another stream right away: nothing may still be in flight.
        with torch.cuda.stream(torch.cuda.Stream()):
            assert rig.halves_equal()
        rig.drain()


# --- GDS --------------------------------------------------------------------------------------


def test_the_kernels_run_here():
    """Or every test above has shown the fallback only."""
    assert kernels.available(torch.device("cuda", torch.cuda.current_device())) is None


def test_chunks_are_copied_by_the_kernel_here(tmp_path, caplog):
    """Or every test above has shown the fallback only; the log says why."""
    tensors = [torch.zeros((16, PAGE), dtype=torch.int8, device="cuda")]
    transport = make_transport("host", tensors, 1 << 20, str(tmp_path))
    assert transport._outside._device.uses_kernel, caplog.text
    transport.close()


def test_slots_are_registered_aligned_and_freed(gds_rig):
    transport = gds_rig.transport
    gc.collect()  # an earlier transport may still go, and give memory back
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    slots = [transport.new_slot(i) for i in range(8)]
    assert all(slot.buffer.tensor.data_ptr() % 4096 == 0 for slot in slots)
    assert all(slot.buffer.tensor.numel() == transport.slot_nbytes for slot in slots)
    during, _ = torch.cuda.mem_get_info()
    assert before - during >= 8 * transport.slot_nbytes
    transport.close()
    assert [event for event, _ in gds_rig.lab.registered] == ["register"] * 8 + ["deregister"] * 8
    del slots
    transport._slots.clear()
    assert torch.cuda.mem_get_info()[0] > during


@pytest.mark.parametrize("num_rows", [1, 2, 7, 32])
@pytest.mark.parametrize("last_nbytes", [4096, 20480, 65536])
def test_digests_of_the_device_are_those_of_xxhash(tmp_path, num_rows, last_nbytes):
    nbytes = (num_rows - 1) * 65536 + last_nbytes
    tensors = [torch.zeros((1, 4096), dtype=torch.int8, device="cuda")]
    transport = make_transport("gds", tensors, 8192 + nbytes, str(tmp_path))
    slot = transport.new_slot(0)
    data = np.random.default_rng(num_rows).bytes(nbytes)
    transport.put_header(slot, bytes(8192) + data)
    wanted = xxh3_rows(memoryview(data))
    assert transport.row_digests(slot, 8192, 8192 + nbytes) == wanted
    transport.fill_zero(slot, 8192 + nbytes - 1, 8192 + nbytes)
    assert (transport.row_digests(slot, 8192, 8192 + nbytes) == wanted) == (data[-1] == 0)
    assert transport.take_header(slot, 4096) == bytes(4096)
    transport.close()


def _loaded_with_a_wrong_bit(rig) -> bool:
    """Flip a bit of each slot after kvikio's read; return whether the load failed."""
    half = rig.num_blocks // 2
    rig.store_random_pages()

    def wrong(file, buffer, nbytes, file_offset, buffer_offset):
        got = type(file).raw_read(file, buffer, nbytes, file_offset, buffer_offset)
        there = torch.as_tensor(buffer, device="cuda")
        there[buffer_offset + nbytes // 2] ^= 0x10
        torch.cuda.current_stream().synchronize()
        return got

    rig.lab.read = wrong
    for tensor in rig.tensors:
        tensor[half:] = -77
    torch.cuda.synchronize()
    rig.runner.submit_load(2, rig.requests(rig.target), None)
    return set(rig.drain()) == {Status.CORRUPT}


def test_a_wrong_bit_in_gpu_memory_reaches_no_page(gds_rig):
    assert _loaded_with_a_wrong_bit(gds_rig)
    half = gds_rig.num_blocks // 2
    assert all(bool((tensor[half:] == -77).all()) for tensor in gds_rig.tensors)


def test_negative_control_without_the_checks_it_does(gds_rig, monkeypatch):
    monkeypatch.setattr(chunk_file, "check_digests", lambda *args: None)
    assert not _loaded_with_a_wrong_bit(gds_rig)
    half = gds_rig.num_blocks // 2
    assert not all(bool((tensor[half:] == -77).all()) for tensor in gds_rig.tensors)
    assert not gds_rig.halves_equal()


def test_a_read_that_hangs_is_given_up_its_slot_parked_and_its_pages_stay_free(gds_rig):
    rig, half = gds_rig, gds_rig.num_blocks // 2
    rig.store_random_pages()
    go_on = threading.Event()

    def hang(file, *args):
        go_on.wait(60)
        return type(file).raw_read(file, *args)

    rig.lab.read = hang
    for tensor in rig.tensors:
        tensor[half:] = -77
    torch.cuda.synchronize()
    rig.runner.submit_load(2, rig.requests(rig.target), None)
    assert rig.finish(2).failed
    assert rig.runner.num_slots_used >= 4, "parked"
    go_on.set()
    end = time.monotonic() + 30
    while rig.runner.num_slots_used:
        assert time.monotonic() < end
        rig.runner.poll()
    torch.cuda.synchronize()
    assert all(bool((tensor[half:] == -77).all()) for tensor in rig.tensors)


def test_gds_is_opened_and_says_what_carries_the_bytes(tmp_path, gds_rig):
    probe_dir = str(tmp_path / "tmp")
    before = [tensor.clone() for tensor in gds_rig.tensors]
    transport = open_transport(
        gds_rig.tensors,
        gds_rig.files.file_nbytes,
        probe_dir=probe_dir,
        transport="gds",
        direct_io="auto",
        file_mode=0o600,
        fsync=False,
    )
    print(f"\n{transport.description}")
    transport.close()
    assert all(map(torch.equal, gds_rig.tensors, before))
    assert os.listdir(probe_dir) == []
    print("CPUs near the GPU:", numa.cuda_cpus(0))
