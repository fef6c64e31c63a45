"""What the real kvikio does with bytes and errors, as found with version 26.10; GdsTransport relies on it.

It runs in a child process, by its compat path with bounce buffers, on memory of the simulated driver
(cuda_sim.py). No GPU, no GPUDirect. Under the fault shim (faults/disk.py): kvikio calls libc outside of the
interpreter. What fskv makes of all this is in test_gds.py and test_transport_faults.py.

Facts, each held by a test:

- Offsets and sizes need no alignment; nothing beside the range is written, in the buffer or in the file.
- A file is opened twice, the second time with O_DIRECT (even if no direct I/O is done); links are
  followed; close-on-exec is set.
- Errors are RuntimeErrors without an errno: a text with the place in the source, ending with strerror's
  words. EBADF too says "Operation not permitted", but without "on pread": it does not mean EPERM.
- A read beyond the end raises "EOF", and the bytes before the end are in the buffer by then.
- EINTR is not tried again.
"""

from __future__ import annotations

import errno
import os

import gds_lab
import pytest
from places import LAB

from faults.disk import Child, DiskFaults

CHILD = r"""
import ctypes, json, os, sys
sys.path.insert(0, os.environ["FSKV_TEST_DIR"])
from cuda_sim import simulation
from fskv.transports.cuda import Driver, _Allocation
import numpy as np
sim = simulation()  # before kvikio looks for a libcuda
import kvikio
driver = Driver(0)
buffer = _Allocation(driver, 4 << 20)
there = (ctypes.c_uint8 * (4 << 20)).from_address(sim.open_address(buffer.address))
memory = np.frombuffer(there, np.uint8)
state = {}
def fill(seed):
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.nbytes, np.uint8)
def set_bytes(value):
    memory[:] = value
def all_are(start, stop, value):
    return bool((memory[start:stop] == value).all())
def read_by(file, nbytes, offset=0, at=0):
    with driver.current():
        return file.raw_read(buffer, nbytes, offset, at)
def write_by(file, nbytes, offset=0, at=0):
    with driver.current():
        return file.raw_write(buffer, nbytes, offset, at)
def read(path, *where):
    with kvikio.CuFile(path, "r") as file:
        return read_by(file, *where)
def write(path, *where):
    with kvikio.CuFile(path, "r+") as file:
        return write_by(file, *where)
def same_as_file(path, at, offset, nbytes):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes) == memory[at : at + nbytes].tobytes()
def opened(path, flags="r"):
    state["file"] = kvikio.CuFile(path, flags)
    return state["file"]
def fds_of(path):
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                lines = open(f"/proc/self/fdinfo/{fd}").read().split()
                found.append(int(lines[lines.index("flags:") + 1], 8))
        except OSError:
            pass
    return sorted(found)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    try:
        result = eval(line)
    except Exception as error:
        result = [type(error).__name__, str(error)]
    print(json.dumps(result, default=str), flush=True)
"""


class Lab:
    def __init__(self, native_library, work):
        self.disk = work / "disk"
        self.disk.mkdir()
        self.faults = DiskFaults(native_library("disk"), self.disk, work / "state")
        own = {"FSKV_TEST_DIR": str(LAB)}
        self.child = Child(CHILD, {**os.environ, **self.faults.env(), **own})
        assert self.faults.attached >= 1
        self._num_files = 0

    def file(self, nbytes=0):
        """Make a file with random bytes; returns its path, as the child writes it."""
        self._num_files += 1
        path = self.disk / f"{self._num_files}.kv"
        path.write_bytes(os.urandom(nbytes))
        return path

    def __call__(self, expression, **names):
        for name, value in names.items():
            expression = expression.replace(f"<{name}>", repr(str(value)))
        return self.child(expression)

    def text_of(self, expression, **names):
        """Return the message of the RuntimeError that the expression must raise."""
        kind, text = self(expression, **names)
        assert kind == "RuntimeError", (kind, text)
        return text


@pytest.fixture(scope="module")
def running(native_library, tmp_path_factory):
    gds_lab.needs_kvikio()
    lab = Lab(native_library, tmp_path_factory.mktemp("kvikio"))
    yield lab
    lab.faults.clear()
    lab.child.close()


@pytest.fixture
def lab(running):
    running.faults.clear()
    yield running
    running.faults.clear()


