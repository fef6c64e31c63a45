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
    Step("hanging", HANG_S, ("sh", "-c", HANG, PID)),
    Step("after it", 20, ("-c", "open('{dir}/file', 'w').write('x'); print('[1, 2]')"),
         figures=lambda found: {"sum": sum(found[0])}),
]
sys.exit(gpu.main(sys.argv[1:]))
"""
HANG = "(echo $$ > $0.part; mv $0.part $0; sleep 600) & echo said before; wait"


class Hour:
    """The runner over STEPS; `pid` is a step's child."""

    def __init__(self, tmp_path, hang_s, *arguments, program=STEPS):
        self.out, self.storage = tmp_path / "out", tmp_path / "storage"
        self.pid_file = tmp_path / "pid"
        head = f"PID = {str(self.pid_file)!r}\nHANG = {HANG!r}\n"
        program = head + program.replace("HANG_S", str(hang_s))
        places = ["--out", str(self.out), "--dir", str(self.storage)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "b", *places, *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self):
        wait_for(self.pid_file.exists, 60)
        return int(self.pid_file.read_text())

    def end(self):
        """Return the exit code and the steps by name."""
        self.printed, self.said = self.process.communicate(timeout=120)
        found = json.loads((self.out / "part-b.json").read_text())
        self.text = (self.out / "page.txt").read_text()
        assert sorted(os.listdir(self.out)) == ["page.txt", "part-b.json"]
        assert os.listdir(self.storage) == []
        return self.process.returncode, {step["name"]: step for step in found["steps"]}


def test_each_step_ends_and_the_page_says_how(tmp_path):
    hour = Hour(tmp_path, 3.0)
    child = hour.pid
    assert not has_ended(child)
    code, steps = hour.end()
    assert code == 1, hour.said
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
    assert hour.printed == hour.text
    assert "2 good, 2 failed, 1 killed, 2 skipped" in hour.text
    assert "GB/s: 2.5" in hour.text


def test_negative_control_where_the_group_is_not_killed_the_child_lives(tmp_path):
    program = STEPS.replace("steps._LEAST_S", "steps.os.killpg = lambda *_: 0; steps._LEAST_S")
    program = program.replace("steps._LEAST_S =", "steps._DEATH_S = 0.1; steps._LEAST_S =")
    hour = Hour(tmp_path, 3.0, program=program)
    child = hour.pid
    try:
        hour.end()
        assert not has_ended(child)
    finally:
        os.kill(child, signal.SIGKILL)
