"""A copy between two roots brings the same files, checked on the way, and no other."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
from fskv_tools import copying
from tool_lab import Lab, check_lines, everything_below, fskv, run, spoil
from toy_engine import TOKENS_PER_CHUNK, Engine
from world import damage, follow_links

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.shared_files import SharedFiles
from fskv.root import beneath, files
from fskv.root.filesystem import Space
from fskv.root.process_id import unique_name
from fskv.sizes import Share


def chunk_files(root):
    """Return every file below namespaces' directories of chunks: relative name -> (content, mtime)."""
    found = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = os.path.join(base, name)
            if "/chunks/" in path:
                with open(path, "rb") as file:
                    found[os.path.relpath(path, root)] = (file.read(), os.stat(path).st_mtime_ns)
    return found


@pytest.mark.parametrize("options", [(), ("--threads", "1")])
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
    damage(path, os.path.getsize(path) - 1)
    target = Lab(tmp_path / "to")
    assert run("copy", "--to", target.path, root=lab.path).exit_code == 1
    assert chunk_files(target.path) == {}
    monkeypatch.setattr(copying.chunk_file, "check_rows", lambda *_: None)
    assert run("copy", "--to", target.path, root=lab.path).exit_code == 0
    assert len(chunk_files(target.path)) == 1


def test_what_is_there_and_bad_is_replaced_and_a_directory_moved_aside(lab, tmp_path):
    where = lab.namespace()
    paths = lab.chunks(where, range(5))
    target = Lab(tmp_path / "to")
    run("copy", "--to", target.path, root=lab.path)
    there = [f"{target.path}/{os.path.relpath(path, lab.path)}" for path in paths]
    damage(there[0], 200)
    os.truncate(there[1], 0)
    os.remove(there[2])
    os.makedirs(f"{there[2]}/of a stranger")
    done = run("copy", "--to", target.path, "--json", root=lab.path)
    assert (done.summary["stored"], done.summary["there"]) == (3, 2)
    assert chunk_files(target.path) == chunk_files(lab.path)
    assert any(path.endswith("of a stranger") for path in everything_below(target.path))


def test_another_identity_in_its_place_is_refused_and_stays(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(3))
    target = Lab(tmp_path / "to")
    target.namespace()
    manifest = tmp_path / "to" / where.id / "namespace.json"
    manifest.write_text("{}")
    done = run("copy", "--to", target.path, "--json", root=lab.path)
    assert (done.exit_code, done.summary["failed"]) == (3, 1)
    assert manifest.read_text() == "{}"
    assert chunk_files(target.path) == {}


def test_what_was_used_lately_may_be_chosen_and_a_dry_run_writes_nothing(lab, tmp_path):
    where, other = lab.namespace(), lab.namespace(model_name="org/other")
    for number in range(6):
        lab.chunk(where, number, age_s=number * 86400)
    lab.chunks(other, range(3))
    target = Lab(tmp_path / "to")
    before = everything_below(target.path)
    done = run("copy", "--to", target.path, "--dry-run", "--json", root=lab.path)
    assert done.summary["stored"] == 9
    assert everything_below(target.path) == before
    run("copy", "--to", target.path, "--newer-than", "36h", where.id, root=lab.path)
    assert len(chunk_files(target.path)) == 2


def test_times_of_the_future_become_now(lab, tmp_path):
    path = lab.chunk(lab.namespace(), 1)
    os.utime(path, (1e10, 1e10))
    target = Lab(tmp_path / "to")
    run("copy", "--to", target.path, root=lab.path)
    ((_, mtime_ns),) = chunk_files(target.path).values()
    assert mtime_ns < 5e18


@pytest.mark.parametrize("killed", [True, False])
def test_what_was_killed_or_met_a_full_disk_is_completed_by_the_next_one(lab, tmp_path, killed):
    lab.chunks(lab.namespace(), range(40))
    target = Lab(tmp_path / "to")
    end = (
        f"os.kill(os.getpid(), {signal.SIGKILL:d})"
        if killed
        else f"raise OSError({errno.ENOSPC}, 'no space')"
    )
    script = (
        "import os, itertools, fskv_tools.copying as copying\n"
        "real, calls = copying.publish_chunk, itertools.count()\n"
        "def publish(*words):\n"
        f"    if next(calls) >= 10: {end}\n"
        "    return real(*words)\n"
        "copying.publish_chunk = publish\n"
        "from fskv_tools.cli import main; main()\n"
    )
    words = ["copy", "--root", lab.path, "--to", target.path, "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120
    )
    there = [name for name in chunk_files(target.path) if name.endswith(".kv")]
    assert len(there) == 10
    if not killed:
        assert (done.returncode, len(chunk_files(target.path))) == (3, 10)
        assert "run the same command again" in done.stderr
    again = run("copy", "--to", target.path, "--json", root=lab.path)
    assert (again.summary["stored"], again.summary["there"]) == (30, 10)


