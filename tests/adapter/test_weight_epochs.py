"""Updates of weights in a simulated engine: no namespace ever gets KV of two sets of weights.

The engine is harsher than a real one: answers come late, steps run while an update is under way, and
updates, resets, versions and sleeps come in any order.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import threading
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
    NOT_RESET,
    MarkedWeights,
    Purity,
    Served,
    Weights,
    changing_methods,
)
from fskv.offload.opener import OPENING

pytestmark = world.VLLM


class Worker:
    """A rank's worker; `model` names what its weights are: "A part on B" has of B what A lacks."""

    def __init__(self):
        self.model = "start"
        self.half_way = None  # the weights after a reload that fails
        parallel = SimpleNamespace(worker_extension_cls=f"{__name__}.Extension")
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            weight_transfer_config=None,
            speculative_config=None,
            model_config=SimpleNamespace(model="/start", revision="v1"),
            load_config=SimpleNamespace(download_dir="/hub"),
        )
        self._weight_update_active = False

    def start_weight_update(self):
        self._weight_update_active = True

    def update_weights(self, name):
        if name is None:
            self._weight_update_active = False
            self.model = f"broken {random.random()}"
            raise RuntimeError("connection lost")
        self.model = name

    def finish_weight_update(self):
        self._weight_update_active = False

    def reload_weights(self, weights_iterator=None, weights_path=None):
        if self.half_way:
            self.model, self.half_way = self.half_way, None
            raise RuntimeError("no more memory")
        path, rest = weights_path or "own", self.model.rpartition(" on ")[2]
        is_part = path.endswith(" part")
        self.model = f"{path} on {rest}" if is_part else path
        self.load_weights({"a"} if is_part else {"a", "b"})

    def load_weights(self, names):
        return names

    def apply_model(self): ...

    def sleep(self, level=1):
        if level == 2:
            self.model = f"garbage {random.random()}"


class Extension:
    def swallow(self):
        with contextlib.suppress(RuntimeError):
            self.update_weights(None)

    def patch(self, name):
        self.model = name

    def release(self):
        self.sleep(1)


class Extended(Extension, Worker):
    pass


class Rank:
    def __init__(self):
        self.worker = Extended()
        self.weights = Weights()
        self.weights.watch(self.worker, [self.worker])
        self.weights._parameters = {"a", "b"}
        self.purity = Purity(self.weights, fixed=False)


class Engine:
    """A scheduler and its ranks. `namespaces` is the root: which weights the KV in each is of."""

    def __init__(self, chance, namespaces, *, num_ranks=2, run="run"):
        self.chance, self.namespaces = chance, namespaces
        self.ranks = [Rank() for _ in range(num_ranks)]
        self.epochs = Epochs(num_ranks, run, fixed=False, has_siblings=False)
        self.table, self.blocks = object(), []
        self.version, self.is_new_version = "default", False
        self.in_flight = []
        self.sources = {0: {}}
        self.num_stored = self.num_named = 0

    def step(self, *, has_tokens=True):
        step = self.epochs.on_step(self.table, self.version, has_tokens=has_tokens)
        number = step.epoch
        is_in_use = not self.epochs.resting
        told = {}
        for rank, one in enumerate(self.ranks):
            one.purity.on_step(step.cache, step.number)
            changes = step.changes[rank]
            is_wanted = number != one.purity.state.epoch and one.purity.counts[0] == changes
            if is_wanted and self.chance.random() < 0.7:
                self.sources[number] = step.sources
                one.purity.serve(number, changes, f"namespace {number}")
            if (news := one.purity.take_news()) is not None:
                told[rank] = news
        if has_tokens:
            self.is_new_version = False
            self.blocks.append([one.worker.model for one in self.ranks])
        if is_in_use:
            self._store()
        self.in_flight.append(told)
        while self.in_flight and self.chance.random() < 0.8:
            self.epochs.on_told(self.in_flight.pop(0))
            self.epochs.take_opened()

    def _store(self):
        """Store all of the cache, rank by rank, where that rank does not refuse."""
        for rank, one in enumerate(self.ranks):
            if one.purity.refuses:
                continue
            sources = self.sources[one.purity.state.epoch]
            name = json.dumps(sources, sort_keys=True)
            for block in self.blocks:
                known = self.namespaces.setdefault((name, rank), block[rank])
                assert known == block[rank], f"{name}: {known} and {block[rank]}"
            self.num_stored += 1
            self.num_named += bool(sources) and "private" not in sources

    def reset(self, *, connectors=True):
        if connectors:
            self.epochs.on_reset({n: one.weights.counts for n, one in enumerate(self.ranks)})
        self.table, self.blocks = object(), []

    def act(self, action, name):
        """Do one thing that a trainer or an operator does."""
        if action in ("reload", "part"):
            path = f"/{name} part" if action == "part" else f"/{name}"
            for one in self.ranks:
                one.worker.reload_weights(weights_path=path)
            self._set_version()
        elif action == "update":
            if self.ranks[0].worker._weight_update_active:
                return
            for one in self.ranks:
                one.worker.start_weight_update()
            if self.chance.random() < 0.3:
                self.step()  # in the middle of it
            for one in self.ranks:
                one.worker.update_weights(name)
            for one in self.ranks:
                one.worker.finish_weight_update()
            self._set_version()
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

    def _set_version(self):
        """Keep the promise of `weights_run`: a version names the weights of the next step with tokens."""
        if self.chance.random() < 0.6:
            self.version = str([one.worker.model for one in self.ranks])
            self.is_new_version = True
        elif self.is_new_version:
            self.version = "default"


