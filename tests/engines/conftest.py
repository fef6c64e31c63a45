"""No engine outlives its test, and what each one cost is in the test's report."""

from __future__ import annotations

import engine_lab as lab
import pytest


@pytest.fixture(autouse=True)
def no_engine_is_left(request, record_property):
    failed_before = request.session.testsfailed
    yield
    started, left = lab.end_engines()
    record_property("engines", [engine.cost for engine in started])
    print(*started, sep="\n")  # pytest shows it where the test failed
    if request.session.testsfailed == failed_before:  # else that is what is to be read
        assert not left, f"outlived their test and were killed: {', '.join(map(str, left))}"
