"""The files by which engines know of each other: nothing that lies about in their place stops anybody."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from capacity_lab import dead_name

from fskv.bounds import shared_files
from fskv.bounds.limits import Heartbeat, Limits, Usage, scopes
from fskv.bounds.shared_files import SharedFiles, file_of, shortened
from fskv.root.filesystem import Space
from fskv.root.process_id import unique_name
from fskv.sizes import Share

NS = "cpu/model@0123456789abcdef"
SPACE = Space(1 << 40, 1 << 40, 0, 0)


@pytest.fixture
def shared(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    return path


def beat(name="a-1-00000000-1", **changes):
    return Heartbeat(name, **{"namespace": NS, "tenant": None, "limits": Limits(), **changes})


def test_heartbeats_and_usage_are_read_as_they_were_written(shared):
    files = SharedFiles(str(shared))
    limits = Limits(1, Share(2.5), 3, {"t": 4}, 5)
    mine = beat(tenant="t", limits=limits, written=9, full=8, beat=7)
    usage = Usage(
        *(1, {NS: (5, 2)}, (3, 4), {NS: "t"}, {"a": 3}, 6, 0.25, 7, 8, {"t": 9}),
        *(10, 11, 12, 13, 14, 15),
    )
    files.publish(mine)
    files.publish_usage(usage)
    assert files.heartbeats() == [mine]
    assert files.usage() == usage
    assert files.left_out == {}
    assert sorted(os.listdir(shared)) == [file_of(mine.name), "usage.json"]
    assert files.published_ns([mine.name, "gone"]).keys() == {mine.name}
    files.withdraw(mine.name)
    assert files.heartbeats() == []


def test_keys_that_are_not_known_are_ignored(shared):
    files = SharedFiles(str(shared))
    files.publish(beat())
    files.publish_usage(Usage(namespaces={NS: (5, 2)}))
    for path in shared.iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "epoch": [1]}))
    assert files.heartbeats() == [beat()]
    assert files.usage() == Usage(namespaces={NS: (5, 2)})


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

    def change(**changes):
        return json.dumps(good | {"name": "bad"} | changes)

    contents = [
        "",
        "[",
        "[]",
        "[" * 100_000,
        "9" * 5000,
        "\x00" * 100,
        change(written=-1),
        change(written=1 << 70),
        change(written=1.5),
        change(full=True),
        change(limits=None),
        change(limits={**good["limits"], "keep_free": {"percent": float("nan")}}),
        change(limits={**good["limits"], "keep_free": {"percent": 1e9}}),
        change(limits={**good["limits"], "max_nbytes": -5}),
        change(limits={**good["limits"], "tenants": [1]}),
        change(name="else"),
        change(tenant="T" * 100_000),
        change(namespace="../../etc@0123456789abcdef"),
        change(namespace="/etc/x@0123456789abcdef"),
    ]
    bad = shared / file_of("bad")
    for content in contents:
        bad.write_text(content)
        assert [one.name for one in files.heartbeats()] == ["good"], content[:40]
        assert files.left_out.keys() == {str(bad)}
    bad.unlink()
    os.symlink(shared / file_of("good"), bad)
    os.mkdir(shared / file_of("dir"))
    os.mkfifo(shared / file_of("fifo"))
    open(os.fsencode(shared) + b"/heartbeat-\xff.json", "w").close()
    assert [one.name for one in files.heartbeats()] == ["good"]
    (shared / file_of("other")).write_text(json.dumps(good | {"name": "other"}))
    assert len(files.heartbeats()) == 2  # the negative control


@pytest.mark.parametrize(
    "changes",
    [
        {"namespaces": {NS: [-1, 0]}},
        {"namespaces": {NS: [1]}},
        {"counted": {"a": 1 << 70}},
        {"look_s": "soon"},
        {"max_nbytes": -1},
        {"others": 7},
        {"tenants": None},
        {"sequence": 1.5},
    ],
    ids=str,
)
def test_a_damaged_usage_is_none(shared, changes):
    files = SharedFiles(str(shared))
    files.publish_usage(Usage())
    assert files.usage() == Usage()  # the control
    (shared / "usage.json").write_text(json.dumps(asdict(Usage()) | changes))
    assert files.usage() is None
    assert files.left_out.keys() == {str(shared / "usage.json")}


@pytest.mark.parametrize(("look_s", "read"), [(float("nan"), 0.0), (-5.0, 0.0), (1e300, 60.0)])
def test_a_time_between_looks_that_nobody_can_wait_for_is_bounded(shared, look_s, read):
    files = SharedFiles(str(shared))
    files.publish_usage(Usage(look_s=look_s))
    assert files.usage().look_s == read


def test_a_heartbeat_is_short_and_what_is_longer_is_neither_read_nor_written(shared):
    files = SharedFiles(str(shared))
    long = beat(
        "long", namespace=None, limits=Limits(tenants={f"t{n:0100}": 1 for n in range(1000)})
    )
    with pytest.raises(OSError, match="more than the 65536 that are read"):
        files.publish(long)
    assert files.heartbeats() == []
    (shared / file_of("long")).write_text(json.dumps(asdict(long)))
    assert files.heartbeats() == []
    assert "longer than 65536" in files.left_out[str(shared / file_of("long"))]
    few = replace(long, limits=Limits(tenants={"t": 1}))
    files.publish(few)
    assert files.heartbeats() == [few]  # the control


def test_all_heartbeats_together_are_short(shared, monkeypatch):
    files = SharedFiles(str(shared))
    for number in range(20):
        files.publish(beat(f"h{number}"))
    assert len(files.heartbeats()) == 20
    nbytes = len((shared / file_of("h1")).read_bytes())
    monkeypatch.setattr(shared_files, "_MAX_NBYTES", 5 * nbytes)
    assert 4 <= len(files.heartbeats()) <= 6


@pytest.mark.parametrize("strict", [True, False])
def test_one_that_cannot_be_read_is_an_error_only_for_who_removes(shared, monkeypatch, strict):
    files = SharedFiles(str(shared))
    files.publish(beat("a"))
    files.publish(beat("b"))
    real = shared_files.regular_file

    def fail(path, **options):
        if path.endswith(file_of("a")):
            raise OSError(errno.EIO, "I/O error")
        return real(path, **options)

    monkeypatch.setattr(shared_files, "regular_file", fail)
    with pytest.raises(OSError, match="I/O") if strict else contextlib.nullcontext():
        assert [one.name for one in files.heartbeats(strict=strict)] == ["b"]


def test_a_directory_in_the_place_of_a_file_is_moved_aside(shared):
    files = SharedFiles(str(shared))
    (shared / "usage.json" / "precious").mkdir(parents=True)
    files.publish_usage(Usage(growth=1))
    assert files.usage() == Usage(growth=1)
    (aside,) = shared.glob("usage.json.foreign-*/precious")
    assert aside.is_dir()


def test_junk_in_the_place_of_heartbeats_goes_when_it_is_a_day_old(shared):
    files = SharedFiles(str(shared))
    now_ns = time.time_ns()
    ages = {"young": 3600, "old": 90_000, "of-tomorrow": -90_000}
    for age, seconds in ages.items():
        for name in (
            file_of(f"{age}-junk"),
            f"{age}-node9-1-00000000-1.part",
            f"{age}-notes.txt",
            file_of(f"{age}-good"),
        ):
            (shared / name).write_text("[")
            if "good" in name:
                files.publish(beat(f"{age}-good"))
            os.utime(shared / name, ns=(now_ns - seconds * 10**9,) * 2)
    make = {"link": lambda p: os.symlink("/etc/passwd", p), "fifo": os.mkfifo, "dir": os.mkdir}
    for kind, call in make.items():
        call(shared / file_of(kind))
        os.utime(shared / file_of(kind), (0, 0), follow_symlinks=False)
    before = set(os.listdir(shared))
    files.heartbeats()
    files.remove_orphans(0)
    assert set(os.listdir(shared)) == before  # nobody knows what time it is
    files.remove_orphans(now_ns)
    gone = {
        name
        for age in ("old", "of-tomorrow")
        for name in (file_of(f"{age}-junk"), f"{age}-node9-1-00000000-1.part")
    }
    assert before - set(os.listdir(shared)) == gone


def test_only_parts_of_dead_processes_go_at_once(shared):
    dead = dead_name()
    names = [unique_name(), "node9-1-00000000-1", "something"]
    for name in [dead, *names]:
        (shared / f"{name}.part").touch()
    (shared / f"{dead}0.part").symlink_to("/nowhere")  # no file: foreign
    SharedFiles(str(shared)).remove_orphans(0)
    assert sorted(os.listdir(shared)) == sorted(f"{name}.part" for name in [*names, f"{dead}0"])


def test_a_usage_that_would_be_too_long_adds_up_the_smallest_and_is_still_read(shared, monkeypatch):
    """Negative control: as it is, it is refused."""
    monkeypatch.setattr(shared_files, "MAX_USAGE_NBYTES", 8000)
    files = SharedFiles(str(shared))
    names = [f"arch/model-{n}@{n:016x}" for n in range(500)]
    usage = Usage(
        namespaces={name: (n * 4096, n) for n, name in enumerate(names)},
        tenants=dict.fromkeys(names, "é\ud800"),
        counted={"a": 1},
        max_nbytes=1 << 40,
    )
    with pytest.raises(OSError, match="more than the 8000"):
        files.publish_usage(usage)
    assert files.usage() is None
    needed = {names[3]}
    files.publish_usage(shortened(usage, needed))
    found = files.usage()
    assert (found.nbytes, found.num_files) == (usage.nbytes, usage.num_files)
    assert needed < found.namespaces.keys()
    assert names[499] in found.namespaces
    assert names[4] not in found.namespaces
    assert 20 < len(found.namespaces) < 100
    assert found.tenants.keys() == found.namespaces.keys()
    assert shortened(found, needed) == found
    (bound,) = scopes(found, SPACE)
    assert bound.used == usage.nbytes


def test_a_forked_child_names_parts_as_its_own():
    """Or maintenance takes them for a dead process's once the parent has ended."""
    code = """
import os
from fskv.root.process_id import is_our_part, part_names
names = part_names()
assert is_our_part(next(names))
if os.fork():
    os._exit(os.wait()[1])
print(os.getpid(), next(names))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, name = run.stdout.split()
    assert name.rsplit("-", 3)[1] == pid
