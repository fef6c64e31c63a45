"""A copy between two roots brings the same files, checked on the way, and no other."""

from __future__ import annotations

import contextlib
import errno
import os
import random

import pytest
from test_archive import chunk_files, damage
from tool_lab import Lab, check_lines, everything_below, fskv, key_of, run, spoil
from world import wait_for

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")

from fskv_tools.commands import import_
from fskv_tools.transfer import allowance, candidate, sink

from fskv.root import beneath, files
from fskv.root.filesystem import Space
from fskv.sizes import Share


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


def good_files(root):
    return {name: found for name, found in chunk_files(root).items() if name.endswith(".kv")}


@pytest.mark.parametrize("options", [(), ("--read-back",), ("--threads", "1")])
def test_all_arrives_byte_for_byte_and_the_second_time_nothing_is_written(lab, tmp_path, options):
    one, other = lab.namespace(), lab.namespace(model_name="org/other")
    for number in range(40):
        lab.chunk(one, number, age_s=100 * number)
    lab.chunks(other, range(5), rank=3)
    target = tmp_path / "to"
    target.mkdir()
    done = run("copy", "--to", target, "--create", "--json", *options, root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert done.summary["stored"] == 45
    check_lines("copy", done.lines)
    assert chunk_files(target) == chunk_files(lab.path)
    inodes = {n: os.stat(target / n).st_ino for n in chunk_files(target)}
    again = run("copy", "--to", target, "--json", root=lab.path)
    assert (again.summary["stored"], again.summary["there"]) == (0, 45)
    assert {n: os.stat(target / n).st_ino for n in chunk_files(target)} == inodes


def test_bad_files_stay_where_they_are_and_strangers_are_no_candidates(lab, tmp_path):
    where = lab.namespace()
    paths = lab.chunks(where, range(30))
    spoil(lab, where)
    rng = random.Random(9)
    bad = rng.sample(paths, 12)
    for path in bad:
        damage(path, rng.randrange(os.path.getsize(path)))
    good = {os.path.relpath(path, lab.path) for path in paths if path not in bad}
    before = everything_below(lab.path)
    target = Lab(tmp_path / "to")
    done = fskv("copy", "--to", target.path, "--json", root=lab.path)
    assert done.exit_code == 1, done.stderr
    assert done.summary["bad"] == 12
    assert set(chunk_files(target.path)) == good
    assert everything_below(lab.path) == before


def test_negative_control_without_the_check_a_bad_file_is_copied(lab, tmp_path, monkeypatch):
    (path,) = lab.chunks(lab.namespace(), range(1))
    damage(path, -1)
    target = Lab(tmp_path / "to")
    assert run("copy", "--to", target.path, root=lab.path).exit_code == 1
    assert chunk_files(target.path) == {}
    monkeypatch.setattr(candidate, "check_rows", lambda header, payload: None)
    assert run("copy", "--to", target.path, root=lab.path).exit_code == 0
    assert len(chunk_files(target.path)) == 1


def test_read_back_finds_what_the_disk_has_changed(lab, tmp_path, monkeypatch):
    lab.chunks(lab.namespace(), range(3))
    real = os.writev

    def writev(fd, pieces):
        return real(fd, [pieces[0], bytes(len(pieces[1]))])

    monkeypatch.setattr(sink.os, "writev", writev)
    target = Lab(tmp_path / "to")
    done = run("copy", "--to", target.path, "--read-back", root=lab.path)
    assert done.exit_code == 3
    assert chunk_files(target.path) == {}
    # Without it nobody looks: that is what it is for.
    assert run("copy", "--to", target.path, root=lab.path).exit_code == 0
    assert len(chunk_files(target.path)) == 3


def test_what_is_there_and_bad_is_replaced(lab, tmp_path):
    where = lab.namespace()
    paths = lab.chunks(where, range(5))
    target = Lab(tmp_path / "to")
    run("copy", "--to", target.path, root=lab.path)
    there = [f"{target.path}/{os.path.relpath(path, lab.path)}" for path in paths]
    damage(there[0], 200)
    os.truncate(there[1], 0)
    done = run("copy", "--to", target.path, "--json", root=lab.path)
    assert (done.summary["stored"], done.summary["there"]) == (2, 3)
    assert chunk_files(target.path) == chunk_files(lab.path)


def test_some_may_be_chosen_and_nothing_is_written_in_a_dry_run(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(6))
    target = Lab(tmp_path / "to")
    before = everything_below(target.path)
    done = run("copy", "--to", target.path, "--dry-run", "--json", root=lab.path)
    assert done.summary["stored"] == 6
    assert everything_below(target.path) == before
    run("copy", "--to", target.path, "--chunk", key_of(2).hex(), where.id, root=lab.path)
    assert len(chunk_files(target.path)) == 1


def test_what_makes_no_sense_is_refused(lab, tmp_path):
    lab.chunks(lab.namespace(), range(1))
    assert run("copy", "--to", lab.path, root=lab.path).exit_code == 2
    assert run("copy", "--to", tmp_path / "no", root=lab.path).exit_code == 10
    (tmp_path / "empty").mkdir()
    assert run("copy", "--to", tmp_path / "empty", root=lab.path).exit_code == 10
    assert os.listdir(tmp_path / "empty") == []
    assert run("copy", "--to", lab.path, "--keep-free", "soon", root=lab.path).exit_code == 2


def test_a_directory_that_may_not_be_written_is_said_and_the_rest_goes_on(lab, tmp_path):
    where = lab.namespace()
    paths = lab.chunks(where, range(5))
    target = Lab(tmp_path / "to")
    target.namespace()
    shard = f"{target.path}/{os.path.relpath(os.path.dirname(paths[0]), lab.path)}"
    with open(shard, "w") as file:
        file.write("a file in the place of a directory")
    done = run("copy", "--to", target.path, "--json", root=lab.path)
    assert done.exit_code == 3, done.stderr
    assert (done.summary["stored"], done.summary["failed"]) == (4, 1)
    assert len(good_files(target.path)) == 4
    with open(shard) as file:
        assert file.read().startswith("a file")


def owners(root):
    found = set()
    for name in everything_below(root):
        with contextlib.suppress(FileNotFoundError):  # the maintenance process is still ending
            found.add(os.lstat(os.path.join(root, name)).st_uid)
    return found


def given_to(path, uid, mode=0o600):
    """Make an empty root of a user; returns its path."""
    target = Lab(path)
    for name in (".", *os.listdir(path)):
        os.chown(path / name, uid, uid)
    os.chmod(path / "fskv.json", mode)
    return target.path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("handed", [True, False])
@pytest.mark.parametrize("command", ["copy", "import"])
def test_what_root_writes_belongs_to_the_roots_owner(lab, tmp_path, monkeypatch, command, handed):
    """Not `handed`, the negative control: it is root's, and no engine of the owner could read it."""
    paths = lab.chunks(lab.namespace(), range(5))
    target = given_to(tmp_path / "to", 4321)
    # One directory is as another thread leaves it for a moment: made, and still root's.
    *above, shard = os.path.relpath(os.path.dirname(paths[0]), lab.path).split("/")
    at = target
    for name in above:
        at = f"{at}/{name}"
        os.mkdir(at, 0o700)
        os.chown(at, 4321, 4321)
    os.mkdir(f"{at}/{shard}", 0o700)
    monkeypatch.setattr(import_, "_refuse_what_its_owner_could_not_read", lambda *_: None)
    if not handed:
        for module in (beneath, files, sink):
            monkeypatch.setattr(module, "hand_over", lambda *_, **__: None)
    if command == "copy":
        done = run("copy", "--to", target, "--json", root=lab.path)
    else:
        assert run("export", "-o", tmp_path / "a", root=lab.path).exit_code == 0
        done = run("import", tmp_path / "a", "--json", root=target)
    assert done.summary["stored"] == 5, done.stderr
    assert os.path.isdir(f"{target}/.fskv-maintenance")
    # A part of the maintenance process is its own for a moment, until it is given away.
    wait_for(lambda: owners(target) == ({4321} if handed else {4321, 0}), 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root's right to write where it may not chown")
@pytest.mark.parametrize(("mode", "refused"), [(0o600, True), (0o660, False)])
def test_where_files_cannot_be_given_to_the_roots_owner_nothing_is_written(
    lab, tmp_path, monkeypatch, mode, refused
):
    """With a mode that lets a group in, the control: files of others are readable there."""
    lab.chunks(lab.namespace(), range(3))
    target = given_to(tmp_path / "to", 4321, mode)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    before = everything_below(target)
    done = run("copy", "--to", target, "--json", root=lab.path)
    assert (done.exit_code != 0) is refused
    if refused:
        assert "belongs to uid 4321" in done.stderr
        assert everything_below(target) == before
    else:
        assert done.summary["stored"] == 3


@pytest.mark.parametrize(("total", "stored"), [(0, True), (1, False)])
def test_what_a_file_system_does_not_know_is_not_kept_free(lab, monkeypatch, total, stored):
    """With `total`, the control: where nothing is free nothing is stored."""
    monkeypatch.setattr(allowance.Space, "of", classmethod(lambda *_: Space(total << 40, 0, 0, 0)))
    mine = allowance.Allowance(
        lab.path, lab.namespace().identity, Share(2.0), 30.0 if stored else 1.0
    )
    try:
        with contextlib.nullcontext() if stored else pytest.raises(allowance.NoRoomError):
            mine.take(4096)
    finally:
        mine.close()
