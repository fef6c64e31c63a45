"""What CONTRIBUTING.md, the workflow and the issue forms name exists, and `make wheel` sees what is wrong.

Links and make targets of the documents are in test_docs.py. Every check takes the text, so that each can be
shown to fail.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess

import pytest
import yaml
from places import REPOSITORY
from test_docs import text_of

from fskv import __version__

DOCUMENTS = ["CONTRIBUTING.md", "CHANGELOG.md", ".github/pull_request_template.md"]
FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*[!g].yml"))  # not config.yml
WORKFLOW = ".github/workflows/ci.yml"


def targets_of(makefile: str) -> dict[str, str]:
    """Return the recipe of each documented target."""
    return dict(re.findall(r"^([a-z-]+):.*## .*\n((?:\t.*\n)+)", makefile, re.MULTILINE))


def check_paths(text: str) -> None:
    """Paths of the tree, alone in backticks or as a word of a command there, exist."""
    tops = "|".join(re.escape(one.name) for one in REPOSITORY.iterdir() if one.is_dir())
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", prose):
        for path in re.findall(rf"(?<![\w./-])((?:{tops})/[\w./-]*\w|[A-Z]+\.md)", code):
            assert (REPOSITORY / path).exists(), path


def check_commands(text: str) -> None:
    cli = pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
    named = set(re.findall(r"`fskv ([a-z]+)", text))
    assert named <= {entry.name for entry in cli.COMMANDS}, named


def check_options(text: str) -> None:
    """Each option of a command of fskv that a text shows is one of that command."""
    manual = text_of("docs/cli.md")
    for name, words in re.findall(r"`fskv ([a-z]+)([^`]*)`", text):
        section = manual.partition(f"\n## fskv {name}\n")[2].partition("\n## ")[0]
        for option in re.findall(r"--[a-z-]+", words):
            assert f"`{option}`" in section, f"fskv {name} {option}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document):
    text = text_of(document)
    check_commands(text)
    check_options(text)
    check_paths(text)


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (check_paths, "`tests/unit/test_config.py`", "`tests/unit/test_confg.py`"),
        (check_paths, "ARGS='tests/adapter'", "ARGS='tests/adaptor'"),
        (check_paths, "`.ci/wheel`", "`.ci/wheels`"),
        (check_paths, "tests/unit/test_native.py tests", "tests/unit/test_natives.py tests"),
        (check_commands, "`fskv prune --watch`", "`fskv trim --watch`"),
        (check_options, "`fskv prune --watch`", "`fskv prune --see`"),
    ],
)
def test_negative_control_a_name_of_nothing_is_found(check, old, new):
    text = text_of("CONTRIBUTING.md")
    assert old in text
    with pytest.raises(AssertionError):
        check(text.replace(old, new))


# --- the release ------------------------------------------------------------------------------


def check_versions(changelog: str, *others: str) -> None:
    """Say that the newest version is the package's, after what is not released."""
    titles = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert titles[0] == "Unreleased"
    for title in titles[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", title), title
    assert all(title.startswith(f"{__version__} ") for title in titles[1:2])
    kinds = set(re.findall(r"^### (.*)$", changelog, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for text in others:
        assert re.search(rf"(?<![\d.]){re.escape(__version__)}(?![\d.]*\d)", text)


PLACES = ("README.md", "deploy/kubernetes/fskv.yaml")


def test_every_place_has_the_version_of_the_package():
    assert all(f"`{name}`" in text_of("CONTRIBUTING.md") for name in PLACES)
    check_versions(text_of("CHANGELOG.md"), *map(text_of, PLACES))


@pytest.mark.parametrize(
    "new",
    [
        f"## {__version__} - 2026-01-01",
        "## Unreleased\n\n## 99.0.0 - 2026-01-01",
        f"## Unreleased\n\n## {__version__}",
        "## Unreleased\n\n### Closed",
    ],
)
def test_negative_control_another_form_of_the_changelog_is_found(new):
    changelog = text_of("CHANGELOG.md")
    assert changelog.count("## Unreleased") == 1
    with pytest.raises(AssertionError):
        check_versions(changelog.replace("## Unreleased", new))


def test_negative_control_another_version_is_found():
    changelog, readme = text_of("CHANGELOG.md"), text_of("README.md")
    with pytest.raises(AssertionError):
        check_versions(changelog, readme.replace(__version__, f"{__version__}1"))


# --- what GitHub reads ------------------------------------------------------------------------


def check_workflow(text: str, makefile: str) -> None:
    """Each job runs targets of the Makefile; together lint and all of `make test`, on the oldest Python.

    What runs on a schedule alone are the contracts of the newest engines.
    """
    recipes = targets_of(makefile)
    workflow = yaml.safe_load(text)
    now_and_then = set()
    run = set()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("target", ())
        scheduled = job.get("if") == "github.event_name == 'schedule'"
        for step in job["steps"]:
            for command in step.get("run", "").splitlines():
                (target,) = re.fullmatch(
                    r"make ([a-z-]+|\$\{\{ matrix\.target \}\})", command
                ).groups()
                targets = set(matrix) if target.startswith("$") else {target}
                if scheduled:
                    now_and_then |= targets
                else:
                    run |= targets
            if "setup-python" in step.get("uses", ""):
                oldest = re.search(r'requires-python = ">=(.*)"', text_of("pyproject.toml"))[1]
                assert step["with"]["python-version"] == oldest
    assert run == {"setup", "lint", "test-unit", "test-engines"}
    assert now_and_then == {"setup", "test-newest"}
    (when,) = workflow[True]["schedule"]  # what YAML makes of `on`
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", when["cron"]), "once a week"
    assert run | now_and_then <= recipes.keys()
    # The two parts are the whole: the same marks, and one leaves out the folder that the other one is.
    marks = {
        name: re.findall(r"-m '.*?'", recipes[name])
        for name in ("test", "test-unit", "test-engines")
    }
    assert marks["test"] == marks["test-unit"] == marks["test-engines"] != []
    assert "--ignore tests/engines" in recipes["test-unit"]
    assert recipes["test-engines"].rstrip().endswith(" tests/engines")


def test_the_workflow_runs_what_make_test_and_make_lint_run():
    check_workflow(text_of(WORKFLOW), text_of("Makefile"))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (WORKFLOW, "[lint, test-unit, ", "[lint, "),
        (WORKFLOW, "run: make ${{", "run: make coffee ${{"),
        (WORKFLOW, "run: make test-newest", "run: make coffee"),
        (WORKFLOW, "run: make test-newest", "run: pip install ."),
        (WORKFLOW, "    if: github.event_name == 'schedule'\n", ""),
        (WORKFLOW, "* * 1", "* * *"),
        (WORKFLOW, '"3.11"', "3.11"),
        ("Makefile", "--ignore tests/engines", "--ignore tests/tools"),
        ("Makefile", "test-engines: ", "test-engine: "),
    ],
)
def test_negative_control_another_workflow_is_found(file, old, new):
    texts = {name: text_of(name) for name in (WORKFLOW, "Makefile")}
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new, 1)
    with pytest.raises((AssertionError, AttributeError, KeyError)):
        check_workflow(*texts.values())


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_something_and_names_commands_that_exist(form):
    text = form.read_text(encoding="utf-8")
    fields = [one for one in yaml.safe_load(text)["body"] if one["type"] != "markdown"]
    assert any(one.get("validations", {}).get("required") for one in fields)
    assert len({one["id"] for one in fields}) == len(fields)
    check_commands(text)
    check_options(text)


