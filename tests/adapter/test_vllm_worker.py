"""FskvWorker as vLLM calls it: behind a step that still runs, and after weights were replaced."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from cuda_sim import SimEvent, simulation
from cuda_torch import on_simulation
from world import VLLM, wait_for

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

import torch
from one_group import PAGE, worker_of
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from fskv.config import StoreConfig
from fskv.data_path.runner import JobRunner
from fskv.engines.vllm.manager import ChunkKeys
from fskv.types import ChunkId

pytestmark = VLLM

LATE_S = 0.3  # a step takes so long; without protection a copy is done long before


class Rig:
    """A worker of one group, one block a chunk; block n holds chunk n."""

    def __init__(self, root, tensor):
        root.mkdir()
        config = StoreConfig.from_mapping(
            {"root": str(root), "maintenance": "off", "io_threads": 2, "direct_io": "off"}
        )
        self.purity = SimpleNamespace(refuses=False)
        self.worker = worker_of(config, tensor, purity=self.purity)

    def submit(self, job, numbers, *, load, blocks=None):
        keys = ChunkKeys([ChunkId(bytes([n]) * 32, 0) for n in numbers])
        pages = GPULoadStoreSpec(list(blocks or numbers), [len(numbers)], [0])
        if load:
            self.worker.submit_load(job, keys, pages)
        else:
            self.worker.submit_store(job, pages, keys)

    def finish(self, job):
        """Step until a job has ended and its files are written; returns whether it failed."""
        ended = set()
        wait_for(lambda: ended.update(r.job_id for r in self.worker.get_finished()) or job in ended)
        wait_for(lambda: self.worker.get_finished() or self.worker.mover.idle)
        return job in self.worker.take_failed_jobs()


# --- behind the engine's stream -----------------------------------------------------------------------


class Device(Rig):
    """Its pages are on a simulated device. The engine computes on a stream that is not of torch's pool."""

    def __init__(self, root, sim, torch_on_sim):
        self.gpu = torch_on_sim.gpu("cuda:0")
        torch.cuda.set_device("cuda:0")
        self.tensor = self.gpu.tensor(64, PAGE)
        self.pages = self.gpu.opened(self.tensor)
        self.stream = torch.cuda.ExternalStream(self.gpu.new_stream().value, "cuda:0")
        super().__init__(root, self.tensor)

    def step(self, blocks, value):
        """Launch a step that fills blocks, in a while."""
        end = threading.Event()
        threading.Timer(LATE_S, end.set).start()

        def fill():
            end.wait(20)
            for block in blocks:
                self.pages[block] = value + block

        self.gpu.launch(fill, self.stream.handle)

    def synchronize(self):
        SimEvent(self.gpu, self.stream.handle).synchronize()

    def holds(self, blocks, value, of=None):
        return all(
            (self.pages[block] == value + chunk).all()
            for block, chunk in zip(blocks, of or blocks, strict=True)
        )


@pytest.fixture
def device(tmp_path, monkeypatch):
    sim = simulation()
    sim.reset(1, 0.0)
    made = Device(tmp_path / "kv", sim, on_simulation(monkeypatch, sim))
    with torch.cuda.stream(made.stream):
        yield made
    made.worker.shutdown()
    assert sim.misuses == []
    assert sim.spinning == 0, "who waits for the engine's event keeps no CPU busy"
    sim.reset(1, 0.0)


@pytest.mark.parametrize("waits", [True, False], ids=["", "negative_control"])
def test_a_store_reads_its_pages_after_the_step_that_fills_them(device, monkeypatch, waits):
    with monkeypatch.context() as patch:
        if not waits:
            patch.setattr(SimEvent, "query", lambda self: True)
        device.pages[:] = 0
        device.step([1, 2, 3], 50)
        device.submit(0, [1, 2, 3], load=False)
        assert not device.finish(0)
    device.synchronize()
    device.submit(1, [1, 2, 3], load=True, blocks=[11, 12, 13])
    assert not device.finish(1)
    assert device.holds([11, 12, 13], 50, of=[1, 2, 3]) is waits


@pytest.mark.parametrize("waits", [True, False], ids=["", "negative_control"])
def test_a_load_writes_its_pages_after_the_step_that_used_them(device, monkeypatch, waits):
    for block in (1, 2, 3):
        device.pages[block] = 50 + block
    device.submit(0, [1, 2, 3], load=False)
    assert not device.finish(0)
    if not waits:
        monkeypatch.setattr(SimEvent, "query", lambda self: True)
    device.step([1, 2, 3], 90)  # vLLM may zero the pages there
    device.submit(1, [1, 2, 3], load=True)
    assert not device.finish(1)
    device.synchronize()
    assert device.holds([1, 2, 3], 50) is waits


# --- weights that were replaced -----------------------------------------------------------------------


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path / "kv", torch.full((64, PAGE), 7, dtype=torch.int8))
    made.tensor = made.worker._files.tensors[0]
    made.submit(0, [1, 2, 3], load=False)
    assert not made.finish(0)
    made.tensor[:] = 0
    yield made
    made.worker.shutdown()


@pytest.mark.parametrize("reloaded", [True, False], ids=["", "negative_control"])
def test_after_weights_were_replaced_no_load_is_good_however_fast_it_is(rig, monkeypatch, reloaded):
    """One that is begun and then given up may have ended: outside the interpreter 191 of 300 had."""
    wait = JobRunner.wait

    def late(runner, job_ids):
        wait_for(lambda: rig.worker.mover.idle)
        wait(runner, job_ids)

    monkeypatch.setattr(JobRunner, "wait", late)
    rig.purity.refuses = reloaded
    rig.submit(1, [1, 2, 3], load=True)
    assert rig.finish(1) is reloaded
    assert bool(rig.tensor.any()) is not reloaded, "no page is touched"


@pytest.mark.parametrize("reloaded", [True, False], ids=["", "negative_control"])
def test_a_load_under_way_while_weights_are_replaced_is_not_good(rig, reloaded):
    rig.submit(1, [1, 2, 3], load=True)
    wait_for(lambda: bool((rig.tensor[1:4] == 7).all()))
    rig.purity.refuses = reloaded
    assert rig.finish(1) is reloaded
