"""The fault shim does what its script says, to every caller of libc, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from world import wait_for

from faults.disk import Child, DiskFaults

# Runs in the child: one line of Python in, one JSON line out, the name of the errno for an OSError.
CHILD = r"""
import ctypes, errno, json, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
libc.pread.restype = ctypes.c_ssize_t
libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64]
libc.pwrite.restype = ctypes.c_ssize_t
def c_call(function, *args):
    result = function(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
def c_pread(fd, n, at):
    buffer = ctypes.create_string_buffer(n)
    got = c_call(libc.pread, fd, buffer, n, at)
    return list(buffer.raw[:got])
def c_pwrite(fd, data, at):
    return c_call(libc.pwrite, fd, data, len(data), at)
def preadv(fd, n, at):
    halves = [bytearray(n // 2), bytearray(n - n // 2)]
    got = os.preadv(fd, halves, at)
    return list(b"".join(halves)[:got])
def read_on_threads(fd, num, times):
    lengths = []
    run = lambda: lengths.extend(len(c_pread(fd, 4, 0)) for _ in range(times))
    threads = [threading.Thread(target=run) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lengths
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    try:
        result = eval(line)
        result = list(result) if isinstance(result, bytes) else result
    except OSError as error:
        result = errno.errorcode[error.errno]
    print(json.dumps(result, default=str), flush=True)
"""


class Lab:
    """A child under the shim with files inside and outside of its directory; all of 100 bytes."""

    def __init__(self, library, tmp_path):
        self.inside = tmp_path / "inside"
        self.outside = tmp_path / "outside"
        for directory in (self.inside, self.outside):
            directory.mkdir()
            (directory / "x.kv").write_bytes(bytes(range(100)))
        self.faults = DiskFaults(library, self.inside, tmp_path / "state")
        self.child = Child(CHILD, {**os.environ, **self.faults.env()})
        assert self.faults.attached >= 1
        self.kv = self.open("inside", "x.kv")
        self.other = self.open("outside", "x.kv")
        self.part = self.open("inside", "y.part")

    def path(self, where, name):
        return repr(str(getattr(self, where) / name))

    def open(self, where, name):
        return self.child(f"os.open({self.path(where, name)}, os.O_RDWR | os.O_CREAT)")


def test_a_space_in_the_library_s_path_keeps_it_from_nothing(native_library, tmp_path):
    (tmp_path / "with space").mkdir()
    library = shutil.copy(native_library("disk"), tmp_path / "with space")
    lab = Lab(str(library), tmp_path)
    lab.faults.set("read EIO")
    assert lab.child(f"os.read({lab.kv}, 10)") == "EIO"
    lab.child.close()
    assert lab.faults.fired()


@pytest.fixture
def lab(native_library, tmp_path):
    lab = Lab(native_library("disk"), tmp_path)
    yield lab
    lab.faults.clear()
    lab.child.close()
    assert not lab.faults.num_bad_lines


# Every way to do it, as an expression of the child; {kv} is an fd, {path} a path.
READS = ["preadv({kv}, 40, 0)", "os.pread({kv}, 40, 0)", "c_pread({kv}, 40, 0)"]
WRITES = [
    "os.pwritev({kv}, [b'ab', b'cd'], 0)",
    "os.pwrite({kv}, b'abcd', 0)",
    "c_pwrite({kv}, b'abcd', 0)",
]
OTHERS = {
    "open": ["os.open({path}, os.O_RDONLY)", "c_call(libc.open, {path}.encode(), 0)"],
    "read": ["os.read({kv}, 10)", "os.readv({kv}, [bytearray(10)])"],
    "write": ["os.write({kv}, b'a')", "os.writev({kv}, [b'a'])"],
    "fstat": ["os.fstat({kv}).st_size", "os.stat({kv}).st_size"],
    "stat": ["os.stat({path}).st_size", "os.lstat({path}).st_size"],
    "rename": ["os.rename({path}, {path})", "os.replace({path}, {path})"],
    "unlink": ["os.unlink({path})"],
    "fsync": ["os.fsync({kv})", "os.fdatasync({kv})"],
    "mkdir": ["os.mkdir({path})"],
    "utime": ["os.utime({kv})", "os.utime({path})"],
    "truncate": ["os.ftruncate({kv}, 100)", "os.truncate({path}, 100)"],
    "fallocate": ["os.posix_fallocate({kv}, 0, 100)"],
    "close": ["os.close(os.dup({kv}))"],
}
ALL = [("pread", e) for e in READS] + [("pwrite", e) for e in WRITES]
ALL += [(operation, e) for operation, es in OTHERS.items() for e in es]


def test_every_operation_fails_inside_and_never_outside(lab):
    for number, (operation, expression) in enumerate(ALL):
        inside = expression.format(kv=lab.kv, path=lab.path("inside", "x.kv"))
        outside = expression.format(kv=lab.other, path=lab.path("outside", "x.kv"))
        rule = f"{operation} {('EIO', 'ESTALE')[number % 2]}"
        lab.faults.set(rule)
        assert lab.child(inside) == ("EIO", "ESTALE")[number % 2], (rule, inside)
        assert lab.faults.fired(rule) == 1, (rule, inside)
        answer = lab.child(outside)
        assert answer not in ["EIO", "ESTALE"], (rule, outside)
        assert lab.faults.fired(rule) == lab.faults.matched(rule) == 1, (rule, outside)
        (lab.outside / "x.kv").write_bytes(bytes(range(100)))


def test_without_a_script_nothing_happens(lab):
    """The negative control of all others; in an empty script and in none at all."""
    for prepare in (
        lambda: None,
        lab.faults.clear,
        lambda: lab.faults.set("open EIO suffix=.none"),
    ):
        prepare()
        for operation, expression in ALL:
            if operation in {"unlink", "mkdir"}:
                continue
            answer = lab.child(expression.format(kv=lab.kv, path=lab.path("inside", "x.kv")))
            assert answer not in list(errno.errorcode.values()), expression
        assert lab.faults.fired() == lab.faults.matched() == 0


def test_after_and_count_and_suffix_choose_the_calls(lab):
    lab.faults.set("pread EIO after=2 count=2 suffix=.kv", "pread ESTALE suffix=.part count=1")
    assert [lab.child(f"len(os.pread({lab.kv}, 4, 0))") for _ in range(6)] == [
        4,
        4,
        "EIO",
        "EIO",
        4,
        4,
    ]
    assert [lab.child(f"len(os.pread({lab.part}, 4, 0))") for _ in range(2)] == ["ESTALE", 0]
    assert lab.faults.fired("pread EIO after=2 count=2 suffix=.kv") == 2
    assert lab.faults.fired() == 3
    # A new script counts from the beginning, also when it says the same.
    lab.faults.set("pread EIO after=2 count=2 suffix=.kv")
    assert [lab.child(f"len(os.pread({lab.kv}, 4, 0))") for _ in range(3)] == [4, 4, "EIO"]


def test_a_rename_is_met_by_either_name(lab):
    names = f"{lab.path('inside', 'y.part')}, {lab.path('inside', 'y.kv')}"
    for suffix in (".part", ".kv"):
        lab.faults.set(f"rename EIO suffix={suffix}")
        assert lab.child(f"os.rename({names})") == "EIO"
    lab.faults.clear()
    assert lab.child(f"os.rename({names})") is None
    # The fd has the new name now.
    lab.faults.set("pwrite ENOSPC suffix=.kv")
    assert lab.child(f"os.pwrite({lab.part}, b'a', 0)") == "ENOSPC"


@pytest.mark.parametrize("read", READS)
def test_reads_are_short_or_over_or_wrong(lab, read):
    right = list(range(40))
    lab.faults.set("pread short=7")
    assert lab.child(read.format(kv=lab.kv)) == right[:7]
    lab.faults.set("pread short=0")
    assert lab.child(read.format(kv=lab.kv)) == []
    lab.faults.set("pread flip count=1")
    assert lab.child(read.format(kv=lab.kv)) == [*right[:20], right[20] ^ 0x10, *right[21:]]
    assert lab.child(read.format(kv=lab.kv)) == right
    lab.faults.set("pread flip at=33")
    assert lab.child(read.format(kv=lab.kv)) == [*right[:33], right[33] ^ 0x10, *right[34:]]
    assert lab.faults.fired() == 1
    lab.faults.set("pread flip at=40")
    assert lab.child(read.format(kv=lab.kv)) == right
    assert lab.faults.fired() == 0


@pytest.mark.parametrize("write", WRITES)
def test_writes_are_cut_or_wrong_or_lost(lab, write):
    before = bytes(range(100))
    lab.faults.set("pwrite ENOSPC partial=7")
    assert [lab.child(write.format(kv=lab.kv)) for _ in range(3)] == [4, 3, "ENOSPC"]
    assert lab.faults.fired() == 2
    (lab.inside / "x.kv").write_bytes(before)
    lab.faults.set("pwrite lost")
    assert lab.child(write.format(kv=lab.kv)) == 4
    assert (lab.inside / "x.kv").read_bytes() == before
    lab.faults.set("pwrite flip")
    assert lab.child(write.format(kv=lab.kv)) == 4
    assert (lab.inside / "x.kv").read_bytes() == b"absd" + before[4:]
    assert ord("c") ^ 0x10 == ord("s")
    lab.faults.set("pwrite short=1")
    assert lab.child(write.format(kv=lab.kv)) == 1


def test_a_hang_ends_with_the_script_and_blocks_no_other_call(lab):
    lab.faults.set("pread hang suffix=.kv", "open slow_ms=1")
    lab.child(f"threading.Thread(target=os.pread, args=({lab.kv}, 4, 0)).start()")
    wait_for(lambda: lab.faults.num_hanging == 1)
    assert lab.child(f"os.pwrite({lab.kv}, b'abcd', 0)") == 4
    assert isinstance(lab.open("inside", "z.kv"), int)
    assert lab.faults.fired("open slow_ms=1") == 1
    lab.child.send(f"list(os.pread({lab.kv}, 4, 0))")
    wait_for(lambda: lab.faults.num_hanging == 2)
    lab.faults.set("pwrite EIO")  # any script that says nothing of a hang
    assert lab.child.read() == [97, 98, 99, 100]
    wait_for(lambda: lab.faults.num_hanging == 0)
    lab.faults.set("pread hang EIO")
    lab.child.send(f"os.pread({lab.kv}, 4, 0)")
    wait_for(lambda: lab.faults.num_hanging == 1)
    lab.faults.clear()
    assert lab.child.read() == "EIO"


def test_many_threads_meet_each_fault_exactly_as_often_as_the_script_says(lab):
    lab.faults.set("pread short=3 after=100 count=37")
    lengths = lab.child(f"read_on_threads({lab.kv}, 8, 50)")
    assert len(lengths) == 400
    assert lengths.count(3) == lab.faults.fired() == 37
    assert lab.faults.matched() == 400


def test_a_rule_that_the_shim_does_not_understand_is_noticed(native_library, tmp_path):
    lab = Lab(native_library("disk"), tmp_path)
    for rule in ("pread EWHAT", "teleport EIO", "pread much=3"):
        lab.faults.set(rule)
        lab.child(f"len(os.pread({lab.kv}, 4, 0))")
        with pytest.raises(AssertionError, match="does not understand"):
            lab.faults.fired()
    lab.child.close()
    assert lab.faults.num_bad_lines == 3
