"""The table of promises, tests/promises.tsv: each test and control exists, and runs where the table says.

Test files are read, not imported. Every check takes the texts, so that each can be shown to fail.
"""

from __future__ import annotations

import ast
import functools
import re

import pytest
from places import REPOSITORY
from test_docs import rows, text_of

from trials.mutants import read_faults

FAILURES = "What happens when"  # its rows are those of README's table, each on a real engine
FAULTS = read_faults()


def is_slow(decorator: ast.expr) -> bool:
    """Say of a mark whether it makes a test slow, and of parameters whether all of them are."""
    text = ast.unparse(decorator)
    if not isinstance(decorator, ast.Call) or text.startswith("pytest.mark.slow"):
        return text.startswith("pytest.mark.slow")
    if not text.startswith("pytest.mark.parametrize"):  # on("fast", slow=("others",))
        return not decorator.args and any(word.arg == "slow" for word in decorator.keywords)
    cases = getattr(decorator.args[1], "elts", [])
    return bool(cases) and all("pytest.mark.slow" in ast.unparse(case) for case in cases)


def place_in(tree: ast.Module, name: str) -> str:
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"there is no {name}"
    decorators = [assigned.get(ast.unparse(one), one) for one in found[0].decorator_list]
    module = ast.unparse(assigned.get("pytestmark", ast.Constant("")))
    for mark in ("shared_fs", "sglang", "pd", "lmcache", "gpu"):
        if any(f"pytest.mark.{mark}" in text for text in (module, *map(ast.unparse, decorators))):
            return mark
    if any(
        isinstance(node, ast.If) and "FSKV_VLLM_PATH" in ast.unparse(node) for node in tree.body
    ):
        return "versions"
    return "slow" if "pytest.mark.slow" in module or any(map(is_slow, decorators)) else "test"


parsed = functools.cache(lambda file: ast.parse(file.read_text(encoding="utf-8")))


@functools.cache
def place(reference: str) -> str:
    """Return where a test runs; a test of which some cases are not slow runs in `make test`."""
    path, _, name = reference.partition("::")
    file = REPOSITORY / "tests" / path
    assert re.fullmatch(r"\w+/test_\w+\.py", path), reference
    assert file.is_file(), f"there is no {path}"
    return place_in(parsed(file), name)


def check_control(control: str, test: str, where: str) -> None:
    """Another test, words that say what the control is, or deliberate faults that the test notices."""
    words, *mutants = re.split(r"`?(?:; )?mutant `([a-z-]+)`?", control)
    for name in mutants[::2]:
        assert name in FAULTS, f"there is no mutant {name}"
        assert where == "test", f"make mutants runs no test that is {where}"
    if not re.fullmatch(r"(same test|none): .*\w+ \w+.*", words) and (words or not mutants):
        assert words != test
        assert place(words) in (where, "test"), test


def check(text: str, readme: str) -> None:
    header, *lines = text.splitlines()
    assert header == "section\tpromise\ttest\tcontrol\twhere"
    promises = [line.split("\t") for line in lines]
    assert len({promise for _, promise, *_ in promises}) == len(promises), (
        "a promise is there twice"
    )
    for _, promise, test, control, where in promises:
        assert place(test) == where, promise
        check_control(control, test, where)
    failures = [row for row in promises if row[0] == FAILURES]
    assert [row[1] for row in failures] == list(rows(readme, "the disk"))
    for _, promise, test, _, where in failures:
        assert test.startswith("engines/"), promise
        assert where == "test", promise


def test_every_promise_has_a_test_that_exists_and_runs_where_the_table_says():
    check(text_of("tests/promises.tsv"), text_of("README.md"))


def with_control(text: str):
    return lambda line: line.replace(line.split("\t")[3], text)


DOCTORS = {
    "a test's name": lambda line: line.replace("::test_", "::test_no_", 1),
    "a control's name": lambda line: "::test_no_".join(line.rsplit("::test_", 1)),
    "a place": lambda line: line.replace("\ttest", "\tslow"),
    "a promise": lambda line: line.replace("\t", "\tsometimes ", 1),
    "a mutant that is not there": with_control("mutant `no-such-mutant`"),
    "the test itself": lambda line: line.replace(line.split("\t")[3], line.split("\t")[2]),
}


@pytest.mark.parametrize("how", DOCTORS)
def test_negative_control_a_doctored_table_fails(how):
    text = text_of("tests/promises.tsv")
    (line,) = re.findall(r"^.*\tis full.*$", text, re.MULTILINE)
    changed = DOCTORS[how](line)
    assert changed != line
    with pytest.raises(AssertionError):
        check(text.replace(f"{line}\n", changed and f"{changed}\n"), text_of("README.md"))


def test_negative_control_a_new_row_of_the_readme_needs_a_promise():
    readme, row = text_of("README.md"), "\n| is missing at start |"
    assert readme.count(row) == 1
    with pytest.raises(AssertionError):
        check(text_of("tests/promises.tsv"), readme.replace(row, f"\n| is on fire | a | b |{row}"))
