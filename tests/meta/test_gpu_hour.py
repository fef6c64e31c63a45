"""`make gpu` without a GPU: how its runner takes what goes wrong, and its parts over the simulated driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from places import REPOSITORY
from world import has_ended, wait_for

pytest.importorskip("torch", reason="the steps need torch: make test")


# Steps that go wrong in all ways, run by the real runner in a process of its own.
STEPS = """
import sys
from benchmarks.gpu import __main__ as gpu, steps
from benchmarks.gpu.steps import Step
steps._LEAST_S = 0.1
gpu.plan.steps = lambda part, quick: [
    Step("good", 20, ("-c", "print('words'); print('{\\"GB/s\\": 2.5}')")),
    Step("failing", 20, ("-c", "import sys; print('some words'); sys.exit('the reason')")),
    Step("crashing", 20, ("-c", "import os; os.kill(os.getpid(), 11)")),
    Step("skipping", 20, ("-c", "import sys; print('no GPU here', file=sys.stderr); sys.exit(77)")),
    Step("no program", 20, ("a-program-of-nobody",)),
    Step("hanging", 3.0, ("sh", "-c", HANG, PID)),
    Step("after it", 20, ("-c", "open('{dir}/file', 'w').write('x'); print('[1, 2]')"),
         figures=lambda found: {"sum": sum(found[0])}),
]
sys.exit(gpu.main(sys.argv[1:]))
"""
HANG = "(echo $$ > $0.part; mv $0.part $0; sleep 600) & echo said before; wait"


def started(tmp_path, program=STEPS):
    """Start the runner over the steps; return its process, and the process id of the hanging step's child."""
    pid_file = tmp_path / "pid"
    program = f"PID = {str(pid_file)!r}\nHANG = {HANG!r}\n" + program
    places = ["--out", str(tmp_path / "out"), "--dir", str(tmp_path / "storage")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, "b", *places],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(pid_file.exists, 60)
    return process, int(pid_file.read_text())


def test_each_step_ends_and_the_page_says_how(tmp_path):
    process, child = started(tmp_path)
    assert not has_ended(child)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == ["page.txt", "part-b.json"]
    assert os.listdir(tmp_path / "storage") == []
    steps = {step["name"]: step for step in json.loads((out / "part-b.json").read_text())["steps"]}
    assert {name: (step["status"], step["why"]) for name, step in steps.items()} == {
        "good": ("good", ""),
        "failing": ("failed", "the reason"),
        "crashing": ("failed", "ended by SIGSEGV"),
        "skipping": ("skipped", "no GPU here"),
        "no program": ("skipped", "a-program-of-nobody is not installed"),
        "hanging": ("killed", "it did not end within 3 s"),
        "after it": ("good", ""),
    }
    assert steps["good"]["figures"] == {"GB/s": 2.5}
    assert steps["after it"]["found"] == [[1, 2]]
    assert steps["after it"]["figures"] == {"sum": 3}
    assert steps["failing"]["tail"] == ["some words", "the reason"]
    assert steps["hanging"]["tail"] == ["said before"]
    assert has_ended(child), "a child outlived its step"
    assert printed == (out / "page.txt").read_text()
    assert "2 good, 2 failed, 1 killed, 2 skipped" in printed
    assert "GB/s: 2.5" in printed


def test_negative_control_where_the_group_is_not_killed_the_child_lives(tmp_path):
    program = STEPS.replace("steps._LEAST_S", "steps.os.killpg = lambda *_: 0; steps._LEAST_S")
    program = program.replace("steps._LEAST_S =", "steps._DEATH_S = 0.1; steps._LEAST_S =")
    process, child = started(tmp_path, program)
    try:
        process.communicate(timeout=120)
        assert not has_ended(child)
    finally:
        os.kill(child, signal.SIGKILL)
