"""Admission: chunks are stored at their first or second sight, by which hits more; sights are shared."""

from __future__ import annotations

import os
import random
import shutil
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
from capacity_lab import DIGEST, NAME, holder_of, make_namespace
from fskv_tools.replay.curve import simulate
from fskv_tools.replay.trace import Request

from fskv.bounds import sights as sights_module
from fskv.bounds.admission import (
    Admission,
    Duel,
    Sights,
    at_first_sight,
    name_of,
)
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Limits, RootState, Space, Traffic, Usage, root_state
from fskv.bounds.maintenance import Maintainer
from fskv.bounds.shared_files import SharedFiles
from fskv.bounds.sights import SightsLog
from fskv.config import StoreConfig
from fskv.index.presence import RankFiles
from fskv.offload.lookup import Lookup
from fskv.offload.mover import News
from fskv.offload.watch import Watch
from fskv.root.process_id import unique_name
from fskv.types import MAX_COUNT, ChunkId, Status

PREFIX = 20  # chunks of a made request


@pytest.fixture
def root(tmp_path):
    make_namespace(str(tmp_path))
    return str(tmp_path)


# --- sights -----------------------------------------------------------------------------------


def test_a_second_viewer_makes_the_second_sight_and_the_same_one_does_not():
    seen = Sights(100)
    assert [seen.see(1, who) for who in ("a", "a", "b", "a", "c")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_old_names_are_forgotten_together_and_the_memory_is_bounded():
    seen = Sights(100)
    prefix = range(50)
    for name in prefix:
        seen.see(name, "a")
    for name in range(1000, 1060):  # the generation of the prefix is the older one now
        seen.see(name, "b")
    assert not any(seen.is_first(name) for name in prefix)
    for name in range(2000, 2100):
        seen.see(name, "c")
    assert all(seen.is_first(name) for name in prefix)
    for name in range(10_000):
        seen.see(name, "d")
        assert len(seen._young) + len(seen._old) <= 200


@pytest.mark.parametrize("mode", ["all", "reused", "auto"])
def test_what_a_mode_admits(mode):
    admission = Admission(mode)
    admission.resize(100)
    admission.first_sight = False
    first, again = admission.admits(7, "a"), admission.admits(7, "b")
    assert (first, again) == (mode == "all", True)
    assert admission.stores_all is (mode == "all")


def test_auto_stores_everything_where_there_is_no_bound():
    admission = Admission("auto")
    admission.first_sight = False  # what a root says for others
    admission.resize(None)
    assert admission.admits(7, "a")


def test_chunks_of_all_groups_at_one_token_have_one_name_and_one_answer():
    key = bytes(range(32))
    admission = Admission("reused")
    assert [admission.admits(name_of(key), who) for who in "aaabbb"] == 3 * [False] + 3 * [True]
    assert name_of(b"short") != name_of(b"shorter")


# --- which of both ----------------------------------------------------------------------------


def fresh(number, seed=0):
    """Return requests with nothing in common."""
    source = random.Random(seed)
    return [
        Request(0.0, tuple(source.getrandbits(60) for _ in range(PREFIX))) for _ in range(number)
    ]


def again(number, seed=0, of=100):
    """Return requests that repeat the same prompts."""
    source, prompts = random.Random(seed), fresh(of, seed + 1)
    return [source.choice(prompts) for _ in range(number)]


def mixed(number, seed=0):
    """Return prompts of which each fifth comes back soon: where little room is, the others push them out."""
    source, recent, found = random.Random(seed), [], []
    for one in fresh(number, seed):
        found.append(one)
        recent = [*recent, one][-60:] if source.random() < 0.2 else recent
        if recent:
            found.append(source.choice(recent))
    return found


TRAFFIC = {
    "never read": fresh(1500),
    "always read": again(1500),
    "mixed": mixed(1500),
    "read, then never": again(1000) + fresh(1000, 5),
    "never, then read": fresh(1000) + again(1000, 5),
    "mixed, then read": mixed(1000) + again(1000, 5),
}


@pytest.mark.parametrize("blocks", [400, 1000, 4000])
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_auto_hits_as_much_as_the_better_of_both(traffic, blocks):
    requests = TRAFFIC[traffic]
    num = sum(len(one.hash_ids) for one in requests)
    by = {mode: simulate(requests, 1, blocks, mode) for mode in ("all", "reused", "auto")}
    better = max(by["all"].hits, by["reused"].hits)
    assert 100 * by["auto"].hits / num >= 100 * better / num - 3.0  # what it takes to learn, too
    assert by["auto"].written <= by["all"].written


def test_chunks_that_are_never_read_end_to_be_written():
    requests = TRAFFIC["never read"]
    written = {mode: simulate(requests, 1, 1000, mode).written for mode in ("all", "auto")}
    assert written["all"] == PREFIX * len(requests)
    assert written["auto"] <= 1100  # the room, once


def test_negative_control_the_worse_mode_is_worse():
    """Where both modes hit the same nothing would be shown."""
    requests = TRAFFIC["mixed"]
    hits = {mode: simulate(requests, 1, 400, mode).hits for mode in ("all", "reused")}
    assert hits["reused"] > 1.2 * hits["all"]
    hits = {
        mode: simulate(TRAFFIC["always read"], 1, 4000, mode).hits for mode in ("all", "reused")
    }
    assert hits["all"] > hits["reused"]


def test_a_duel_has_no_voice_while_everything_finds_room():
    duel = Duel(1000)
    for number, request in enumerate(again(100, of=20)):
        duel.use(request.hash_ids, number)
    assert duel.hits == (0.0, 0.0)
    for number, request in enumerate(fresh(200)):
        duel.use(request.hash_ids, number)
    assert max(duel.hits) > 0


def test_without_a_voice_the_mode_stays():
    assert at_first_sight(True, []) is True
    assert at_first_sight(False, [(0.0, 0.0)]) is False
    assert at_first_sight(True, [(10.0, 30.0), (25.0, 10.0)]) is False
    assert at_first_sight(False, [(30.0, 10.0), (10.0, 5.0)]) is True


@pytest.mark.parametrize("room", [1, 50, 200, 1000])
def test_a_room_that_grows_or_shrinks_a_little_keeps_what_was_learnt(room):
    duel = Duel(room)
    for number, request in enumerate(fresh(200)):
        duel.use(request.hash_ids, number)
    learnt = duel.hits
    duel.resize(room * 14 // 10)
    duel.resize(room * 7 // 10)
    assert duel.hits == learnt != (0.0, 0.0)
    duel.resize(1 << 24)  # the control: another sample
    assert duel.hits == (0.0, 0.0)


# --- sights that are shared -------------------------------------------------------------------


def packed(*names):
    return struct.pack(f"<{len(names)}Q", *names)


@pytest.fixture
def shared(root):
    os.makedirs(f"{root}/{SHARED_DIR}/sights")
    return f"{root}/{SHARED_DIR}"


def log(shared, engine=None, digest=DIGEST):
    return SightsLog(shared, digest, engine or unique_name())


def test_sights_are_told_once_to_the_engines_of_the_namespace(shared):
    one, other, stranger = log(shared), log(shared), log(shared, digest="f" * 16)
    one.publish(packed(1, 2))
    one.publish(packed(3))
    assert other.take_new() == packed(1, 2, 3)
    one.publish(packed(4))
    assert other.take_new() == packed(4)
    assert other.take_new() == one.take_new() == stranger.take_new() == b""
    assert log(shared).take_new() == packed(1, 2, 3, 4)  # after a restart, too


@pytest.mark.parametrize("moved", [True, False], ids=["", "negative control"])
def test_an_engine_with_another_namespace_leaves_no_sights_of_the_last_one(shared, moved):
    one, other, there = log(shared), log(shared), log(shared, digest="f" * 16)
    one.publish(packed(1))
    other.publish(packed(2))
    there.publish(packed(3))
    if moved:
        one.move("f" * 16)
    one.publish(packed(4))
    assert one.take_new() == packed(3 if moved else 2)
    assert there.take_new() == (packed(4) if moved else b"")
    assert other.take_new() == (b"" if moved else packed(1, 4))


def test_a_maintenance_process_that_is_started_again_does_not_hear_its_own_engine(shared):
    engine = unique_name()
    log(shared, engine).publish(packed(1))
    again = log(shared, engine)
    assert again.take_new() == b""
    again.publish(packed(2))
    assert sorted(log(shared).take_new()) == sorted(packed(1, 2))


def test_files_of_sights_are_bounded_and_go_after_a_day(shared, monkeypatch):
    monkeypatch.setattr(sights_module, "_MAX_NBYTES", 64)
    monkeypatch.setattr(sights_module, "_MAX_TAKEN_NBYTES", 24)
    one, other = log(shared), log(shared)
    for name in range(100):
        one.publish(packed(name))
    sizes = [os.stat(f"{shared}/sights/{name}").st_size for name in os.listdir(f"{shared}/sights")]
    assert len(sizes) == 2
    assert max(sizes) <= 64
    taken = [other.take_new() for _ in range(10)]
    assert max(map(len, taken)) == 24
    assert packed(99) in b"".join(taken)
    assert taken[-1] == b""
    now_ns = os.stat(shared).st_mtime_ns
    other.remove_old(now_ns)
    assert len(os.listdir(f"{shared}/sights")) == 2
    other.remove_old(now_ns + 2 * 86_400 * 10**9)
    assert os.listdir(f"{shared}/sights") == []
    one.publish(packed(7))  # its file has gone: that one is lost, and the next one is in another
    one.publish(packed(8))
    assert other.take_new() == packed(8)


def test_an_engine_that_lives_is_heard_at_once_among_the_files_of_many_that_have_ended(shared):
    for _ in range(10):
        one = f"{shared}/sights/{DIGEST}-{unique_name()}.1"
        with open(one, "wb") as file:
            file.write(packed(1) * (1 << 16))
        os.utime(one, (1, 1))
    log(shared).publish(packed(2))
    other = log(shared)
    assert other.take_new()[:8] == packed(2)
    more = sum(map(len, iter(other.take_new, b"")))
    assert 0 < more < 2 << 20  # what is older than anybody remembers is not read


def test_after_a_write_that_ends_within_a_name_the_next_names_are_whole(shared, monkeypatch):
    one, write = log(shared), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:11]))
    one.publish(packed(1, 2))
    monkeypatch.undo()
    one.publish(packed(3))
    assert sorted(log(shared).take_new()) == sorted(packed(1, 3))


