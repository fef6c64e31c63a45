"""The workflow runs what `make test` runs, issue forms name what exists, `make wheel` sees what is wrong."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re

import pytest
import yaml
from places import REPOSITORY
from test_docs import check_commands, text_of

FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*[!g].yml"))  # not config.yml
WORKFLOW = ".github/workflows/ci.yml"


def check_workflow(text: str, makefile: str) -> None:
    """Each job runs targets of the Makefile; together lint and all of `make test`, on the oldest Python.

    What runs on a schedule alone are the contracts of the newest engines.
    """
    recipes = dict(re.findall(r"^([a-z-]+):.*## .*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    workflow = yaml.safe_load(text)
    run, now_and_then = set(), set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("target", ())
        scheduled = job.get("if") == "github.event_name == 'schedule'"
        for step in job["steps"]:
            for command in step.get("run", "").splitlines():
                target = re.fullmatch(r"make ([a-z-]+|\$\{\{ matrix\.target \}\})", command)[1]
                into = now_and_then if scheduled else run
                into |= set(matrix) if target.startswith("$") else {target}
            if "setup-python" in step.get("uses", ""):
                oldest = re.search(r'requires-python = ">=(.*)"', text_of("pyproject.toml"))[1]
                assert step["with"]["python-version"] == oldest
    assert run == {"setup", "lint", "test-unit", "test-engines"}
    assert now_and_then == {"setup", "test-newest"}
    assert run | now_and_then <= recipes.keys()
    # The two parts are the whole: the same marks, and one leaves out the folder that the other one is.
    whole, *parts = (
        re.findall(r"-m '.*?'", recipes[name]) for name in ("test", "test-unit", "test-engines")
    )
    assert parts == [whole, whole] != [[], []]
    assert "--ignore tests/engines" in recipes["test-unit"]
    assert recipes["test-engines"].rstrip().endswith(" tests/engines")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (WORKFLOW, "[lint, test-unit, ", "[lint, "),
        (WORKFLOW, "run: make test-newest", "run: make coffee"),
        (WORKFLOW, "    if: github.event_name == 'schedule'\n", ""),
        (WORKFLOW, '"3.11"', "3.11"),
        ("Makefile", "--ignore tests/engines", "--ignore tests/tools"),
    ],
)
def test_the_workflow_runs_what_make_test_and_make_lint_run_and_another_is_found(file, old, new):
    texts = {name: text_of(name) for name in (WORKFLOW, "Makefile")}
    check_workflow(*texts.values())
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new, 1)
    with pytest.raises((AssertionError, TypeError, KeyError)):
        check_workflow(*texts.values())


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_something_and_names_commands_that_exist(form):
    text = form.read_text(encoding="utf-8")
    fields = [one for one in yaml.safe_load(text)["body"] if one["type"] != "markdown"]
    assert any(one.get("validations", {}).get("required") for one in fields)
    check_commands(form.name, text)


# --- make wheel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel():
    loader = importlib.machinery.SourceFileLoader("ci_wheel", str(REPOSITORY / ".ci" / "wheel"))
    spec = importlib.util.spec_from_loader("ci_wheel", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


TREE = [
    *("fskv/a.py", "fskv/_native.pyi", "fskv/py.typed", "fskv/csrc/a.c"),
    *("tools/b/c.py", "tests/d.py"),
]
WHEEL = {
    *("fskv/", "fskv/a.py", "fskv/_native.pyi", "fskv/py.typed", "fskv_tools/b/c.py"),
    *("fskv/_native.cpython-311-x86_64-linux-gnu.so", "fskv-0.1.0.dist-info/METADATA"),
}


def test_a_wheel_has_the_packages_and_nothing_else(wheel):
    assert wheel.wrong_contents(WHEEL, TREE) == []
    for lost in WHEEL - {"fskv/", "fskv-0.1.0.dist-info/METADATA"}:
        assert len(wheel.wrong_contents(WHEEL - {lost}, TREE)) == 1, lost
    for more in ("tests/d.py", "fskv/csrc/a.c", "tools/b/c.py", "fskv/docs.md"):
        assert wheel.wrong_contents(WHEEL | {more}, TREE) == [f"has {more}"]
