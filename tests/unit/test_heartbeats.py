"""A wrong clock is found out, and costs neither a live engine's claim nor the count of a file."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from capacity_lab import NAME, make_namespace, name_of, run, write_chunk
from world import Clock

from fskv.bounds import heartbeats, leader, maintenance
from fskv.bounds.heartbeats import SILENT_S, Heartbeats
from fskv.bounds.lease import SHARED_DIR, Lease
from fskv.bounds.ledger import Ledger
from fskv.bounds.maintenance import Maintainer
from fskv.bounds.quota import Claim, Limits
from fskv.root.process_id import unique_name

NODE = "node9-1-00000000-1"


@pytest.fixture
def shared(tmp_path):
    make_namespace(tmp_path)
    path = tmp_path / SHARED_DIR
    (path / "claims").mkdir(parents=True)
    return str(path)


class Node:
    """An engine on another machine, whose clock differs by some seconds."""

    def __init__(self, shared, ahead_s=0.0, name=NODE, beat=7):
        self.book = Ledger(shared)
        self.ahead_s = ahead_s
        self.path = f"{shared}/claims/{name}.json"
        self.claim = Claim(name, NAME, None, Limits(), beat=beat)

    def publish(self):
        self.book.publish(self.claim)
        stamp(self.path, self.ahead_s)
        self.claim = replace(self.claim, beat=self.claim.beat + 1)


def stamp(path, ahead_s):
    at_ns = time.time_ns() + int(ahead_s * 1e9)
    os.utime(path, ns=(at_ns, at_ns))


class Listener:
    """Heartbeats with a clock that is told, and what it reads."""

    def __init__(self, shared, monkeypatch):
        self.book, lease = Ledger(shared), Lease(shared)
        assert lease.renew()
        self.clock = Clock()
        self.heard = Heartbeats(os.path.dirname(shared), self.book, lease)
        monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=self.clock))

    def look(self, after_s=1.0):
        self.clock.advance(after_s)
        return self.heard.watch(self.book.claims(), self.clock())

    def silent(self):
        return self.heard.silent(self.book.claims())


@pytest.mark.parametrize(
    ("ahead_s", "differs"),
    [(-3600, True), (-30, True), (-4, False), (0, False), (4, False), (30, True), (3600, True)],
)
def test_a_clock_that_differs_is_found_out_and_told_of_once(
    shared, monkeypatch, caplog, ahead_s, differs
):
    node, good = Node(shared, ahead_s), Node(shared, name="node8-1-00000000-1")
    listener = Listener(shared, monkeypatch)
    node.publish()
    good.publish()
    assert not listener.look()
    assert not listener.heard.clocks_differ, "when it was written is not known"
    for number in range(3):
        node.publish()
        good.publish()
        assert listener.look() is (differs and not number)
        assert listener.heard.clocks_differ is differs
        assert not listener.look()
        assert listener.heard.clocks_differ is differs, "until it is rewritten"
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == differs
    assert all(
        f"event=clocks_differ root={os.path.dirname(shared)} claim={NODE}" in x for x in lines
    )


@pytest.mark.parametrize("how", ["set right", "gone"])
def test_clocks_agree_again_once_the_wrong_one_is_right_or_gone(shared, monkeypatch, how):
    node = Node(shared, -60)
    listener = Listener(shared, monkeypatch)
    for _ in range(2):
        node.publish()
        listener.look()
    assert listener.heard.clocks_differ
    if how == "gone":
        os.unlink(node.path)
    else:
        node.ahead_s = 0
        node.publish()
    assert not listener.look()
    assert not listener.heard.clocks_differ


def test_who_is_new_is_judged_by_the_first_claim_of_its_life(shared, monkeypatch):
    listener = Listener(shared, monkeypatch)
    listener.look()
    Node(shared, -60, "node7-1-00000000-1", beat=5).publish()  # we could not read it for a while
    listener.look()
    assert not listener.heard.clocks_differ
    Node(shared, -60, beat=1).publish()
    listener.look()
    assert listener.heard.clocks_differ


def test_a_claim_that_was_read_late_is_not_of_a_wrong_clock(shared, monkeypatch):
    """We were stopped for a minute, and it was written half a minute ago."""
    node = Node(shared)
    listener = Listener(shared, monkeypatch)
    node.publish()
    listener.look()
    node.ahead_s = -30
    node.publish()
    assert not listener.look(after_s=60)
    node.publish()
    assert listener.look(), "the control: nobody was stopped"


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_who_is_heard_is_alive_whatever_its_clock_says_and_who_is_not_is_silent(
    shared, monkeypatch, ahead_s
):
    node = Node(shared, ahead_s)
    listener = Listener(shared, monkeypatch)
    node.publish()
    listener.look()
    # An hour old, and never heard: as that of who is gone.
    assert listener.silent() == ({NODE} if ahead_s < 0 else set())
    node.publish()
    listener.look()
    assert not listener.silent()
    for _ in range(int(SILENT_S)):
        listener.look()
    assert not listener.silent()
    listener.look(after_s=2)
    assert listener.silent() == {NODE}


@pytest.mark.parametrize("watches", [True, False])
def test_a_holder_whose_clock_is_ahead_takes_no_live_engines_claim_away(
    shared, monkeypatch, watches
):
    """Two minutes. The control goes by the times of the claims."""
    root = os.path.dirname(shared)
    make_namespace(root, model="b")
    monkeypatch.setattr(maintenance, "TTL_S", 0.2)  # a beat every 50 ms
    monkeypatch.setattr(leader, "_WITHDRAW_S", 0.5)
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    real = Lease.now_ns
    monkeypatch.setattr(Lease, "now_ns", lambda lease: real(lease) + 120 * 10**9)
    if not watches:
        monkeypatch.setattr(Heartbeats, "watch", lambda *_: False)
    live = Claim(unique_name(), name_of("b"), None, Limits(max_nbytes=1 << 20))
    book, counts = Ledger(shared), set()

    def is_there():
        if (usage := book.usage()) is not None:
            counts.add(usage.at_ms)
        return live.name in {claim.name for claim in book.claims()}

    async def steps():
        holder = Maintainer(root, Claim(unique_name(), NAME, None, Limits()))
        other = Maintainer(root, live)
        end = time.monotonic() + 20
        await other.try_step()
        while (stays := is_there()) and len(counts) < 40:
            assert time.monotonic() < end
            await holder.try_step()
            await other.try_step()
            await asyncio.sleep(0.01)
        await other.close()
        await holder.close()
        return stays

    assert run(steps()) is watches


@pytest.mark.parametrize(
    ("skew_s", "protection"),
    [(60, True), (60, False), (3, True), (3, False), (-60, True), (-60, False)],
)
def test_what_a_node_writes_whose_clock_is_behind_is_counted(
    shared, monkeypatch, skew_s, protection
):
    """On CephFS a directory's mtime is the latest stamp of all: that of a clock that is ahead.

    Without the protection, the control: what came after the first count is never counted.
    """
    root = os.path.dirname(shared)
    monkeypatch.setattr(leader, "_COUNT_ALL_S", 0.05)
    monkeypatch.setattr(leader, "_LISTED_AGAIN", 0)
    real = Lease.now_ns
    monkeypatch.setattr(Lease, "now_ns", lambda lease: real(lease) + skew_s * 10**9)
    if not protection:
        monkeypatch.setattr(Heartbeats, "watch", lambda *_: False)
        monkeypatch.setattr(leader, "UNNOTICED_NS", 0)
        monkeypatch.setattr(heartbeats, "SILENT_S", 3600)
    node = Node(shared)
    shard = f"{root}/{NAME}/chunks/abc"
    # Settled, by the holder's clock; and later than what comes next.
    write_chunk(f"{root}/{NAME}", "abc" + "0" * 29)
    latest_ns = time.time_ns() + int((skew_s - (1 if skew_s == 3 else 20)) * 1e9)
    os.utime(shard, ns=(latest_ns, latest_ns))

    async def until(maintainer, condition):
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            node.publish()
            await maintainer.try_step()
            await asyncio.sleep(0.01)

    def counts(number):
        seen = set()

        def over():
            usage = node.book.usage()
            if usage is not None:
                seen.add(usage.at_ms)
            return len(seen) > number

        return over

    async def steps():
        maintainer = Maintainer(root, None)
        await until(maintainer, counts(3))
        assert node.book.usage().num_files == 1
        write_chunk(f"{root}/{NAME}", "abc" + "1" * 29)
        os.utime(shard, ns=(latest_ns, latest_ns))  # no later stamp than that
        await until(maintainer, counts(5))
        assert node.book.usage().num_files == 1 + protection
        await maintainer.close()

    run(steps())
