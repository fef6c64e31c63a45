"""No engine outlives its test."""

from __future__ import annotations

import engine_lab as lab
import pytest


@pytest.fixture(autouse=True)
def no_engine_is_left(request):
    failed_before = request.session.testsfailed
    yield
    started, left = lab.end_engines()
    print(*started, sep="\n")  # pytest shows it where the test failed
    if request.session.testsfailed == failed_before:  # else that is what is to be read
        assert not left, f"outlived their test and were killed: {', '.join(map(str, left))}"
