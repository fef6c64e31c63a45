"""What may go is removed, and nothing else: nothing foreign, behind a link or changed since it was judged."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from fskv.root import remove
from fskv.root.remove import Fate, Place, always, remove_directory, sweep

DIRECTORY = "arch/model/chunks/abc"


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    (path / DIRECTORY).mkdir(parents=True)
    (path / "fskv.json").touch()
    return str(path)


@pytest.fixture
def path(root):
    """A file of that root."""
    found = f"{root}/{DIRECTORY}/file"
    with open(found, "w") as file:
        file.write("x" * 5000)
    return found


def gone(root, judge=always("file")):  # noqa: B008
    with Place(root, f"{root}/{DIRECTORY}") as place:
        return place.remove("file", judge)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "file"])
def test_what_is_no_regular_file_stays_whatever_the_judge_says(root, path, tmp_path, kind):
    """The control: a file in the same place goes."""
    target = tmp_path / "target"
    os.rename(path, target)
    if kind == "link":
        os.symlink(target, path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    else:
        shutil.copy(target, path)
    assert gone(root).fate is (Fate.GOES if kind == "file" else Fate.FOREIGN)
    assert os.path.lexists(path) is (kind != "file")
    assert os.path.getsize(target) == 5000


@pytest.mark.parametrize("changed", ["another", "used", None])
def test_what_has_changed_since_it_was_judged_stays(root, path, tmp_path, changed):
    """The judge sees the file as it is when it goes. The control: what is the same goes."""
    known = os.lstat(path)
    if changed == "another":
        shutil.copy2(path, tmp_path / "other")
        os.rename(tmp_path / "other", path)
    elif changed == "used":
        os.utime(path)

    def same(_, info):
        is_same = (info.st_ino, info.st_mtime_ns) == (known.st_ino, known.st_mtime_ns)
        return "file" if is_same else Fate.STAYS

    assert gone(root, judge=same).fate is (Fate.STAYS if changed else Fate.GOES)
    assert os.path.exists(path) is (changed is not None)


@pytest.mark.parametrize("kind", ["empty", "full", "link"])
def test_only_an_empty_directory_goes(root, path, tmp_path, kind):
    directory = os.path.dirname(path)
    if kind != "full":
        os.unlink(path)
    if kind == "link":
        os.rename(directory, tmp_path / "target")
        os.symlink(tmp_path / "target", directory)
    assert remove_directory(root, directory, lambda *_: Fate.STAYS).fate is Fate.STAYS
    fate = {"empty": Fate.GOES, "full": Fate.STAYS, "link": Fate.FOREIGN}[kind]
    assert remove_directory(root, directory).fate is fate
    assert os.path.lexists(directory) is (kind != "empty")


@pytest.mark.parametrize("away", ["root", "root is stale", "directory is stale", "directory"])
def test_of_a_root_that_is_away_nothing_is_taken_for_gone(root, path, away, monkeypatch):
    """Bytes that come back would be granted twice. The control: a directory that is removed is gone."""

    def stale(*_):  # what NFS says while a server is back and its export is not
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    if "stale" in away:
        monkeypatch.setattr(remove, "open_directory", stale)
        if away == "root is stale":
            os.unlink(f"{root}/fskv.json")
    else:
        where = root if away == "root" else os.path.dirname(path)
        os.rename(where, f"{where}.away")
    if away.startswith("root"):
        with pytest.raises(FileNotFoundError):
            gone(root)
        return
    fate = Fate.FAILED if "stale" in away else Fate.VANISHED
    assert gone(root).fate is fate
    assert [one.fate for one in sweep(root, os.path.dirname(path), always("file"))] == [fate]


def namespace_of(root):
    """A namespace without chunks."""
    path = f"{root}/arch/empty"
    for name in ("chunks", "tmp"):
        os.makedirs(f"{path}/{name}")
    with open(f"{path}/namespace.json", "w") as file:
        file.write("whose it is")
    return path


def test_a_namespace_goes_and_one_into_which_a_writer_came_keeps_its_manifest(root, monkeypatch):
    assert remove.remove_namespace(root, namespace_of(root)).fate is Fate.GOES
    path = namespace_of(root)

    def beside_a_writer(root, directory, *rest):
        if directory == path:
            os.mkdir(f"{path}/chunks")
        return remove_directory(root, directory, *rest)

    monkeypatch.setattr(remove, "remove_directory", beside_a_writer)
    assert remove.remove_namespace(root, path).fate is Fate.STAYS
    with open(f"{path}/namespace.json") as file:
        assert file.read() == "whose it is"
    assert sorted(os.listdir(path)) == ["chunks", "namespace.json"]


def test_a_namespace_whose_directory_cannot_be_removed_says_why(root, monkeypatch):
    path = namespace_of(root)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "rmdir", refuse)
    found = remove.remove_namespace(root, path)
    assert (found.fate, found.reason) == (Fate.FAILED, "no")
    assert sorted(os.listdir(path)) == ["chunks", "namespace.json", "tmp"]
