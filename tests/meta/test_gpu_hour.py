"""`make gpu` without a GPU: how its runner takes what goes wrong, and the hour over the simulated driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from places import REPOSITORY
from world import wait_for

pytest.importorskip("torch", reason="the steps need torch: make test")

from benchmarks.gpu import plan

# Steps that go wrong in all ways, run by the real runner in a process of its own.
STEPS = """
import sys
from benchmarks.gpu import __main__ as gpu, plan
from benchmarks.gpu.steps import Step
gpu.plan.steps = lambda part, **_: [
    Step("good", 20, ("-c", "print('words'); print('{\\"GB/s\\": 2.5}')")),
    Step("failing", 20, ("-c", "import sys; print('some words'); sys.exit('the reason')")),
    Step("crashing", 20, ("-c", "import os; os.kill(os.getpid(), 11)")),
    Step("skipping", 20, ("-c", "import sys; print('no GPU here', file=sys.stderr); sys.exit(77)")),
    Step("lacking", 20, ("-c", "pass"), needs=("a_package_of_nobody",)),
    Step("no program", 20, ("sh", "-c", "exit 3"), needs=("bin:a-program-of-nobody",)),
    Step("hanging", HANG_S, ("sh", "-c", HANG, PID)),
    Step("after it", 20, ("-c", "open('{dir}/file', 'w').write('x'); print('[1, 2]')"),
         figures=lambda found: {"sum": sum(found[0])}),
]
sys.exit(gpu.main(sys.argv[1:]))
"""
# A child in a session of its own, whose parent has gone: no group holds it.
HIDE = '(setsid sh -c \'echo $$ > "$0.part"; mv "$0.part" "$0"; exec sleep 600\' "$0" &)'
HANG = HIDE + '; until [ -e "$0" ]; do sleep 0.01; done; echo said before'


def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Hour:
    """The runner over STEPS; `pid` is the child that hides."""

    def __init__(self, tmp_path, hang_s, *arguments, program=None):
        self.out, self.storage = tmp_path / "out", tmp_path / "storage"
        self.pid_file = tmp_path / "pid"
        head = f"PID = {str(self.pid_file)!r}\nHANG = {HANG + '; exec sleep 600'!r}\n"
        program = head + (program or STEPS).replace("HANG_S", str(hang_s))
        places = ["--out", str(self.out), "--dir", str(self.storage)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *places, *arguments],
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
        found = json.loads((self.out / "page.json").read_text())
        self.text = (self.out / "page.txt").read_text()
        assert sorted(os.listdir(self.out)) == ["page.json", "page.txt"]
        assert os.listdir(self.storage) == []
        return self.process.returncode, {step["name"]: step for step in found["steps"]}


def test_each_step_ends_and_the_page_says_how(tmp_path):
    hour = Hour(tmp_path, 3.0)
    hidden = hour.pid
    assert is_there(hidden)
    code, steps = hour.end()
    assert code == 1, hour.said
    assert {name: (step["status"], step["why"]) for name, step in steps.items()} == {
        "good": ("good", ""),
        "failing": ("failed", "the reason"),
        "crashing": ("failed", "ended by SIGSEGV"),
        "skipping": ("skipped", "no GPU here"),
        "lacking": ("skipped", "the Python package a_package_of_nobody is not installed"),
        "no program": ("skipped", "a-program-of-nobody is not installed"),
        "hanging": ("killed", "it did not end within 3 s"),
        "after it": ("good", ""),
    }
    assert steps["good"]["figures"] == {"GB/s": 2.5}
    assert steps["after it"]["found"] == [[1, 2]]
    assert steps["after it"]["figures"] == {"sum": 3}
    assert steps["failing"]["tail"] == ["some words", "the reason"]
    assert steps["hanging"]["tail"] == ["said before"]
    assert 3 <= steps["hanging"]["seconds"] < 60
    assert not is_there(hidden), "a child outlived its step"
    assert hour.printed == hour.text
    assert "2 good, 2 failed, 1 killed, 3 skipped" in hour.text
    assert "GB/s: 2.5" in hour.text


def test_negative_control_without_the_adoption_the_hidden_child_lives(tmp_path):
    program = STEPS.replace("sys.exit(gpu", "gpu.adopt_orphans = lambda: None\nsys.exit(gpu")
    hour = Hour(tmp_path, 3.0, "--only", "hanging", program=program)
    hidden = hour.pid
    try:
        hour.end()
        assert is_there(hidden)
    finally:
        os.kill(hidden, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_step_and_writes_the_page(tmp_path, number):
    hour = Hour(tmp_path, 600)
    hidden = hour.pid
    hour.process.send_signal(number)
    code, steps = hour.end()
    assert code == 130
    assert steps["good"]["status"] == "good"
    assert steps["hanging"]["status"] == "interrupted"
    assert steps["after it"]["status"] == "not begun"
    assert not is_there(hidden)
    assert "Traceback" not in hour.said


def test_a_process_that_a_step_leaves_behind_is_told_and_ended(tmp_path):
    program = f"HANG = {HANG!r}\n{STEPS}"
    hour = Hour(tmp_path, 30, "--only", "hanging", program=program)
    hidden = hour.pid
    _, steps = hour.end()
    assert steps["hanging"]["status"] == "good"
    assert steps["hanging"]["left_behind"] == 1
    assert not is_there(hidden)


def test_storage_that_hangs_costs_each_step_its_time_and_no_more(tmp_path, monkeypatch):
    for name in ("mkdir", "rm"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\nexec sleep 600\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    program = STEPS.replace('("good", 20', '("good", 0.5').replace(
        "sys.exit(gpu", "from benchmarks.gpu import steps\nsteps._DEATH_S = 0.5\nsys.exit(gpu"
    )
    _, steps = Hour(tmp_path, 0.5, "--only", "good", "hanging", program=program).end()
    assert {step["status"] for step in steps.values()} == {"killed"}


def test_every_step_is_one_that_can_be_run_here_and_a_part_takes_560_s_at_most():
    parts = [[*plan.steps(part, quick=False)] for part in plan.PARTS]
    names = [step.name for steps in parts for step in steps if not step.again]
    assert len(set(names)) == len(names)
    for steps in parts:
        assert steps[0].name == plan.EXTENSION
        assert sum(step.limit_s for step in steps) <= 560
        for step in steps:
            assert step.limit_s > 0
            for word in step.command:
                if word.startswith(("tests/", "benchmarks/")):
                    assert (REPOSITORY / word).exists(), word


def test_where_the_extension_does_not_work_nothing_else_is_begun(tmp_path):
    program = """
