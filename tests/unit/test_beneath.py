"""Below the root no link is followed, whichever way a directory is opened."""

from __future__ import annotations

import ctypes
import errno
import os

import native_build
import outside
import pytest
from world import World, follow_links

from fskv.root import beneath
from fskv.root.beneath import make_directory
from fskv.types import Status

LEVELS = ("arch", "arch/model", "arch/model/chunks", "arch/model/chunks/abc")


@pytest.fixture
def root(tmp_path):
    os.makedirs(tmp_path / "disk" / "root" / LEVELS[-1])
    os.symlink("disk/root", tmp_path / "root")  # the root itself may be a link
    return str(tmp_path / "root")


@pytest.fixture(
    params=["openat2", "ENOSYS", "EPERM", "EACCES", "EINVAL", "EOPNOTSUPP", "in Python"]
)
def open_(request, tmp_path):
    """Each way to open a directory of a root, and each answer that refuses openat2."""
    if request.param == "in Python":
        return beneath.open_directory
    refused = [] if request.param == "openat2" else [f"-DREFUSED={request.param}"]
    library = ctypes.CDLL(native_build.build("beneath_walk", tmp_path, *refused), use_errno=True)
    call = library.open_beneath
    call.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

    def walk(root, path):
        raw = path.encode()
        fd = call(raw, len(root), len(raw), os.O_RDONLY)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        return fd

    return walk


def found(open_, root, path):
    """Return the inode of what is opened."""
    fd = open_(root, path)
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def test_a_directory_is_opened_where_nothing_is_a_link(open_, root):
    for path in (root, *(f"{root}/{level}" for level in LEVELS)):
        assert found(open_, root, path) == os.stat(path).st_ino


@pytest.mark.parametrize("level", LEVELS)
def test_a_link_at_any_level_is_refused(open_, root, tmp_path, level):
    path = f"{root}/{LEVELS[-1]}"
    before = len(os.listdir("/proc/self/fd"))
    os.rename(f"{root}/{level}", tmp_path / "outside")
    os.symlink(tmp_path / "outside", f"{root}/{level}")
    with pytest.raises(OSError) as caught:
        open_(root, path)
    assert caught.value.errno == errno.ELOOP
    assert os.path.isdir(path)  # the control: by its path it is there
    os.unlink(f"{root}/{level}")
    with pytest.raises(FileNotFoundError):
        open_(root, path)
    with open(f"{root}/{level}", "w"), pytest.raises(NotADirectoryError):
        open_(root, path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("below", ["", *LEVELS])
def test_slashes_too_many_do_not_lead_out_of_the_root(open_, root, tmp_path, below):
    """What follows the root is never an absolute path, also where the root is a link."""
    assert found(open_, root, f"{root}//{below}") == os.stat(f"{root}/{below}").st_ino
    os.mkdir(tmp_path / "outside")
    with pytest.raises(FileNotFoundError):
        open_(root, f"{root}/{tmp_path}/outside")
    assert os.path.isdir(f"/{tmp_path}/outside")  # the control: it is there


@pytest.mark.parametrize("swapped", [True, False])
def test_a_new_directory_gets_its_mode_and_nothing_that_takes_its_place(
    tmp_path, monkeypatch, swapped
):
    """With its control: what nobody swaps gets the mode. By path, the mode was the victim's."""
    victim, path = tmp_path / "victim", f"{tmp_path}/abc"
    os.mkdir(victim, 0o700)
    real = os.mkdir

    def mkdir(name, *args, **options):
        real(name, *args, **options)
        if swapped:
            os.rmdir(path)
            os.symlink(victim, path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    if swapped:
        with pytest.raises(OSError, match="symbolic links"):
            make_directory(path, 0o770)
    else:
        assert make_directory(path, 0o770)
        assert os.stat(path).st_mode & 0o777 == 0o770
    assert os.stat(victim).st_mode & 0o777 == 0o700


# --- the store --------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [True, False])
def test_a_directory_that_somebody_makes_at_this_moment_is_put_back(root, monkeypatch, checked):
    """Negative control: by a rename alone it is gone from its place, with all that is in it."""
    path, real = f"{root}/shared", os.stat
    open(path, "w").close()

    def stat_(name, *rest, **options):
        info = real(name, *rest, **options)
        if name == "shared":  # another process is as far, and faster
            os.rename(path, f"{root}/theirs")
            os.makedirs(f"{path}/claims")
        return info if checked or name == "shared" else real(f"{root}/theirs")

    monkeypatch.setattr(os, "stat", stat_)
    assert beneath.move_aside(path, "aside", str(root)) is not checked
    assert os.path.isdir(f"{path}/claims") is checked
    assert os.path.isfile(f"{root}/theirs")


def linked(tmp_path, level, **options):
    """Return a store whose directory at `level` is a link into another root, and that root's store."""
    theirs, ours = (World(tmp_path / name, **options) for name in ("theirs", "ours"))
    theirs.fill(range(4), seed=1)
    assert theirs.put(1, theirs.content(1)) is Status.OK
    old = os.stat(theirs.path(1)).st_mtime_ns - 10**15
    os.utime(theirs.path(1), ns=(old, old))
    assert ours.put(1, ours.content(1)) is Status.OK
    directory = os.path.relpath(os.path.dirname(ours.path(1)), ours.root)
    directory = "/".join(directory.split("/")[:level])
    os.rename(f"{ours.root}/{directory}", tmp_path / "before")
    os.symlink(f"{theirs.root}/{directory}", f"{ours.root}/{directory}")
    assert os.path.samefile(ours.path(1), theirs.path(1))
    return ours, theirs


def state(world):
    """What of another root a link could lead to: names, contents, times, modes."""
    return {
        path: (os.lstat(path).st_mtime_ns, os.lstat(path).st_mode, os.lstat(path).st_ino)
        for where, names, files in os.walk(world.root)
        for path in (where, *(f"{where}/{name}" for name in names + files))
    }


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("protected", [True, False])
def test_a_store_changes_nothing_behind_a_link(tmp_path, monkeypatch, level, protected):
    """A bad file there is not discarded, a good one not touched, nothing is written."""
    ours, theirs = linked(tmp_path, level)
    if not protected:
        follow_links(monkeypatch)
    before = state(theirs)
    got = ours.get(1)[0]
    ours.store.touch(ours.chunk(1))
    assert (state(theirs) == before) is protected  # good, and its mtime is old
    with open(theirs.path(1), "r+b") as file:
        file.write(b"bad")
    before = state(theirs)
    got, put = ours.get(1)[0], ours.put(1, ours.content(1))
    assert (state(theirs) == before) is protected
    assert (got, put) == ((Status.STALE,) * 2 if protected else (Status.CORRUPT, Status.OK))


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("behind_a_link", [True, False])
def test_outside_the_interpreter_nothing_is_changed_behind_a_link(tmp_path, level, behind_a_link):
    """With its control: the store whose files they are loads, touches and writes."""
    ours, theirs = linked(tmp_path, level, native=True)
    world = ours if behind_a_link else theirs
    before, slot = state(theirs), world.transport.new_slot(0)

    def is_left_to_python(number, *, is_load):
        return outside.run(outside.transfer(world, number, range(4), is_load=is_load), slot) is None

    assert is_left_to_python(1, is_load=True) is behind_a_link
    assert is_left_to_python(1, is_load=False) is behind_a_link
    assert (state(theirs) == before) is behind_a_link
    before = state(theirs)
    for number in range(100, 110):  # most of their directories are still to be made
        assert is_left_to_python(number, is_load=False) is (behind_a_link and level < 4)
    assert (state(theirs) == before) is behind_a_link
