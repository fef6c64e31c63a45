"""No engine outlives its test, and what each one cost is in the test's report."""

from __future__ import annotations

import engine_lab as lab
import pytest


@pytest.fixture(autouse=True)
def no_engine_is_left(request, record_property):
    failed_before = request.session.testsfailed
    yield
    costs, num_left = lab.end_engines()
    record_property("engines", costs)
    if request.session.testsfailed == failed_before:  # else that is what is to be read
        assert not num_left, f"{num_left} engines outlived their test and were killed"
