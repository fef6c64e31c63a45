"""The doctor ends in time, whatever hangs; says what is wrong, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fskv_tools.doctor import machine, mount, probes, rounds, space
from fskv_tools.doctor.finding import Level, Subject
from fskv_tools.doctor.mount import judge
from tool_lab import check_lines, everything_below, fskv, run, spoil
from world import wait_for

from faults.disk import DiskFaults
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.root.mounts import mount_of
from fskv.sizes import Share

PATIENT = ("--timeout", "120")  # a check imports torch, on a busy machine


def findings(done):
    return [line for line in done.lines if line["type"] == "finding"]


def of(done, check):
    return [(line["level"], line["found"]) for line in findings(done) if line["check"] == check]


def test_a_sound_root_has_no_problem_and_is_left_as_it_was(lab):
    lab.chunks(lab.namespace(), range(5))
    before = everything_below(lab.path)
    done = run("doctor", *PATIENT, "--json", root=lab.path)
    assert done.exit_code == 0, done.stdout
    assert done.summary["problem"] == 0
    assert everything_below(lab.path) == before
    assert of(done, "namespaces") == [("ok", "1 namespace")]
    for check in ("round trip", "write", "clock", "root", "owner of root"):
        assert of(done, check)[0][0] == "ok", check
    for line in findings(done):
        assert (line["advice"] is None) == (line["level"] in ("ok", "note")), line
    check_lines("doctor", done.lines)


def test_without_a_root_it_looks_at_the_machine():
    done = run("doctor", *PATIENT, "--json")
    assert done.exit_code == 0
    assert {line["check"] for line in findings(done)} >= {"fskv", "huge pages", "GDS"}


def here(root, **changes):
    """Make the checks in this process, where a test can reach what they call."""
    subject = Subject(str(root), **{"timeout_s": 10.0, "may_write": True, **changes})
    return [one for one in rounds.findings(subject) if not isinstance(one, str)]


def levels(found, check):
    return [(one.level, one.found) for one in found if one.check == check]


@pytest.mark.parametrize(("version", "warns"), [("0.31.0", True), ("0.33.2", False), ("x", True)])
def test_a_vllm_that_was_never_run_is_a_warning(monkeypatch, version, warns):
    monkeypatch.setattr(machine, "_version", lambda name: version if name == "vllm" else None)
    assert levels(machine.versions(), "vllm") == [(Level.WARNING, version)] * warns


@pytest.mark.parametrize("driver", [True, False])
def test_what_is_absent_is_not_called_ok(monkeypatch, driver):
    monkeypatch.setattr(machine, "_HAS_DRIVER", driver)
    monkeypatch.setattr(machine, "_version", lambda name: "1" if name == "kvikio" else None)
    assert [one.level for one in machine.gds()] == ["ok" if driver else "note"]


@pytest.mark.parametrize("kind", ["missing", "foreign", "newer", "a file", "empty"])
def test_what_is_no_root_is_a_finding_and_nothing_is_written_there(tmp_path, kind):
    path = tmp_path / "kv"
    if kind == "a file":
        path.write_text("")
    elif kind != "missing":
        path.mkdir()
    if kind == "foreign":
        (path / "photo.jpg").write_bytes(b"")
    if kind == "newer":
        (path / "fskv.json").write_text('{"format": 2}')
    before = everything_below(tmp_path)
    stamp = path.stat().st_mtime_ns if path.is_dir() else 0
    done = run("doctor", *PATIENT, "--json", root=path)
    assert everything_below(tmp_path) == before
    if kind == "empty":
        assert done.exit_code == 0
        assert of(done, "root")[0][0] == "hint"
        assert of(done, "round trip")[0][0] == "ok"
        assert run("ls", root=path).exit_code == 10  # still no root
    else:
        assert (done.exit_code, done.summary["problem"]) == (1, 1)  # one fault, one problem
        assert of(done, "root")[0][0] == "problem"
        assert not of(done, "write")
        (advice,) = [line["advice"] for line in findings(done) if line["check"] == "root"]
        words = {
            "missing": "make the directory, or mount",
            "foreign": "no engine starts on it",
            "newer": "engines of this fskv need another",
            "a file": "the directory that the engines have",
        }
        assert words[kind] in advice
        assert not of(done, "mount"), "of the directory above it"
        if path.is_dir():
            assert path.stat().st_mtime_ns == stamp


def test_with_no_write_nothing_is_tried_and_strange_entries_stay(lab):
    spoil(lab, lab.namespace())
    before, stamp = everything_below(lab.path), os.stat(lab.path).st_mtime_ns
    for options, level in ((["--no-write"], "note"), ([], "ok")):
        done = fskv("doctor", *PATIENT, *options, "--json", root=lab.path)
        assert (done.exit_code, of(done, "write")[0][0]) == (0, level)
        assert everything_below(lab.path) == before
        assert (os.stat(lab.path).st_mtime_ns == stamp) is bool(options)


@pytest.fixture
def disk(lab, tmp_path, native_library):
    return DiskFaults(native_library("disk"), pathlib.Path(lab.path), tmp_path / "faults")


@pytest.mark.parametrize(
    "calls", [("open", "read", "pread", "stat", "write"), ("pread",), ("open",)]
)
def test_a_root_that_hangs_is_a_finding_in_time(lab, disk, calls):
    lab.chunks(lab.namespace(), range(3))
    sound = fskv("doctor", "--json", "--timeout", "20", root=lab.path, env=disk.env())
    assert sound.exit_code == 0, sound.stdout
    disk.set(*(f"{call} hang" for call in calls))
    start = time.monotonic()
    options = ("--json", "--timeout", "2")
    done = fskv("doctor", *options, root=lab.path, env=disk.env(), timeout_s=90)
    took_s = time.monotonic() - start
    assert disk.matched()
    assert done.exit_code == 1
    assert any("did not answer in 2 s" in line["found"] for line in findings(done))
    assert took_s < 60
    disk.clear()
    # What hung comes to its end, and cleans up.
    wait_for(lambda: not any(name.startswith(".fskv-") for name in os.listdir(lab.path)))


def test_a_disk_that_changes_bytes_is_found_by_the_round_trip(lab, disk):
    disk.set("read flip suffix=.part")
    done = fskv("doctor", *PATIENT, "--json", root=lab.path, env=disk.env())
    assert disk.fired()
    assert done.exit_code == 1
    assert of(done, "round trip")[0][0] == "problem", done.stdout
    disk.clear()
    done = fskv("doctor", *PATIENT, "--json", root=lab.path, env=disk.env())
    assert of(done, "round trip")[0][0] == "ok"


def test_a_read_only_root_is_a_problem_unless_engines_only_load(lab, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    told = LINE.format(point="/", kind="ext4", source="/dev/a", options="").replace(" rw,", " ro,")
    with open(f"{lab.path}-mountinfo", "w") as file:
        file.write(told)
    monkeypatch.setattr(mount, "_MOUNTINFO", f"{lab.path}-mountinfo")
    monkeypatch.setattr(probes, "new_file", refuse)
    found = here(lab.path)
    assert [one.check for one in found if one.level == "problem"] == ["mount", "write"]
    assert "Read-only" in levels(found, "write")[0][1]
    loads = here(lab.path, only_loads=True)
    assert not [one for one in loads if one.level == "problem"]
    assert [level for level, _ in levels(loads, "write")] == ["note"]


@pytest.mark.parametrize(
    ("step_ns", "level"), [(1000, "ok"), (2 * 10**9, "hint"), (7 * 10**12, "problem")]
)
def test_coarse_times_wrong_clocks_and_no_o_direct_are_told(lab, monkeypatch, step_ns, level):
    utime, now, opened, subject = os.utime, time.time, os.open, Subject(lab.path, 10.0, True)

    def coarse(path, ns=None):
        utime(path, ns=tuple(one // step_ns * step_ns for one in ns or (time.time_ns(),) * 2))

    def no_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)

    assert [one.level for one in probes.direct_io(subject)] == ["ok"]
    monkeypatch.setattr(os, "utime", coarse)
    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(probes.time, "time", lambda: now() + 7200)
    found = list(probes.write(subject))
    assert [each for each, _ in levels(found, "mtime")] == [level]
    assert [each for each, _ in levels(found, "clock")] == ["warning"]
    assert [one.level for one in probes.direct_io(subject)] == ["hint"]


def test_where_nothing_can_be_stored_is_a_problem_and_not_how_much_is_free(lab, monkeypatch):
    """A disk of 150 MiB with 4 MiB free, of which keep_free leaves 1 MiB: less than a chunk of 2.7 MiB."""
    where = lab.namespace(pages=(1_400_000, 1_400_000), blocks_per_chunk=1)
    subject = Subject(lab.path, 10.0, False)

    def judged(free_mib, counted=None, **told):
        info = {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 150 << 8, "f_bavail": free_mib << 8}
        info["f_bfree"] = info["f_bavail"]
        info |= {"f_files": 0, "f_favail": 0}
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**info))
        if counted is not None:
            os.makedirs(f"{lab.path}/.fskv-maintenance", exist_ok=True)
            usage = Usage(namespaces={where.id: (counted, 1)}, at_ms=1)
            SharedFiles(f"{lab.path}/.fskv-maintenance").publish_usage(usage)
        limits = (Limits(**told),) if told else ()
        return levels(list(space.space(dataclasses.replace(subject, told=limits))), "space")

    assert [level for level, _ in judged(4)] == ["warning"]  # nobody has counted what could go
    ((level, found),) = judged(4, counted=0)
    assert level == "problem"
    assert f"1.00 MiB left, and a chunk of {where.id} has 2.6" in found
    assert [level for level, _ in judged(4, counted=3 << 20)] == ["hint"]  # pruned, then stored
    assert [level for level, _ in judged(1, counted=6 << 20)] == ["warning"]
    # The control: with enough left it is ok, as the same disk is for an engine that keeps less free.
    assert [level for level, _ in judged(6, counted=0)] == ["ok"]
    assert [level for level, _ in judged(4, keep_free=1 << 20)] == ["ok"]
    # What an engine is to have: a bound that is smaller than a chunk, and a share that is not there.
    assert [level for level, _ in judged(90, max_nbytes=1 << 20)] == ["problem", "ok"]
    assert [level for level, _ in judged(90, keep_free=Share(70.0))] == ["problem"]


def test_interrupted_it_leaves_nothing(lab, disk):
    lab.chunks(lab.namespace(), range(3))
    before = everything_below(lab.path)
    disk.set("fsync slow_ms=5000")
    words = [sys.executable, "-m", "fskv_tools", "doctor", "--root", lab.path]
    env = {**os.environ, **disk.env()}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
    wait_for(disk.matched, 60)
    assert everything_below(lab.path) != before  # the probe is there
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    disk.clear()
    wait_for(lambda: everything_below(lab.path) == before)


def test_damaged_and_hostile_maintenance_files_are_findings(lab):
    shared = f"{lab.path}/.fskv-maintenance"
    os.makedirs(shared)
    with open(f"{shared}/heartbeat-x.json", "w") as file:
        file.write('{"name": "x", "limits": 7}')
    assert levels(here(lab.path), "engines")[0][0] == "note"
    os.mkfifo(f"{shared}/heartbeat-y.json")
    os.symlink("/dev/zero", f"{shared}/lease.json")
    done = run("doctor", "--json", "--timeout", "20", root=lab.path)
    assert not any("did not answer" in line["found"] for line in findings(done))
    engine = Capacity(lab.path, lab.namespace().id, None, Limits())
    engine.start()
    assert levels(here(lab.path), "engines") == [("ok", "1 engine or watcher lives")]
    engine.close()


@pytest.mark.parametrize("denied", [True, False])
def test_heartbeats_that_may_not_be_read_are_not_taken_for_none(lab, monkeypatch, denied):
    os.mkdir(f"{lab.path}/.fskv-maintenance")
    if denied:
        monkeypatch.setattr(SharedFiles, "heartbeats", refused)
    ((level, found),) = levels(here(lab.path), "engines")
    assert (level == "problem", "Permission denied" in found) == (denied, denied)
    assert ("none is alive" in found) is not denied


def refused(*_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("kind", ["a loop", "a fifo", "a directory"])
def test_what_is_in_the_place_of_the_maintenance_files_is_one_problem(lab, kind):
    shared = f"{lab.path}/.fskv-maintenance"
    if kind == "a loop":
        os.symlink(".fskv-maintenance", shared)
    else:
        (os.mkfifo if kind == "a fifo" else os.mkdir)(shared)
    problems = [one.check for one in here(lab.path) if one.level == "problem"]
    assert problems == ([] if kind == "a directory" else ["owner of maintenance"])


@pytest.mark.parametrize(
    ("max_nbytes", "levels_"), [(None, ["warning"]), (1 << 30, ["warning"]), (900 << 20, [])]
)
def test_a_quota_of_cephfs_is_told_of_beside_the_bound(tmp_path, monkeypatch, max_nbytes, levels_):
    """It is of a directory above the root, and is met late. `make test-shared-fs` has a real one."""
    root = tmp_path / "kv"
    root.mkdir()

    def getxattr(path, name):
        if path != str(tmp_path) or name != "ceph.quota.max_bytes":
            raise OSError(errno.ENODATA, "No data available")
        return b"1073741824"

    monkeypatch.setattr(os, "getxattr", getxattr)
    subject = Subject(str(root), 5.0, False, told=(Limits(max_nbytes=max_nbytes),))
    assert [level for level, _ in levels(space.space(subject), "quota")] == levels_


def test_namespaces_that_look_alike_and_do_not_share_are_named(lab):
    one = lab.namespace()
    other = lab.namespace(kv_cache_dtype="fp8")
    ((level, found),) = [each for each in levels(here(lab.path), "namespaces") if each[0] != "ok"]
    assert level == "hint"
    assert all(each in found for each in (one.identity.digest16, other.identity.digest16))
    assert "kv_cache_dtype" in found
    with open(f"{one.directory.path}/namespace.json", "w") as file:
        file.write("{")
    os.chmod(lab.path, 0o777)
    found = here(lab.path)
    assert [(one.level, one.check) for one in found if one.level in ("problem", "warning")] == [
        ("warning", "owner of root"),
        ("problem", "namespaces"),
    ]


LINE = "36 35 98:0 / {point} rw,noatime shared:1 - {kind} {source} rw{options}\n"


@pytest.mark.parametrize(
    ("kind", "options", "level", "words"),
    [
        ("ext4", "", "ok", "ext4"),
        ("nfs4", ",vers=4.2,hard", "ok", "vers=4.2"),
        ("nfs4", ",vers=4.2,noac", "warning", "noac"),
        ("tmpfs", "", "warning", "in memory"),
        ("overlay", "", "warning", "container"),
        ("fuse.mfs", "", "hint", "keep their room"),
        ("fuse.juicefs", "", "hint", "keep their room"),
        ("lustre", "", "hint", "not tried"),
    ],
)
def test_mounts_are_judged_by_type_and_options(kind, options, level, words):
    text = LINE.format(point="/", kind="ext4", source="/dev/a", options="")
    text += LINE.format(point="/mnt/k\\040v", kind=kind, source="server:/x", options=options)
    mount = mount_of("/mnt/k v/root", text)
    assert (mount.point, mount.kind) == ("/mnt/k v", kind)
    assert any(f.level == level and words in f.found for f in judge(mount)), list(judge(mount))
    of_system = [one.found for one in judge(mount_of("/mnt/k vx", text))]
    assert "system's own" in of_system[1]
    assert not any("system's own" in one.found for one in judge(mount))


# --- what an engine is told ---------------------------------------------------------------------


def transfer(path, connector="FskvConnector", **options):
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"root": str(path), **options},
    }


def nested(connector, key, *inner):
    return {**transfer("/x", connector), "kv_connector_extra_config": {key: list(inner)}}


def configured(given):
    done = run("doctor", *PATIENT, "--no-write", "--json", "--config", given)
    return done, [line for line in findings(done) if line["level"] == "problem"]


# What operators got wrong, and the words that they need.
MISTAKES = {
    "a unit that is none": ({"max_bytes": "100G"}, "did you mean 100GiB?"),
    "a typo": ({"max_byte": "1GiB"}, "did you mean 'max_bytes'?"),
    "no root": ({"root": None}, "'root': found None"),
    "a root that is missing": ({"root": "/nowhere/at/all"}, "does not exist"),
    "a foreign directory": ({"root": "/etc"}, "not an fskv root and not empty"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_an_engine_would_refuse_is_said_beforehand(lab, mistake):
    options, words = MISTAKES[mistake]
    done, problems = configured(json.dumps(transfer(lab.path, **options)))
    assert done.exit_code == 1
    assert any(words in line["found"] for line in problems), problems


def test_all_that_is_wrong_is_told_at_once_problems_first(tmp_path):
    given = transfer(tmp_path / "nowhere", max_byte="1GiB", io_threads=0, health_file="/no/x.json")
    line = f"vllm serve M --no-enable-prefix-caching --kv-transfer-config '{json.dumps(given)}'"
    done, problems = configured(line)
    assert [one["check"] for one in problems] == ["options"] * 3 + ["health file", "root"]
    levels_ = [one["level"] for one in findings(done)]
    assert levels_ == sorted(levels_, key=list(Level).index)
    # The control: what is right is not told.
    (tmp_path / "nowhere").mkdir()
    for name in ("max_byte", "io_threads"):
        del given["kv_connector_extra_config"][name]
    _, problems = configured(json.dumps(given))
    assert [one["check"] for one in problems] == ["health file"]


def test_a_store_that_only_loads_needs_no_room(lab):
    for role, options in (("kv_both", {"store": False}), ("kv_consumer", {})):
        done, problems = configured(json.dumps({**transfer(lab.path, **options), "kv_role": role}))
        assert (done.exit_code, problems) == (0, [])
        assert [level for level, _ in of(done, "space")] == ["note"]


@pytest.mark.parametrize(
    "wrong",
    [
        transfer("/x", "FskvConector"),
        nested("FskvMultiConnector", "connectors", transfer("relative")),
        nested("OffloadingConnector", "secondary_tiers", {"type": "FskvTier", "root": "relative"}),
        {"root": "/mnt/kv"},
    ],
    ids=json.dumps,
)
def test_whatever_is_around_a_store_is_looked_into(wrong):
    done, problems = configured(json.dumps(wrong))
    assert (done.exit_code, [line["check"] for line in problems]) == (1, ["options"])


@pytest.mark.parametrize("how", ["JSON", "file of Windows", "line", "file with a line"])
def test_a_configuration_comes_as_json_a_file_or_a_servers_line(lab, tmp_path, how):
    """The control of all mistakes: what an engine takes has no problem, and the root is left as it was."""
    before = everything_below(lab.path)
    written = json.dumps(transfer(lab.path, max_bytes="2TiB"))
    line = f"vllm serve M --shutdown-timeout 10 \\\n  --kv-transfer-config='{written}'"
    given = line if how.endswith("line") else written
    if how.startswith("file"):
        path = tmp_path / "given"
        path.write_text(f"#!/bin/sh\n{given}\n" if how.endswith("line") else f"\ufeff{given}")
        given = path
    done, problems = configured(given)
    assert (done.exit_code, problems, done.summary["root"]) == (0, [], lab.path)
    assert of(done, "options") == [("ok", f"of the store at {lab.path}")]
    assert everything_below(lab.path) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("vllm serve M", "a line of `vllm serve` with --kv-transfer-config"),
        ("vllm serve M --kv-transfer-confg {}", "did you mean --kv-transfer-config?"),
        ("{", "--config: no JSON: Expecting"),
        ("vllm serve it's", "No closing quotation"),
        ("no/such.json", "no/such.json: No such file or directory"),
        ("line", "fskv: line: found vllm serve M, expected"),
    ],
)
def test_what_is_no_configuration_is_one_sentence(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line").write_text("vllm serve M")
    done = run("doctor", "--config", given)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_problems_come_first(tmp_path):
    root = tmp_path / "kv"
    lines = run("doctor", *PATIENT, root=root).stdout.splitlines()
    told = [word for line in lines if (word := line.partition(" ")[0]) in list(Level)]
    found = [line["level"] for line in findings(run("doctor", *PATIENT, "--json", root=root))]
    for each in (told, found):
        assert each == sorted(each, key=list(Level).index)
        assert each[0] == Level.PROBLEM


def test_a_check_that_fails_is_a_problem():
    def fails(_):
        raise ZeroDivisionError("so it is")
        yield

    (found,) = rounds.look(fails, None)
    assert (found.check, found.level) == ("fails", Level.PROBLEM)
