"""A root that is gone, or not mounted, is no root without chunks: the breaker opens, and closes again."""

from __future__ import annotations

import os

import pytest
from world import wait_for

from fskv import namespace
from fskv.config import StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.root.root import NamespaceDir, Root
from fskv.types import ChunkId, Presence, Status

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
NBYTES = 4096


def chunk(number: int) -> ChunkId:
    return ChunkId(number.to_bytes(32, "big"), 0)


@pytest.fixture
def manager(tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")
    from fskv.engines.vllm.manager import FskvHandshake, FskvManager

    root = str(tmp_path / "root")
    os.mkdir(root)
    Root.open(root, create=True)
    space = f"{root}/arch/model@0123456789abcdef"
    path = f"{space}/{namespace.chunk_path(*chunk(0), None)}"
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as file:
        file.truncate(NBYTES)
    for name, value in (("failures", 3), ("probe_s", 0.05)):
        monkeypatch.setitem(Breaker.__init__.__kwdefaults__, name, value)
    made = FskvManager(StoreConfig(root=root, maintenance="off"), 2)
    directory = NamespaceDir(space, b"d", 0o700, 0o600)
    made.set_workers([FskvHandshake(0, 1, 2, directory, {0: NBYTES})])
    yield made
    made.shutdown()


def ask(manager, number: int):
    """Look a chunk up until something is known of it; returns that and why."""
    found = []

    def known() -> bool:
        found[:] = manager.chunks.presence.lookup(chunk(number))
        manager.on_schedule_end(None)
        return found[0] is not Presence.UNKNOWN

    wait_for(known)
    return tuple(found)


def test_a_root_that_is_gone_opens_the_breaker_and_one_that_is_back_closes_it(manager, tmp_path):
    root, away = tmp_path / "root", tmp_path / "away"
    assert ask(manager, 0) == (Presence.HIT, Status.OK)
    assert [ask(manager, number) for number in range(1, 20)] == [
        (Presence.MISS, Status.MISSING)
    ] * 19
    assert not manager.chunks.breaker.open, "the control: chunks that are not there are no sign"
    os.rename(root, away)
    root.mkdir()  # what is left of a mount
    answers = [ask(manager, number) for number in range(20, 40)]
    assert {presence for presence, _ in answers} == {Presence.MISS}
    assert manager.chunks.breaker.open
    assert Status.BREAKER in {reason for _, reason in answers}
    assert os.listdir(root) == [], "nothing is made in the place of a mount"
    root.rmdir()
    os.rename(away, root)
    wait_for(lambda: ask(manager, 41) == (Presence.MISS, Status.MISSING))
    assert not manager.chunks.breaker.open
