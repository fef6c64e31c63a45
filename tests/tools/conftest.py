"""Fixtures of the tests of the command line."""

from __future__ import annotations

import os

import pytest
from tool_lab import Lab

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.shared_files import SharedFiles


@pytest.fixture
def lab(tmp_path):
    """Make an empty root."""
    return Lab(tmp_path / "kv")


@pytest.fixture
def shared(lab):
    """Make the directory of a root in which engines and watchers tell each other things."""
    os.makedirs(f"{lab.path}/{SHARED_DIR}")
    return SharedFiles(f"{lab.path}/{SHARED_DIR}")
