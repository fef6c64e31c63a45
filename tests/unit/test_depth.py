"""How many chunks are at the disk at once with `io_threads` "auto": by what the mount takes to answer."""

from __future__ import annotations

import json
import os
import re
import threading

import pytest
from places import REPOSITORY
from toy_engine import Engine

from faults.disk import Child, DiskFaults
from fskv.data_path.depth import measure_answer_s, wanted_threads
from fskv.offload import mover

KIB = 1 << 10
MIB = 1 << 20

_ASK = """
import json, sys
from fskv.data_path.depth import measure_answer_s
print('"ready"', flush=True)
for line in sys.stdin:
    directory, direct = json.loads(line)
    print(json.dumps(measure_answer_s(directory, 0o600, direct=direct)), flush=True)
"""


@pytest.mark.parametrize(
    ("answer_s", "file_nbytes", "threads"),
    [
        (None, 2 * MIB, 8),
        (0.0, 64 * KIB, 8),
        (0.0005, 64 * KIB, 8),  # a local disk, whatever the chunks
        (0.001, 2 * MIB, 10),
        (0.004, 2 * MIB, 21),
        (0.004, 8 * MIB, 11),
        (0.004, 512 * KIB, 32),
        (0.01, 2 * MIB, 32),
        (60.0, 8 * MIB, 32),
    ],
)
def test_a_mount_that_answers_late_has_more_chunks_at_the_disk(answer_s, file_nbytes, threads):
    assert wanted_threads(answer_s, file_nbytes) == threads


@pytest.fixture
def disk(native_library, tmp_path):
    """A function that measures in a child whose disk has faults, and the faults."""
    directory = tmp_path / "disk"
    directory.mkdir()
    faults = DiskFaults(native_library("disk"), directory, tmp_path / "state")
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    child = Child(_ASK, {**os.environ, **faults.env(), "PYTHONPATH": path})

    def measure(*rules, direct=True):
        faults.set(*rules)
        found = child(json.dumps([str(directory), direct]))
        assert list(directory.iterdir()) == [], "a probe was left behind"
        return found, faults

    yield measure
    child.close()


@pytest.mark.parametrize("direct", [True, False])
def test_the_answer_of_a_slow_mount_is_its_openings_and_its_reads(disk, direct):
    at_once, _ = disk(direct=direct)
    late, faults = disk("pread slow_ms=20", "open slow_ms=10", direct=direct)
    assert at_once < 0.02
    assert 0.03 <= late < 1
    assert faults.fired("pread slow_ms=20") == 5


def test_one_busy_moment_is_not_the_mounts_answer(disk):
    found, faults = disk("pread slow_ms=500 count=3")
    assert faults.fired() == 3
    assert found < 0.4


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_is_synced_only_where_no_direct_read_has_it_written(disk, direct):
    """A sync may wait for all that others have written to the same disk."""
    _, faults = disk("fsync slow_ms=1", direct=direct)
    assert faults.fired() == (not direct)


@pytest.mark.parametrize("rule", ["open EROFS", "write ENOSPC", "pread EIO"])
def test_a_root_that_cannot_be_asked_says_nothing_and_nothing_is_raised(disk, rule):
    found, faults = disk(rule)
    assert found is None
    assert faults.fired() >= 1


def test_a_root_that_cannot_be_synced_says_nothing(disk):
    assert disk("fsync EIO", direct=False)[0] is None


def test_without_direct_reads_the_others_count(disk):
    found, _ = disk("pread EINVAL count=1", "pread slow_ms=20")
    assert found >= 0.02


@pytest.mark.parametrize("direct", [True, False])
def test_a_root_that_is_only_read_is_asked_with_a_file_that_is_there(tmp_path, direct):
    there = tmp_path / "fskv.json"
    there.write_text("{}")
    before, none = there.stat().st_mtime_ns, str(tmp_path / "none")
    assert measure_answer_s(none, 0o600, direct=direct, probe_file=str(there)) < 1
    assert (os.listdir(tmp_path), there.stat().st_mtime_ns) == (["fskv.json"], before)
    there.unlink()
    assert measure_answer_s(none, 0o600, direct=direct, probe_file=str(there)) is None


def test_a_directory_that_is_gone_says_nothing(tmp_path):
    assert measure_answer_s(str(tmp_path / "none"), 0o600, direct=True) is None


@pytest.mark.parametrize(
    ("answer_s", "options", "said"),
    [
        (0.00001, {}, "8 I/O threads (auto: a file opens and is read in 0.0 ms)"),
        (5.0, {}, "32 I/O threads (auto: a file opens and is read in 5000.0 ms)"),
        (None, {}, "8 I/O threads (auto),"),
        (5.0, {"io_threads": 3}, "3 I/O threads,"),
        (5.0, {"staging_bytes": 64 * KIB}, "4 I/O threads (auto: half of the staging slots),"),
    ],
)
def test_a_worker_has_what_its_mount_wants(tmp_path, monkeypatch, caplog, answer_s, options, said):
    measured = []

    def measure(directory, file_mode, *, direct, probe_file):
        assert probe_file is None
        measured.append(os.path.isdir(directory))
        return answer_s

    monkeypatch.setattr(mover, "measure_answer_s", measure)
    caplog.set_level("INFO")
    Engine(str(tmp_path), max_bytes="1 GiB", keep_free=0, **options).close()
    assert measured == ([] if "io_threads" in options else [True])
    assert said in caplog.text


def test_a_mount_that_does_not_answer_the_question_is_not_refused_for_it(
    tmp_path, monkeypatch, caplog
):
    never = threading.Event()
    monkeypatch.setattr(mover, "measure_answer_s", lambda *_, **__: never.wait(60))
    monkeypatch.setattr(mover, "_ANSWER_S", 0.1)
    caplog.set_level("INFO")
    Engine(str(tmp_path), max_bytes="1 GiB", keep_free=0).close()
    never.set()
    said = rf"option 'io_threads': \"auto\" is 8, as {tmp_path}/\S*/tmp did not answer within 0.1 s"
    assert re.search(said, caplog.text)
    assert "8 I/O threads (auto)," in caplog.text
