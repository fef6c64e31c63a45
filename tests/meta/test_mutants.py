"""The faults of trials.mutants fit the tree, and what the script says of one is so."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest
from places import REPOSITORY

from trials import mutants
from trials.mutant_kinds import FAULTS, Fault, FaultError

GOOD = Fault("good", "It has a name.", "fskv/__init__.py", "the", "a", ("tests/unit",))


def text_of(fault):
    return (REPOSITORY / fault.path).read_text()


def by_name(faults):
    return pytest.mark.parametrize("fault", faults, ids=[fault.name for fault in faults])


# --- the faults -------------------------------------------------------------------------


@by_name(FAULTS)
def test_a_fault_fits_the_tree_and_names_who_has_to_notice(fault):
    text = text_of(fault)
    assert text.count(fault.old) == 1
    assert fault.apply(text) == text.replace(fault.old, fault.new) != text
    assert fault.promise.endswith(".")
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert f"\ndef {name}" in (REPOSITORY / path).read_text(), test


@by_name([fault for fault in FAULTS if fault.path.endswith(".py")])
def test_a_faulty_module_compiles_and_is_another_program(fault):
    text = text_of(fault)
    faulty = compile(fault.apply(text), fault.path, "exec", dont_inherit=True)
    assert faulty != compile(text, fault.path, "exec", dont_inherit=True)


@by_name([fault for fault in FAULTS if fault.is_native])
def test_a_faulty_c_source_compiles(fault, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here (cc or gcc)")
    tree = shutil.copytree(REPOSITORY / "fskv" / "csrc", tmp_path / "csrc")
    source = tree / os.path.basename(fault.path)
    source.write_text(fault.apply(text_of(fault)))
    command = [compiler, "-std=gnu11", "-fsyntax-only", f"-I{sysconfig.get_paths()['include']}"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_is_one_of_each_name_and_some_of_each_kind():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12
    kinds = {os.path.splitext(fault.path)[1] for fault in FAULTS}
    assert kinds == {".py", ".c"}
    assert {fault.path.split("/")[0] for fault in FAULTS} == {"fskv", "tools"}


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("nothing of it", {"old": "gone"}, "is 0 times"),
        ("the one, the next", {}, "is 2 times"),
        ("the one", {"new": "the"}, "its new text is the old one"),
    ],
    ids=["gone", "twice", "no change"],
)
def test_negative_control_a_fault_that_does_not_fit_is_refused(text, changes, said):
    assert GOOD.apply("the one") == "a one"
    with pytest.raises(FaultError, match=said):
        dataclasses.replace(GOOD, **changes).apply(text)


def test_one_fault_that_does_not_fit_stops_the_command(monkeypatch, capsys):
    gone = dataclasses.replace(GOOD, name="gone", old="no such text")
    monkeypatch.setattr(mutants, "FAULTS", (*FAULTS, gone))
    with pytest.raises(FaultError, match="gone: its old text is 0 times"):
        mutants.chosen([])
    with pytest.raises(FaultError, match="no-such: no such fault"):
        mutants.chosen(["no-such"])
    assert mutants.chosen([FAULTS[0].name]) == [FAULTS[0]]


# --- the command ------------------------------------------------------------------------


def run(*words):
    """Run the command on a small selection; returns (exit code, facts)."""
    done = subprocess.run(
        [sys.executable, "-m", "trials.mutants", "--json", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert len(done.stdout.splitlines()) == 1, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done.returncode, json.loads(done.stdout)


needs_git = pytest.mark.skipif(
    not (REPOSITORY / ".git").exists(), reason="no checkout: the script copies what git knows"
)
FAULT = "group-page-size-not-in-identity"
NOTICED = "tests/unit/test_namespace.py -k every_field_of_a_group"
UNNOTICED = "tests/unit/test_namespace.py -k digest16_is_the_head"


@needs_git
@pytest.mark.slow
def test_a_fault_is_killed_by_the_test_that_is_for_it_and_survives_another_one():
    code, facts = run(FAULT, "--select", NOTICED)
    (one,) = facts["faults"]
    assert (code, facts["survived"], one["killed"], one["problem"]) == (0, [], True, "")
    assert one["by"].startswith("tests/unit/test_namespace.py::test_every_field_of_a_group")
    code, facts = run(FAULT, "--select", UNNOTICED)
    assert (code, facts["survived"], facts["faults"][0]["by"]) == (1, [FAULT], "")


@needs_git
def test_a_selection_of_nothing_is_a_problem_and_no_survivor():
    code, facts = run(FAULT, "--select", "tests/unit/test_namespace.py -k no_such_test")
    assert code == 2
    assert facts["survived"] == []
    assert facts["faults"][0]["problem"]


def test_a_test_that_fails_on_the_unchanged_tree_has_noticed_nothing(monkeypatch):
    kill = mutants.Result("fault", True, "tests/unit/test_x.py::test_x", "", True, 1.0)
    crash = dataclasses.replace(kill, by="ended by SIGSEGV")
    asked = []

    def test(_, words, *, stop):
        asked.append((words, stop))
        return failed

    monkeypatch.setattr(mutants.Copy, "__init__", lambda copy, directory: None)
    monkeypatch.setattr(mutants.Copy, "test", test)
    failed = []
    assert mutants.confirmed([kill, crash]) == [kill, crash]
    failed = [kill.by]
    first, second = mutants.confirmed([kill, crash])
    assert (first.killed, second) == (False, crash)
    assert "fails on the unchanged tree too" in first.problem
    assert asked == [([kill.by], False)] * 2


@pytest.mark.parametrize(
    ("near", "all_tests", "killed", "expected"),
    [(["a::b"], [], True, True), ([], ["c::d"], True, False), ([], [], False, False)],
    ids=["by its own", "by another", "survived"],
)
def test_its_own_tests_run_first_and_all_others_only_if_they_notice_nothing(
    monkeypatch, near, all_tests, killed, expected
):
    asked = []

    def test(_, words, *, stop=True):
        asked.append(words[0])
        return near if len(asked) == 1 else all_tests

    monkeypatch.setattr(mutants.Copy, "__init__", lambda copy, directory: None)
    monkeypatch.setattr(mutants.Copy, "make", lambda copy, fault: None)
    monkeypatch.setattr(mutants.Copy, "test", test)
    options = argparse.Namespace(select=None, near=False)
    fault = dataclasses.replace(GOOD, tests=("tests/unit/test_store.py",))
    result = mutants.examine(fault, options)
    assert (result.killed, result.expected, result.problem) == (killed, expected, "")
    assert result.by == "".join(near or all_tests)
    assert asked == ["tests/unit/test_store.py", "tests/unit"][: 1 if near else 2]
