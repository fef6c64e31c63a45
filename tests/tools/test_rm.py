"""`fskv rm`: what is named goes, with all that fskv made of it, and nothing that it did not make."""

from __future__ import annotations

import os

import pytest
from capacity_lab import dead_name
from tool_lab import check_lines, fskv, key_of, run

from fskv import namespace
from fskv.bounds.eviction_news import EvictionNews, entries
from fskv.bounds.limits import Heartbeat, Limits
from fskv.root.process_id import unique_name


def there(paths):
    return [path for path in paths if os.path.lexists(path)]


def test_a_namespace_goes_as_a_whole_and_the_others_stay(lab):
    one, other = lab.namespace(), lab.namespace(model_name="org/other")
    paths, others = lab.chunks(one, range(30)), lab.chunks(other, range(5))
    os.makedirs(f"{lab.path}/.fskv-maintenance/removed")
    for name in ("tmp/node-1-00000000-1.part", "snapshot.msgpack"):
        with open(f"{one.directory.path}/{name}", "w") as file:
            file.write("x")
    plan = run("rm", one.id, "--dry-run", "--json", root=lab.path)
    assert plan.summary["planned_files"] == 30
    assert fskv("rm", one.id, root=lab.path).exit_code == 2, "nobody could be asked"
    assert there(paths) == paths
    done = run("rm", one.id, "--yes", "--json", root=lab.path)
    assert (done.exit_code, done.summary["removed_files"]) == (0, 30), done.stderr
    assert not os.path.lexists(one.directory.path)
    assert there(others) == others
    check_lines("rm", done.lines)
    news = EvictionNews(f"{lab.path}/.fskv-maintenance").take_new(one.id.rpartition("@")[2])
    gone = {bytes.fromhex(namespace.chunk_name(key_of(n))) for n in range(30)}
    assert {name for name, _ in entries(news)} == gone, "engines hear of it"


def test_a_model_goes_with_all_of_its_namespaces_and_no_other_model(lab):
    model, longer = "org/small", "org/small-instruct"
    ours = [lab.namespace(model_name=model, engine_version=one) for one in ("1", "2")]
    other = lab.namespace(model_name=longer)
    for each in (*ours, other):
        lab.chunks(each, range(3))
    plan = run("rm", model, "--dry-run", root=lab.path)
    assert {line.partition(":")[0] for line in plan.stdout.splitlines()} == {x.id for x in ours}
    assert run("rm", "org", "--yes", root=lab.path).exit_code == 2, "that may be both models"
    done = run("rm", model, "--yes", "--json", root=lab.path)
    assert (done.exit_code, done.summary["removed_files"]) == (0, 6)
    assert there(each.directory.path for each in (*ours, other)) == [other.directory.path]


@pytest.mark.parametrize("name", ["--help", "-rf", "rm"])
def test_a_directory_that_is_called_like_a_command_or_an_option_is_a_name(lab, name):
    path, env = f"{lab.path}/cpu/{name}@{'0' * 16}", {"FSKV_ROOT": lab.path}
    os.makedirs(f"{path}/chunks")
    assert run("ls", "-q", "--", name, env=env).stdout == f"cpu/{name}@{'0' * 16}\n"
    assert run("rm", "--yes", "--", name, env=env).exit_code == 0
    assert not os.path.lexists(path)
    os.makedirs(f"{lab.path}/--root=/org--m@{'0' * 16}")  # `xargs` would hand it over as an option
    assert run("ls", "-q", env=env).stdout == ""


def spoiled(path, kind):
    """Make a namespace.json of this kind; returns what must stay as it is."""
    kept = f"{path}.kept"
    if kind != "garbage":
        os.rename(path, kept)
    if kind == "garbage":
        with open(path, "w") as file:
            file.write("{")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        os.rename(kept, kept := f"{os.path.dirname(path)}-kept")
        os.symlink(kept, path)
        return [kept]
    elif kind == "directory":
        os.mkdir(path)
    if os.path.exists(kept):
        os.unlink(kept)
    return []


