"""The fault storm, in small: nothing wrong is served, nothing leaks, and the storm would notice if it did.

The storm runs once as it is, and with one safety after the other taken away: then it must fail, for that very
reason. Besides: a writer killed within each single call of a store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from facts import facts_of
from places import LAB
from world import World, wait_for

from faults.disk import DiskFaults

pytest.importorskip("torch", reason="the storm needs torch: make test")
pytest.importorskip("xxhash", reason="the storm finds files by their names")

from trials import storm_damage

DRIVER = LAB / "fault_driver.py"


def storm(directory, *arguments):
    return facts_of("trials.storm", directory, "--mean-s", "0.15", *arguments)


# --- the storm as it is ---------------------------------------------------------------------


@pytest.mark.slow
def test_no_wrong_byte_is_served_while_writers_are_killed_and_files_damaged(tmp_path):
    for _ in range(5):  # when a kill comes is chance
        code, facts = storm(tmp_path, "--kills", "15")
        assert (code, facts["problems"], facts["leaks"], facts["parts_left"]) == (0, [], [], 0)
        # The storm was one: chunks were stored and loaded, and damage was met.
        assert facts["kills"]["all"] == 15
        assert facts["counted"]["stored"] > 100
        assert facts["counted"]["loaded"] > 100
        assert facts["counted"]["load corrupt"] > 0
        assert set(facts["planted"]) == set(storm_damage.KINDS)
        if facts["kills"]["while a part was open"] > 0:
            return
    pytest.fail("no kill came while a part was open")


@pytest.mark.slow
def test_negative_control_without_checks_the_storm_serves_wrong_bytes(tmp_path):
    code, facts = storm(tmp_path, "--break", "checks", "--kills", "6")
    assert code == 1
    assert facts["counted"]["wrong"] > 0


# --- one kill at a chosen call --------------------------------------------------------------

FILE_NBYTES = 262_144  # of a chunk of the driver

# Where the writer hangs when SIGKILL comes, and how many bytes the part has then; None: there is none.
MOMENTS = {
    "before the part is made": (["open suffix=.part hang"], None),
    "before the first byte": (["pwrite suffix=.part hang"], 0),
    "in the middle of a write": (
        ["pwrite suffix=.part short=65536 count=1", "pwrite suffix=.part hang"],
        65536,
    ),
    "when all is written": (["close suffix=.part hang"], FILE_NBYTES),
    "before the rename": (["rename suffix=.part hang"], FILE_NBYTES),
}


@pytest.mark.parametrize(
    ("moment", "transport"),
    [
        *((moment, "native") for moment in MOMENTS),
        *(
            (moment, "host-buffered")
            for moment in ("in the middle of a write", "before the rename")
        ),
    ],
)
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
    assert all(f"-{writer.pid}-" in path.name for path in left), "a dead writer's, as its name says"

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


@pytest.mark.slow
def test_negative_control_who_does_not_give_back_is_noticed(tmp_path):
    code, facts = storm(tmp_path, "--break", "ending", "--kills", "2")
    assert code == 1
    assert len(facts["leaks"]) == 4
    assert all(left["files"] > 0 for left in facts["leaks"])
