"""FskvConnector beside a connector that pulls KV from another engine, in vLLM's own MultiConnector.

The sibling stands for NixlConnector: it needs the handshake of its own workers, and loads into blocks by
itself. With the real one: tests/pd_engines.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from world import VLLM

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

from scheduler_half import add_epochs, scheduler_with, step
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from fskv.engines.vllm.connector import FskvConnector, FskvOffloadingSpec
from fskv.engines.vllm.manager import FskvHandshake
from fskv.errors import ConfigError
from fskv.root.root import NamespaceDir

pytestmark = VLLM

ROOT = "/nowhere"


@pytest.fixture
def scheduler_half(make_manager, scheduler_side):
    return lambda root=ROOT: scheduler_side(make_manager(workers=(), root=root))


class Pulls:
    """A child as NixlConnector is one: `got` is whose handshakes it was given."""

    def __init__(self, handshake=None):
        self.handshake, self.got = handshake, None

    def get_handshake_metadata(self):
        return self.handshake

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        if any(not isinstance(each, str) for each in metadata.values()):
            raise ValueError("expects its own payload for handshake metadata")
        self.got = metadata

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        pass


def multi(*children):
    made = MultiConnector.__new__(MultiConnector)
    made._connectors, made._requests_to_connector, made._extra_async_saves = list(children), {}, {}
    return made


def ours():
    made = FskvConnector.__new__(FskvConnector)
    made.connector_worker = made.connector_scheduler = None
    return made


def worker_half(handshake):
    made = ours()
    spec = FskvOffloadingSpec.__new__(FskvOffloadingSpec)
    spec.worker = SimpleNamespace(handshake=handshake)
    made.connector_worker = SimpleNamespace(spec=spec)
    return made


class Core:
    """Stands for vLLM's EngineCore at its start: two workers, each with a MultiConnector."""

    def __init__(self, monkeypatch, make_children, handshakes):
        self._monkeypatch = monkeypatch
        self.model_executor = SimpleNamespace(collective_rpc=self._send)
        self.workers = [multi(*make_children(worker_half(one))) for one in handshakes]

    def _send(self, function, timeout):
        assert timeout > 0
        answers = []
        for worker in self.workers:
            self._monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
            answers.append(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(function))(None))))
        return answers

    def start(self, connector):
        told = {
            (0, rank): one
            for rank, worker in enumerate(self.workers)
            if (one := worker.get_handshake_metadata()) is not None
        }
        connector.set_xfer_handshake_metadata_pp_aware(told)


def handshakes(root=ROOT):
    directory = NamespaceDir(f"{root}/cpu/m@0", b"d", 0o700, 0o600)
    return [FskvHandshake(rank, 2, 2, directory, {0: 4096}) for rank in (0, 1)]


def fskv_first(own):
    return own, Pulls("theirs")


def fskv_last(own):
    return Pulls("theirs"), own


@pytest.mark.parametrize("order", [fskv_first, fskv_last])
def test_each_child_hears_its_own_workers_whichever_is_first(monkeypatch, scheduler_half, order):
    core = Core(monkeypatch, order, handshakes())
    half = scheduler_half()
    children = order(half)
    core.start(multi(*children))
    (other,) = [child for child in children if child is not half]
    assert other.got == {(0, 0): "theirs", (0, 1): "theirs"}
    assert half._manager.workers == handshakes()


def test_negative_control_a_handshake_of_ours_would_be_handed_to_the_other_one(
    monkeypatch, scheduler_half
):
    monkeypatch.setattr(FskvConnector, "get_handshake_metadata", lambda own: own.handshake)
    core = Core(monkeypatch, fskv_first, handshakes())
    half = scheduler_half()
    with pytest.raises(ValueError, match="its own payload"):
        core.start(multi(*fskv_first(half)))


@pytest.mark.parametrize("told", [True, False], ids=["told", "negative_control"])
def test_a_store_reads_its_blocks_before_a_sibling_pulls_into_them(monkeypatch, told):
    """Block 7 was a finished request's, whose store is queued; "r" gets it, and the sibling pulls into it."""
    from fskv.engines.vllm import connector

    if not told:
        monkeypatch.setattr(connector, "tell_allocated", lambda scheduler, blocks: None)
    half = ours()
    scheduler = half.connector_scheduler = scheduler_with({1: ("finished", True)})
    scheduler._block_id_to_pending_jobs = {7: {1}}
    scheduler.config.kv_group_configs = [SimpleNamespace(group_idx=0, tokens_per_chunk=128)]
    scheduler._req_status["r"] = SimpleNamespace(
        transfer_jobs=set(),
        num_locally_computed_tokens=0,
        group_states=[SimpleNamespace(offload_keys=[])],
    )
    half.budget = SimpleNamespace(admitted=lambda *_: None, on_step=lambda _: None)
    add_epochs(half)
    scheduler._build_partial_tail_store_jobs = scheduler._build_store_jobs = lambda output: {}
    both = multi(Pulls(), half)
    both._requests_to_connector = {"r": 0}
    blocks = SimpleNamespace(blocks=([SimpleNamespace(block_id=7)],))
    both.update_state_after_alloc(SimpleNamespace(request_id="r"), blocks, 128)
    _, meta = both.build_connector_meta(step(None)).metadata
    assert meta.jobs_to_flush == ({1} if told else set())


def test_where_the_workers_cannot_be_asked_the_engine_does_not_start(scheduler_half):
    with pytest.raises(ConfigError, match="no worker reported a namespace"):
        scheduler_half().set_xfer_handshake_metadata_pp_aware({(0, 0): "theirs"})


def test_each_of_two_connectors_takes_the_workers_of_its_own_root(monkeypatch, scheduler_half):
    """In FskvMultiConnector; its workers have a connector for each root."""
    roots = [handshakes(), handshakes("/other")]
    halves = [scheduler_half(), scheduler_half("/other")]
    make = lambda own: (own, worker_half(roots[1][own.handshake.rank]))
    core = Core(monkeypatch, make, roots[0])
    core.start(multi(*halves))
    for half, expected in zip(halves, roots, strict=True):
        assert half._manager.workers == expected