ACTIONS = ["reload", "part", "update", "fails", "patch", "unseen", "sleep", "reset", "reset"]


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
    monkeypatch.setattr(weights_module, "checkpoint_place", lambda name, *_: name)
    monkeypatch.setattr(weights_module, "checkpoint_state", lambda path: {})
    monkeypatch.setattr(weights_module, "weights_fingerprint", lambda path, **_: path)


def test_no_namespace_gets_kv_of_two_sets_of_weights():
    done = [engine for seed in range(60) for engine in simulate(seed)]
    assert sum(one.num_stored for one in done) > 400
    assert sum(one.num_named for one in done) > 20
    assert max(one.epochs.number for one in done) > 10


def simulate_many():
    for seed in range(60):
        simulate(seed)


@pytest.mark.parametrize("without", ["purity", "unseen", "tie", "whole"])
def test_negative_controls(monkeypatch, without):
    """Each rule is needed: without it some namespace gets KV of two sets of weights."""
    if without == "purity":
        monkeypatch.setattr(Purity, "doubt", "")
        monkeypatch.setattr(Purity, "refuses", False)
    elif without == "unseen":
        monkeypatch.setattr(Epochs, "on_reset", lambda self, counts: None)
    elif without == "whole":
        monkeypatch.setattr(
            Weights, "_changed", property(lambda _: set(), lambda *_: None), raising=False
        )
    else:
        name = Epochs._name_weights

        def _name_weights(self):
            self._version_step = self._told[0].step
            return name(self)

        monkeypatch.setattr(Epochs, "_name_weights", _name_weights)
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


@pytest.mark.parametrize(("first", "second"), [("/A", "/A"), ("/A", "/B"), ("/A", None)])
def test_a_checkpoint_names_weights_only_where_all_ranks_have_loaded_it(first, second):
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {}, run=None)
    for one, path in zip(engine.ranks, (first, second), strict=True):
        if path:
            one.worker.reload_weights(weights_path=path)
    engine.reset()
    for _ in range(4):
        engine.step()
    assert ("model" in engine.sources[engine.epochs.number]) is (first == second)


@pytest.mark.parametrize("num_empty", [0, 1])
def test_a_version_names_no_weights_that_came_after_it(num_empty):
    """Without requests a trainer may set it some steps after the update; there is no older KV then."""
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {})
    for version in ("1", "2", "3"):
        engine.reset()
        for one in engine.ranks:
            one.worker.start_weight_update()
            one.worker.update_weights(version)
            one.worker.finish_weight_update()
        for _ in range(num_empty):
            engine.step(has_tokens=False)
        engine.version = version
        for _ in range(3):
            engine.step(has_tokens=False)
        sources = engine.sources[engine.epochs.number]
        named = {"model": {"run": "run", "version": version}}
        assert sources == named if not num_empty else "private" in sources


@pytest.mark.parametrize("through", ["sleep", "release"])
@pytest.mark.parametrize("fixed", [True, False])
def test_pages_that_were_lost_are_not_stored_though_weights_are_fixed(fixed, through):
    rank = Rank()
    purity = Purity(rank.weights, fixed=fixed)
    purity.on_step(1, (1, 1))
    assert not purity.refuses
    getattr(rank.worker, through)()
    assert purity.refuses
    purity.on_step(1, (2, 2))
    assert purity.refuses
    purity.on_step(2, (3, 3))
    assert purity.refuses is (through == "release" and not fixed), "it may have changed weights"


@pytest.mark.parametrize("was_unseen", [True, False])
def test_a_checkpoint_names_no_weights_that_were_changed_behind_vllm_s_back(was_unseen):
    """It may lack what was changed."""
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {}, run=None)
    for action in ["unseen"] * was_unseen + ["part"]:
        one_update(engine, action)
    assert ("model" in engine.sources[engine.epochs.number]) is not was_unseen


@pytest.mark.parametrize(
    "why", ["a draft", "a patch", "a loss", "a part that failed", "a part before it", ""]
)
@pytest.mark.parametrize("is_reload", [True, False])
def test_weights_that_a_name_may_not_tell_are_named_by_none(why, is_reload):
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {})
    for one in engine.ranks:
        worker = one.worker
        if why == "a draft":
            worker.vllm_config.speculative_config = object()
        if why == "a patch":
            worker.vllm_config.weight_transfer_config = SimpleNamespace(backend="sparse_nccl")
        if is_reload:
            worker.reload_weights(weights_path="/A")
        else:
            worker.start_weight_update()
            worker.update_weights("A")
            worker.finish_weight_update()
        if why == "a loss":
            worker.sleep(2)
        if why.startswith("a part"):
            worker.swallow()
        if why == "a part before it":
            worker.apply_model()
    engine.version = "A"
    engine.reset()
    for _ in range(4):
        engine.step()
    (source,) = engine.sources[engine.epochs.number]
    assert source == ("private" if why else "model")


