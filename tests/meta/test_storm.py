"""The fault storm, in small: nothing wrong is served, nothing leaks, and the storm would notice if it did.

Each part of `python -m trials.storm` runs once as it is, and with one safety after the other taken away:
then it must fail, for that very reason. Besides: a writer killed within each single call of a store.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest
from places import LAB, REPOSITORY
from world import World, damage, wait_for

from faults.disk import DiskFaults

pytest.importorskip("torch", reason="the storm needs torch: make test")
pytest.importorskip("xxhash", reason="the storm finds files by their names")

DRIVER = LAB / "fault_driver.py"
LIMIT_S = 200  # of one command; it only bounds a hang

sys.path.insert(0, str(REPOSITORY))
from trials import storm_accounts, storm_content, storm_damage  # noqa: E402


def storm(directory, *arguments):
    """Run the storm and return (exit code, facts); nothing of it is left, no mount either."""
    command = [sys.executable, "-m", "trials.storm", "--json", "--dir", str(directory)]
    done = subprocess.run(
        [*command, "--mean-s", "0.15", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert list(directory.iterdir()) == [], "something was left behind"
    assert str(directory) not in pathlib.Path("/proc/mounts").read_text()
    lines = done.stdout.splitlines()
    assert len(lines) == 1, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done.returncode, json.loads(lines[0])


def part(facts, name):
    """Return the facts of a part; skips where it cannot run, with the sentence that says why."""
    found = facts["parts"][name]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


def assert_nothing_leaked(found):
    assert (found["slots"], found["threads"], found["files"], found["leaks"]) == (0, 0, 0, [])


# --- the storm as it is ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return storm(tmp_path_factory.mktemp("calm"), "--kills", "15")


@pytest.mark.slow
def test_no_wrong_byte_is_served_while_writers_are_killed_and_files_damaged(calm):
    found = part(calm[1], "kills")
    assert found["problems"] == []
    assert found["wrong"] == 0
    assert found["kills"] == 15
    assert found["killed"]["native"] + found["killed"]["python"] == 15
    # The storm was one: chunks were stored and served, and damage was met.
    assert found["served"] > 100
    assert found["ended"]["store.ok"] > 100
    assert found["ended"]["load.corrupt"] > 0
    assert set(found["planted"]) == set(storm_damage.KINDS)


@pytest.mark.slow
def test_only_killed_writers_leave_parts_and_survivors_give_all_back(calm):
    found = part(calm[1], "kills")
    assert found["parts_leaked"] == []
    assert found["orphans"] > 0, "no kill met a write, so nothing was shown"
    assert found["processes"] == 3 + 2 + 1  # writers, readers, the healer
    assert_nothing_leaked(found)


@pytest.mark.slow
def test_what_the_storm_damaged_heals(calm):
    healed = part(calm[1], "kills")["healed"]
    assert healed["not_good_by_round"][-1] == 0
    assert healed["whole_files"] == healed["chunks"]


@pytest.mark.slow
def test_a_full_disk_ends_stores_as_no_space_and_leaves_no_part(calm):
    found = part(calm[1], "space")
    assert found["problems"] == []
    assert set(found["stores"]) == {"ok", "no_space"}
    assert found["steps"]["parts when full"] == 0
    assert found["steps"]["served while it ran full"] > 0
    assert found["steps"]["stored with room again"] > 0
    assert found["wrong"] == 0
    assert_nothing_leaked(found)


@pytest.mark.slow
def test_errors_hangs_and_lies_of_a_mount_end_as_they_must(calm):
    found = part(calm[1], "mount")
    assert found["problems"] == []
    assert found["wrong"] == 0
    assert found["served"] > 0
    for name in ("native", "Python"):
        steps = found["by_step"]
        assert steps[f"{name}: EIO of reads"]["load io_error"] >= 8
        assert steps[f"{name}: EIO of reads"]["load breaker"] == 1
        assert steps[f"{name}: EIO of write"]["store io_error"] == 8
        assert steps[f"{name}: flip in the payload"]["load corrupt"] == 8
        assert steps[f"{name}: hanging read"]["load timed_out"] == 1
        assert steps[f"{name}: hanging read"]["parked"] >= 1
    assert_nothing_leaked(found)


@pytest.mark.slow
def test_the_exit_code_says_that_all_was_well(calm):
    code, facts = calm
    assert (code, facts["problems"], facts["wrong"]) == (0, [], 0)


@pytest.mark.slow
def test_a_longer_storm_with_another_seed_serves_nothing_wrong_either(tmp_path):
    code, facts = storm(tmp_path, "--kills", "60", "--seed", "7", "--parts", "kills")
    found = part(facts, "kills")
    assert (code, found["wrong"], found["problems"], found["parts_leaked"]) == (0, 0, [], [])
    assert found["kills"] == 60
    assert_nothing_leaked(found)


# --- negative controls ----------------------------------------------------------------------


@pytest.mark.slow
def test_negative_control_without_checks_the_storm_serves_wrong_bytes(tmp_path):
    code, facts = storm(tmp_path, "--no-verify", "--kills", "6", "--parts", "kills")
    found = part(facts, "kills")
    assert code == 1
    assert found["wrong"] > 0
    assert any("served wrong" in problem for problem in found["problems"])


@pytest.mark.slow
def test_negative_control_without_checks_the_mount_serves_wrong_bytes(tmp_path):
    code, facts = storm(tmp_path, "--no-verify", "--parts", "mount")
    found = part(facts, "mount")
    assert code == 1
    assert found["wrong_by_step"]["Python: flip in the payload"] == 8
    assert found["wrong_by_step"]["Python: zeros from the middle"] == 8


@pytest.mark.slow
def test_negative_control_without_guard_late_bytes_reach_pages_that_were_given_up(tmp_path):
    code, facts = storm(tmp_path, "--break", "guard", "--parts", "mount")
    found = part(facts, "mount")
    assert code == 1
    assert found["wrong_by_step"] == {"late bytes in pages that were given up": 1}


@pytest.mark.slow
def test_negative_control_without_removal_a_full_disk_leaves_parts(tmp_path):
    code, facts = storm(tmp_path, "--break", "removal", "--parts", "space")
    found = part(facts, "space")
    assert code == 1
    assert found["steps"]["parts when full"] > 0


@pytest.mark.slow
def test_negative_control_who_does_not_give_back_is_noticed(tmp_path):
    code, facts = storm(tmp_path, "--break", "ending", "--kills", "2", "--parts", "kills")
    found = part(facts, "kills")
    assert code == 1
    assert len(found["leaks"]) == 5
    for left in found["leaks"]:
        assert left["slots"] > 0
        assert left["files"] == 1
    assert found["threads"] > 0  # who has only just started has none yet


@pytest.mark.slow
def test_an_interrupted_storm_leaves_neither_files_nor_mounts(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "trials.storm", "--parts", "mount", "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: any(tmp_path.rglob("*.kv")) or process.poll() is not None, 60)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    finally:
        process.kill()
    if process.returncode == 1 and "skipped" in shown:
        pytest.skip("no FUSE mount here")
    assert process.returncode == 130, said
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in pathlib.Path("/proc/mounts").read_text()


# --- who judges -----------------------------------------------------------------------------


def test_who_judges_and_who_damages_import_nothing_of_fskv():
    code = (
        "import sys, trials.storm_content, trials.storm_damage; "
        "print([name for name in sys.modules if name.partition('.')[0] == 'fskv'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_judge_tells_one_wrong_bit(tmp_path):
    pages = storm_content.Pages(str(tmp_path / "pages"), 4)
    judge = storm_content.Judge()
    for number in range(4):
        pages.write(number, storm_content.content(number))
    assert all(judge.look(pages, number, number) for number in range(4))
    wrong = bytearray(storm_content.content(2))
    wrong[200_000] ^= 1
    pages.write(2, bytes(wrong))
    assert not judge.look(pages, 2, 2)
    assert not judge.look(pages, 1, 0), "another chunk"
    assert judge.wrong[0]["first_byte"] == 200_000
    assert (judge.num_served, judge.num_wrong) == (6, 2)


def test_the_outside_view_of_files_is_that_of_a_store(tmp_path):
    """The storm names and reads files by docs/format.md alone; here it meets files of the store."""
    world = World(tmp_path / "kv", faults=False, layout_digest=bytes(16))
    for number in (1, 2):
        chunk = world.chunk(0)._replace(key_hash=storm_content.key_hash(number))
        slot = world.transport.new_slot(0)
        content = storm_content.content(number)
        slot.view[world.base : world.base + len(content)] = content
        assert world.store.put(chunk, 0, slot).good
        path = f"{world.directory.path}/chunks/{storm_content.file_name(number)}"
        assert world.store.path(chunk) == path
        assert storm_content.is_whole_file(path, number)
        assert not storm_content.is_whole_file(path, number + 1)
    damage(path, 200_000)
    assert not storm_content.is_whole_file(path, 2)


def test_each_kind_of_damage_changes_a_file(tmp_path):
    kinds = set()
    chunks = tmp_path / "chunks"
    harm = storm_damage.Damage(str(chunks), 2, random.Random(3), str(tmp_path / "spare"))
    for _ in range(60):
        for number in (0, 1):
            path = chunks / storm_content.file_name(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(4096) + storm_content.content(number) + bytes(2048))
        harm.plant()
        (number,) = harm.last
        (kind,) = harm.last.values()
        path = chunks / storm_content.file_name(number)
        before = bytes(4096) + storm_content.content(number) + bytes(2048)
        padding_only = kind == "zeros" and path.read_bytes() == before
        assert padding_only or not path.exists() or path.read_bytes() != before
        same_length = path.exists() and path.stat().st_size == storm_content.FILE_NBYTES
        assert same_length == (kind in ("zeros", "flip", "swap"))
        kinds.add(kind)
        harm.last.clear()
    assert kinds == set(storm_damage.KINDS)


def test_parts_of_the_living_are_not_taken_for_orphans():
    parts = ["a/host-with-dash-17-0123abcd-5.part", ".fskv-host-18-0123abcd-6.part", "x.part"]
    assert storm_accounts.split_parts(parts, {17}) == (parts[:1], parts[1:])
    assert storm_accounts.split_parts(parts, {17, 18}) == (parts[:2], parts[2:])
    probe = ["tmp/probe-0011223344556677.part"]
    assert storm_accounts.split_parts(probe, {1}) == (probe, [])
    assert storm_accounts.split_parts(probe, set()) == ([], probe)


# --- one kill at a chosen call --------------------------------------------------------------

# Where the writer hangs when SIGKILL comes, and how many bytes the part has then; None: there is none.
MOMENTS = {
    "before the part is made": (["open suffix=.part hang"], None),
    "before the first byte": (["pwrite suffix=.part hang"], 0),
    "in the middle of a write": (
        ["pwrite suffix=.part short=65536 count=1", "pwrite suffix=.part hang"],
        65536,
    ),
    "when all is written": (["close suffix=.part hang"], storm_content.FILE_NBYTES),
    "before the rename": (["rename suffix=.part hang"], storm_content.FILE_NBYTES),
}


@pytest.mark.parametrize("transport", ["native", "host-buffered"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_killed_within_a_call_leaves_a_part_and_no_chunk(
    moment, transport, native_library, tmp_path
):
    rules, nbytes = MOMENTS[moment]
    disk = tmp_path / "disk"
    disk.mkdir()
    faults = DiskFaults(native_library("disk"), disk, tmp_path / "state")
    writer = subprocess.Popen(
        [sys.executable, str(DRIVER)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **faults.env()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:

        def tell(**step):
            writer.stdin.write(json.dumps(step) + "\n")
            writer.stdin.flush()

        tell(step="begin", root=str(disk / "kv"), transport=transport)
        told = writer.stdout.readline()
        assert "description" in told, told
        faults.set(*rules)
        tell(step="store", numbers=[7])
        wait_for(lambda: faults.num_hanging == 1)
    finally:
        writer.kill()
        writer.wait(30)
        with contextlib.suppress(BrokenPipeError):
            writer.stdin.close()
        writer.stdout.close()

    assert writer.returncode == -signal.SIGKILL
    left = [path for path in disk.rglob("*.part") if path.parent.name != "tmp"]
    assert [path.stat().st_size for path in left] == ([] if nbytes is None else [nbytes])
    assert list(disk.rglob("*.kv")) == [], "a chunk that nobody has finished is visible"
    orphans, leaked = storm_accounts.split_parts([str(path) for path in left], {writer.pid})
    assert (len(orphans), leaked) == (len(left), [])

    # The next one finds nothing in its way.
    world = World(disk / "kv", native=transport.startswith("native"))
    content = world.content(7)
    assert world.get(7)[0].value == "absent"
    assert world.put(7, content).value == "ok"
    status, found = world.get(7)
    assert (status.value, found) == ("ok", content)


def test_negative_control_a_writer_that_is_not_stopped_leaves_a_chunk(native_library, tmp_path):
    """What the test above calls "no chunk" is not the driver's doing: left alone, it stores one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps({"step": "begin", "root": str(disk / "kv"), "transport": "native"})
        + "\n"
        + json.dumps({"step": "store", "numbers": [7]})
        + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert '"statuses": ["ok"]' in done.stdout, done.stderr
    assert len(list(disk.rglob("*.kv"))) == 1
    assert list(disk.rglob("*.part")) == []
