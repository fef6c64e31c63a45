"""Where trials.soak puts its root: a CephFS with two clients, or a directory, and what can be done to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import SubprocessError

from benchmarks.rig import BenchmarkError
from faults.disk import DiskFaults, build_library

_TESTS = Path(__file__).parent.parent / "tests"


class Directory:
    """A plain directory: nothing of it can be stalled or filled."""

    title = "a plain directory"
    can_stall = False
    _closed = False

    def __init__(self, path: str) -> None:
        """Make the root in a new directory below `path`."""
        self._path = tempfile.mkdtemp(prefix="fskv-soak-", dir=path)
        self._make_root(self._path, self._path)

    def _make_root(self, first: str, second: str) -> None:
        self.roots = f"{first}/kv", f"{second}/kv"  # the same one, as each engine reaches it
        os.mkdir(self.roots[0])

    def stall(self) -> None:
        raise NotImplementedError

    def fill(self) -> None:
        raise NotImplementedError

    def mend(self) -> None:
        """End a stall of the place, and make room in it."""

    def close(self) -> None:
        """Remove the place; calls that hang on it fail then. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._close()

    def _close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class FaultyDirectory(Directory):
    """A plain directory that can hang and be full, for each process that this one starts from now on."""

    title = "a plain directory under a fault shim"
    can_stall = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        library = build_library(self._path)
        if library is None:
            raise BenchmarkError("no C compiler: nothing can stall the directory")
        self._faults = DiskFaults(library, Path(self.roots[0]), Path(self._path, "faults"))
        os.environ.update(self._faults.env())

    def stall(self) -> None:
        calls = "open", "read", "pread", "write", "pwrite", "stat", "rename", "unlink", "mkdir"
        self._faults.set(*(f"{call} hang" for call in calls))

    def fill(self) -> None:
        self._faults.set(*(f"{call} ENOSPC" for call in ("write", "pwrite", "mkdir")))

    def mend(self) -> None:
        self._faults.clear()


class CephFS(Directory):
    """A CephFS on this machine, each engine on a client of its own."""

    title = "CephFS, two clients"
    can_stall = True

    def __init__(self) -> None:
        from shared_fs.ceph import Ceph

        self._ceph = Ceph()
        try:
            self._ceph.up()
            self._make_root(self._ceph.a.mount, self._ceph.b.mount)
        except BaseException as error:
            self._ceph.down()
            if isinstance(error, AssertionError | SubprocessError):
                raise BenchmarkError(f"CephFS does not start here: {error}") from None
            raise

    def stall(self) -> None:
        self._ceph.stall()

    def fill(self) -> None:
        self._ceph.limit_data(4096)

    def mend(self) -> None:
        self._ceph.undo()
        self._ceph.limit_data(0)
        self._ceph.mend()

    def _close(self) -> None:
        self._ceph.down()


def _no_ceph() -> str | None:
    sys.path.insert(0, str(_TESTS))
    from shared_fs.ceph import Ceph

    sentence: str | None = Ceph.missing()
    return sentence


@contextlib.contextmanager
def opened(root: str | None, scratch: str) -> Iterator[tuple[Directory, str]]:
    """Open the place and return it with a sentence on why it is no better one.

    `root` is a directory of the caller's choice. Without it CephFS is taken, and where that cannot run a
    directory below `scratch`.
    """
    why = ""
    if root is not None:
        place = Directory(root)
    elif not (why := _no_ceph() or ""):
        place = CephFS()
    else:
        place = FaultyDirectory(scratch)
    try:
        yield place, why
    finally:
        place.close()
