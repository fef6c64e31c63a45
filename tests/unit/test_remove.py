"""What may go is removed, and nothing else: nothing foreign, behind a link or changed since it was judged."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from world import follow_links, leaves_nothing_open

from fskv.root import remove
from fskv.root.remove import Fate, Place, Tally, always, remove_directory, sweep

DIRECTORY = "arch/model/chunks/abc"
LEVELS = ("arch", "arch/model", "arch/model/chunks", DIRECTORY)


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


def gone(root, name="file", judge=always("file"), **options):  # noqa: B008
    with Place(root, f"{root}/{DIRECTORY}", **options) as place:
        return place.remove(name, judge)


def fail(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_a_file_goes_and_what_it_was_is_told(root, path):
    nbytes = os.lstat(path).st_blocks * 512
    planned = gone(root, delete=False)
    assert os.path.exists(path)
    found = gone(root)
    assert not os.path.exists(path)
    for one in (planned, found):
        assert (one.fate, one.what, one.path, one.nbytes) == (Fate.GOES, "file", path, nbytes)
    again = gone(root)
    assert (again.fate, again.is_gone, again.nbytes) == (Fate.VANISHED, True, 0)
    tally = Tally()
    for one in (found, again):
        tally.add(one)
    assert (tally.count, tally.nbytes["file"]) == ({"file": 1, "vanished": 1}, nbytes)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "device", "file"])
def test_what_is_no_regular_file_stays_whatever_the_judge_says(root, path, tmp_path, kind):
    """The control: a file in the same place goes."""
    os.rename(path, tmp_path / "target")
    if kind == "link":
        os.symlink(tmp_path / "target", path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    elif kind == "file":
        shutil.copy(tmp_path / "target", path)
    else:
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("mknod needs root")
    assert gone(root).fate is (Fate.GOES if kind == "file" else Fate.FOREIGN)
    assert os.path.lexists(path) is (kind != "file")
    assert os.path.getsize(tmp_path / "target") == 5000


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_nothing_behind_a_link_is_removed(root, path, tmp_path, level, protected, monkeypatch):
    """By descriptor or by a sweep, of files and of directories."""
    outside = tmp_path / "outside"
    os.rename(f"{root}/{level}", outside)
    os.symlink(outside, f"{root}/{level}")
    if not protected:
        follow_links(monkeypatch)
    with leaves_nothing_open():
        found = [gone(root)]
        found += sweep(root, os.path.dirname(path), always("file"))
        found.append(remove_directory(root, os.path.dirname(path)))
    assert os.path.exists(path) is protected
    assert (Fate.GOES in {one.fate for one in found}) is not protected
    assert (found[0].fate is Fate.FOREIGN) is protected


@pytest.mark.parametrize("changed", ["another", "longer", "used", None])
def test_what_has_changed_since_it_was_judged_stays(root, path, tmp_path, changed):
    """The judge sees the file as it is when it goes. The control: what is the same goes."""
    known = os.lstat(path)
    if changed == "another":
        shutil.copy2(path, tmp_path / "other")
        os.rename(tmp_path / "other", path)
    elif changed == "longer":
        with open(path, "a") as file:
            file.write("x")
        os.utime(path, ns=(known.st_mtime_ns, known.st_mtime_ns))
    elif changed == "used":
        os.utime(path)

    def same(name, info):
        fields = ("st_ino", "st_size", "st_mtime_ns")
        is_same = all(getattr(info, field) == getattr(known, field) for field in fields)
        return "file" if name == "file" and is_same else Fate.STAYS

    assert gone(root, judge=same).fate is (Fate.STAYS if changed else Fate.GOES)
    assert os.path.exists(path) is (changed is not None)


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "Denied"), OverflowError("large")])
@pytest.mark.parametrize("call", ["stat", "unlink"])
def test_a_file_that_cannot_be_removed_is_told_with_the_reason_and_the_others_go(
    root, path, monkeypatch, call, error
):
    real = getattr(os, call)

    def denied(name, **options):
        if name == "file":
            raise error
        return real(name, **options)

    open(f"{path}2", "w").close()
    monkeypatch.setattr(os, call, denied)
    found = {one.name: one for one in sweep(root, os.path.dirname(path), always("file"))}
    assert {name: one.fate for name, one in found.items()} == {
        "file": Fate.FAILED,
        "file2": Fate.GOES,
    }
    assert found["file"].reason in ("Denied", "OverflowError('large')")
    assert os.path.lexists(path)


def test_a_sweep_removes_what_its_judge_names_until_it_is_stopped(root, path):
    directory = os.path.dirname(path)
    for name in ("foreign", "one", "two"):
        open(f"{directory}/{name}", "w").close()
    verdicts = {"file": Fate.STAYS, "foreign": Fate.FOREIGN}

    def judge(name, _):
        return verdicts.get(name, name)

    answers = iter([False, False, False, True])
    found = list(sweep(root, directory, judge, stop=lambda: next(answers)))
    assert [(one.name, one.fate, one.what) for one in found] == [
        ("file", Fate.STAYS, ""),
        ("foreign", Fate.FOREIGN, ""),
        ("one", Fate.GOES, "one"),
    ]
    assert sorted(os.listdir(directory)) == ["file", "foreign", "two"]


@pytest.mark.parametrize("kind", ["empty", "full", "link", "file", "nothing", "denied"])
def test_only_an_empty_directory_goes(root, path, tmp_path, kind, monkeypatch):
    directory = os.path.dirname(path)
    if kind != "full":
        os.unlink(path)
    if kind in ("link", "file", "nothing"):
        os.rmdir(directory)
    if kind == "link":
        os.mkdir(tmp_path / "target")
        os.symlink(tmp_path / "target", directory)
    elif kind == "file":
        open(directory, "w").close()
    elif kind == "denied":
        monkeypatch.setattr(os, "rmdir", fail(errno.EACCES))
    assert remove_directory(root, directory, lambda *_: Fate.STAYS).fate in (
        Fate.STAYS,
        Fate.VANISHED,
    )
    assert os.path.lexists(directory) is (kind != "nothing")
    expected = {"empty": Fate.GOES, "full": Fate.STAYS, "nothing": Fate.VANISHED}
    expected |= {"denied": Fate.FAILED}
    assert remove_directory(root, directory).fate is expected.get(kind, Fate.FOREIGN)
    assert os.path.lexists(directory) is (kind not in ("empty", "nothing"))


@pytest.mark.parametrize("away", ["root", "root is stale", "directory is stale", "directory"])
def test_of_a_root_that_is_away_nothing_is_taken_for_gone(root, path, away, monkeypatch):
    """Bytes that come back would be granted twice. The control: a directory that is removed is gone."""
    if "stale" in away:  # what NFS says while a server is back and its export is not
        monkeypatch.setattr(remove, "open_directory", fail(errno.ESTALE))
        if away == "root is stale":
            os.unlink(f"{root}/fskv.json")
    else:
        where = root if away == "root" else os.path.dirname(path)
        os.rename(where, f"{where}.away")
    if away.startswith("root"):
        with pytest.raises(FileNotFoundError):
            gone(root)
        with pytest.raises(FileNotFoundError):
            list(sweep(root, os.path.dirname(path), always("file")))
        return
    fate = Fate.FAILED if "stale" in away else Fate.VANISHED
    assert gone(root).fate is fate
    assert [one.fate for one in sweep(root, os.path.dirname(path), always("file"))] == [fate]


@pytest.mark.parametrize("back", [True, False], ids=["", "negative control"])
def test_a_root_that_is_away_while_a_directory_is_opened_has_its_files(
    root, path, back, monkeypatch
):
    """It is back when it is looked at. The control: the directory is really gone."""
    real, opened = remove.open_directory, []

    def away_at_first(*arguments):
        opened.append(arguments)
        return fail(errno.ENOENT)() if len(opened) == 1 else real(*arguments)

    monkeypatch.setattr(remove, "open_directory", away_at_first)
    if not back:
        shutil.rmtree(os.path.dirname(path))
    assert gone(root).fate is (Fate.GOES if back else Fate.VANISHED)
