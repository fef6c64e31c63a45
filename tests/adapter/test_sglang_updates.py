"""Updates of weights in a simulated SGLang: no namespace ever gets KV of two sets of weights."""

from __future__ import annotations

import contextlib
import random

import pytest

from fskv.engines.sglang import server
from fskv.engines.sglang.server import Updates


class Store:
    """What the adapter calls of a BlockingStore, and which weights' KV is in its namespaces."""

    def __init__(self):
        self.resting = self.stopped = ""
        self.namespaces = [set()]

    def rest(self, reason):
        self.resting = reason

    def stop(self, reason):
        self.stopped = reason

    def renew(self):
        if self.resting:
            self.resting = ""
            self.namespaces.append(set())

    def store(self, kv):
        if not (self.resting or self.stopped):
            self.namespaces[-1].add(kv)


class Engine:
    """SGLang's weights and its memory of KV, and the wrapped methods that change them."""

    cache_controller = object()

    def __init__(self, goes_on=True, store=None):
        self.store = store or Store()
        server.stores[self.store] = goes_on
        self.weights, self.memory, self.is_open = 0, set(), False

    def update_weights(self, result=(True, "")):
        self.weights += 1
        self.compute()  # of a part of them
        if isinstance(result, Exception):
            raise result
        self.weights += 1
        return result

    def begin_weight_update(self, result=None):
        if result is not None:
            raise result
        self.is_open = True

    def end_weight_update(self, result=None):
        if result is not None:
            raise result
        self.is_open = False
        self.weights += 1

    def reset(self):
        self.memory.clear()

    def compute(self):
        self.memory.add(self.weights)
        for kv in self.memory:
            self.store.store(kv)

    def call(self, name, *args):
        code = server._reset if name == "reset" else server._update
        with contextlib.suppress(RuntimeError):
            code(getattr(type(self), name), self, *args)


@pytest.fixture(autouse=True)
def updates(monkeypatch):
    monkeypatch.setattr(server, "updates", Updates())
    monkeypatch.setattr(server, "stores", {})


FAILURE = RuntimeError("connection lost")
UPDATE, RESET = ("update_weights",), ("reset",)
FAILED, RAISED = ("update_weights", (False, "no such file")), ("update_weights", FAILURE)
BEGIN, END = ("begin_weight_update",), ("end_weight_update",)
NOT_BEGUN, NOT_ENDED = (*BEGIN, FAILURE), (*END, FAILURE)


@pytest.mark.parametrize(
    ("calls", "goes_on"),
    [
        ([UPDATE, RESET], True),
        ([UPDATE], False),
        ([RESET, UPDATE], False),
        ([UPDATE, UPDATE, RESET], True),
        ([FAILED, RESET], False),
        ([RAISED, RESET], False),
        ([RAISED, UPDATE], False),
        ([RAISED, RESET, UPDATE, RESET], True),
        ([BEGIN, RESET], False),
        ([BEGIN, UPDATE, RESET], False),
        ([BEGIN, UPDATE, RESET, END], False),
        ([BEGIN, UPDATE, END, RESET], True),
        ([BEGIN, END, RESET], True),
        ([BEGIN, FAILED, UPDATE, END, RESET], False),
        ([BEGIN, RAISED, END, RESET, BEGIN, UPDATE, END, RESET], True),
        ([BEGIN, UPDATE, NOT_ENDED, RESET], False),
        ([BEGIN, UPDATE, NOT_ENDED, END, RESET], False),
        ([BEGIN, NOT_ENDED, END, UPDATE, RESET], True),
    ],
)
def test_a_store_goes_on_after_a_whole_update_and_a_reset(calls, goes_on):
    engine = Engine()
    engine.compute()
    for call in calls:
        engine.call(*call)
    assert (engine.store.resting == "") is goes_on
    engine.compute()
    assert engine.store.namespaces == ([{0}, {engine.weights}] if goes_on else [{0}])


@pytest.mark.parametrize("guarded", [True, False])
def test_no_namespace_gets_kv_of_two_sets_of_weights(guarded):
    """Where an update's end counts as a reset, the negative control, some do."""
    calls = (UPDATE, RESET, RESET, FAILED, RAISED, BEGIN, END, NOT_ENDED)
    mixed = renewed = 0
    for seed in range(300):
        draw = random.Random(seed)
        engine = Engine()
        server.updates = Updates()
        for _ in range(30):
            call = draw.choice(calls)
            if call in (BEGIN, END, NOT_ENDED) and engine.is_open is (call is BEGIN):
                continue  # SGLang refuses it
            engine.call(*call)
            if not guarded:
                server.updates.on_reset()
            if draw.random() < 0.7:
                engine.compute()
        mixed += any(len(found) > 1 for found in engine.store.namespaces)
        renewed += sum(map(bool, engine.store.namespaces[1:]))
    assert renewed > 100
    assert bool(mixed) is not guarded


def test_a_session_that_began_on_one_of_two_runners_alone_ends_with_the_next_whole_one():
    """SGLang gives it up where the other runner fails; nobody ends it."""
    engine = Engine()
    draft = Engine(store=engine.store)
    for other in (NOT_BEGUN, BEGIN):
        engine.call(*BEGIN)
        draft.call(*other)
        engine.call(*RESET)
        assert engine.store.resting
    for call in (UPDATE, END):
        engine.call(*call)
        draft.call(*call)
    engine.call(*RESET)
    assert not engine.store.resting


def test_a_reset_of_a_tree_without_host_memory_ends_no_rest():
    engine = Engine()
    engine.call(*UPDATE)
    engine.cache_controller = None
    engine.call(*RESET)
    assert engine.store.resting


def test_a_store_that_may_not_go_on_is_stopped():
    """The control: without an update a reset stops nothing."""
    engine = Engine(goes_on=False)
    engine.call(*RESET)
    assert not engine.store.stopped
    engine.call(*UPDATE)
    engine.call(*RESET)
    assert "(update_weights)" in engine.store.stopped
