"""The prefill rate in a namespace is a hint: any content of its file is a number or none."""

from __future__ import annotations

import os
import pathlib

import pytest
from world import make_identity, returns_in_time

from fskv.root.prefill_rate import read_prefill_rate, write_prefill_rate
from fskv.root.remove import Fate, remove_namespace
from fskv.root.root import RATE_FILE, Root


@pytest.fixture
def directory(tmp_path):
    return Root.open(str(tmp_path), create=True).open_namespace(make_identity())


def test_the_last_rate_is_read_by_the_next_engine(directory):
    assert read_prefill_rate(directory) is None
    for rate in (812.44, 95.0):
        write_prefill_rate(directory, rate)
        assert read_prefill_rate(directory) == round(rate, 1)
    assert os.listdir(directory.tmp_dir) == []
    assert os.stat(f"{directory.path}/{RATE_FILE}").st_mode & 0o777 == directory.file_mode


@pytest.mark.parametrize(
    "content",
    [b"", b"nan", b"inf", b"-5", b"0", b"5e-324", b"1e12", b"fast", b"\xff\xfe", b"1" * 65],
)
def test_what_is_no_rate_is_none(directory, content):
    pathlib.Path(directory.path, RATE_FILE).write_bytes(content)
    assert read_prefill_rate(directory) is None


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/hostname", path)]
)
def test_what_stands_in_its_place_holds_nobody_up(directory, make):
    make(f"{directory.path}/{RATE_FILE}")
    assert returns_in_time(lambda: read_prefill_rate(directory) is None)


def test_an_engine_that_only_loads_leaves_none(directory, tmp_path):
    only_loads = Root.open(str(tmp_path), create=False, writable=False)
    write_prefill_rate(only_loads.open_namespace(make_identity()), 812.0)
    assert not os.path.lexists(f"{directory.path}/{RATE_FILE}")


def test_it_goes_with_its_namespace(directory, tmp_path):
    write_prefill_rate(directory, 812.0)
    assert remove_namespace(str(tmp_path), directory.path).fate is Fate.GOES
    assert not os.path.exists(directory.path)
