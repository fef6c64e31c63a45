"""Updates of weights in a simulated engine: no namespace ever gets KV of two sets of weights.

The engine is harsher than a real one: answers come late, steps run while an update is under way, and
updates, resets, versions and sleeps come in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")

import torch
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from fskv.config import StoreConfig
from fskv.engines.vllm import weights as weights_module
from fskv.engines.vllm.epochs import Epochs
from fskv.engines.vllm.manager import FskvManager
from fskv.engines.vllm.weights import (
    CHECKPOINT,
    DRAFT,
    MODEL,
    PRIVATE,
    MarkedWeights,
    Part,
    Purity,
    Weights,
    changing_methods,
)
from fskv.offload.opener import OPENING

pytestmark = world.VLLM


class Worker:
    """A rank's worker; `model` and `draft` name what its weights are."""

    def __init__(self):
        self.model, self.draft = "start", "start"
        self.half_way = None  # the weights after a reload that fails
        parallel = SimpleNamespace(worker_extension_cls=f"{__name__}.Extension")
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            weight_transfer_config=None,
            speculative_config=object(),
            model_config=SimpleNamespace(model="/start", revision="v1"),
            load_config=SimpleNamespace(download_dir="/hub"),
        )
        self._weight_update_active = self._weight_update_is_draft = False

    def start_weight_update(self):
        self._weight_update_active, self._weight_update_is_draft = True, False

    def start_draft_weight_update(self):
        self._weight_update_active = self._weight_update_is_draft = True

    def update_weights(self, name):
        if name is None:
            self._weight_update_active = False
            self.model = f"broken {random.random()}"
            raise RuntimeError("connection lost")
        if self._weight_update_is_draft:
            self.draft = name
        else:
            self.model = name

    def finish_weight_update(self):
        self._weight_update_active = False

    def reload_weights(self, weights_iterator=None, weights_path=None):
        self.model, self.half_way = self.half_way or weights_path, None
        if self.model != weights_path:
            raise RuntimeError("no more memory")

    def sleep(self, level=1):
        if level == 2:
            self.model = f"garbage {random.random()}"


class Extension:
    def patch(self, name):
        self.model = self.draft = name


class Extended(Extension, Worker):
    pass


class Rank:
    def __init__(self, number):
        self.worker = Extended()
        self.weights = Weights()
        self.weights.watch(self.worker, [self.worker])
        self.purity = Purity(self.weights, number, fixed=False)

    @property
    def now(self):
        return self.worker.model, self.worker.draft


class Engine:
    """A scheduler and its ranks. `namespaces` is the root: which weights the KV in each is of."""

    def __init__(self, chance, namespaces, *, num_ranks=2, run="run"):
        self.chance, self.namespaces = chance, namespaces
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.epochs = Epochs(num_ranks, run, fixed=False, has_siblings=False, parts=(MODEL, DRAFT))
        self.table, self.blocks = object(), []
        self.version = "default"
        self.in_flight = []
        self.sources = {0: {}}
        self.num_stored = self.num_named = 0

    def step(self, *, has_tokens=True):
        step = self.epochs.on_step(self.table, self.version, has_tokens=has_tokens)
        number = step.epoch.number
        is_in_use = not self.epochs.resting
        told = {}
        for rank, one in enumerate(self.ranks):
            one.purity.on_step(step.cache, step.number)
            is_wanted = number != one.purity.epoch and one.purity.is_of(step.epoch.changes[rank])
            if is_wanted and self.chance.random() < 0.7:
                self.sources[number] = step.epoch.sources
                one.purity.serve(number, step.epoch.changes[rank])
            if (news := one.purity.take_news()) is not None:
                told[rank] = news
        if has_tokens:
            self.blocks.append([one.now for one in self.ranks])
        if is_in_use:
            self._store()
        self.in_flight.append(told)
        while self.in_flight and self.chance.random() < 0.8:
            self.epochs.on_told(self.in_flight.pop(0))
            if self.epochs.all_serve():
                self.epochs.opened()

    def _store(self):
        """Store all of the cache, rank by rank, where that rank does not refuse."""
        for rank, one in enumerate(self.ranks):
            if one.purity.refuses:
                continue
            sources = self.sources[one.purity.epoch]
            name = json.dumps(sources, sort_keys=True)
            for block in self.blocks:
                known = self.namespaces.setdefault((name, rank), block[rank])
                assert known == block[rank], f"{name}: {known} and {block[rank]}"
            self.num_stored += 1
            self.num_named += bool(sources) and "private" not in sources

    def reset(self, *, connectors=True):
        if connectors:
            self.epochs.on_reset({n: one.purity.weight_counts for n, one in enumerate(self.ranks)})
        self.table, self.blocks = object(), []

    def act(self, action, name):
        """Do one thing that a trainer or an operator does."""
        if action == "reload":
            for one in self.ranks:
                one.worker.reload_weights(weights_path=f"/{name}")
        elif action in ("update", "draft"):
            if self.ranks[0].worker._weight_update_active:
                return
            for one in self.ranks:
                start = one.worker.start_draft_weight_update if action == "draft" else None
                (start or one.worker.start_weight_update)()
            if self.chance.random() < 0.3:
                self.step()  # in the middle of it
            for one in self.ranks:
                one.worker.update_weights(name)
            for one in self.ranks:
                one.worker.finish_weight_update()
            if self.chance.random() < 0.6:
                # The promise of `weights_run`: a version names the weights of all parts it is set for.
                self.version = f"{action} {name}"
        elif action == "fails":
            is_reload = self.chance.random() < 0.5
            for one in self.ranks[1:]:
                if is_reload:
                    one.worker.half_way = f"half of /{name} {self.chance.random()}"
                    with pytest.raises(RuntimeError):
                        one.worker.reload_weights(weights_path=f"/{name}")
                    continue
                one.worker.start_weight_update()
                with pytest.raises(RuntimeError):
                    one.worker.update_weights(None)
        elif action == "patch":
            for one in self.ranks:
                one.worker.patch(f"patch {name} {self.chance.random()}")
            self.version = "default"  # whoever sets one sets it with each update
        elif action == "unseen":
            # Trainers pause the engine first. Between a seen update and its reset nothing can be told apart.
            self.reset()
            for one in self.ranks:
                one.worker.model = f"unseen {self.chance.random()}"
            self.reset()
        elif action == "sleep":
            self.reset()
            for one in self.ranks:
                one.worker.sleep(level=self.chance.choice([1, 2]))
        else:
            self.reset(connectors=self.chance.random() < 0.5)


