"""tests/conftest.py: one test's environment is not the next one's, and long files begin early."""

import os
import re

import pytest
from places import REPOSITORY

LEFT = "FSKV_LEFT_BY_A_FIXTURE"


@pytest.fixture(scope="module")
def one_of_several_tests():
    os.environ[LEFT] = "1"
    return os.environ[LEFT]


@pytest.fixture
def one_of_a_single_test():
    os.environ[LEFT] = "1"


def test_a_fixture_of_several_tests_leaves_the_environment_as_it_was(one_of_several_tests):
    assert one_of_several_tests == "1"
    assert LEFT not in os.environ


@pytest.mark.parametrize("again", range(2))
def test_a_fixture_of_a_test_may_set_what_its_test_needs(again, request):
    assert LEFT not in os.environ
    request.getfixturevalue("one_of_a_single_test")
    assert LEFT in os.environ


def test_each_file_that_begins_early_is_there():
    """A renamed one would begin late, and nobody would notice."""
    text = (REPOSITORY / "tests" / "conftest.py").read_text(encoding="utf-8")
    named = re.findall(r'^ {4}"(\w+/test_\w+\.py)",$', text, re.MULTILINE)
    assert len(named) > 5
    assert [name for name in named if not (REPOSITORY / "tests" / name).is_file()] == []
