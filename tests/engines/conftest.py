"""What tests with real engines share: a root, its disk, and that no engine outlives its test."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess

import engine_lab as lab
import pytest

from faults.disk import DiskFaults


@pytest.fixture(autouse=True)
def no_engine_is_left(request):
    failed_before = request.session.testsfailed
    yield
    started, left = lab.end_engines()
    print(*started, sep="\n")  # pytest shows it where the test failed
    if request.session.testsfailed == failed_before:  # else that is what is to be read
        assert not left, f"outlived their test and were killed: {', '.join(map(str, left))}"


@pytest.fixture
def root(tmp_path) -> str:
    """An empty root."""
    (tmp_path / "root").mkdir()
    return str(tmp_path / "root")


@pytest.fixture
def roots(tmp_path) -> tuple[str, str]:
    """Two empty roots, "fast" and "slow"."""
    for name in ("fast", "slow"):
        (tmp_path / name).mkdir()
    return str(tmp_path / "fast"), str(tmp_path / "slow")


@pytest.fixture
def faults(root, tmp_path, native_library) -> DiskFaults:
    """The faults of the disk that the root is on, for engines that have their environment."""
    return DiskFaults(native_library("disk"), pathlib.Path(root), tmp_path / "faults")


@pytest.fixture
def small_disk():
    """Mount file systems of so many bytes of their own, for a test: `small_disk(directory, "512k")`."""
    with contextlib.ExitStack() as stack:

        def mount(at: str, size: str) -> str:
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "fskv-test", at]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if done.returncode:
                pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", at], timeout=60, check=True)
            return at

        yield mount