ACTIONS = ["reload", "update", "draft", "fails", "patch", "unseen", "sleep", "reset", "reset"]


def simulate(seed, num_actions=60):
    chance, namespaces = random.Random(seed), {}
    engines = [Engine(chance, namespaces) for _ in range(2)]
    for _ in range(num_actions):
        engine = chance.choice(engines)
        engine.act(chance.choice(ACTIONS), chance.choice("AB"))
        for _ in range(chance.randrange(8)):
            engine.step(has_tokens=chance.random() < 0.8)
    return engines


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch):
    monkeypatch.setattr(weights_module, "checkpoint_state", lambda path: {})
    monkeypatch.setattr(weights_module, "changed_file", lambda path, before: None)
    monkeypatch.setattr(weights_module, "weights_fingerprint", lambda path, **_: path)


def test_no_namespace_gets_kv_of_two_sets_of_weights():
    done = [engine for seed in range(60) for engine in simulate(seed)]
    assert sum(one.num_stored for one in done) > 400
    assert sum(one.num_named for one in done) > 20
    assert max(one.epochs.number for one in done) > 10


def simulate_many():
    for seed in range(60):
        simulate(seed)


@pytest.mark.parametrize("without", ["purity", "unseen", "tie"])
def test_negative_controls(monkeypatch, without):
    """Each rule is needed: without it some namespace gets KV of two sets of weights."""
    if without == "purity":
        served = Purity.served
        good = {"is_pure": True, "is_steady": True}
        monkeypatch.setattr(Purity, "served", lambda self: replace(served(self), **good))
        monkeypatch.setattr(Purity, "refuses", False)
    elif without == "unseen":
        monkeypatch.setattr(Epochs, "on_reset", lambda self, counts: None)
    else:
        name = Epochs._name

        def _name(self, part):
            self._version_step = self._told[0].parts.get(part, Part()).step
            return name(self, part)

        monkeypatch.setattr(Epochs, "_name", _name)
    with pytest.raises(AssertionError, match=" and "):
        simulate_many()


def one_update(engine, action, steps=4):
    engine.act(action, "A")
    engine.reset()
    for _ in range(steps):
        engine.step()


def test_a_rank_that_failed_leaves_the_engine_at_rest_until_all_have_succeeded():
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {})
    one_update(engine, "fails")
    assert "failed (update_weights)" in engine.epochs.resting
    engine.ranks[1].worker.finish_weight_update()
    one_update(engine, "reload")
    assert engine.epochs.resting == ""
    assert engine.sources[engine.epochs.number] == {"model": {"checkpoint": "/A"}}


