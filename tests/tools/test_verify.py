"""`fskv verify`: everything that is wrong is found, nothing else is reported, and only that is removed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
import shutil
import stat
from functools import partial

import pytest
from fskv_tools.check import judge
from fskv_tools.check import run as check_run
from fskv_tools.commands import verify as command
from tool_lab import check_lines, fskv, key_of, run, spoil

from fskv import namespace
from fskv.format.chunk_file import ChunkHeader, FileLayout, encode_header
from trials import corruptions


def verify(lab, *words, **options):
    return run("verify", "--json", *words, root=lab.path, **options)


def bad_paths(done):
    return {line["path"] for line in done.lines if line["type"] == "bad"}


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def tree(path):
    """Everything below a directory: name -> inode, mtime and content."""
    found = {}
    for directory, names, files in os.walk(path):
        for name in [*names, *files]:
            path = pathlib.Path(directory, name)
            info = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(info.st_mode) else None
            found[str(path)] = (info.st_ino, info.st_mtime_ns, content)
    return found


# --- what is found ----------------------------------------------------------------------


def test_a_good_root_is_good_and_every_byte_was_read(lab):
    where = lab.namespace()
    other = lab.namespace(model_name="org/other", pages=(70000, 5000))
    paths = lab.chunks(where, range(40))
    paths += lab.chunks(other, range(5), rank=0) + lab.chunks(other, range(5), rank=1)
    done = verify(lab, "--read-data")
    assert done.exit_code == 0, done.stderr
    assert done.summary["files"] == done.summary["data_files"] == 50
    assert done.summary["nbytes_read"] == sum(os.stat(path).st_size for path in paths)
    check_lines("verify", done.lines)
    headers = verify(lab)
    assert headers.summary["nbytes_read"] < done.summary["nbytes_read"]
    assert headers.summary["data_files"] == 0
    assert run("verify", root=lab.path).stdout == ""
    one = verify(lab, "org/other"[4:])
    assert one.summary["files"] == 10


def test_random_corruptions_are_all_found_and_no_good_file_is_reported(tmp_path):
    score = corruptions.run(str(tmp_path), 500, seed=7)
    assert score.num_planted == 500
    assert set(score.planted) == set(corruptions.KINDS)
    assert score.missed == []
    assert score.num_found == 500
    assert score.false_alarms == 0


@pytest.mark.parametrize("check", list(corruptions.CONTROLS))
def test_negative_control_with_a_check_switched_off_some_are_missed(tmp_path, check):
    with corruptions.CONTROLS[check]():
        score = corruptions.run(str(tmp_path), 150, seed=7)
    assert 0 < score.num_found < score.num_planted
    assert score.false_alarms == 0


def test_a_header_that_is_longer_than_a_piece_and_a_payload_of_several_are_judged(lab):
    pages = (4096,) * 600_000  # 4.8 MB of page sizes; nobody writes them, somebody may claim them
    where = lab.namespace(pages=pages[:1000], blocks_per_chunk=3)
    path = lab.chunk(where, 1)
    assert os.stat(path).st_size > 2 * judge.PIECE_NBYTES
    assert verify(lab, "--read-data").exit_code == 0
    flip(path, os.stat(path).st_size - 1)
    assert bad_paths(verify(lab, "--read-data")) == {path}
    layout = FileLayout(1, pages, b"L" * 16)
    assert layout.header_nbytes > judge.PIECE_NBYTES
    huge = f"{lab.path}/huge.kv"
    header = ChunkHeader(
        *(b"k" * 32, 0, 0, b"n" * 32, layout.digest, layout.num_blocks, layout.page_nbytes, 0),
        *(layout.payload_nbytes, bytes(8 * layout.num_rows), "test", 0),
    )
    with open(huge, "wb") as file:
        file.write(encode_header(header, layout.header_nbytes))
        file.truncate(layout.file_nbytes)
    assert judge.judge(judge.Reader(), huge, rows=False).finding == "ok"
    flip(huge, layout.header_nbytes - 1)
    assert judge.judge(judge.Reader(), huge, rows=False).finding == "corrupt"


def test_a_damaged_manifest_is_a_problem_and_the_directory_name_still_tells_foreign_files(lab):
    where = lab.namespace()
    other = lab.namespace(model_name="org/other")
    paths = lab.chunks(where, range(5))
    shutil.copyfile(lab.chunk(other, 2), paths[2])
    with open(f"{where.directory.path}/namespace.json", "w", encoding="ascii") as file:
        file.write("{")
    done = verify(lab, "--read-data")
    assert bad_paths(done) == {paths[2]}
    assert done.exit_code == 1
    assert done.summary["problems"] == 1
    assert "no engine can use 1 namespace" in run("verify", root=lab.path).stderr
    assert [line["namespace"] for line in done.lines if line["type"] == "namespace"] == [where.id]
    # whose fault it is that they do not fit, nobody knows
    assert verify(lab, "--remove-bad", "--yes").summary["removed"] == 0


def test_options_that_make_no_sense_are_usage_errors(lab):
    for words in (("--yes",), ("--dry-run",), ("--remove-bad",), ("--quiet",)):
        done = verify(lab, *words)
        assert (done.exit_code, done.stdout) == (2, ""), words


# --- removal ----------------------------------------------------------------------------


def damaged_root(lab):
    where = lab.namespace()
    paths = lab.chunks(where, range(20))
    flip(paths[3], 5000)
    os.truncate(paths[4], 0)
    shutil.copyfile(paths[6], paths[5])
    return where, paths, {paths[3], paths[4], paths[5]}


def test_only_bad_files_are_removed_and_nothing_else_is_written(lab):
    where, _, bad = damaged_root(lab)
    strange = spoil(lab, where)
    before = tree(lab.path)
    done = verify(lab, "--read-data", "--remove-bad", "--yes")
    assert done.exit_code == 1
    assert done.summary["removed"] == 3
    check_lines("verify", [dict(line) for line in done.lines])
    after = tree(lab.path)
    assert before.keys() - after.keys() == bad
    directories = {os.path.dirname(path) for path in bad}  # their mtimes say that a name went
    assert {k: v for k, v in before.items() if k not in bad | directories} == {
        k: v for k, v in after.items() if k not in directories
    }
    assert all(os.path.lexists(path) for path in strange)
    assert verify(lab, "--read-data").exit_code == 0


def test_a_dry_run_and_a_plain_run_change_nothing(lab):
    _, _, bad = damaged_root(lab)
    before = tree(lab.path)
    for words in ((), ("--remove-bad", "--dry-run"), ("--remove-bad", "--dry-run", "--yes")):
        done = verify(lab, "--read-data", *words)
        assert done.exit_code == 1
        assert bad_paths(done) == bad
        assert done.summary["removed"] == 0
    assert "would remove 3 bad files" in done.stderr
    ids = run("verify", "--read-data", "-q", root=lab.path).stdout.split()
    assert len(ids) == len(run("verify", "--read-data", root=lab.path).stdout.splitlines()) == 3
    assert len(bad_paths(verify(lab))) == 2, "rows are not read"
    unasked = fskv("verify", "--read-data", "--remove-bad", root=lab.path)
    assert (unasked.exit_code, unasked.stdout) == (2, ""), "it refuses before it reads"
    assert tree(lab.path) == before


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_a_file_that_became_good_or_another_after_it_was_read_stays(lab, monkeypatch, protected):
    """In the control a removal by name alone takes the good one."""
    where, paths, _ = damaged_root(lab)
    real = command._remove

    def meanwhile(*words, **options):
        lab.chunk(where, 3)  # an engine has stored it again, into the same inode even
        os.unlink(paths[4])  # another one has discarded this
        return real(*words, **options)

    monkeypatch.setattr(command, "_remove", meanwhile)
    if not protected:
        monkeypatch.setattr(check_run, "_version", lambda _: ())
    done = verify(lab, "--read-data", "--remove-bad", "--yes")
    assert done.summary["removed"] == (1 if protected else 2)
    assert os.path.exists(paths[3]) is protected
    assert not os.path.exists(paths[5])
    reasons = {line["path"]: line["reason"] for line in done.lines if line["type"] == "removal"}
    first = "changed since it was read" if protected else "removed"
    assert reasons == {paths[3]: first, paths[4]: "gone meanwhile", paths[5]: "removed"}


# --- hostile and busy roots -------------------------------------------------------------


def test_what_takes_a_files_place_between_listing_and_opening_is_stale_and_stays(lab, monkeypatch):
    where = lab.namespace()
    paths = lab.chunks(where, range(4))
    outside = f"{lab.path}-precious"
    shutil.copyfile(paths[0], outside)
    real = check_run.judge

    def replace(reader, name, **options):
        path = next(path for path in paths if path.endswith(name))
        if os.path.isfile(path) and not os.path.islink(path):
            os.unlink(path)
            makers = (partial(os.symlink, outside), os.mkfifo, os.mkdir, lambda _: None)
            makers[paths.index(path)](path)
        return real(reader, name, **options)

    monkeypatch.setattr(check_run, "judge", replace)
    done = verify(lab, "--read-data", "--remove-bad", "--yes")
    found = {line["path"]: line["finding"] for line in done.lines if line["type"] == "bad"}
    assert found == dict.fromkeys(paths[:3], "stale")
    assert done.summary["vanished"] == 1
    assert done.summary["removed"] == 0
    assert all(os.path.lexists(path) for path in (*paths[:3], outside))


def test_a_file_that_changes_in_place_is_reported_as_that_and_stays(lab, monkeypatch):
    where = lab.namespace()
    paths = lab.chunks(where, range(3))
    flip(paths[1], 5000)
    real = judge.judge_open
    seen = []

    def heal(file, *words):
        verdict = real(file, *words)
        if verdict.bad and not seen:
            seen.append(verdict)
            flip(paths[1], 5000)
        return verdict

    monkeypatch.setattr(judge, "judge_open", heal)
    done = verify(lab, "--read-data", "--remove-bad", "--yes")
    assert [line["finding"] for line in done.lines if line["type"] == "bad"] == ["changing"]
    assert done.exit_code == 1
    assert os.path.exists(paths[1])


def test_a_file_that_cannot_be_read_is_unreadable_partial_and_stays(lab, monkeypatch):
    path, *_ = lab.chunks(lab.namespace(), range(3))
    inode = os.stat(path).st_ino
    real = os.preadv

    def fail(fd, *words):
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, *words)

    monkeypatch.setattr(os, "preadv", fail)
    done = verify(lab, "--read-data", "--remove-bad", "--yes")
    assert done.exit_code == 3
    assert (done.summary["unreadable"], done.summary["removed"]) == (1, 0)
    assert (done.summary["files"], done.summary["data_files"]) == (3, 2)
    assert os.path.exists(path)


def test_a_missing_direct_io_makes_no_difference(lab, monkeypatch):
    _, _, bad = damaged_root(lab)
    real = os.open

    def refuse(path, flags, *words, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *words, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert bad_paths(verify(lab, "--read-data")) == bad


def test_a_namespace_with_a_field_that_nobody_knows_ends_no_command(lab):
    """A later version's, or made up: the command would end for the whole root."""
    space = lab.namespace()
    lab.chunks(space, range(3))
    other = lab.namespace(model_name="other")
    manifest = other.identity.to_manifest() | {"integrity": "later"}
    digest = hashlib.sha256(namespace.canonical_json(manifest)).digest()
    lab.chunks(other, range(2), namespace_digest=digest)
    path = f"{other.directory.path.rpartition('@')[0]}@{digest.hex()[:16]}"
    os.rename(other.directory.path, path)
    with open(f"{path}/namespace.json", "w") as file:
        json.dump(manifest, file)

    done = verify(lab, "--read-data")
    assert done.exit_code == 1
    problems = [line["problem"] for line in done.lines if line["type"] == "namespace"]
    assert len(problems) == 1
    assert "field 'integrity' is unknown to this version of fskv" in problems[0]
    assert (done.summary["bad"], bad_paths(done)) == (0, set()), "the others are judged"
    file = f"{path}/{namespace.chunk_path(key_of(1), 0, None)}"
    assert "'integrity' is unknown" in run("inspect", file, root=lab.path).stderr
