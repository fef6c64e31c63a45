"""The host transport on a real CUDA device: byte exactness, stream order, staging bounds."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from fskv.breaker import Breaker  # noqa: E402
from fskv.chunk_file import FileLayout  # noqa: E402
from fskv.config import Deadline  # noqa: E402
from fskv.job import ChunkRequest  # noqa: E402
from fskv.jobs import JobRunner  # noqa: E402
from fskv.root import NamespaceDir  # noqa: E402
from fskv.span_plan import GroupLayout, plan_job  # noqa: E402
from fskv.store import ChunkStore  # noqa: E402
from fskv.transports.host import HostTransport  # noqa: E402
from fskv.types import ChunkId, Status  # noqa: E402

BLOCKS_PER_CHUNK, PAGE, NUM_CHUNKS = 4, 65536, 16


class Rig:
    """Two KV tensors of a hybrid-looking cache on the device, and the runner over a directory."""

    def __init__(self, path: str) -> None:
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
        transport = HostTransport(
            self.tensors, files.file_nbytes, probe_dir=f"{path}/tmp", direct_io="auto"
        )
        store = ChunkStore(directory, {0: files}, transport, rank=None, touch_interval_s=600)
        self.runner = JobRunner(
            store,
            transport,
            num_threads=4,
            num_slots=16,
            max_queued_chunks=64,
            deadline=Deadline(30, 0, 30),
            breaker=Breaker(8, 5),
        )
        self.chunks = [ChunkId(b"chunk%d" % i, 0) for i in range(NUM_CHUNKS)]
        self.source = torch.randperm(self.num_blocks // 2).tolist()
        self.target = [self.num_blocks // 2 + block for block in self.source]

    def requests(self, blocks: list[int]) -> list[ChunkRequest]:
        strides = [tensor.stride(0) for tensor in self.tensors]
        plan = plan_job([self.layout], strides, [NUM_CHUNKS], blocks, [len(blocks)], [0])
        return [ChunkRequest(self.chunks[part.key_idx], part) for part in plan.chunks]

    def drain(self) -> list[Status]:
        statuses: list[Status] = []
        while len(statuses) < NUM_CHUNKS:
            self.runner.poll()
            statuses += [outcome.status for outcome in self.runner.take_outcomes()]
        return statuses

    def halves_equal(self) -> bool:
        half = self.num_blocks // 2
        first = torch.equal(self.tensors[0][:half], self.tensors[0][half:])
        return first and torch.equal(
            self.tensors[1][:half, : PAGE - 512], self.tensors[1][half:, : PAGE - 512]
        )


@pytest.fixture
def rig(tmp_path):
    made = Rig(str(tmp_path))
    yield made
    made.runner.shutdown(5)


def test_every_byte_of_every_page_comes_back(rig):
    half = rig.num_blocks // 2
    for tensor in rig.tensors:
        tensor[:half].random_(-128, 128)
    rig.runner.submit_store(1, rig.requests(rig.source), torch.cuda.current_stream().record_event())
    assert set(rig.drain()) == {Status.OK}
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


def test_a_load_is_complete_when_it_is_reported(rig):
    half = rig.num_blocks // 2
    for tensor in rig.tensors:
        tensor[:half].random_(-128, 128)
    rig.runner.submit_store(1, rig.requests(rig.source), torch.cuda.current_stream().record_event())
    rig.drain()
    for _ in range(20):
        for tensor in rig.tensors:
            tensor[half:] = 0
        torch.cuda.synchronize()
        rig.runner.submit_load(2, rig.requests(rig.target), None)
        while not rig.runner.poll():
            pass
        # Read on another stream right away: nothing may still be in flight.
        with torch.cuda.stream(torch.cuda.Stream()):
            assert rig.halves_equal()
        rig.drain()
