"""What is removed for room and stays in use, in a trash or a snapshot, does not cost everything."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
from capacity_lab import NAME, make_namespace, run, write_chunk
from world import Clock

from fskv.bounds import leader, maintenance, room_freed
from fskv.bounds.maintenance import Engine, Maintainer
from fskv.bounds.quota import Claim, Limits
from fskv.bounds.room_freed import RoomFreed
from fskv.root.filesystem import Space
from fskv.root.process_id import unique_name

MIB = 1 << 20
TOTAL = 100 * MIB


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(room_freed, "time", SimpleNamespace(monotonic=clock))
    return clock


def free(nbytes):
    return Space(TOTAL, nbytes, 0, 0)


def claim(written=0):
    return Claim("node9-1-00000000-1", NAME, None, Limits(), granted=1 << 40, written=written)


def waited_s(freed, clock, most_s=10_000):
    """Return for how long more nothing is removed."""
    for seconds in range(most_s):
        if not freed.is_awaited("full"):
            return seconds
        clock.advance(1)
    return most_s


def test_what_never_shows_is_waited_for_twice_as_long_each_time_and_told_of_once(clock, caplog):
    freed, found = RoomFreed("/kv"), []
    for _ in range(10):
        freed.removed("full", 4 * MIB, free(MIB), free(MIB), [claim()])
        assert not freed.is_awaited("keep_free"), "each reason waits for itself"
        found.append(waited_s(freed, clock))
        freed.look(free(MIB), [claim()])
    assert found == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    (line,) = [r.getMessage() for r in caplog.records]
    words = f"event=room_not_freed root=/kv bytes={8 * MIB} free_bytes={MIB} next_in_s=60"
    assert line.startswith(f"fskv: {words} ")


@pytest.mark.parametrize(
    ("shown", "wrote", "is_seen"),
    [
        (4 * MIB, 0, True),
        (2 * MIB, 0, True),
        (2 * MIB - 1, 0, False),
        (0, 2 * MIB, True),  # engines have used it
        (-50 * MIB, 2 * MIB, True),  # beside others who fill the disk: a quota's
        (-50 * MIB, MIB, False),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_shows_ends_the_wait(clock, shown, wrote, is_seen, at_once):
    freed = RoomFreed("/kv")
    for _ in range(3):
        freed.removed("full", 4 * MIB, free(60 * MIB), free(60 * MIB), [claim(100)])
    if at_once and not wrote:
        freed.removed("full", 4 * MIB, free(60 * MIB), free(60 * MIB + shown), [claim(100)])
    else:
        freed.look(free(60 * MIB + shown), [claim(100 + wrote)])
    assert freed.is_awaited("full") is not is_seen
    freed.look(free(60 * MIB), [claim(100)])  # others have taken it
    freed.removed("full", 4 * MIB, free(60 * MIB), free(60 * MIB), [claim(100)])
    assert (waited_s(freed, clock) == room_freed.USUAL_S) is is_seen


def test_what_shows_in_the_part_that_is_kept_for_root_shows(clock):
    """As on ext4 that root has filled: nothing is free for others, before and after."""
    before, after = (
        Space.believed(
            SimpleNamespace(
                f_bsize=MIB,
                f_frsize=MIB,
                f_blocks=100,
                f_bfree=nbytes,
                f_bavail=0,
                f_files=0,
                f_favail=0,
            )
        )
        for nbytes in (1, 4)
    )
    freed = RoomFreed("/kv")
    freed.removed("full", 3 * MIB, before, after, ())
    assert not freed.is_awaited("full")
    freed.removed("full", 3 * MIB, before, before, ())
    assert freed.is_awaited("full"), "the control"


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("why", ["keep_free", "full"])
@pytest.mark.parametrize(
    ("shows_after_s", "rounds"),
    [(None, 4), (0, 1), (20, 1), (45, 2)],
    ids=["trash", "at once", "late", "very late"],
)
def test_what_a_trash_keeps_does_not_have_everything_pruned(
    tmp_path, monkeypatch, clock, why, shows_after_s, rounds, waits
):
    """In 4 minutes, of which each step takes a second. The control does not wait, and prunes on and on."""
    make_namespace(tmp_path)
    root = str(tmp_path)
    paths = {write_chunk(f"{root}/{NAME}", number, MIB) for number in range(40)}
    gone = {}  # path -> since when
    monkeypatch.setattr(leader, "_FULL_LEAST", 3 * MIB)
    monkeypatch.setattr(leader, "_FUTILE_S", 0.0)
    if not waits:
        monkeypatch.setattr(RoomFreed, "is_awaited", lambda *_: False)

    def space(_):
        gone.update({path: clock() for path in paths - gone.keys() if not os.path.exists(path)})
        ages = [clock() - at for at in gone.values()]
        shown = sum(shows_after_s is not None and age >= shows_after_s for age in ages)
        return free((1 + shown) * MIB)

    monkeypatch.setattr(Space, "of", space)
    keep = 2 * MIB if why == "keep_free" else 0
    mine = Claim(unique_name(), NAME, None, Limits(keep_free=keep))
    left = [len(paths)]

    async def steps():
        maintainer = Maintainer(root, mine)
        full = 0
        end = clock() + 240
        while clock() < end:
            if why == "full" and space(root).free_nbytes < 2 * MIB:
                full += clock() % 5 == 0  # a store is tried
                maintainer.hear(Engine(full=full))
            await maintainer.try_step()
            if maintainer.work is not None:
                await asyncio.wait([maintainer.work])
            now_left = sum(map(os.path.exists, paths))
            if now_left < left[-1]:
                left.append(now_left)
            clock.advance(1)
        await maintainer.close()

    run(steps())
    waiting = waits or shows_after_s == 0
    assert len(left) - 1 == rounds if waiting else len(left) - 1 > rounds
    assert (left[-1] > len(paths) // 2) or not waiting


def test_room_for_a_lease_is_not_made_again_and_again_in_a_trash(tmp_path, monkeypatch, clock):
    """The control: once a claim found room, more is removed at once when there is none."""
    make_namespace(tmp_path)
    paths = [write_chunk(tmp_path / NAME, number, MIB) for number in range(40)]
    monkeypatch.setattr(maintenance, "_AFTER_FAILURE_S", 0.0)
    monkeypatch.setattr(Space, "of", lambda _: free(0))
    maintainer = Maintainer(str(tmp_path), Claim(unique_name(), NAME, None, Limits()))
    maintainer.start()

    def make_room():
        run(maintainer.make_room())
        return sum(map(os.path.exists, paths))

    first = make_room()
    assert 0 < first < len(paths)
    assert [make_room() for _ in range(3)] == [first] * 3
    clock.advance(31)
    second = make_room()
    assert second < first
    clock.advance(59)
    assert make_room() == second
    run(maintainer.try_step())
    assert make_room() < second