def test_a_reset_that_left_vllm_s_own_cache_begins_no_epoch_of_what_is_in_it():
    chance = SimpleNamespace(random=lambda: 0.5, choice=lambda words: words[0])
    engine = Engine(chance, {})
    engine.step()
    for one in engine.ranks:
        one.worker.model = "unseen"
    counts = {n: one.weights.counts for n, one in enumerate(engine.ranks)}
    engine.epochs.on_reset(counts)  # requests are running: the pool refuses
    for _ in range(4):
        engine.step()
    assert engine.epochs.resting == NOT_RESET
    engine.reset()
    for _ in range(4):
        engine.step()
    assert engine.epochs.resting == ""
    assert "private" in engine.sources[engine.epochs.number]


def test_after_a_reset_that_the_pool_refused_no_namespace_is_being_opened():
    epochs, changed = Epochs(1, None, fixed=False, has_siblings=False), (1, 0)
    epochs.on_step("first", None, has_tokens=True)
    epochs.on_told({0: Served(1, NOT_RESET, changed)})
    for table, is_refused in (("second", True), ("third", False)):
        step = epochs.on_step(table, None, has_tokens=True)
        if is_refused:
            epochs.on_reset({0: changed})
        epochs.on_told({0: Served(step.cache, "", changed)})
        assert epochs.resting == (NOT_RESET if is_refused else OPENING)


def test_a_reload_of_the_engine_s_own_checkpoint_is_of_its_revision_and_place(monkeypatch):
    places = {("/start", "v1", "/hub"): "/hub/1", ("/other", None, "/hub"): "/other"}
    monkeypatch.setattr(weights_module, "checkpoint_place", lambda *asked: places[asked])
    rank = Rank()
    rank.worker.reload_weights()
    assert rank.weights.checkpoint == "/hub/1"
    rank.worker.reload_weights(None, "/other")
    assert rank.weights.checkpoint == "/other"
    with pytest.raises(TypeError):
        rank.worker.reload_weights(None, "/other", False)
    assert rank.weights.checkpoint == ""
    # The hub's name leads elsewhere while it is loaded.
    found = iter(["/hub/1", "/hub/2"])
    monkeypatch.setattr(weights_module, "checkpoint_place", lambda *asked: next(found))
    rank.worker.reload_weights()
    assert rank.weights.checkpoint == ""


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


def test_a_file_tells_that_an_update_failed_until_a_whole_one(tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    worker, weights = Extended(), Weights()
    weights.watch(worker, [worker], str(mark))
    told = MarkedWeights(os.open(mark, os.O_RDONLY))
    for fails in (True, True, False):
        worker.half_way = "half" if fails else None
        with contextlib.suppress(RuntimeError):
            worker.reload_weights(weights_path="/A")
        assert told.is_steady is weights.is_steady is not fails
        worker.sleep(1)
        assert told.is_steady is weights.is_steady is not fails
    assert told.counts == weights.counts == (5, 3)
    assert mark.read_bytes() == b"xxyxxyx.....y"


def test_an_end_that_could_not_be_told_is_told_with_the_next_call(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    mark.touch()
    worker, weights = Extended(), Weights()
    weights.watch(worker, [worker], str(mark))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", _no_space_for_dots(write))
        worker.patch("A")
    assert mark.read_bytes() == b"x"
    worker.sleep(1)
    assert mark.read_bytes() == b"xy."


def _no_space_for_dots(write):
    def written(fd, told):
        if told != b"x":
            raise OSError(errno.ENOSPC, "no space")
        return write(fd, told)

    return written


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
        (["update"], "ab", True),
        (["update"], "a", False),
        (["patch"], "ab", False),  # a user's method may change what no checkpoint has
        (["fails"], "ab", True),
        (["fails"], "a", False),
        (["abc", "fails"], "ab", False),
        (["abc", "update"], "ab", False),
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
            if what == "patch":
                worker.patch("x")
            elif what == "update":
                worker.update_weights("x")
            else:
                worker.reload_weights(weights_path="there")
    assert bool(weights.checkpoint) is names_them


class Released(Worker):
    def sleep(self, level=1):
        puller = threading.Thread(target=self.update_weights, args=("B",))
        puller.start()
        puller.join()


def test_an_update_on_another_thread_counts_while_a_call_that_is_none_runs():
    worker, weights = Released(), Weights()
    weights.watch(worker, [worker])
    worker.sleep(1)
    assert (weights.counts, weights.method) == ((1, 1), "update_weights")
    assert weights.is_steady


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
