"""What the real kvikio does with bytes and errors, as found with version 26.10; a transport relies on it.

It runs in a child process on the libcuda stub (cuda_stub.py), on host memory and, by its compat path with
bounce buffers, on ranges that the stub declares to be device memory. No GPU, no GPUDirect: what the driver
does is not shown here. Under the fault shim (faults/disk.py): kvikio calls libc outside of the interpreter.

Facts, each held by a test:

- Offsets and sizes need no alignment; nothing beside the range is written, in the buffer or in the file.
- A file is opened twice, the second time with O_DIRECT (even if no direct I/O is done); links are
  followed; close-on-exec is set. If only the second open fails with EIO, all goes on buffered.
- Errors are RuntimeErrors without an errno: a text with the place in the source, ending with strerror's words
  (ERRORS below). EBADF too says "Operation not permitted", but without "on pread": it does not mean EPERM.
- A read beyond the end raises "EOF", and the bytes before the end are in the buffer by then.
- EINTR is not tried again. A write that makes no progress (0) is repeated for ever.
- ENOSPC leaves what was written.
- A future cannot be cancelled and has no timeout; `get` a second time raises. `pread` and `pwrite` of less
  than gds_threshold (16 KiB) of device memory are done by the caller before there is a future: they hang with
  the disk.
- `close` does not wait for futures. One that has begun goes on with the file; one that is queued fails with
  the text of EBADF, as long as the CuFile object lives: keep it until every future has been got.
"""

from __future__ import annotations

import errno
import importlib.util
import os

import pytest
from cuda_stub import build_stub
from places import LAB
from world import wait_for

from faults.disk import Child, DiskFaults

if importlib.util.find_spec("kvikio") is None:
    pytest.skip(
        "kvikio is not installed: pip install 'fskv[gds]', or see .ci/setup",
        allow_module_level=True,
    )

