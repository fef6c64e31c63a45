"""Where the time of a test run goes: every test's seconds in a file, and a summary at the end of the run.

    pytest --timings=FILE

The file is JSON: for each test its outcome, the worker that ran it, the seconds of set-up, call and
tear-down, and what its engines cost. With several workers the summary's seconds add up to more than the
run's.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path

_NUM_SLOWEST = 10
_NUM_FILES = 15


def pytest_addoption(parser):
    parser.addoption("--timings", metavar="FILE", help="write each test's seconds to FILE")


def pytest_configure(config):
    path = config.getoption("--timings")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings(Path(path)), "timings-of-this-run")


class Timings:
    """The reports of all workers, as they come."""

    def __init__(self, path):
        self._path = path
        self._begin = time.monotonic()
        self._tests = defaultdict(lambda: {"seconds": {}, "outcome": "passed", "engines": []})

    def pytest_runtest_logreport(self, report):
        test = self._tests[report.nodeid]
        test["seconds"][report.when] = round(report.duration, 3)
        test["worker"] = getattr(report, "worker_id", "main")
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            test["engines"] = dict(report.user_properties).get("engines", [])

    def pytest_terminal_summary(self, terminalreporter, exitstatus, config):
        wall_s = time.monotonic() - self._begin
        whole = {
            "arguments": list(config.invocation_params.args),
            "exit_status": int(exitstatus),
            "wall_s": round(wall_s, 1),
            "cores": os.cpu_count(),
            "tests": dict(self._tests),
        }
        say = terminalreporter.write_line
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(whole, indent=1))
        except OSError as error:
            say(f"{self._path} cannot be written: {error}")
        terminalreporter.section("where the time went")
        for line in summary(self._tests, wall_s):
            say(line)
        say(f"each test: {self._path}")


def summary(tests, wall_s):
    """Return the lines: by file, by engine starts, the slowest tests."""
    spent = {name: sum(test["seconds"].values()) for name, test in tests.items()}
    files, counts, starts = defaultdict(float), defaultdict(int), defaultdict(int)
    for name, seconds in spent.items():
        file = name.partition("::")[0]
        files[file] += seconds
        counts[file] += 1
        starts[file] += len(tests[name]["engines"])
    yield f"{wall_s:.0f} s, {len(tests)} tests, {sum(spent.values()):.0f} s of tests"
    engines = [engine for test in tests.values() for engine in test["engines"]]
    if engines:
        forked = sum(engine["forked"] for engine in engines)
        sums = {
            name: sum(engine.get(name, 0.0) for engine in engines)
            for name in ("life_s", "import_s", "engine_start_s")
        }
        yield (
            f"{len(engines)} engines ({forked} forked), {sums['life_s']:.0f} s of life: "
            f"{sums['import_s']:.0f} s of imports, {sums['engine_start_s']:.0f} s of starts"
        )
    yield f"{'seconds':>9} {'tests':>6} {'engines':>8}  by file"
    ranked = sorted(files, key=files.get, reverse=True)
    for file in ranked[:_NUM_FILES]:
        yield f"{files[file]:9.1f} {counts[file]:6} {starts[file]:8}  {file}"
    rest = ranked[_NUM_FILES:]
    if rest:
        yield (
            f"{sum(files[f] for f in rest):9.1f} {sum(counts[f] for f in rest):6} "
            f"{sum(starts[f] for f in rest):8}  {len(rest)} other files"
        )
    yield f"{'seconds':>9}  slowest tests"
    for name in sorted(spent, key=spent.get, reverse=True)[:_NUM_SLOWEST]:
        yield f"{spent[name]:9.1f}  {name}"