def test_a_reset_that_left_vllm_s_own_cache_begins_no_epoch_of_what_is_in_it():
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {})
    engine.step()
    for one in engine.ranks:
        one.worker.model = "unseen"
    counts = {n: one.purity.weight_counts for n, one in enumerate(engine.ranks)}
    engine.epochs.on_reset(counts)  # requests are running: the pool refuses
    for _ in range(4):
        engine.step()
    assert "was not reset" in engine.epochs.resting
    engine.reset()
    for _ in range(4):
        engine.step()
    assert engine.epochs.resting == ""
    assert "private" in engine.sources[engine.epochs.number]


def test_a_reload_of_the_engine_s_own_checkpoint_is_of_its_revision_and_place(monkeypatch):
    places = {("/start", "v1", "/hub"): "/hub/1", ("/other", None, "/hub"): "/other"}
    monkeypatch.setattr(weights_module, "checkpoint_place", lambda *asked: places[asked])
    rank = Rank(0)
    rank.worker.reload_weights()
    assert rank.weights.parts[MODEL].name == "/hub/1"
    rank.worker.reload_weights(None, "/other")
    assert rank.weights.parts[MODEL].name == "/other"
    with pytest.raises(TypeError):
        rank.worker.reload_weights(None, "/other", False)
    assert rank.weights.parts[MODEL].kind == PRIVATE
    # The hub's name leads elsewhere while it is loaded.
    found = iter(["/hub/1", "/hub/2"])
    monkeypatch.setattr(weights_module, "checkpoint_place", lambda *asked: next(found))
    rank.worker.reload_weights()
    assert rank.weights.parts[MODEL].kind == PRIVATE


class Base:
    def sync(self): ...


class OfUser(Base):
    def check_and_pull(self): ...

    def __reduce__(self): ...


class Mixed(OfUser, Worker):
    pass


def test_all_methods_of_a_worker_s_extension_may_change_weights():
    assert {"sync", "check_and_pull"} <= set(changing_methods(Mixed, OfUser))
    assert not {"sync", "check_and_pull", "__reduce__"} & set(changing_methods(Mixed))


@pytest.mark.parametrize(
    ("told", "is_steady"),
    [
        (b"", True),
        (b"x", False),
        (b"x.", True),
        (b"x!", False),
        (b"xx.", False),
        (b"x!x.", True),
        (b"xx!.", False),
    ],
)
def test_weights_of_other_processes_are_read_from_their_marks(tmp_path, told, is_steady):
    path = tmp_path / "mark"
    path.write_bytes(told)
    fd = os.open(path, os.O_RDONLY)
    weights = MarkedWeights(fd, 2 if told.startswith(b"xx") else 1)
    assert weights.is_steady is is_steady
    assert weights.num_changes == told.count(b"x")
    assert bool(weights.parts) is bool(told)
    os.close(fd)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))

    def load_weights(self, names):
        if names == "fails":
            raise RuntimeError("connection lost")
        return names if names is None else set(names)


class Loading(Extended):
    """A worker that loads a checkpoint as vLLM does: through its model, which tells what it has loaded."""

    def __init__(self):
        super().__init__()
        self.loading = Model()

    def reload_weights(self, weights_iterator=None, weights_path=None):
        self.loading.load_weights(self.has)


@pytest.mark.parametrize(
    ("before", "has", "names_them"),
    [
        ([], "a", True),
        (["ab"], "ab", True),
        (["ab"], "a", False),
        (["a"], "a", True),
        (["patch"], "ab", True),
        (["patch"], "a", False),
        (["fails"], "ab", True),
        (["fails"], "a", False),
        (["ab", "a"], "ab", True),
        ([], None, False),
    ],
)
def test_a_checkpoint_names_weights_only_where_it_holds_all_that_may_have_changed(
    before, has, names_them
):
    worker, weights = Loading(), Weights()
    weights.watch(worker, [worker, worker.loading])
    for what in (*before, has):
        worker.has = what
        with contextlib.suppress(RuntimeError):
            worker.patch("x") if what == "patch" else worker.reload_weights(weights_path="there")
    assert (weights.parts[MODEL].kind == CHECKPOINT) is names_them


def test_no_request_waits_for_ever_where_the_reasons_of_a_rest_alternate(tmp_path):
    config = StoreConfig.from_mapping({"root": str(tmp_path), "lookup_timeout_s": 0.01})
    manager = FskvManager(config, 1)
    key, request = make_offload_key(b"k" * 32, 0), ReqContext("r")
    reasons = itertools.cycle(["an update", OPENING, "no reset"])
    assert manager.lookup(key, request) is LookupResult.MISS

    def lookup():
        manager.rest(next(reasons))
        return manager.lookup(key, request)

    assert lookup() is LookupResult.RETRY
    world.wait_for(lambda: lookup() is LookupResult.MISS)
    assert {lookup() for _ in range(9)} == {LookupResult.MISS}
    manager.rest("")
    assert lookup() is LookupResult.RETRY  # another rest
    manager.shutdown()
