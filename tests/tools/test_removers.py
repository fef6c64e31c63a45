"""`rm`, `prune` and `verify` remove what they are for and nothing else, whatever happens meanwhile."""

from __future__ import annotations

import os
import time

import pytest
from capacity_lab import dead_name
from tool_lab import run, spoil
from world import follow_links

from fskv.root import remove

COMMANDS = pytest.mark.parametrize(
    "words",
    [("rm", "NAMESPACE"), ("prune", "--max-size", "1B"), ("verify", "--remove-bad")],
    ids=" ".join,
)


@pytest.fixture
def where(lab):
    """A namespace of three chunks that any of the commands removes: old, and bad."""
    found = lab.namespace()
    for path in lab.chunks(found, range(3)):
        os.truncate(path, 4096)
    make_old(found.directory.path)
    return found


def make_old(path):
    then = time.time_ns() - 10**15
    for directory, _, names in os.walk(path):
        for name in (".", *names):
            os.utime(f"{directory}/{name}", ns=(then, then), follow_symlinks=False)


def carry_out(lab, where, words, *form):
    words = [where.id if word == "NAMESPACE" else word for word in words]
    return run(*words, "--yes", *form, root=lab.path)


def chunks_below(path):
    return [f"{d}/{name}" for d, _, names in os.walk(path) for name in names if name[-3:] == ".kv"]


@COMMANDS
@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_a_link_that_takes_a_directorys_place_leads_nowhere(
    lab, where, tmp_path, words, protected, monkeypatch
):
    """In the control links are followed, and the files outside go."""
    chunks, outside = f"{where.directory.path}/chunks", tmp_path / "outside"
    if not protected:
        follow_links(monkeypatch)
    real = remove.Place.__init__

    def swapped(self, root, path, *rest, **options):
        if f"{chunks}/" in path and not os.path.islink(chunks):
            os.rename(chunks, outside)
            os.symlink(outside, chunks)
            make_old(where.directory.path)
        real(self, root, path, *rest, **options)

    monkeypatch.setattr(remove.Place, "__init__", swapped)
    done = carry_out(lab, where, words)
    assert len(chunks_below(outside)) == (3 if protected else 0)
    assert done.exit_code in ((1, 3) if protected else (0, 1, 3))
    assert "Traceback" not in done.stderr


@COMMANDS
def test_of_a_hostile_root_goes_what_is_ours_and_all_else_stays(lab, where, words):
    ours, strange = chunks_below(lab.path), spoil(lab, where)
    strange += [
        f"{where.directory.path}/tmp/my film.part",
        f"{lab.path}-outside/{dead_name()}.part",
    ]
    for path in strange[-2:]:
        open(path, "w").close()
    make_old(where.directory.path)
    before = {os.fsencode(path): os.lstat(path).st_ino for path in strange}
    done = carry_out(lab, where, words)
    assert done.exit_code in (0, 1, 3)
    assert all(c.isprintable() or c == "\n" for c in done.stdout + done.stderr)
    assert not set(ours) & set(chunks_below(lab.path))
    assert {path: os.lstat(path).st_ino for path in before} == before
    assert os.path.exists(f"{where.directory.path}/namespace.json"), "it is still a namespace"


@COMMANDS
def test_what_cannot_be_removed_is_passed_over_and_named(lab, where, words, monkeypatch):
    real, denied = os.unlink, []

    def unlink(name, **options):
        if name.endswith(".kv") and (not denied or name == denied[0]):
            denied.append(name)
            raise PermissionError(1, "Operation not permitted", name)
        return real(name, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    done = carry_out(lab, where, words, "--json")
    assert done.exit_code == (1 if words[0] == "verify" else 3)
    assert len(chunks_below(lab.path)) == 1
    told = [line for line in done.lines if line.get("reason") == "Operation not permitted"]
    assert [os.path.basename(line["path"]) for line in told] == denied[:1]


@COMMANDS
def test_otherwise_all_goes(lab, where, words):
    """The control of all of these."""
    done = carry_out(lab, where, words)
    assert done.exit_code == (1 if words[0] == "verify" else 0), done.stderr
    assert chunks_below(lab.path) == []