@pytest.mark.parametrize("level", ["arch", "namespace", "tmp", "chunks", "shard"])
@pytest.mark.parametrize("protected", [True, False])
def test_nothing_is_made_behind_a_link(lab, tmp_path, monkeypatch, level, protected):
    """Negative control: where links are followed, things are made behind the link."""
    where = lab.namespace()
    lab.chunks(where, range(3))
    root, outside = Lab(tmp_path / "to").path, tmp_path / "outside"
    outside.mkdir()
    links = {"arch": [where.id.split("/")[0]], "namespace": [where.id]}
    links |= {"chunks": [f"{where.id}/chunks"], "tmp": [f"{where.id}/tmp"]}
    for link in links.get(level) or [f"{where.id}/chunks/{idx:03x}" for idx in range(4096)]:
        os.makedirs(os.path.dirname(f"{root}/{link}"), exist_ok=True)
        os.symlink(outside, f"{root}/{link}")
    if not protected:
        follow_links(monkeypatch)
    before_ns = os.stat(outside).st_mtime_ns  # parts and probes do not stay
    done = run("copy", "--to", root, "--json", root=lab.path)
    assert (done.summary["failed"] > 0) is protected
    assert done.summary["stored"] == (0 if protected else 3)
    assert (os.stat(outside).st_mtime_ns == before_ns) is protected


@pytest.mark.parametrize(("tenant", "holds"), [(None, True), ("theirs", True), ("other", False)])
def test_the_bounds_of_a_living_engine_hold_and_nothing_is_pruned(lab, tmp_path, tenant, holds):
    """Negative control: a bound of another tenant's."""
    where = lab.namespace(tenant="theirs")
    size = os.stat(lab.chunks(where, range(40))[0]).st_size
    target = Lab(tmp_path / "to")
    shared = f"{target.path}/{SHARED_DIR}"
    os.makedirs(shared)
    limits = Limits(**{"tenant_max_nbytes" if tenant else "max_nbytes": 10 * size})
    beat = Heartbeat(unique_name(), where.id, tenant, limits)
    SharedFiles(shared).publish(beat)
    done = run("copy", "--to", target.path, "--json", root=lab.path)
    assert done.exit_code == (3 if holds else 0)
    assert done.summary["stored"] == (10 if holds else 40)
    assert done.summary["no_room"] == 40 - done.summary["stored"]


@pytest.mark.parametrize("copied", ["tar", "cp", "rsync"])
def test_what_any_other_program_has_copied_is_good_and_serves(tmp_path, copied):
    """docs/operations.md says so. The control: a chunk that did not come along is computed."""
    if shutil.which(copied) is None:
        pytest.skip(f"no {copied}")
    source, target = tmp_path / "kv", tmp_path / "new"
    source.mkdir()
    target.mkdir()
    prompt = list(range(5 * TOKENS_PER_CHUNK))
    first = Engine(str(source))
    content = first.run(prompt)
    commands = {
        "tar": "tar -C kv --exclude=./.fskv-maintenance --exclude='*.part' -cf kv.tar . && "
        "tar -C new -xf kv.tar",
        "cp": "cp -a kv/. new/",
        "rsync": "rsync -a --exclude=.fskv-maintenance --exclude='*.part' kv/ new/",
    }
    subprocess.run(commands[copied], shell=True, cwd=tmp_path, check=True)
    first.close()
    assert run("verify", "--read-data", root=target).exit_code == 0
    second = Engine(str(target))
    assert (second.run(prompt), second.num_loaded) == (content, 5)
    assert second.run([*prompt[:-1], 7]) != content
    assert second.num_loaded == 5 + 4
    second.close()


def test_what_makes_no_sense_is_refused(lab, tmp_path):
    lab.chunks(lab.namespace(), range(1))
    assert run("copy", "--to", lab.path, root=lab.path).exit_code == 2
    assert run("copy", "--to", "", root=lab.path).exit_code == 2
    assert run("copy", "--to", tmp_path / "no", root=lab.path).exit_code == 10
    (tmp_path / "empty").mkdir()
    assert run("copy", "--to", tmp_path / "empty", root=lab.path).exit_code == 10
    assert os.listdir(tmp_path / "empty") == []
    assert run("copy", "--to", lab.path, "--keep-free", "soon", root=lab.path).exit_code == 2


def owners(root):
    return {os.lstat(os.path.join(root, name)).st_uid for name in everything_below(root)}


def given_to(path, uid, mode=0o600):
    """Make an empty root of a user; returns its path."""
    target = Lab(path)
    for name in (".", *os.listdir(path)):
        os.chown(path / name, uid, uid)
    os.chmod(path / "fskv.json", mode)
    return target.path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("handed", [True, False])
def test_what_root_writes_belongs_to_the_roots_owner(lab, tmp_path, monkeypatch, handed):
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
    monkeypatch.setattr(copying, "_refuse_what_its_owner_could_not_read", lambda *_: None)
    if not handed:
        for module in (beneath, files, copying):
            monkeypatch.setattr(module, "hand_over", lambda *_, **__: None)
    done = run("copy", "--to", target, "--json", root=lab.path)
    assert done.summary["stored"] == 5, done.stderr
    assert owners(target) == ({4321} if handed else {4321, 0})


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
    monkeypatch.setattr(Space, "of", classmethod(lambda *_: Space(total << 40, 0, 0, 0)))
    assert copying.Room(lab.path, Share(2.0)).take(None, 4096) is stored
