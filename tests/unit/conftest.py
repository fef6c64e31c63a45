"""Fixtures of several files here."""

from __future__ import annotations

import pytest
from capacity_lab import make_namespace
from world import Clock


@pytest.fixture
def namespace(tmp_path):
    """The directory of a namespace without chunks, in a root of its own."""
    return make_namespace(tmp_path)


@pytest.fixture
def root(namespace, tmp_path):
    """The root of that namespace."""
    return str(tmp_path)


@pytest.fixture
def clock():
    return Clock()