def test_a_report_of_wrong_output_brings_what_is_needed_to_judge_it():
    (form,) = (one for one in FORMS if one.stem == "wrong-output")
    wanted = {"explain", "inspect", "doctor", "versions", "namespace"}
    fields = yaml.safe_load(form.read_text(encoding="utf-8"))["body"]
    assert wanted <= {one.get("id") for one in fields if one.get("validations", {}).get("required")}


# --- make wheel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel():
    loader = importlib.machinery.SourceFileLoader("ci_wheel", str(REPOSITORY / ".ci" / "wheel"))
    spec = importlib.util.spec_from_loader("ci_wheel", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


TREE = [
    "fskv/a.py",
    "fskv/_native.pyi",
    "fskv/py.typed",
    "fskv/csrc/a.c",
    "tools/b/c.py",
    "tests/d.py",
]
WHEEL = {
    *("fskv/", "fskv/a.py", "fskv/_native.pyi", "fskv/py.typed", "fskv_tools/b/c.py"),
    *("fskv/_native.cpython-311-x86_64-linux-gnu.so", "fskv-0.1.0.dist-info/METADATA"),
}


def test_a_wheel_has_the_packages_and_nothing_else(wheel):
    assert wheel.wrong_contents(WHEEL, TREE) == []
    for lost in WHEEL - {"fskv/", "fskv-0.1.0.dist-info/METADATA"}:
        assert len(wheel.wrong_contents(WHEEL - {lost}, TREE)) == 1, lost
    for more in (
        "tests/d.py",
        "fskv/csrc/a.c",
        "tools/b/c.py",
        "fskv/docs.md",
        "fskv_tools/old.py",
    ):
        assert wheel.wrong_contents(WHEEL | {more}, TREE) == [f"has {more}"]


def test_the_files_of_this_tree_that_belong_into_a_wheel_are_found(wheel):
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a clone of git")
    expected = wheel.expected_files(done.stdout.split("\0"))
    assert {"fskv/py.typed", "fskv/__init__.py", "fskv_tools/__main__.py"} <= expected
    assert not [name for name in expected if name.startswith("tests") or "csrc" in name]


def test_a_wheel_whose_extension_is_not_used_or_whose_chunks_are_not_loaded_is_found(wheel):
    good = {"stored": 2, "loaded": 2, "same": True}
    assert wheel.wrong_engine(good) == []
    for bad in ({"loaded": 0}, {"stored": 0}, {"same": False}):
        assert len(wheel.wrong_engine({**good, **bad})) == 1
    version = {"version": "1.0.0", "native": True}
    assert wheel.wrong_version(version, "1.0.0", native=True) == []
    assert len(wheel.wrong_version(version, "1.0.1", native=False)) == 2