CHILD = r"""
import json, mmap, os, sys
sys.path.insert(0, os.environ["FSKV_TEST_DIR"])
from cuda_stub import DeviceArray, load_stub
stub = load_stub(os.environ["FSKV_TEST_CUDA_STUB"])
import kvikio, kvikio.defaults
import numpy as np
memory = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)
buffer = memory
if os.environ["FSKV_TEST_MEMORY"] == "device":
    stub.declare_device(memory.ctypes.data, memory.nbytes)
    buffer = DeviceArray(memory)
state = {}
def part(start, stop=None):
    view = memory[start:stop]
    return view if buffer is memory else DeviceArray(view)
def fill(seed):
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.nbytes, np.uint8)
def set_bytes(value):
    memory[:] = value
def bytes_are(start, stop, hexes):
    return bool((memory[start:stop] == np.frombuffer(bytes.fromhex(hexes), np.uint8)).all())
def all_are(start, stop, value):
    return bool((memory[start:stop] == value).all())
def read(path, nbytes, offset=0, at=0):
    with kvikio.CuFile(path, "r") as file:
        return file.read(part(at), nbytes, file_offset=offset)
def write(path, nbytes, offset=0, at=0, flags="r+"):
    with kvikio.CuFile(path, flags) as file:
        return file.write(part(at), nbytes, file_offset=offset)
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
    def __init__(self, native_library, work, memory):
        self.disk = work / "disk"
        self.disk.mkdir()
        self.memory = memory
        self.faults = DiskFaults(native_library("disk"), self.disk, work / "state")
        own = {
            "FSKV_TEST_DIR": str(LAB),
            "FSKV_TEST_CUDA_STUB": build_stub(native_library),
            "FSKV_TEST_MEMORY": memory,
        }
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


@pytest.fixture(scope="module", params=["host", "device"])
def running(request, native_library, tmp_path_factory):
    lab = Lab(native_library, tmp_path_factory.mktemp("kvikio"), request.param)
    yield lab
    lab.faults.clear()
    lab.child.close()


@pytest.fixture
def lab(running):
    running.faults.clear()
    yield running
    running.faults.clear()


# Above gds_threshold: smaller transfers of device memory are done before `pread` returns.
NBYTES = 100_000

# errno -> the end of kvikio's message on a read, a write or an open. For the transport that translates them.
ERRORS = {
    number: os.strerror(number)
    for number in (
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ESTALE,
        errno.EACCES,
        errno.EROFS,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EINTR,
        errno.EINVAL,
    )
}


@pytest.mark.parametrize(
    ("nbytes", "offset", "at"),
    [(1 << 20, 0, 0), (262_144, 4096, 4096), (12_345, 777, 3), (1, 4095, 1), (5000, 1 << 20, 4095)],
)
def test_bytes_arrive_and_nothing_beside_them_changes(lab, nbytes, offset, at):
    path = lab.file(2 << 20)
    before = path.read_bytes()
    copies = lab("stub.num_copies")
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
    # The negative control of "device": it went through the stub's copies, and on host memory it did not.
    assert (lab("stub.num_copies") > copies) == (lab.memory == "device")


def test_a_write_beyond_the_end_makes_the_file_longer(lab):
    path = lab.file(10)
    assert lab("write(<path>, 100, 5000)", path=path) == 100
    assert path.stat().st_size == 5100


@pytest.mark.parametrize("flags", ["r", "r+", "w"])
def test_a_file_is_opened_twice_and_the_second_time_direct(lab, flags):
    path = lab.file(5000)
    lab("opened(<path>, <flags>) and None", path=path, flags=flags)
    flags_of_fds = lab("fds_of(<path>)", path=path)
    assert len(flags_of_fds) == 2
    assert [bool(found & os.O_DIRECT) for found in flags_of_fds] == [False, True]
    assert all(found & os.O_CLOEXEC for found in flags_of_fds)
    assert not any(found & (os.O_NOFOLLOW | os.O_NONBLOCK) for found in flags_of_fds)
    lab("state['file'].close()")
    assert lab("fds_of(<path>)", path=path) == []
    assert path.stat().st_size == (0 if flags == "w" else 5000)


def test_symbolic_links_are_followed(lab):
    path = lab.file(5000)
    link = lab.disk / f"{path.name}.link"
    link.symlink_to(path)
    assert lab("read(<path>, 5000)", path=link) == 5000


@pytest.mark.parametrize(("nbytes", "offset"), [(6000, 0), (8192, 0), (100, 10_000), (1, 5000)])
def test_a_read_beyond_the_end_says_eof_and_has_filled_the_buffer_up_to_it(lab, nbytes, offset):
    path = lab.file(5000)
    lab("set_bytes(0x5A)")
    text = lab.text_of(f"read(<path>, {nbytes}, {offset})", path=path)
    assert text.endswith("POSIX error on pread: EOF")
    there = max(0, 5000 - offset)
    assert lab(f"same_as_file(<path>, 0, {offset}, {there})", path=path)
    assert lab(f"all_are({there}, None, 0x5A)")


def test_missing_files_and_foreign_things(lab):
    path = lab.file(100)
    for expression in ("read(<path>, 10)", "write(<path>, 10)"):
        text = lab.text_of(expression, path=f"{path}.none")
        assert text.startswith("Unable to open file.")
        assert text.endswith(": No such file or directory")
        assert lab.text_of(expression, path=f"{path}/x").endswith(": Not a directory")
    assert lab.text_of("read(<path>, 10)", path=lab.disk).endswith(": Is a directory")
    assert lab.text_of("write(<path>, 10)", path=lab.disk).endswith(": Is a directory")
    assert lab("read(<path>, 8 << 20)", path=path) == [
        "ValueError",
        "Size is greater than the size of the buffer",
    ]
    assert lab("read(<path>, 0)", path=path) == 0


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_an_errno_is_the_end_of_the_message(lab, number):
    path = lab.file(100_000)
    name = errno.errorcode[number]
    lab.faults.set(f"pread {name}")
    text = lab.text_of("read(<path>, 100_000)", path=path)
    assert text.endswith(f": POSIX error on pread: {ERRORS[number]}")
    lab.faults.set(f"pwrite {name}")
    text = lab.text_of("write(<path>, 100_000)", path=path)
    assert text.endswith(f": POSIX error on pwrite: {ERRORS[number]}")
    lab.faults.set(f"open {name}")
    text = lab.text_of("read(<path>, 100_000)", path=path)
    assert text.startswith("Unable to open file.")
    assert text.endswith(f": {ERRORS[number]}")
    assert lab.faults.fired() >= 1


def test_a_bad_descriptor_says_operation_not_permitted(lab):
    path = lab.file(100)
    for expression in (
        "opened(<path>).close() or state['file'].read(part(0), 100)",
        "opened(<path>, 'r').write(part(0), 100)",
        "opened(<path>, 'w').read(part(0), 100)",
    ):
        text = lab.text_of(expression, path=path)
        assert text.endswith("POSIX error: Operation not permitted")
    path = lab.file(100)
    lab.faults.set("pread EPERM")
    assert lab.text_of("read(<path>, 100)", path=path).endswith(
        "POSIX error on pread: Operation not permitted"
    )


def test_only_the_second_open_fails(lab):
    path = lab.file(100_000)
    lab.faults.set("open EIO after=1 count=1")
    answer = lab("read(<path>, 100_000)", path=path)
    assert lab.faults.fired() == 1
    assert answer == 100_000


def test_short_transfers_are_continued(lab):
    path = lab.file(300_000)
    lab.faults.set("pread short=4096", "pwrite short=8192")
    lab("fill(2)")
    assert lab("write(<path>, 300_000)", path=path) == 300_000
    assert lab("same_as_file(<path>, 0, 0, 300_000)", path=path)
    lab("set_bytes(0)")
    assert lab("read(<path>, 300_000)", path=path) == 300_000
    lab.faults.clear()
    assert lab("same_as_file(<path>, 0, 0, 300_000)", path=path)


def test_a_full_disk_leaves_what_was_written(lab):
    path = lab.file(0)
    lab.faults.set("pwrite ENOSPC partial=65536")
    text = lab.text_of("write(<path>, 262_144)", path=path)
    assert text.endswith(": POSIX error on pwrite: No space left on device")
    assert path.stat().st_size == 65536
    assert lab.faults.fired() == 2


def test_a_write_without_progress_is_repeated_for_ever(lab):
    path = lab.file(0)
    lab.faults.set("pwrite short=0")
    lab.child.send(f"write({str(path)!r}, 4096)")
    wait_for(lambda: lab.faults.fired() > 1000)
    lab.faults.clear()
    assert lab.child.read() == 4096


def test_a_future_that_hangs_is_not_done_and_is_got_once(lab):
    path = lab.file(NBYTES)
    lab.faults.set("pread hang")
    lab(f"state.update(future=opened(<path>).pread(part(0), {NBYTES}))", path=path)
    wait_for(lambda: lab.faults.num_hanging == 1)
    assert lab("state['future'].done()") is False
    # Closing does not wait for it, and the fd's file lives as long as the call.
    assert lab("state['file'].close()") is None
    lab.faults.clear()
    wait_for(lambda: lab("state['future'].done()"))
    lab("state.update(first=state['future'].get())")
    assert lab.text_of("state['future'].get()").endswith("No associated state")
    lab("state.clear()")


def test_closing_a_file_makes_its_queued_future_fail(lab):
    """One thread (the default) hangs in the first read; the second is queued while its file is closed."""
    first, second, other = lab.file(NBYTES), lab.file(NBYTES), lab.file(NBYTES)
    os.rename(first, f"{first}.slow")
    lab.faults.set("pread hang suffix=.slow")
    assert lab("kvikio.defaults.get('num_threads')") == 1
    lab("state.update(slow=opened(<path>))", path=f"{first}.slow")
    lab(f"state.update(one=state['slow'].pread(part(1 << 20), {NBYTES}))")
    wait_for(lambda: lab.faults.num_hanging == 1)
    lab("set_bytes(0x5A)")
    lab("state.update(second=opened(<path>))", path=second)
    lab(f"state.update(two=state['second'].pread(part(0), {NBYTES}))")
    lab("state['second'].close()")
    lab("opened(<path>) and None", path=other)  # gets the numbers of the two fds that were closed
    lab.faults.clear()
    text = lab.text_of("state['two'].get()")
    assert text.endswith("POSIX error: Operation not permitted")
    assert lab(f"all_are(0, {NBYTES}, 0x5A)")
    lab("[state['one'].get(), state['slow'].close(), state['file'].close(), state.clear()]")


def test_small_transfers_of_device_memory_are_over_when_the_future_is_there(lab):
    path = lab.file(NBYTES)
    lab.faults.set("pread slow_ms=700")
    small = lab("opened(<path>).pread(part(0), 8192).done()", path=path)
    assert small is (lab.memory == "device")
    assert lab("kvikio.defaults.get('gds_threshold')") == 16384
    lab(f"state.update(future=state['file'].pread(part(0), {NBYTES}))")
    assert lab("state['future'].done()") is False
    lab("[state['future'].get(), state['file'].close(), state.clear()]")


def test_a_failed_copy_is_an_error_and_the_next_one_works(lab):
    path = lab.file(100_000)
    lab("stub.fail_copies(1)")
    if lab.memory == "host":  # is not copied by CUDA
        assert lab("read(<path>, 100_000)", path=path) == 100_000
        return
    text = lab.text_of("read(<path>, 100_000)", path=path)
    assert text.startswith("CUDA error at: ")
    assert text.endswith("CUDA_ERROR_LAUNCH_FAILED(stub: launch failed)")
    assert lab("read(<path>, 100_000)", path=path) == 100_000


def test_host_memory_that_is_read_only_is_written_all_the_same(lab):
    path = lab.file(100)
    assert (
        lab(
            "opened(<path>).read(state.setdefault('ro', np.frombuffer(bytes(100), np.uint8)), 100)",
            path=path,
        )
        == 100
    )
    assert lab("state['ro'].tobytes().hex()") == path.read_bytes().hex()
    lab("state['file'].close()")
