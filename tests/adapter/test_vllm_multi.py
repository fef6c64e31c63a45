"""FskvMultiConnector without an engine: what it adds to vLLM's MultiConnector, on vLLM's own parts."""

from __future__ import annotations

import inspect
import os
import time
from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")


from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.engines.vllm.connector import FskvConnector
from fskv.engines.vllm.failed_loads import FailedLoads
from fskv.engines.vllm.plugin import register
from fskv.engines.vllm_multi import connector as module
from fskv.engines.vllm_multi.connector import FskvMultiConnector, _check_whole_chunks, _real
from fskv.engines.vllm_multi.metrics import _sharing
from fskv.errors import ConfigError
from fskv.kv_transfer.multi import ChildConfig, check_roots
from fskv.observe.metrics import Counters

pytestmark = world.VLLM


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


class Child:
    """A connector that says what it is told to say; what it is asked is in `calls`."""

    supports_divergent_local_hybrid_hits = False

    def __init__(self, tokens=0):
        self.tokens = tokens
        self.calls: list[str] = []
        self.fails: set[str] = set()

    def _call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise OSError(f"{name} failed")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._call("match")
        return self.tokens, bool(self.tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._call(f"alloc {num_external_tokens}")

    def update_connector_output(self, connector_output):
        self._call("output")

    def request_finished_all_groups(self, request, block_ids):
        self._call("finished")
        return False, None

    def reset_cache(self):
        self._call("reset")
        return True

    def shutdown(self):
        self._call("shutdown")


def connector(*children, lookup_timeout_s=60.0, weights=None):
    """Return one whose children are these, as its constructor leaves it on the scheduler's side."""
    made = FskvMultiConnector.__new__(FskvMultiConnector)
    made._connectors = list(children)
    made._names = [f"child{idx}" for idx in range(len(children))]
    made._config = SimpleNamespace(
        lookup_timeout_s=lookup_timeout_s,
        connectors=[SimpleNamespace(load_weight=w) for w in weights or [1.0] * len(children)],
    )
    made._all_support_hma = True
    made._requests_to_connector, made._extra_async_saves = {}, {}
    made._counters, made._failed_loads = Counters(), FailedLoads()
    made._waits_since, made._given_up, made._failed = {}, {}, {}
    return made


def request(name="r", num_tokens=96):
    return SimpleNamespace(request_id=name, num_tokens=num_tokens)


def output(finished=(), failed=()):
    return SimpleNamespace(
        finished_recving=set(finished), failed_recving=set(failed), kv_connector_worker_meta=None
    )


def test_what_is_reached_into_is_there_in_this_vllm():
    for name in ("_aggregate_request_finished", "_get_connector_classes_and_configs"):
        assert hasattr(MultiConnector, name), name
    source = inspect.getsource(MultiConnector)
    for name in ("_connectors", "_requests_to_connector", "_ktc_kv_transfer_config"):
        assert f"self.{name}" in source, name
    # Where the blocks of a load are noted, and where stores are made to read them first: _tell_allocated.
    noted = inspect.getsource(OffloadingConnectorScheduler.update_state_after_alloc)
    assert "self._current_batch_allocated_block_ids.update(" in noted
    flushed = inspect.getsource(OffloadingConnectorScheduler)
    assert "for bid in self._current_batch_allocated_block_ids" in flushed
    # What vllm_reset reads and writes.
    for name in ("_req_status", "_sliding_window_groups", "_current_batch_load_jobs"):
        assert f"self.{name}" in flushed, name


# --- waiting and choosing -------------------------------------------------------------------


def test_vllms_own_connector_defers_instead():
    """The negative control: one child without an answer, and the request waits, for as long as that is so."""
    multi = connector(Child(None), Child(96))
    for _ in range(3):
        assert MultiConnector.get_num_new_matched_tokens(multi, request(), 0) == (None, False)


@pytest.mark.parametrize(
    ("tokens", "weights", "found"),
    [
        ([32, 96, 96], None, 1),  # the first of equals
        ([32, 96], [4.0, 1.0], 0),
        ([32, 96], [0.0, 1.0], 1),
        ([0, 0], None, None),
        ([96, 0], [0.0, 1.0], None),  # stored to, never loaded from
        ([None, 96], None, 1),  # a silent child that has no more at most
        ([None, 32], [0.1, 1.0], 1),
        ([None, 32], [0.0, 1.0], 1),
        ([None, 32], None, "later"),
        ([32, None], [1.0, 2.0], "later"),
        ([0, None], None, "later"),
        ([None, None], [0.0, 0.0], None),
    ],
)
def test_the_child_with_the_most_by_weight_is_loaded_from(tokens, weights, found):
    multi = connector(*map(Child, tokens), weights=weights)
    answer = multi.get_num_new_matched_tokens(request(), 0)
    if isinstance(found, int):
        assert answer == (tokens[found], True)
        assert multi._requests_to_connector == {"r": found}
    else:
        assert answer == (None if found == "later" else 0, False)
        assert multi._requests_to_connector == {}


def test_a_silent_child_of_vllms_kind_has_whole_chunks_at_most():
    class Silent(OffloadingConnector):
        def __init__(self, *, partial):
            groups = [SimpleNamespace(tokens_per_chunk=size) for size in (16, 64)]
            self.connector_scheduler = SimpleNamespace(
                config=SimpleNamespace(
                    supports_partial_tail=partial, tokens_per_hash=16, kv_group_configs=groups
                )
            )

        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return None, False

    for partial, tokens, waits in (
        (False, 64, False),
        (False, 63, True),
        (True, 95, True),
        (True, 96, False),
    ):
        multi = connector(Silent(partial=partial), Child(tokens))
        answer = multi.get_num_new_matched_tokens(request(num_tokens=100), 0)
        assert answer == ((None, False) if waits else (tokens, True))
    # Of these the engine itself has all but 16 tokens.
    multi = connector(Silent(partial=True), Child(16))
    assert multi.get_num_new_matched_tokens(request(num_tokens=100), 80) == (16, True)


def test_the_wait_for_a_silent_child_ends_and_is_counted_once():
    multi = connector(Child(None), Child(32), lookup_timeout_s=0.05)
    assert multi.get_num_new_matched_tokens(request(), 0) == (None, False)
    time.sleep(0.06)
    for _ in range(3):  # the blocks were not there, so the scheduler asks again
        assert multi.get_num_new_matched_tokens(request(), 0) == (32, True)
    multi.update_state_after_alloc(request(), None, 32)
    counts = {(m.name, child): amount for (m, child), amount in multi._counters.drain().items()}
    assert counts == {("fskv_multi_given_up", "child0"): 1, ("fskv_multi_loads", "child1"): 1}
    # After a preemption it may wait again.
    assert multi.get_num_new_matched_tokens(request(), 0) == (None, False)


def test_a_child_that_answers_after_all_is_not_counted_as_given_up():
    silent, other = Child(None), Child(32)
    multi = connector(silent, other, lookup_timeout_s=0.0)
    assert multi.get_num_new_matched_tokens(request(), 0) == (32, True)
    silent.tokens = other.tokens = 0
    assert multi.get_num_new_matched_tokens(request(), 0) == (0, False)
    multi.update_state_after_alloc(request(), None, 0)
    assert multi._counters.drain() == {}


@pytest.mark.parametrize("is_ours", [True, False])
def test_with_nothing_elsewhere_one_of_ours_ends_the_wait_itself_and_another_is_given_up(
    monkeypatch, is_ours
):
    """Also for a load of the same tokens: to go on would compute them again."""
    monkeypatch.setattr(module, "FskvConnector", Child if is_ours else int)
    silent = Child(None)
    multi = connector(silent, Child(0), lookup_timeout_s=0.01)
    assert multi.get_num_new_matched_tokens(request(), 0) == (None, False)
    time.sleep(0.12)
    expected = (None, False) if is_ours else (0, False)
    assert multi.get_num_new_matched_tokens(request(), 0) == expected
    silent.tokens = 0
    assert multi.get_num_new_matched_tokens(request(), 0) == (0, False)


def test_a_choice_of_before_is_forgotten_when_the_child_has_nothing_any_more():
    child = Child(96)
    multi = connector(child)
    multi.get_num_new_matched_tokens(request(), 0)
    child.tokens = 0
    assert multi.get_num_new_matched_tokens(request(), 0) == (0, False)
    assert multi._requests_to_connector == {}
    assert multi.get_loaded_kv_cache_group_ids(request()) == ()


def test_after_a_failed_load_the_others_come_first_until_the_request_ends():
    first, second = Child(96), Child(32)
    multi = connector(first, second, weights=[9.0, 1.0])
    asked = request()
    reserved = []
    waiting = SimpleNamespace(discard=lambda request: reserved.clear())
    multi._failed_loads._scheduler = SimpleNamespace(
        requests={"r": asked}, _inflight_prefills=waiting
    )
    multi.get_num_new_matched_tokens(asked, 0)
    multi.update_state_after_alloc(asked, None, 96)
    reserved.append(asked)
    multi.update_connector_output(output(finished=["r"], failed=["r"]))
    assert multi.get_num_new_matched_tokens(asked, 0) == (None, False)  # behind what is loaded
    assert reserved == [], "it would wait for itself"
    assert multi.get_num_new_matched_tokens(asked, 0) == (32, True)
    second.tokens = 0
    assert multi.get_num_new_matched_tokens(asked, 0) == (96, True)
    multi.request_finished_all_groups(asked, ([],))
    assert not any((multi._failed, multi._waits_since, multi._given_up))
    second.tokens = 32
    assert multi.get_num_new_matched_tokens(asked, 0) == (96, True)


# --- start, end, reset ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["shutdown", "reset"])
def test_one_child_that_fails_does_not_keep_the_others_from_closing_or_resetting(what):
    children = Child(), Child(), Child()
    children[0].fails.add(what)
    multi = connector(*children)
    with pytest.raises(OSError, match=what):
        multi.shutdown() if what == "shutdown" else multi.reset_cache()
    assert [child.calls for child in children] == [[what]] * 3


def test_vllms_own_offloading_of_windows_in_chunks_of_several_blocks_is_refused():
    def child(cls, blocks_per_chunk, windows):
        made = cls.__new__(cls)
        made.connector_scheduler = SimpleNamespace(
            config=SimpleNamespace(blocks_per_chunk=blocks_per_chunk),
            _sliding_window_groups=windows,
        )
        return made

    good = [
        child(OffloadingConnector, 1, (0,)),
        child(OffloadingConnector, 8, ()),
        child(FskvConnector, 8, (0,)),  # stores whole chunks alone
        Child(),
    ]
    _check_whole_chunks(list("abcd"), good)
    with pytest.raises(ConfigError, match=r"connector e.*found 8 blocks.*expected 1 block"):
        _check_whole_chunks(list("abcde"), [*good, child(OffloadingConnector, 8, (0,))])


def test_a_link_to_the_root_of_another_child_is_noticed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    os.symlink(tmp_path / "a", tmp_path / "link")

    def check(*names):
        roots = [_child_config(name, root=str(tmp_path / name)) for name in names]
        check_roots([ChildConfig(transfer=root) for root in roots], _real)

    check("a", "b", "missing")
    for names in (("a", "link"), ("link/below", "a")):
        with pytest.raises(ConfigError, match="a root of its own"):
            check(*names)


@pytest.mark.parametrize(
    ("child", "sentence"),
    [
        (
            {"kv_connector": "FskvConector", "kv_role": "kv_both"},
            "Unsupported connector type: FskvConector",
        ),
        ({"kv_connector": "FskvConnector", "kv_role": "both"}, "kv_role"),
        ({"kv_connector": "FskvConnector", "kv_role": "kv_both", "root": "/b"}, "root"),
    ],
)
def test_a_child_that_vllm_refuses_is_named(child, sentence):
    of = FskvMultiConnector._get_connector_classes_and_configs
    assert len(of(_vllm_config(_child_config("a"), _child_config("b")))) == 2
    with pytest.raises(ConfigError) as caught:
        of(_vllm_config(_child_config("a", store=False), child))
    assert str(caught.value).startswith("option 'connectors[1]': ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


# --- metrics --------------------------------------------------------------------------------


def test_a_child_that_refuses_to_start_closes_those_that_have(monkeypatch, caplog):
    from fskv.engines.vllm_multi import connector

    first = Child()

    def built_up_to_the_second(self, *_):
        self._connectors = [first]
        raise ConfigError("option 'staging_bytes': found 1")

    monkeypatch.setattr(MultiConnector, "__init__", built_up_to_the_second)
    config = _vllm_config(_child_config("a"), _child_config("b"))
    with pytest.raises(ConfigError, match="'staging_bytes': found 1"):
        connector.FskvMultiConnector(config, None, None)
    assert "fskv: option 'staging_bytes': found 1" in caplog.text
    assert first.calls == ["shutdown"]


def _vllm_config(*children):
    outer = KVTransferConfig(
        kv_connector="FskvMultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(children)},
    )
    return SimpleNamespace(kv_transfer_config=outer)


def _child_config(name, kind="FskvConnector", kv_role="kv_both", **extra):
    options = {"root": f"/{name}"} if kind == "FskvConnector" else {}
    return {
        "kv_connector": kind,
        "kv_role": kv_role,
        "kv_connector_extra_config": {"name": name, **options, **extra},
    }


def test_a_name_with_other_labels_gets_the_childs_number_and_is_not_an_error():
    defined, made = [], {}

    def gauge(**definition):
        defined.append(definition)
        return definition

    for child, labels in ((0, ["a"]), (1, ["b"]), (2, ["a"])):
        _sharing(gauge, made, child)(name="info", documentation="", labelnames=labels)
    assert [(each["name"], each["labelnames"]) for each in defined] == [
        ("info", ["a"]),
        ("info_connector1", ["b"]),
    ]