@pytest.mark.parametrize("kind", ["garbage", "fifo", "link", "directory", "nothing"])
def test_a_damaged_namespace_is_called_so_once_and_goes(lab, kind):
    """What a link leads to stays."""
    where, good = lab.namespace(), lab.namespace(model_name="org/good")
    lab.chunks(where, range(3))
    stays = lab.chunks(good, range(2))
    stays += spoiled(f"{where.directory.path}/namespace.json", kind)
    for words, counted in ((("ls",), 2), (("du",), 2), (("prune", "-n"), 0)):
        done = run(*words, root=lab.path, env={"FSKV_ROOT": lab.path})
        said = [line for line in done.stderr.splitlines() if where.id in line]
        assert len(said) == 1, done.stderr
        assert said[0].startswith(f"{where.id}: damaged: ")
        assert "option" not in done.stderr
        assert (f"{counted} namespaces, 1 damaged" in done.stdout) is bool(counted)
    done = run("rm", where.id, "--yes", root=lab.path)
    assert (done.exit_code, there([where.directory.path])) == (0, []), done
    assert there(stays) == stays


def test_what_fskv_did_not_make_is_named_and_stays_with_its_namespace(lab):
    where = lab.namespace()
    paths = lab.chunks(where, range(3))
    os.symlink(lab.path, f"{where.directory.path}/chunks/linked")
    notes = [f"{where.directory.path}/{name}" for name in ("notes.txt", "chunks/abc.txt")]
    for path in notes:
        open(path, "w").close()
    done = run("rm", where.id, "--yes", "--json", root=lab.path)
    assert (done.exit_code, there(paths)) == (3, [])
    named = {line["path"] for line in done.lines if line["type"] == "foreign"}
    assert named == {*notes, f"{where.directory.path}/chunks/linked"}
    assert os.path.exists(f"{where.directory.path}/namespace.json")


@pytest.mark.parametrize("name", ["snapshot.msgpack", "prefill_rate.txt", "", "negative control"])
def test_a_namespace_that_stays_is_never_called_gone(lab, name):
    """A directory has the name of a file of fskv's, which is not looked for below."""
    where = lab.namespace()
    paths = lab.chunks(where, range(3))
    if name != "negative control":
        os.makedirs(f"{where.directory.path}/{name or 'tmp/own'}")
    done = run("rm", where.id, "--yes", root=lab.path)
    stays = os.path.lexists(where.directory.path)
    assert (there(paths), stays) == ([], name != "negative control")
    assert done.exit_code == (3 if stays else 0)
    assert ("stays" in done.stdout) is stays


def test_a_namespace_that_an_engine_writes_to_is_refused_unless_forced(lab, shared):
    """What an engine has claimed that is gone is no obstacle."""
    where = lab.namespace()
    paths = lab.chunks(where, range(5))
    for name, is_alive in ((dead_name(), False), (unique_name(), True)):
        shared.publish(Heartbeat(name, where.id, None, Limits()))
        plan = run("rm", where.id, "-n", "--json", root=lab.path)
        assert plan.lines[0]["in_use"] is is_alive
    done = run("rm", where.id, "--yes", root=lab.path)
    assert done.exit_code == 2
    assert "--force" in done.stderr
    assert there(paths) == paths
    assert run("rm", where.id, "--yes", "--force", root=lab.path).exit_code == 0
    assert not os.path.lexists(where.directory.path)


@pytest.mark.parametrize("whole", [False, True], ids=["", "negative control"])
def test_nobody_is_told_that_a_tenant_is_gone_while_a_namespace_may_be_his(lab, whole):
    seen, unseen = (lab.namespace(tenant="blue", model_name=name) for name in ("org/a", "org/b"))
    gone, left = lab.chunks(seen, range(3)), lab.chunks(unseen, range(3))
    if not whole:
        with open(f"{unseen.directory.path}/namespace.json", "w") as file:
            file.write("{")
    done = run("rm", "--tenant", "blue", "--yes", root=lab.path)
    assert (len(there(gone)), len(there(left))) == (0, 0 if whole else 3)
    assert done.exit_code == (0 if whole else 3)
    said = f"{unseen.id}: may be a tenant's, and nobody can tell" in done.stderr
    assert said is not whole


def test_a_tenant_goes_with_all_of_its_namespaces_and_nobody_elses(lab):
    his = [lab.namespace(tenant="blue", model_name=model) for model in ("org/a", "org/b")]
    others = [lab.namespace(tenant="blue2"), lab.namespace()]
    paths = [lab.chunks(space, range(3)) for space in (*his, *others)]
    done = run("rm", "--tenant", "blue", "--yes", "--json", root=lab.path)
    assert (done.exit_code, done.summary["removed_files"]) == (0, 6)
    assert not there(space.directory.path for space in his)
    for words in ([], ["--tenant", "blu"], ["--tenant", "blue"], [""]):
        assert run("rm", *words, "--yes", root=lab.path).exit_code == 2
    assert [len(there(each)) for each in paths] == [0, 0, 3, 3]
