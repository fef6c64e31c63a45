"""Fixtures of several files here."""

from __future__ import annotations

import contextlib

import pytest
from capacity_lab import make_namespace
from key_files import write_keys
from toy_engine import Engine
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
def engine(tmp_path):
    """Make toy engines on one root, `tmp_path/kv` or where it is seen; they are closed in the end."""
    (tmp_path / "kv").mkdir()
    with contextlib.ExitStack() as stack:

        def make(at=tmp_path / "kv", **options):
            options = {"max_bytes": "1 GiB", "keep_free": 0, **options}
            return stack.enter_context(contextlib.closing(Engine(str(at), **options)))

        yield make


@pytest.fixture
def key_file(tmp_path):
    """A key file with two keys, `a` and `c`."""
    write_keys(tmp_path / "keys", "a", "c")
    return tmp_path / "keys"


@pytest.fixture
def clock():
    return Clock()
