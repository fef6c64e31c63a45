"""Uses of prefixes: what is stamped by what, and how few touches that takes."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time

import pytest
from toy_engine import TOKENS_PER_CHUNK
from world import Clock, wait_for

from fskv.native import _native
from fskv.offload import mover
from fskv.offload.uses import Uses

MS = 10**6
PREFIX = [b"%d" % n for n in range(1000)]


@pytest.fixture
def made():
    made = Uses[bytes](lambda: 600, lambda key: key in made.storing, Clock())
    made.storing, made.clock = set(), made._clock
    made.clock.now = 0.0
    return made


def test_a_prefix_is_touched_once_in_a_use_and_what_follows_on_it_alone(made):
    first, start = made.begin(PREFIX, 0)
    assert start == 0
    made.clock.now = 20
    again, start = made.begin(PREFIX, 990)  # what was ever used is younger than what never was
    assert (again.number != first.number, start) == (True, 0)
    for made.clock.now in range(21, 500):
        assert made.begin(PREFIX, 990) == (again, 990), "nothing is due"
    assert made.begin(PREFIX, 1000) == (again, 990)
    other = [*PREFIX[:500], b"another"]
    assert made.begin(other, 501) == (again, 500)
    made.clock.now = 620  # an interval later all of it is due again, a second early for its depth
    late, start = made.begin(PREFIX, 1000)
    assert (late.number != again.number, start) == (True, 0)


def test_a_use_lasts_until_what_it_stores_can_be_touched(made):
    first, _ = made.begin(PREFIX, 0)
    made.storing = {PREFIX[3]}
    made.clock.now = 20
    assert made.begin(PREFIX, 4) == (first, 0)
    made.storing = set()
    assert made.begin(PREFIX, 4)[0] != first


def test_what_was_pruned_is_stored_with_the_time_of_a_new_use(made):
    first, _ = made.begin(PREFIX, 0)
    assert made.begin(PREFIX, 0)[0] == first, "two requests at once"
    made.clock.now = 11
    assert made.begin(PREFIX, 0)[0] != first
    assert not made.is_old(first)
    made.clock.now = 601
    assert made.is_old(first)


class Files:
    def __init__(self, path):
        self.path, self.use = path, bytearray(8)
        self.fd = os.open(path, os.O_PATH)

    def stamp(self, depth, *, fresh):
        path = self.path / str(depth)
        if fresh:
            path.write_bytes(b"x")
        _native.stamp_use(self.fd, str(depth), self.use, depth, fresh)
        return path.stat().st_mtime_ns if path.exists() else None


@pytest.fixture
def files(tmp_path):
    made = Files(tmp_path)
    yield made
    os.close(made.fd)


def test_files_of_a_use_are_a_millisecond_apart_whenever_they_were_stamped(files):
    third = files.stamp(3, fresh=True)
    time.sleep(0.05)
    assert files.stamp(5, fresh=True) == third - 2 * MS
    (files.path / "0").write_bytes(b"x")
    os.utime(files.path / "0", (1, 1))
    assert files.stamp(0, fresh=False) == third + 3 * MS
    # Its thread was late: another one has stamped the use since it was written.
    head = files.path / "1"
    head.write_bytes(b"x")
    late_ns = third - 500 * MS
    os.utime(head, ns=(late_ns, late_ns))
    _native.stamp_use(files.fd, "1", files.use, 1, True)
    assert head.stat().st_mtime_ns == third + 2 * MS
    assert files.stamp(9, fresh=False) is None, "it is not there"
    # What another engine has used since stays younger.
    now = time.time_ns()
    os.utime(files.path / "0", ns=(now, now))
    assert files.stamp(0, fresh=False) == now
    assert files.stamp(10**9 - 1, fresh=True) == third + 3 * MS - 60_000 * MS, "at most a minute"


def test_a_touch_alone_asks_the_file_system_for_the_time(files):
    (files.path / "7").write_bytes(b"x")
    os.utime(files.path / "7", (1, 1))
    before = time.time_ns()
    assert before - 20 * MS < files.stamp(7, fresh=False) + 7 * MS <= time.time_ns()
    assert int.from_bytes(files.use, "little") - 7 * MS == (files.path / "7").stat().st_mtime_ns


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's file")
def test_another_users_file_is_touched_with_the_time_of_now(files):
    """Others may set it to now alone, with a permission to write."""
    at_ns = files.stamp(1, fresh=True) + 1 * MS
    files.path.chmod(0o777)
    path = files.path / "4"
    path.write_bytes(b"x")
    path.chmod(0o666)
    os.utime(path, (1, 1))
    time.sleep(0.05)
    child = os.fork()
    if not child:
        try:
            os.seteuid(65534)
            _native.stamp_use(files.fd, "4", files.use, 4, False)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert path.stat().st_mtime_ns > at_ns + 20 * MS


@pytest.mark.parametrize("use", [b"12345678", bytearray(7), None])
def test_what_is_no_use_is_refused(files, use):
    with pytest.raises(ValueError, match="a bytearray of 8"):
        _native.stamp_use(files.fd, "1", use, 0, True)


def test_what_is_loaded_gets_the_time_of_its_use_also_if_it_was_of_a_time_to_come(engine, tmp_path):
    """The control: a file that is younger than the use stays so."""
    prompt = list(range(5 * TOKENS_PER_CHUNK))
    first = engine()
    first.run(prompt)
    first.close()
    paths = sorted(tmp_path.glob("kv/cpu/*/chunks/*/*.kv"))
    for path in paths[1:]:
        os.utime(path, (1, 1))
    soon, far = time.time_ns() + 60_000 * MS, time.time_ns() + 7200_000 * MS
    for path, at_ns in zip(paths, (soon, far), strict=False):
        os.utime(path, ns=(at_ns, at_ns))
    second = engine()
    moves, depths = second.kv.moves, itertools.count()

    def used(*arguments):
        use = second.kv.mover.use(7, next(depths))
        return [move._replace(use=use) for move in moves(*arguments)]

    second.kv.moves = used
    second.run(prompt)
    assert second.num_loaded == 5
    wait_for(lambda: all(1 < path.stat().st_mtime <= time.time() for path in paths[1:]))
    assert paths[0].stat().st_mtime_ns == soon
    at_ns = sorted(path.stat().st_mtime_ns for path in paths[1:])
    assert {(at_ns[-1] - one) % MS for one in at_ns} == {0}
    assert at_ns[-1] - at_ns[0] <= 4 * MS


class Shared(collections.deque):
    """The lists that wait, as another thread takes from them just now."""

    def __iter__(self):
        raise RuntimeError("deque mutated during iteration")


def test_touches_that_wait_are_bounded_by_files_and_never_looked_through(engine, monkeypatch):
    """An exception there would end the engine: it is on the thread of the model."""
    monkeypatch.setattr(mover, "_MAX_TOUCHES", 100)
    one, touched, goes_on = engine().kv.mover, [], threading.Event()
    monkeypatch.setattr(
        one._store, "touch", lambda file, use: goes_on.wait(60) and touched.append((file, use))
    )
    one._touches = Shared()
    lists = [[((n, at), one.use(1, at)) for at in range(10)] for n in range(30)]
    for files in lists:
        one.touch(files)
    waits = one._num_touches
    goes_on.set()
    wait_for(lambda: not one._num_touches)
    # One list may be under way already; the last one may go beyond the bound.
    assert 100 < waits <= 110
    wait_for(lambda: len(touched) >= waits)
    assert [use.depth for _, use in touched[:10]] == list(range(9, -1, -1))
    one.touch(lists[0])  # the control: they are taken again
    wait_for(lambda: len(touched) >= waits + 10)