import sys
from benchmarks.gpu import __main__ as gpu, plan
from benchmarks.gpu.steps import Step
gpu.plan.steps = lambda part, **_: [
    Step(plan.EXTENSION, 20, ("-c", "import sys; sys.exit('the C extension does not work here: why')")),
    Step("after it", 20, ("-c", "pass")),
]
sys.exit(gpu.main(sys.argv[1:]))
"""
    code, steps = Hour(tmp_path, 1.0, program=program).end()
    assert code == 1
    assert steps["extension"]["why"] == "the C extension does not work here: why"
    assert steps["after it"]["status"] == "not begun"


def test_parts_add_up_to_one_page_and_a_part_that_is_run_again_is_told_once(tmp_path):
    program = """
import sys
from benchmarks.gpu import __main__ as gpu, plan
from benchmarks.gpu.steps import Step
gpu.plan.steps = lambda part, **_: [Step("of " + part, 20, ("-c", "pass"))]
sys.exit(gpu.main(sys.argv[1:]))
"""
    for part in ("a", "b", "a"):
        code, steps = Hour(tmp_path, 1.0, part, program=program).end()
        assert code == 0
    assert {name: step["status"] for name, step in steps.items()} == {
        "of a": "good",
        "of b": "good",
    }
    unknown = Hour(tmp_path, 1.0, "d", program=program).process
    assert "no such part: d" in unknown.communicate(timeout=60)[1]
    assert unknown.returncode == 2


def rehearse(tmp_path, *arguments):
    command = [
        "-m",
        "benchmarks.gpu",
        "--quick",
        "--out",
        str(tmp_path / "out"),
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    steps = json.loads((tmp_path / "out" / "page.json").read_text())["steps"]
    return done, {step["name"]: step for step in steps}


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "only",
    [
        pytest.param(("facts", "ceilings"), id="some"),
        pytest.param((), id="all", marks=pytest.mark.slow),
    ],
)
def test_the_hour_is_rehearsed_over_the_simulated_driver(tmp_path, only):
    done, steps = rehearse(tmp_path, "--simulated", *(["--only", *only] if only else []))
    bad = {n: s for n, s in steps.items() if s["status"] not in ("good", "skipped")}
    assert done.returncode == 0, (bad, done.stderr)
    assert done.stdout.startswith("SIMULATED: no GPU was used"), done.stdout
    assert "2 devices" in steps["facts"]["figures"]["libcuda"]
    assert all(value > 0 for value in steps["ceilings"]["figures"].values())
    assert len(steps["ceilings"]["figures"]) >= 8
    if not only:
        rates = steps["rates, busy engine beside"]["figures"]
        assert rates["products/s beside"] > 0
        assert rates["load, host O_DIRECT, 64 KiB pages, GB/s"] > 0
        assert steps["order"]["status"] == steps["transports"]["status"] == "good"
        assert steps["kernels"]["why"] == "not over the simulation"


def test_without_a_gpu_a_step_says_that_it_is_missing(tmp_path):
    done, steps = rehearse(tmp_path, "--only", "rates, idle")
    assert done.returncode == 0
    assert {step["status"] for step in steps.values()} == {"skipped"}
    assert {step["why"] for step in steps.values()} == {"torch sees no CUDA device"}
