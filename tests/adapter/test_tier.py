"""FskvTier without an engine (tier_rig.py): what goes to files and comes back, and what fails."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import read_only
from world import VLLM, damage, make_identity, read_by_hand, returns_in_time, wait_for

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

import numpy as np
from tier_rig import NUM_ROWS, POISON, REFS, REQUEST, STEP, Rig, caches, groups, placed, report
from vllm.v1.kv_offload.base import CanonicalPageMapping, LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from faults import transport as faults
from fskv.data_path.job import Job
from fskv.engines.vllm.files import canonical_files
from fskv.engines.vllm_tier import tier, workers
from fskv.engines.vllm_tier.workers import combine
from fskv.errors import ConfigError, RestError

pytestmark = VLLM


# --- rows and files ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("bpc", [1, 3])
def test_a_file_holds_the_pages_without_padding_and_comes_back_into_any_row(
    make_rig, num_ranks, bpc
):
    rig = make_rig(num_ranks=num_ranks, bpc=bpc)
    wanted = rig.store([1, 2])
    for (number, rank, group), pages in wanted.items():
        file = read_by_hand(rig.path(rig.keys(number)[group], rank))
        assert file.payload[: len(pages)] == pages
        assert not any(file.payload[len(pages) :])
        assert len(file.payload) == -(-len(pages) // 4096) * 4096
    rig.rows[:] = POISON
    rows = (9, 4)
    result = rig.finish(rig.submit(rig.keys(2), rows, load=True))
    assert result.success
    assert result.successful_keys is None
    assert result.transfer_bytes == sum(len(p) for (n, *_), p in wanted.items() if n == 2)
    for group, row in enumerate(rows):
        written = np.count_nonzero(rig.rows[row] != POISON)
        size = sum(n for _, n in REFS[group]) * bpc * num_ranks
        assert size * 0.98 < written <= size, "the padding is left alone"
    others = [row for row in range(NUM_ROWS) if row not in rows]
    assert (rig.rows[others] == POISON).all()
    found = rig.pages_of_rows(12, rows)
    assert found == {
        place: pages for (n, *place), pages in wanted.items() if n == 2 for place in [tuple(place)]
    }


def test_a_tier_that_only_loads_changes_nothing(make_rig, tmp_path, monkeypatch):
    writer = make_rig()
    wanted = writer.store([1])
    read_only.make_old(writer.root)
    before = read_only.look(writer.root)
    with read_only.mounted(writer.root, tmp_path / "ro") as at:
        rig = Rig(at, monkeypatch, store=False, maintenance="on")
        assert [rig.lookup(key) for key in rig.keys(1)] == [LookupResult.HIT] * 2
        assert rig.finish(rig.submit(rig.keys(1), (9, 4), load=True)).success
        assert rig.pages_of_rows(12, (9, 4)) == {(0, 0): wanted[1, 0, 0], (0, 1): wanted[1, 0, 1]}
        rig.fill_rows(0, (2, 3), 2)
        assert rig.finish(rig.submit(rig.keys(2), (2, 3), load=False)).success
        rig.close()
    assert read_only.look(writer.root) == before
    writer.store([1, 2])
    assert read_only.look(writer.root) != before, "the control"


def test_slices_of_canonical_pages_are_what_the_connector_cuts():
    """Slice s of a page of n * num_slices bytes is bytes [s * n, (s + 1) * n) of it (vllm_files)."""
    places = (0, 40960), (2 * 40960, 24576)
    refs = (((0, 40000), (1, 24000)), ((0, 30000),))
    mapped = caches(
        placed(*places, blocks=2), refs, lambda n: CanonicalPageMapping(n, n // 2, (), 1, 0, True)
    )
    files = canonical_files(groups(), 2, mapped, 4, in_full=True)
    for number, of_slice in workers.placements_of(files).items():
        for placement, of_group in zip(of_slice, refs, strict=True):
            spans = workers.plan_row(placement).spans  # in the payload's order, without gaps
            found = [(span.tensor_offset, span.nbytes) for span in spans]
            by_hand = [
                (places[t][0] + block * places[t][1] + number * nbytes // 4, nbytes // 4)
                for block in range(2)
                for t, nbytes in of_group
            ]
            assert found == by_hand


def test_workers_that_do_not_agree_refuse_to_start():
    first, beside = placed((0, 40960), (40960, 24576)), placed((65536, 40960), (106496, 24576))
    good = [report(0, first, 131072), report(1, beside, 131072)]
    assert [*combine(good, 2, 131072).files] == [0, 1]
    assert [*combine([report(0, first, 65536, num_ranks=1)], 1, 65536).files] == [None]
    other = make_identity(weights="commit:" + "b" * 40)
    for reports, words in (
        (good[:1], "expected all of 2"),
        ([good[0], report(1, beside, 131072, identity=other)], "all must agree"),
        ([good[0], report(1, beside, 135168)], "rows of 135168 bytes"),
        ([good[0], report(1, placed((65536, 40960), (131072, 24576)), 131072)], "do not fit"),
        ([good[0], report(1, first, 131072)], "overlap"),
    ):
        with pytest.raises(ConfigError, match=words):
            combine(reports, 2, 131072)


# --- failure ----------------------------------------------------------------------------------


def test_the_failure_of_some_keys_keeps_the_others(make_rig):
    rig = make_rig(num_ranks=2)
    wanted = rig.store([1, 2])
    keys = rig.keys(1) + rig.keys(2)
    damage(rig.path(keys[1], rank=1), -100 + os.path.getsize(rig.path(keys[1], rank=1)))
    damage(rig.path(keys[1], rank=0), 0)
    os.unlink(rig.path(keys[2], rank=0))
    rig.rows[:] = POISON
    result = rig.finish(rig.submit(keys, [0, 1, 2, 3], load=True))
    assert not result.success
    assert result.successful_keys == (keys[0], keys[3])
    found = {**rig.pages_of_rows(12, (0, 3))}
    assert found == {
        (rank, group): wanted[number, rank, group]
        for rank in (0, 1)
        for number, group in ((1, 0), (2, 1))
    }
    for key, answer in zip(keys, ("HIT", "MISS", "MISS", "HIT"), strict=True):
        assert rig.lookup(key).name == answer
    # Healed: what failed is stored again, and what is there is not written twice.
    before = {path: os.stat(path).st_ino for path in rig.files()}
    refilled = rig.fill_rows(0, (0, 1), seed=1)
    assert refilled == {
        place: pages for (n, *place), pages in wanted.items() if n == 1 for place in [tuple(place)]
    }
    rig.fill_rows(0, (2, 3), seed=2)
    assert rig.finish(rig.submit(keys, [0, 1, 2, 3], load=False)).success
    wait_for(lambda: rig.poll() and not rig.tier._manager.chunks.storing)
    assert rig.finish(rig.submit(keys, [4, 5, 6, 7], load=True)).success
    after = {path: os.stat(path).st_ino for path in rig.files()}
    assert len(after) == 8
    kept = {rig.path(key, rank) for key in (keys[0], keys[3]) for rank in (0, 1)}
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}


@pytest.mark.parametrize("guarded", [True, False])
def test_a_late_load_is_failed_and_writes_no_row_that_was_given_away(
    make_rig, monkeypatch, guarded
):
    """The control: without the guard the late bytes land in the row."""
    if not guarded:
        monkeypatch.setattr(Job, "abandon", lambda self: None)
    seconds = 0.5
    rig = make_rig(faults.Script(), load_deadline_s=seconds, io_threads=3)
    wanted = rig.store([1, 2])
    keys = rig.keys(1) + rig.keys(2)
    rig.rows[:] = POISON
    rig.transport.script = faults.Script(read="..HH")
    result = rig.finish(rig.submit(keys, [0, 1, 2, 3], load=True))
    assert not result.success
    assert len(result.successful_keys or ()) in (0, 1, 2)
    late = [i for i, key in enumerate(keys) if key not in (result.successful_keys or ())]
    good = [i for i in range(4) if i not in late]
    assert len(late) >= 2
    rig.rows[late] = POISON  # vLLM gives them to other chunks
    rig.transport.release()
    wait_for(lambda: rig.poll() and rig.tier._worker.mover._runner.num_threads_hung == 0)
    wait_for(lambda: rig.tier._worker.mover._runner.num_running == 0)
    assert (rig.rows[late] == POISON).all() == guarded
    for row in good:
        number, group = row // 2 + 1, row % 2
        assert rig.rows[row][:1000].tobytes() == wanted[number, 0, group][:1000]


def test_drain_returns_while_the_disk_hangs_and_nothing_is_touched_after(make_rig):
    rig = make_rig(faults.Script(), io_threads=2)
    wanted = rig.store([1])
    stored = {key: rig.path(key) for key in rig.keys(1)}
    rig.transport.script = faults.Script(read="H*", write="H*")
    rows = {2: (4, 5), 3: (6, 7)}
    pages = {n: rig.fill_rows(0, place, seed=n) for n, place in rows.items()}
    for n, place in rows.items():
        rig.submit(rig.keys(n), place, load=False)
    rig.transport.wait_until_hanging(2)
    rig.rows[[0, 1]] = POISON
    load = rig.submit(rig.keys(1), [0, 1], load=True)
    began = time.monotonic()
    returns_in_time(lambda: rig.tier.drain_jobs() or 1)
    assert time.monotonic() - began < 15, "a bound against a hang"
    rig.poll()
    assert set(rig.results) == set(range(1, load + 1)), "every job has its result at once"
    assert not rig.results[load].success
    assert not rig.results[load].successful_keys
    assert not rig.tier._jobs
    rig.rows[:] = POISON
    rig.transport.script = faults.Script()
    rig.transport.release()
    wait_for(lambda: rig.poll() and rig.tier._worker.mover._runner.num_running == 0)
    assert (rig.rows == POISON).all(), "no late write"
    # What was gathered before is what is written, whatever became of the rows.
    for path in set(rig.files()) - set(stored.values()):
        payload = read_by_hand(path).payload
        assert any(
            payload[: len(content)] == content
            for of_chunk in pages.values()
            for content in of_chunk.values()
        )
    for (_, _, group), content in wanted.items():
        assert read_by_hand(stored[rig.keys(1)[group]]).payload[: len(content)] == content


# --- what the engine decides ------------------------------------------------------------------


def test_after_a_reset_requests_that_run_store_nothing_new_ones_do(make_rig):
    """vLLM offers windows' blocks again that are another request's by then; see FskvTier.drain_jobs."""
    rig = make_rig()
    rig.store([1])
    rig.tier.drain_jobs()
    rig.fill_rows(0, (2, 3), seed=5)
    assert rig.finish(rig.submit(rig.keys(5), (2, 3), load=False)).success
    assert rig.lookup(rig.keys(1)[0]) is LookupResult.MISS
    assert len(rig.files()) == 2
    rig.tier.on_request_finished(REQUEST)
    rig.tier.on_new_request(REQUEST)  # another one of that name
    wait_for(lambda: rig.counted() is not None and rig.lookup(rig.keys(1)[0]) is LookupResult.HIT)
    rig.store([1, 5])
    assert len(rig.files()) == 4


def test_after_a_reset_nothing_is_done_unless_the_weights_are_vouched_for(make_rig):
    rig = make_rig(weights_fixed=False)
    rig.store([1])
    rig.tier.drain_jobs()
    later = ReqContext("later")
    rig.tier.on_new_request(later)
    assert rig.lookup(rig.keys(1)[0], later) is LookupResult.MISS
    rig.tier.submit_store(TransferJob(77, rig.keys(2), np.array([2, 3], np.int32), False, later))
    assert rig.finish(77).success
    assert len(rig.files()) == 2


def test_events_name_what_is_visible_and_what_is_gone_with_the_tiers_locality(make_rig):
    rig = make_rig(events=True, locality="REMOTE")
    rig.store([1])
    events = list(rig.tier.take_events())
    assert {(key, e.removed, e.medium.name) for e in events for key in e.keys} == {
        (key, False, "STORAGE") for key in rig.keys(1)
    }
    assert {event.locality.name for event in events} == {"REMOTE"}
    os.unlink(rig.path(rig.keys(1)[0]))
    assert not rig.finish(rig.submit(rig.keys(1), [0, 1], load=True)).success
    assert [(e.removed, list(e.keys)) for e in rig.tier.take_events()] == [(True, rig.keys(1)[:1])]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "option 'root'"),
        ({"root": "/x", "block_size": 128}, "beside 'secondary_tiers'"),
        ({"root": "/x", "canonical_layout": True}, "beside 'secondary_tiers'"),
        ({"root": "/x", "offload_prompt_only": True}, "beside 'secondary_tiers'"),
        ({"root": "/x", "hybrid_chunk_size": 128}, "set 'block_size'"),
        ({"root": "/x", "io_thread": 3}, "did you mean 'io_threads'"),
        ({"root": "/x", "kv_load_failure_policy": "fail"}, '"recompute"'),
        ({"root": "/x", "load_budget": "on"}, "does not tell a tier"),
    ],
)
def test_options_are_refused_with_one_sentence(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        tier.tier_config(options)
    assert "\n" not in str(caught.value)


# --- where the workers do not know their KV ------------------------------------------------------


def test_a_vllm_that_hides_its_workers_refuses_to_start():
    spec, config = SimpleNamespace(), tier.tier_config({"root": "/x"})
    with pytest.raises(ConfigError, match="cannot be used with it"):
        workers.ask_workers(spec, config, 0, "")
    kind, sentence = workers.report(None, "engine", config, "")
    assert kind is ConfigError
    assert "FskvTier cannot be used" in sentence


def test_where_a_worker_does_not_know_its_kv_the_tier_rests(tmp_path, monkeypatch, caplog):
    def rests(*_):
        raise RestError("KV layer l.7: nobody knows")

    rig = Rig(tmp_path / "kv", monkeypatch, resting=rests)
    try:
        assert "event=kv_unknown" in caplog.text
        assert "KV layer l.7: nobody knows" in caplog.text
        keys = rig.keys(1)
        rig.fill_rows(0, (0, 1), seed=1)
        stored = rig.finish(rig.submit(keys, (0, 1), load=False))
        assert stored.success, "vLLM keeps what it has in its rows"
        assert rig.files() == []
        assert all(rig.tier.lookup(key, REQUEST) is LookupResult.MISS for key in keys)
        loaded = rig.finish(rig.submit(keys, (0, 1), load=True))  # asked for all the same
        assert not loaded.success
        rig.tier.on_schedule_end(STEP)
        data = rig.tier.get_stats().data["data"]
        assert set(data) <= set(rig.tier.build_metric_definitions({}))
        assert [*data["vllm:fskv_off"].values()] == [1.0]
        rig.tier.drain_jobs()
    finally:
        rig.close()


def test_a_worker_s_answer_that_it_does_not_know_its_kv_is_no_refusal(monkeypatch):
    answers = [(RestError, "KV layer l.7: nobody knows"), (ConfigError, "found 1, expected 2")]
    executor = SimpleNamespace(collective_rpc=lambda *_, **__: answers)
    monkeypatch.setattr(workers, "executor", lambda: executor)
    media = SimpleNamespace(language_model_only=True, enable_mm_embeds=False)
    model = SimpleNamespace(multimodal_config=media)
    executor.vllm_config = SimpleNamespace(model_config=model)
    spec = SimpleNamespace(config=SimpleNamespace(engine_id="e"))
    with pytest.raises(RestError, match="nobody knows"):
        workers.ask_workers(spec, SimpleNamespace(trust=()), 0, "")
    answers.reverse()
    with pytest.raises(ConfigError, match="expected 2"):  # the control: a setting is refused
        workers.ask_workers(spec, SimpleNamespace(trust=()), 0, "")
    for only, embeds in ((False, False), (True, True)):  # embeddings come in with limits of 0, too
        media.language_model_only, media.enable_mm_embeds = only, embeds
        with pytest.raises(ConfigError, match="a model that takes media"):
            workers.ask_workers(spec, SimpleNamespace(trust=("media",)), 0, "")

    def find():
        raise RestError("KV layer l.7: nobody knows")

    monkeypatch.setattr(workers, "connectors", find)
    assert workers.report(None, "e", None, "") == answers[1]


def test_rows_beyond_two_gib_are_found(make_rig):
    rig = make_rig()
    used = tier.ChunkKeys([rig.tier._manager.chunk_of(rig.keys(1)[0])], use=0, depths=[0])
    (move,) = rig.tier._worker._plan(used, np.array([100_000], np.int32), is_load=False)
    assert move.plan.spans[0].tensor_offset == 100_000 * rig.row_nbytes


@pytest.mark.parametrize("vouched", [False, True], ids=["in_doubt", "negative_control"])
def test_a_drain_that_puts_the_weights_in_doubt_gathers_nothing_more(make_rig, vouched):
    rig = make_rig(faults.Script(write="H*"), io_threads=2, weights_fixed=vouched)
    for number, rows in ((2, (4, 5)), (3, (6, 7))):
        rig.fill_rows(0, rows, seed=number)
        rig.submit(rig.keys(number), rows, load=False)
    rig.transport.wait_until_hanging(2)
    returns_in_time(lambda: rig.tier.drain_jobs() or 1)
    rig.poll()
    assert set(rig.results) == {1, 2}, "every job has its result at once"
    rig.rows[:] = POISON
    rig.transport.script = faults.Script()
    rig.transport.release()
    wait_for(lambda: rig.poll() and rig.tier._worker.mover._runner.num_open_stores == 0)
    assert len(rig.files()) == (4 if vouched else 2), "those that threads had gathered"
