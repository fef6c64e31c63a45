"""The files by which engines know of each other: nothing that lies about in their place stops anybody."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import asdict, replace

import pytest

from fskv.bounds import shared_files
from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.shared_files import SharedFiles, file_of, shortened
from fskv.root.process_id import is_our_part, part_names
from fskv.sizes import Share

NS = "cpu/model@0123456789abcdef"


@pytest.fixture
def shared(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    return path


def beat(name="a-1-00000000-1", **changes):
    return Heartbeat(name, **{"namespace": NS, "tenant": None, "limits": Limits(), **changes})


def test_heartbeats_and_usage_are_read_as_they_were_written(shared):
    files = SharedFiles(str(shared))
    mine = beat(tenant="t", limits=Limits(1, Share(2.5), 3, {"t": 4}, 5), written=9, full=8, beat=7)
    usage = Usage(
        *(1, {NS: (5, 2)}, (3, 4), {NS: "t"}, {"a": 3}, 6, 0.25, 7, 8, {"t": 9}),
        *(10, 11, 12, 13, 14, 15),
    )
    files.publish(mine)
    files.publish_usage(usage)
    for path in shared.iterdir():  # of a later version
        path.write_text(json.dumps({**json.loads(path.read_text()), "epoch": [1]}))
    assert files.heartbeats() == [mine]
    assert files.usage() == usage
    assert files.skipped == {}
    files.withdraw(mine.name)
    assert files.heartbeats() == []


@pytest.mark.parametrize("told_late", [True, False], ids=["", "negative control"])
def test_a_heartbeat_that_has_no_bytes_for_want_of_room_is_not_published(
    shared, monkeypatch, told_late
):
    """As on a full pool of CephFS: write and close are well, and fsync alone says that there is no room."""
    monkeypatch.setattr(shared_files, "is_full_late", lambda _: told_late)
    files = SharedFiles(str(shared))
    files.publish(beat())

    def no_space(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    encoded = shared_files._encoded
    monkeypatch.setattr(os, "fsync", no_space)
    monkeypatch.setattr(shared_files, "_encoded", lambda tree: bytes(len(encoded(tree))))
    with pytest.raises(OSError, match="space") if told_late else contextlib.nullcontext():
        files.publish(beat(written=1))
    assert files.heartbeats() == ([beat()] if told_late else [])


def test_damaged_foreign_and_hostile_files_are_left_out_and_raise_nothing(shared):
    files = SharedFiles(str(shared))
    files.publish(beat("good"))
    good = json.loads((shared / file_of("good")).read_text())
    bad = shared / file_of("bad")
    limits = good["limits"]
    changes = [
        {"written": -1},
        {"written": 1 << 70},
        {"full": True},
        {"limits": None},
        {"limits": {**limits, "keep_free": {"percent": float("nan")}}},
        {"limits": {**limits, "max_nbytes": -5}},
        {"limits": {**limits, "tenants": [1]}},
        {"name": "else"},
        {"tenant": "T" * 100_000},
        {"namespace": "../../etc@0123456789abcdef"},
    ]
    damaged = [json.dumps(good | {"name": "bad"} | change) for change in changes]
    for content in ("", "[]", "[" * 60_000, "9" * 5000, "\x00" * 100, *damaged):
        bad.write_text(content)
        assert [one.name for one in files.heartbeats()] == ["good"], content[:40]
        assert files.skipped.keys() == {str(bad)}
    bad.unlink()
    os.symlink(shared / file_of("good"), bad)
    os.mkdir(shared / file_of("dir"))
    os.mkfifo(shared / file_of("fifo"))
    open(os.fsencode(shared) + b"/heartbeat-\xff.json", "w").close()
    assert [one.name for one in files.heartbeats()] == ["good"]
    (shared / file_of("other")).write_text(json.dumps(good | {"name": "other"}))
    assert len(files.heartbeats()) == 2  # the negative control


@pytest.mark.parametrize(
    "changes", [{"namespaces": {NS: [-1, 0]}}, {"counted": {"a": 1 << 70}}, {"look_s": "soon"}]
)
def test_a_damaged_usage_is_none(shared, changes):
    files = SharedFiles(str(shared))
    files.publish_usage(Usage())
    assert files.usage() == Usage()  # the control
    (shared / "usage.json").write_text(json.dumps(asdict(Usage()) | changes))
    assert files.usage() is None
    assert files.skipped.keys() == {str(shared / "usage.json")}


def test_a_heartbeat_is_short_and_what_is_longer_is_neither_read_nor_written(shared):
    files = SharedFiles(str(shared))
    many = {f"t{n:0100}": 1 for n in range(1000)}
    long = beat("long", namespace=None, limits=Limits(tenants=many))
    with pytest.raises(OSError, match="more than the 65536 that are read"):
        files.publish(long)
    (shared / file_of("long")).write_text(json.dumps(asdict(long)))
    assert files.heartbeats() == []
    assert "longer than 65536" in files.skipped[str(shared / file_of("long"))]
    few = replace(long, limits=Limits(tenants={"t": 1}))
    files.publish(few)
    assert files.heartbeats() == [few]  # the control


def test_junk_in_the_place_of_heartbeats_goes_when_it_is_a_day_old(shared):
    files = SharedFiles(str(shared))
    now_ns = time.time_ns()
    files.publish(beat("good"))
    goes, stays = [], [shared / file_of("good")]
    for age, seconds in {"young": 3600, "old": 90_000, "of-tomorrow": -90_000}.items():
        junk = [shared / file_of(age), shared / f"{age}-node9-1-00000000-1.part"]
        notes = shared / f"{age}-notes.txt"
        for path in (*junk, notes):
            path.write_text("[")
            os.utime(path, ns=(now_ns - seconds * 10**9,) * 2)
        stays.append(notes)
        (stays if age == "young" else goes).extend(junk)
    os.symlink("/etc/passwd", shared / file_of("link"))
    os.utime(shared / file_of("link"), (0, 0), follow_symlinks=False)
    files.heartbeats()
    files.remove_orphans(0)
    assert {*goes, *stays} <= {*shared.iterdir()}, "nobody knows what time it is"
    files.remove_orphans(now_ns)
    assert {*shared.iterdir()} == {*stays, shared / file_of("link")}


def test_a_usage_that_would_be_too_long_adds_up_the_smallest_and_is_still_read(shared, monkeypatch):
    """Negative control: as it is, it is refused."""
    monkeypatch.setattr(shared_files, "MAX_USAGE_NBYTES", 8000)
    files = SharedFiles(str(shared))
    names = [f"arch/model-{n}@{n:016x}" for n in range(500)]
    usage = Usage(namespaces={name: (n * 4096, n) for n, name in enumerate(names)})
    with pytest.raises(OSError, match="more than the 8000"):
        files.publish_usage(usage)
    needed = names[3]
    files.publish_usage(shortened(usage, {needed}))
    found = files.usage()
    assert (found.nbytes, found.num_files) == (usage.nbytes, usage.num_files)
    assert {needed, names[499]} < found.namespaces.keys()
    assert names[4] not in found.namespaces


def test_a_forked_child_names_parts_as_its_own():
    """Or maintenance takes them for a dead process's once the parent has ended."""
    names = part_names()
    assert is_our_part(next(names))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, next(names).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 500).decode().rsplit("-", 3)[1] == str(child)
    os.close(reader)
    os.close(writer)
