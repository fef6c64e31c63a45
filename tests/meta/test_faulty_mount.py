"""The faulty mount does what its rules say to plain file functions, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from places import REPOSITORY
from world import returns_in_time, wait_for

from faults import mount as faulty_mount
from faults.mount import FaultyMount

CONTENT = bytes(range(256)) * 1024  # 256 KiB: more than one transfer of FUSE


@pytest.fixture(scope="module", autouse=True)
def needs_fuse():
    if missing := faulty_mount.why_not():
        pytest.skip(missing)


@pytest.fixture
def mount(tmp_path):
    with FaultyMount(tmp_path / "lab") as mounted:
        Path(mounted.backing, "a.kv").write_bytes(CONTENT)
        Path(mounted.backing, "b.txt").write_bytes(CONTENT)
        yield mounted
    assert not os.path.ismount(mounted.path)


def path_of(mount, name="a.kv"):
    return os.path.join(mount.path, name)


def read(mount, name="a.kv"):
    """Read a file by one pread after the other, whatever each of them gives."""
    fd = os.open(path_of(mount, name), os.O_RDONLY)
    try:
        data, lengths = b"", []
        while part := os.pread(fd, len(CONTENT), len(data)):
            data += part
            lengths.append(len(part))
        return data, lengths
    finally:
        os.close(fd)


def test_without_rules_it_passes_everything_through(mount):
    assert read(mount) == (CONTENT, [len(CONTENT)])
    path = path_of(mount, "new")
    os.mkdir(path)
    Path(path, "x").write_bytes(CONTENT)
    os.rename(f"{path}/x", f"{path}/y")
    os.utime(f"{path}/y", ns=(10**18, 10**18))
    os.chmod(f"{path}/y", 0o640)
    behind = Path(mount.backing, "new", "y")
    assert behind.read_bytes() == CONTENT
    assert os.stat(f"{path}/y").st_mtime_ns == behind.stat().st_mtime_ns == 10**18
    assert os.stat(f"{path}/y").st_ino == behind.stat().st_ino
    assert behind.stat().st_mode & 0o777 == 0o640
    os.unlink(f"{path}/y")
    os.rmdir(path)
    assert sorted(os.listdir(mount.path)) == ["a.kv", "b.txt"]
    assert mount.fired() == 0


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("getattr", os.stat),
        ("open", lambda path: os.close(os.open(path, os.O_RDONLY))),
        ("read", lambda path: Path(path).read_bytes()),
        ("write", lambda path: Path(path).write_bytes(b"x")),
        ("rename", lambda path: os.rename(path, f"{path}.moved")),
        ("unlink", os.unlink),
        ("utimens", os.utime),
    ],
)
def test_a_call_fails_with_the_errno_of_its_rule_and_others_do_not(mount, op, call):
    mount.set({"ops": [op], "errno": "EIO", "suffix": ".kv"})
    with pytest.raises(OSError, match="Input/output") as caught:
        call(path_of(mount))
    assert caught.value.errno == errno.EIO
    assert mount.fired() >= 1
    call(path_of(mount, "b.txt"))
    mount.clear()
    call(path_of(mount))


def test_after_and_count_say_which_calls_fail(mount):
    mount.set({"ops": ["open"], "errno": "EACCES", "after": 1, "count": 2})
    failed = []
    for _ in range(4):
        try:
            os.close(os.open(path_of(mount), os.O_RDONLY))
            failed.append(False)
        except PermissionError:
            failed.append(True)
    assert failed == [False, True, True, False]
    assert mount.fired() == 2


def test_a_hanging_call_goes_on_when_it_is_released_and_others_go_on_meanwhile(mount):
    mount.set({"ops": ["read"], "contains": "a.kv", "hang": True})
    results = []
    thread = threading.Thread(target=lambda: results.append(read(mount)[0]), daemon=True)
    thread.start()
    wait_for(lambda: mount.fired() == 1)
    assert returns_in_time(lambda: read(mount, "b.txt"))[0] == CONTENT
    assert thread.is_alive()
    mount.clear()
    thread.join(20)
    assert results == [CONTENT]


def test_a_hanging_call_comes_back_as_an_error_when_the_mount_is_closed(tmp_path):
    with FaultyMount(tmp_path / "lab") as mount:
        Path(mount.backing, "a.kv").write_bytes(CONTENT)
        mount.set({"ops": ["read"], "hang": True})
        errors = []

        def run():
            try:
                read(mount)
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        wait_for(lambda: mount.fired() == 1)
    thread.join(20)
    assert len(errors) == 1
    assert not os.path.ismount(mount.path)


def test_what_is_read_is_short_flipped_cut_off_or_zero(mount):
    mount.set({"ops": ["read"], "short": 4096})
    assert read(mount) == (CONTENT, [4096] * 64)
    mount.set({"ops": ["read"], "flip": 200_000})
    data, _ = read(mount)
    assert [at for at in range(len(CONTENT)) if data[at] != CONTENT[at]] == [200_000]
    mount.set({"ops": ["read"], "flip": True, "count": 1})
    data, _ = read(mount)
    assert sum(a != b for a, b in zip(data, CONTENT, strict=True)) == 1
    mount.set({"ops": ["read"], "ends_at": 150_000})
    assert os.stat(path_of(mount)).st_size == len(CONTENT)
    assert read(mount)[0] == CONTENT[:150_000]
    mount.set({"ops": ["read"], "zero_from": 150_000})
    assert read(mount)[0] == CONTENT[:150_000] + bytes(len(CONTENT) - 150_000)
    mount.set({"ops": ["getattr"], "suffix": ".kv", "nbytes": 7})
    assert os.stat(path_of(mount)).st_size == 7
    mount.clear()
    assert read(mount)[0] == CONTENT


def test_what_is_written_is_short_or_flipped(mount):
    fd = os.open(path_of(mount, "new"), os.O_CREAT | os.O_WRONLY, 0o600)
    mount.set({"ops": ["write"], "short": 4096})
    assert os.pwrite(fd, CONTENT, 0) == 4096
    mount.set({"ops": ["write"], "flip": 10})
    assert os.pwrite(fd, CONTENT[:100], 0) == 100
    os.close(fd)
    data = Path(mount.backing, "new").read_bytes()[:100]
    assert [at for at in range(100) if data[at] != CONTENT[at]] == [10]


def test_a_delayed_call_is_only_late(mount):
    mount.set({"ops": ["read"], "delay_s": 0.05, "count": 1})
    assert read(mount)[0] == CONTENT
    assert mount.fired() == 1


def test_an_unknown_word_in_a_rule_is_a_mistake_of_the_test(mount):
    with pytest.raises(AssertionError, match="errnoo"):
        mount.set({"errnoo": "EIO"})


def test_no_mount_outlives_who_made_it(tmp_path):
    program = (
        "import sys, time; from faults.mount import FaultyMount; "
        "mount = FaultyMount(sys.argv[1]); print('mounted', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lab")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == b"mounted\n"
        assert os.path.ismount(tmp_path / "lab" / "mount")
    finally:
        child.kill()
        child.wait(30)
        child.stdout.close()
    wait_for(lambda: not os.path.ismount(tmp_path / "lab" / "mount"))
