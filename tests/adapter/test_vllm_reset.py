"""Resets of vLLM's caches in the middle of requests, with vLLM's own scheduler side of its connectors."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
from types import SimpleNamespace

import pytest
from world import VLLM, read_by_hand, returns_in_time, wait_for

from faults import transport as faults

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

import torch
from one_group import PAGE, worker_of
from resettable_half import scheduler_around
from scheduler_half import add_epochs, scheduler_with, step
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, make_offload_key
from vllm.v1.outputs import KVConnectorOutput

from fskv.bounds.limits import RootState
from fskv.config import StoreConfig
from fskv.engines.vllm.connector import FskvConnector, FskvOffloadingSpec
from fskv.engines.vllm.failed_loads import FailedLoads
from fskv.engines.vllm.manager import FskvManager
from fskv.engines.vllm.metrics import SoFar
from fskv.engines.vllm.quirks import mend_vllm
from fskv.engines.vllm_multi.connector import FskvMultiConnector

pytestmark = VLLM


JOBS = {1: ("stores", True), 2: ("stores", True), 3: ("loads", False)}
PREEMPTED = {"stores", "loads", "idle"}


class Stock(OffloadingConnector):
    def __init__(self, scheduler):
        self.connector_scheduler = scheduler


class Ours(FskvConnector):
    def __init__(self, scheduler):
        self.connector_scheduler = scheduler
        self.budget = SimpleNamespace(on_step=lambda scheduled: None)
        add_epochs(self)


def multi(scheduler):
    made = FskvMultiConnector.__new__(FskvMultiConnector)
    made._connectors, made._extra_async_saves = [Stock(scheduler)], {"r": 1}
    made._failed_loads = FailedLoads()
    return made


def test_negative_control_vllms_own_connector_stops_the_engine(monkeypatch):
    of_vllm = inspect.unwrap(OffloadingConnectorScheduler.build_connector_meta)
    monkeypatch.setattr(OffloadingConnectorScheduler, "build_connector_meta", of_vllm)
    with pytest.raises(AssertionError):
        Stock(scheduler_with(JOBS)).build_connector_meta(step(PREEMPTED))


@pytest.mark.parametrize("make", [Ours, multi])
def test_a_request_that_a_reset_preempts_and_that_loads_in_the_same_step_is_no_error(make):
    mend_vllm()
    connector, output = make(scheduler_with(JOBS)), step(PREEMPTED)
    meta = connector.build_connector_meta(output)
    of_child = meta.metadata[0] if make is multi else meta
    assert set(of_child.load_jobs) == {3}
    assert of_child.jobs_to_flush == {1, 2}, "stores of preempted requests are flushed as ever"
    assert output.preempted_req_ids == PREEMPTED, "vLLM's own object is as it was"
    if make is multi:
        assert meta.extra_async_saves == {"r": 1}
        assert connector.build_connector_meta(step(None)).extra_async_saves is None


# --- the engine gives its KV up -----------------------------------------------------------------

POISON = 0x5A
REQUEST = ReqContext("r")


class Grants:
    """Stands for Capacity: what is taken and not given back."""

    paused = False
    state = RootState()

    def __init__(self):
        self.taken = 0

    def take(self, nbytes):
        self.taken += nbytes
        return True

    def settle(self, back, written, loaded=0):
        self.taken -= back

    def poll(self):
        return ()

    def report_use(self, used, hits, take_sights, at_once=False):
        return []

    def close(self):
        pass


class Core:
    """Stands for vLLM's EngineCore: the reset comes from a method of what has the executor."""

    def __init__(self, connector):
        self.connector = connector
        self.model_executor = SimpleNamespace(collective_rpc=self._send)

    def _send(self, function, timeout):
        assert timeout > 0  # a worker that hangs must not hold a reset for ever
        return [pickle.loads(pickle.dumps(function))(None)]

    def reset(self):
        assert self.connector.reset_cache() is True