@pytest.mark.parametrize(
    ("nbytes", "offset", "at"),
    [(1 << 20, 0, 0), (262_144, 4096, 4096), (12_345, 777, 3), (1, 4095, 1), (5000, 1 << 20, 4095)],
)
def test_bytes_arrive_and_nothing_beside_them_changes(lab, nbytes, offset, at):
    path = lab.file(2 << 20)
    before = path.read_bytes()
    lab("fill(1)")
    assert lab(f"write(<path>, {nbytes}, {offset}, {at})", path=path) == nbytes
    assert lab(f"same_as_file(<path>, {at}, {offset}, {nbytes})", path=path)
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after[:offset] == before[:offset]
    assert after[offset + nbytes :] == before[offset + nbytes :]
    lab("set_bytes(0x5A)")
    assert lab(f"read(<path>, {nbytes}, {offset}, {at})", path=path) == nbytes
    assert lab(f"same_as_file(<path>, {at}, {offset}, {nbytes})", path=path)
    assert lab(f"all_are(0, {at}, 0x5A) and all_are({at + nbytes}, None, 0x5A)")


@pytest.mark.parametrize("flags", ["r", "r+"])
@pytest.mark.parametrize("link", [False, True])
def test_a_file_is_opened_twice_and_the_second_time_direct(lab, flags, link):
    path = name = lab.file(5000)
    if link:
        name = lab.disk / f"{path.name}.link"
        name.symlink_to(path)
    lab("opened(<path>, <flags>) and None", path=name, flags=flags)
    flags_of_fds = lab("fds_of(<path>)", path=path)
    assert len(flags_of_fds) == 2
    assert [bool(found & os.O_DIRECT) for found in flags_of_fds] == [False, True]
    assert all(found & os.O_CLOEXEC for found in flags_of_fds)
    assert not any(found & (os.O_NOFOLLOW | os.O_NONBLOCK) for found in flags_of_fds)
    lab("state['file'].close()")
    assert lab("fds_of(<path>)", path=path) == []


@pytest.mark.parametrize(("nbytes", "offset"), [(6000, 0), (8192, 0), (100, 10_000), (1, 5000)])
def test_a_read_beyond_the_end_says_eof_and_has_filled_the_buffer_up_to_it(lab, nbytes, offset):
    path = lab.file(5000)
    lab("set_bytes(0x5A)")
    text = lab.text_of(f"read(<path>, {nbytes}, {offset})", path=path)
    assert text.endswith("POSIX error on pread: EOF")
    there = max(0, 5000 - offset)
    assert lab(f"same_as_file(<path>, 0, {offset}, {there})", path=path)
    assert lab(f"all_are({there}, None, 0x5A)")


@pytest.mark.parametrize(
    "name",
    [
        *("EIO", "ENOSPC", "EDQUOT", "ESTALE", "EACCES", "EROFS", "ETIMEDOUT"),
        *("ENOTCONN", "EINTR", "EINVAL"),
    ],
)
def test_an_errno_is_the_end_of_the_message(lab, name):
    path = lab.file(100_000)
    words = os.strerror(getattr(errno, name))
    lab.faults.set(f"pread {name}")
    text = lab.text_of("read(<path>, 100_000)", path=path)
    assert text.endswith(f": POSIX error on pread: {words}")
    lab.faults.set(f"pwrite {name}")
    text = lab.text_of("write(<path>, 100_000)", path=path)
    assert text.endswith(f": POSIX error on pwrite: {words}")
    lab.faults.set(f"open {name}")
    text = lab.text_of("read(<path>, 100_000)", path=path)
    assert text.startswith("Unable to open file.")
    assert text.endswith(f": {words}")
    assert lab.faults.fired() >= 1


def test_a_bad_descriptor_says_operation_not_permitted(lab):
    path = lab.file(100)
    for expression in (
        "opened(<path>).close() or read_by(state['file'], 100)",
        "write_by(opened(<path>, 'r'), 100)",
    ):
        text = lab.text_of(expression, path=path)
        assert text.endswith("POSIX error: Operation not permitted")
    lab.faults.set("pread EPERM")
    assert lab.text_of("read(<path>, 100)", path=path).endswith(
        "POSIX error on pread: Operation not permitted"
    )
