"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path

import places
import pytest
from native_build import build
from world import World

# Tests run beside each other: more threads for torch only wait for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it puts into the background with Ctrl-C ignored, and a process passes that on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What commands do and write depends on these, and whoever runs the tests may have them. Two of them readline
# sets for children alone, at its import.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401
for name in (
    "FSKV_ROOT",
    *("COLUMNS", "LINES", "TERMINAL_WIDTH"),
    *("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"),
    "PYTHONDONTWRITEBYTECODE",
):
    os.environ.pop(name, None)
    os.unsetenv(name)

# Else each worker rewrites every assertion again, and each command that is started compiles fskv again.
sys.dont_write_bytecode = False


@pytest.fixture(scope="session", autouse=True)
def directory_of_this_run(request, tmp_path_factory):
    own = tmp_path_factory.getbasetemp()
    is_worker = hasattr(request.config, "workerinput")  # its own directory is in the run's
    places.run_directory = own.parent if is_worker else own


# Longest first: one that begins late keeps one worker busy when the others have ended.
LONG = (
    "unit/test_transport_faults.py",
    "unit/test_encryption.py",
    "meta/test_operations.py",
    "tools/test_doctor.py",
    "unit/test_capacity.py",
    "tools/test_cli_roots.py",
    "tools/test_interrupt.py",
    "tools/test_cli.py",
    "meta/test_storm.py",
    "meta/test_fuzz.py",
    "tools/test_top.py",
)


def pytest_collection_modifyitems(items):
    """Engines first: they take longest. Then long files; what is short fills the gaps of several workers."""
    tests = Path(__file__).parent

    @functools.cache
    def place(path):
        name = path.relative_to(tests).as_posix()
        if name.startswith("engines/"):
            return -1
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=lambda item: place(item.path))


@contextlib.contextmanager
def environment_stays():
    """Put back what is done to the environment: vLLM sets LD_PRELOAD and more."""
    before = dict(os.environ)
    try:
        yield
    finally:
        now = os.environ.get("PYTEST_CURRENT_TEST")
        os.environ.clear()
        os.environ.update(before)
        if now is not None:
            os.environ["PYTEST_CURRENT_TEST"] = now


@pytest.fixture(autouse=True)
def environment_of_a_test_stays():
    with environment_stays():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """What a fixture of several tests makes in this process leaves the environment as it was."""
    with contextlib.nullcontext() if fixturedef.scope == "function" else environment_stays():
        return (yield)


@pytest.fixture(scope="session")
def native_library(request, tmp_path_factory):
    """Build a C source of the tests into pytest's cache: `native_library("disk")` is its path."""
    cache = getattr(request.config, "cache", None)
    directory = cache.mkdir("native") if cache else tmp_path_factory.mktemp("native")
    return lambda name, *flags, **how: build(name, directory, *flags, **how)


@pytest.fixture
def make_world(tmp_path):
    """Make Worlds on one root; what hangs in them is released at the end."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            world = World(options.pop("root", tmp_path / "kv"), **options)
            if hasattr(world.transport, "release"):
                stack.callback(world.transport.release)
            return world

        yield make


@pytest.fixture
def world(make_world):
    return make_world()