class Engine:
    """Both halves of FskvConnector over vLLM's own, one block a chunk, files on a scripted disk."""

    def __init__(self, root, **options):
        os.makedirs(root)
        options = {"root": str(root), "maintenance": "off", "io_threads": 2, **options}
        config = StoreConfig.from_mapping(options)
        self.kv = torch.randint(-128, 128, (64, PAGE), dtype=torch.int8)
        self.worker = worker_of(config, self.kv)
        self.manager = FskvManager(config, 1)
        self.manager.set_workers([self.worker.handshake])
        self.grants = self.manager.chunks.capacity = Grants()
        self._make_scheduler()
        self._make_half()
        self.jobs = {}  # of the next step, by number
        self.num_jobs = 0
        self.files = os.path.join(self.worker.handshake.directory.path, "chunks")

    def _make_scheduler(self):
        self.half = scheduler_around(self.manager)
        self.scheduler = FskvConnector.__new__(FskvConnector)
        self.scheduler.connector_scheduler, self.scheduler._so_far = self.half, SoFar()
        self.scheduler._failed_loads = FailedLoads()
        add_epochs(self.scheduler, fixed=self.manager.config.weights_fixed)
        self.scheduler.budget = SimpleNamespace(
            on_step=lambda _: None, on_loads=lambda _: None, reset=lambda: None
        )

    def _make_half(self):
        half = OffloadingConnectorWorker.__new__(OffloadingConnectorWorker)
        half.spec = FskvOffloadingSpec.__new__(FskvOffloadingSpec)
        half.spec.worker = half.worker = self.worker
        half._is_store_writer, half._load_jobs, half._unsubmitted_store_jobs = True, {}, []
        half._connector_worker_meta = common.OffloadingWorkerMetadata()
        self.connector = FskvConnector.__new__(FskvConnector)
        self.connector.connector_worker, self.connector.connector_scheduler = half, None

    @property
    def transport(self):
        return self.worker.mover._transport

    def begin(self, numbers, *, load=False):
        """Have the next step store the chunks of these numbers, or load them; block n holds chunk n."""
        keys = [make_offload_key(bytes([n]) * 32, 0) for n in numbers]
        pages = GPULoadStoreSpec(list(numbers), [len(numbers)], [0])
        if load:
            job = common.TransferJob("r", self.manager.prepare_load(keys, REQUEST), pages)
        else:
            taken = self.manager.prepare_store(keys, REQUEST)
            assert list(taken.keys_to_store) == keys
            job = common.TransferJob("r", pages, taken.store_spec)
        self.jobs[self.num_jobs] = (job, load)
        self.half._jobs[self.num_jobs] = SimpleNamespace(is_store=not load)
        self.num_jobs += 1
        self.half._job_counter = self.num_jobs
        return self.num_jobs - 1

    def step(self):
        """Make one step; return what its worker said."""
        planned = self.scheduler.build_connector_meta(step(None))
        meta = common.OffloadingConnectorMetadata(
            {n: job for n, (job, load) in self.jobs.items() if load},
            {n: job for n, (job, load) in self.jobs.items() if not load},
            planned.jobs_to_flush,
        )
        self.jobs = {}
        self.connector._connector_metadata = meta
        returns_in_time(lambda: self.connector.handle_preemptions(meta) or 1)
        self.connector.connector_worker.start_kv_transfers(meta)
        self.connector.wait_for_save()
        ended = self.connector.get_transfer_results(set())
        news = self.connector.build_connector_worker_meta()
        # Jobs end here as vLLM's scheduler would end them, if it had their requests.
        for number in news.completed_jobs if news else ():
            self.half._jobs.pop(number, None)
        self.half._stale_job_threshold = self.num_jobs
        self.scheduler.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=news, failed_recving=ended.failed_recving)
        )
        return ended, news

    def reset(self):
        returns_in_time(lambda: Core(self.scheduler).reset() or 1)

    def give_up_kv(self):
        """What a sleep does to the pages, and more: they hold something else at once."""
        self.kv[:] = POISON

    def settle(self):
        self.transport.script = faults.Script()
        self.transport.release()
        wait_for(lambda: self.step() and self.worker.mover._runner.num_open_stores == 0)
        wait_for(lambda: self.worker.mover._runner.num_running == 0)
        self.step()

    def stored(self):
        """Return, by hand, the payload of every chunk on disk, by its number."""
        found = {}
        for where, _, names in os.walk(self.files):
            for name in names:
                file = read_by_hand(os.path.join(where, name))
                found[file.meta["key"][0]] = file.payload
        return found

    def close(self):
        self.transport.release()
        self.worker.mover._runner._pool.close()
        self.manager.shutdown()


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:

        def make(script, *, inside_multi=False, **options):
            stack.callback(faults.install(script))
            engine = Engine(tmp_path / "root", **options)
            stack.callback(engine.close)
            group = engine.connector
            if inside_multi:
                group = SimpleNamespace(_connectors=[SimpleNamespace(), engine.connector])
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)
            return engine

        yield make


@pytest.mark.parametrize("how", ["reset", "inside_multi", "unregistered", "negative_control"])
def test_a_load_in_flight_writes_no_page_that_is_given_up(make_engine, monkeypatch, how):
    """At a reset, and where vLLM 0.33 says that it unmaps the KV cache."""
    told = how != "negative_control"
    if not told:
        monkeypatch.setattr("fskv.engines.vllm.connector.drop_in_workers", dict)
    engine = make_engine(faults.Script(), inside_multi=how == "inside_multi", weights_fixed=True)
    engine.begin([1])
    engine.step()
    engine.settle()
    assert set(engine.stored()) == {1}
    engine.transport.script = faults.Script(read="H*")
    engine.begin([1], load=True)
    engine.step()
    engine.transport.wait_until_hanging(1)
    if how == "unregistered":
        engine.connector.unregister_kv_caches()
    else:
        engine.reset()
    engine.give_up_kv()
    engine.transport.script = faults.Script()
    engine.transport.release()
    wait_for(lambda: engine.worker.mover._runner.num_running == 0)
    assert bool((engine.kv == POISON).all()) is told
    if told:
        ended, _ = engine.step()
        assert ended.failed_recving == ended.finished_recving == {"r"}


def test_blocks_of_a_session_that_goes_on_are_told_anew(monkeypatch):
    """vLLM hands out all of them again, and its connector would append them; what it had is gone before."""
    told = []

    def of_vllm(self, output):
        told.append([list(group.block_ids) for group in self._req_status["goes on"].group_states])

    monkeypatch.setattr(OffloadingConnectorScheduler, "_update_req_states", of_vllm)
    made = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    state = SimpleNamespace(group_states=[SimpleNamespace(block_ids=[7, 8])])
    made._req_status = {"goes on": state}
    new = [SimpleNamespace(req_id=req_id) for req_id in ("goes on", "not known")]
    made._update_req_states(SimpleNamespace(scheduled_new_reqs=new))
    for _ in range(2):
        mend_vllm()
    made._update_req_states(SimpleNamespace(scheduled_new_reqs=new[1:]))
    made._update_req_states(SimpleNamespace(scheduled_new_reqs=new))
    assert told == [[[7, 8]], [[7, 8]], [[]]], (
        "without it, without the request, with both; each once"
    )