def test_whatever_has_a_name_there_is_not_followed_and_nothing_hangs(shared, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(packed(1))
    names = [f"{DIGEST}-{unique_name()}.1" for _ in range(5)]
    os.symlink(secret, f"{shared}/sights/{names[0]}")
    os.mkfifo(f"{shared}/sights/{names[1]}")
    os.mkdir(f"{shared}/sights/{names[2]}")
    with open(f"{shared}/sights/{names[3]}", "wb") as file:
        file.write(packed(5)[:7])  # a part of a name
    with open(f"{shared}/sights/{DIGEST}-foreign", "wb") as file:
        file.write(packed(6))
    with open(f"{shared}/sights/{names[4]}", "wb") as file:
        file.truncate(1 << 40)
    engine = unique_name()
    os.link(secret, f"{shared}/sights/{DIGEST}-{engine}.1")  # what would be ours
    one = log(shared, engine)
    one.publish(packed(9))
    assert secret.read_bytes() == packed(1)
    assert log(shared).take_new()  # zeros of the large file, and no more than a call's
    one.remove_old(os.stat(shared).st_mtime_ns + 2 * 86_400 * 10**9)
    assert sorted(os.listdir(f"{shared}/sights")) == sorted([*names[:3], f"{DIGEST}-foreign"])
    assert secret.exists()


# --- what the leader says ---------------------------------------------------------------------


def usage_of(root):
    return SharedFiles(f"{root}/{SHARED_DIR}").usage()


def maintainers(root, number, **fields):
    limits = Limits(max_nbytes=1 << 20)
    beats = [Heartbeat(unique_name(), NAME, None, limits, **fields) for _ in range(number)]
    return [Maintainer(root, beat) for beat in beats]


def steps(root, some, until):
    """Step these until it is so."""
    import asyncio
    import time

    async def go():
        end = time.monotonic() + 30
        while not until():
            assert time.monotonic() < end, "waited in vain"
            for one in some:
                one.step()
            await asyncio.sleep(0.01)
        for one in some:  # or the end of the loop would cancel it
            if one.work is not None:
                await asyncio.wait([one.work])

    asyncio.run(go())


def test_the_leader_finds_the_mode_and_the_shares_of_all(root):
    some = maintainers(root, 2)
    steps(root, some, lambda: usage_of(root) is not None and holder_of(root))
    some[0].receive(used=1000, first_hits=1000, second_hits=5000)
    some[1].receive(used=3000, first_hits=2000, second_hits=1000)
    names = [one._heartbeat.name for one in some]
    steps(root, some, lambda: len(usage_of(root).shares) == 2)
    usage = usage_of(root)
    assert [round(usage.shares[name], -1) for name in names] == [250, 750]
    assert (usage.first_hits, usage.second_hits) == (3000, 6000)
    assert not usage.first_sight
    beat = some[0]._heartbeat
    state = root_state(usage, Space(0, 0, 0, 0), beat, holder=False)
    assert not state.usage.first_sight
    assert state.share == usage.shares[beat.name]
    assert state.room == 1 << 20
    some[1].receive(used=4000, first_hits=9000, second_hits=1000)
    steps(root, some, lambda: usage_of(root).first_sight)


def test_an_engine_hears_what_another_one_has_seen(root):
    some, heard = maintainers(root, 2), []
    some[0]._send = lambda message: not heard.append(message.get("sights", b"")) or True
    some[1].receive(sights=packed(1, 2))
    for one in some:
        one._news_at = float("-inf")
    steps(root, some[::-1], lambda: any(heard))
    assert b"".join(heard) == packed(1, 2)


def test_where_the_last_sights_cannot_be_written_the_lease_is_given_back(root):
    some = maintainers(root, 1)
    steps(root, some, lambda: holder_of(root))
    shutil.rmtree(f"{root}/{SHARED_DIR}/sights")
    some[0].receive(sights=packed(1))
    some[0].close()
    assert holder_of(root) is None


@pytest.mark.parametrize(
    ("stored", "loaded", "limit", "unread"),
    [
        (11 << 30, 0, None, True),
        (11 << 30, 1 << 30, None, False),  # it is read
        (9 << 30, 0, None, False),  # little
        (9 << 30, 0, 20 << 30, True),  # and much for this root
        (0, 0, 0, False),
    ],
)
def test_much_that_is_stored_and_never_read_is_told_of(stored, loaded, limit, unread):
    usage = Usage(last_hour=Traffic(1, stored, loaded), max_nbytes=limit)
    assert usage.is_unread is unread


@pytest.mark.parametrize(
    ("asked", "failed", "words"),
    [(0, False, "never asks"), (100, True, "loads fail"), (100, False, "prompts part")],
)
def test_the_likeliest_reason_is_said_once_and_a_producer_is_not_unhealthy(
    root, caplog, asked, failed, words
):
    lookup = Lookup(StoreConfig(root=root, maintenance="off"))
    lookup.attach([RankFiles(f"{root}/{NAME}", None, {0: 4096})])
    watch = Watch(StoreConfig(root=root), lookup, 0)
    for number in range(asked):
        lookup.ask(ChunkId(number.to_bytes(32, "big"), 0))
    if failed:
        lookup.on_news(News(failed_loads={ChunkId(b"k" * 32, 0): Status.TIMED_OUT}))
    capacity = SimpleNamespace(state=RootState(), report_use=lambda *_, **__: [])
    with caplog.at_level("WARNING"):
        lookup._follow(capacity)
        assert not lookup.unread
        for sequence in (1, 2):  # told once
            capacity.state = RootState(usage=Usage(sequence, last_hour=Traffic(1, 1 << 40)))
            lookup._follow(capacity)
    assert words in lookup.unread
    assert caplog.text.count("event=written_unread") == 1
    assert ("written_unread" in watch._unhealthy()) is bool(asked)
    # Two hours later: the reason is of the last hour, and not of the engine's life.
    for hour in (2, 3):
        capacity.state = RootState(usage=Usage(last_hour=Traffic(hour, 1 << 40)))
        lookup._follow(capacity)
    assert "loads fail" not in lookup.unread
    lookup.close()


def test_the_traffic_of_an_hour_is_added_up_and_the_next_hour_begins(root, monkeypatch):
    from fskv.bounds import leader

    some = maintainers(root, 1)
    steps(root, some, lambda: usage_of(root) is not None)
    some[0].receive(written=5 << 20, loaded=1 << 20)
    steps(root, some, lambda: usage_of(root).hour.stored == 5 << 20)
    assert usage_of(root).hour.loaded == 1 << 20
    monkeypatch.setattr(leader, "_HOUR_MS", 1)
    steps(root, some, lambda: usage_of(root).last_hour.stored == 5 << 20)
    steps(root, some, lambda: usage_of(root).last_hour.stored == 0)  # an idle one


def test_heartbeats_with_any_numbers_and_any_number_of_them_leave_a_usage_that_is_read(root):
    some = maintainers(root, 1)
    steps(root, some, lambda: usage_of(root) is not None)
    files = SharedFiles(f"{root}/{SHARED_DIR}")
    for beat, loaded in enumerate((0, MAX_COUNT)):
        for name in ("a", "b"):
            files.publish(Heartbeat(name, None, None, Limits(), beat=beat, loaded=loaded))
        some[0].step()
    assert usage_of(root).hour.loaded == MAX_COUNT
    for round_ in range(2):  # those of the first round are gone when the others come
        beats = [Heartbeat(f"{round_}-{n}", None, None, Limits()) for n in range(11_000)]
        some[0]._leader.look([some[0]._heartbeat, *beats], Space.of(root))
    assert some[0]._heartbeat.name in usage_of(root).counted


def test_the_traffic_of_a_day_when_nobody_led_since_is_not_that_of_the_last_hour(root):
    some = maintainers(root, 1)
    steps(root, some, lambda: usage_of(root) is not None)
    some[0]._leader._usage = replace(usage_of(root), hour=Traffic(1, stored=11 << 30))
    some[0].step()
    assert not usage_of(root).is_unread
    assert usage_of(root).hour.stored == 0


def test_what_an_engine_loaded_at_its_end_is_told(root):
    some = maintainers(root, 2)
    steps(root, some, lambda: usage_of(root) is not None and len(usage_of(root).counted) == 2)
    leader, other = sorted(some, key=lambda one: not one.seen.holder)
    other.receive(loaded=1 << 20)
    other.close()
    leader.step()
    assert usage_of(root).hour.loaded == 1 << 20


@pytest.mark.parametrize("is_full", [False, True])
def test_chunks_are_stored_at_first_sight_where_nothing_is_measured_and_there_is_room(
    root, is_full
):
    some = maintainers(root, 1)
    steps(root, some, lambda: usage_of(root) is not None)
    leader = some[0]._leader
    leader._usage = replace(leader._usage, first_sight=False, others=((1 << 20) * is_full, 0))
    leader._note_use(1.0, Space.of(root))
    assert leader._usage.first_sight is not is_full


def test_a_new_leader_knows_the_shares_at_its_first_look(root):
    some = maintainers(root, 1)
    steps(root, some, lambda: usage_of(root) is not None)
    leader = some[0]._leader
    limits, space = Limits(), Space.of(root)
    leader._used = {}
    leader._beats = [Heartbeat(n, NAME, None, limits, used=1 << 30) for n in "abcd"]
    leader._note_use(0.0, space)
    assert leader._usage.shares == dict.fromkeys("abcd", 250)
    leader._beats.append(Heartbeat("late", NAME, None, limits, used=1 << 40))
    leader._note_use(1.0, space)
    assert "late" not in leader._usage.shares  # its life was before
