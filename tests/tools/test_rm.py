"""`fskv rm`: what is named goes, with all that fskv made of it, and nothing that it did not make."""

from __future__ import annotations

import os
import time

import pytest
from capacity_lab import dead_name
from tool_lab import Lab, check_lines, fskv, key_of, run

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")

from fskv_tools.commands import rm

from fskv import namespace
from fskv.bounds.eviction_news import EvictionNews, entries
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.shared_files import SharedFiles
from fskv.root.process_id import unique_name


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


def there(paths):
    return [path for path in paths if os.path.lexists(path)]


def test_a_namespace_goes_as_a_whole_and_the_others_stay(lab):
    one, other = lab.namespace(), lab.namespace(model_name="org/other")
    paths, others = lab.chunks(one, range(30)), lab.chunks(other, range(5))
    for name in ("tmp/node-1-00000000-1.part", "snapshot.msgpack"):
        with open(f"{one.directory.path}/{name}", "w") as file:
            file.write("x")
    plan = run("rm", one.id, "--dry-run", "--json", root=lab.path)
    assert plan.summary["planned_files"] == 30
    assert "would remove 30 files" in plan.stderr
    assert fskv("rm", one.id, root=lab.path).exit_code == 2, "nobody could be asked"
    assert there(paths) == paths
    done = run("rm", one.id, "--yes", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert not os.path.lexists(one.directory.path)
    assert there(others) == others
    assert done.summary["removed_files"] == 30
    check_lines("rm", done.lines)
    assert run("rm", other.id, "--yes", root=lab.path).exit_code == 0
    assert sorted(os.listdir(lab.path)) == ["CACHEDIR.TAG", "fskv.json"]
    assert run("ls", root=lab.path).exit_code == 0


def test_chunks_go_by_any_name_and_engines_hear_of_it(lab):
    where = lab.namespace()
    os.makedirs(f"{lab.path}/.fskv-maintenance/removed")
    paths = lab.chunks(where, range(10))
    ranks = [lab.chunk(where, 20, rank=rank) for rank in (0, 1)]
    words = [key_of(1).hex(), os.path.basename(paths[2]), paths[3], key_of(20).hex()]
    done = run("rm", *words, "--yes", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert there(paths + ranks) == [paths[0], *paths[4:]]
    news = EvictionNews(f"{lab.path}/.fskv-maintenance").take_new(where.id.rpartition("@")[2])
    gone = {bytes.fromhex(namespace.chunk_name(key_of(n))) for n in (1, 2, 3, 20)}
    assert {name for name, _ in entries(news)} == gone
    for name in ("ffffffffffff", ""):
        assert run("rm", name, "--yes", root=lab.path).exit_code == 2
    assert len(there(paths)) == 7


def test_a_namespace_that_an_engine_writes_to_is_refused_unless_forced(lab):
    """What an engine has claimed that is gone is no obstacle."""
    where = lab.namespace()
    paths = lab.chunks(where, range(5))
    os.makedirs(f"{lab.path}/{SHARED_DIR}")
    for name, is_alive in ((dead_name(), False), (unique_name(), True)):
        beat = Heartbeat(name, where.id, None, Limits())
        SharedFiles(f"{lab.path}/{SHARED_DIR}").publish(beat)
        plan = run("rm", where.id, "-n", "--json", root=lab.path)
        assert plan.lines[0]["in_use"] is is_alive
    done = run("rm", where.id, "--yes", root=lab.path)
    assert done.exit_code == 2
    assert "--force" in done.stderr
    assert there(paths) == paths
    assert run("rm", paths[0], "--yes", root=lab.path).exit_code == 0  # a chunk may always go
    assert run("rm", where.id, "--yes", "--force", root=lab.path).exit_code == 0
    assert not os.path.lexists(where.directory.path)


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_namespaces_that_were_not_used_for_so_long_go_and_used_ones_stay(
    lab, protected, monkeypatch
):
    """In the control a removal that does not look at each file takes along what is used meanwhile."""
    old, used = lab.namespace(), lab.namespace(model_name="org/used")
    paths = [*lab.chunks(old, range(10)), *lab.chunks(used, range(10))]
    then = time.time_ns() - 100 * 86400 * 10**9
    for directory, _, names in os.walk(lab.path):
        for name in (".", *names):
            os.utime(f"{directory}/{name}", ns=(then, then))
    os.utime(paths[15])
    real = rm.remove_namespace

    def remove(one, news, stop, before_ns):
        os.utime(paths[3])
        return real(one, news, stop, before_ns if protected else None)

    assert run("rm", "--unused-for", "101d", "--yes", root=lab.path).exit_code == 0
    assert there(paths) == paths
    monkeypatch.setattr(rm, "remove_namespace", remove)
    done = run("rm", "--unused-for", "90d", "--yes", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert there(paths) == ([paths[3]] if protected else []) + paths[10:]
    chunk = os.path.basename(paths[15]).removesuffix(".kv")
    assert run("rm", "--unused-for", "90d", chunk, "--yes", root=lab.path).exit_code == 2


@pytest.mark.parametrize("words", [("rm",), ("prune", "--max-size", "1B")])
def test_nobody_is_told_that_a_tenant_is_gone_while_a_namespace_may_be_his(lab, words):
    seen, unseen = (lab.namespace(tenant="blue", model_name=name) for name in ("org/a", "org/b"))
    gone, left = lab.chunks(seen, range(3)), lab.chunks(unseen, range(3))
    manifest = f"{unseen.directory.path}/namespace.json"
    os.rename(manifest, f"{lab.path}/kept")
    with open(manifest, "w") as file:
        file.write("{")
    done = run(*words, "--tenant", "blue", "--yes", root=lab.path)
    assert (len(there(gone)), len(there(left))) == (0, 3)
    assert done.exit_code == 3
    assert f"{unseen.id}: may be a tenant's, and nobody can tell" in " ".join(done.stderr.split())
    # The control: with the manifest whole again there is nothing to be said.
    os.rename(f"{lab.path}/kept", manifest)
    done = run(*words, "--tenant", "blue", "--yes", root=lab.path)
    assert (done.exit_code, there(left)) == (0, [])


def test_a_tenant_goes_with_all_of_its_namespaces_and_nobody_elses(lab):
    his = [lab.namespace(tenant="blue", model_name=model) for model in ("org/a", "org/b")]
    others = [lab.namespace(tenant="blue2"), lab.namespace()]
    paths = [lab.chunks(space, range(3)) for space in (*his, *others)]
    planned = run("rm", "--tenant", "blue", "--dry-run", "--json", root=lab.path)
    assert (planned.summary["planned_files"], planned.summary["removed_files"]) == (6, 0)
    done = run("rm", "--tenant", "blue", "--yes", "--json", root=lab.path)
    assert (done.exit_code, done.summary["removed_files"]) == (0, 6)
    assert not there(space.directory.path for space in his)
    for words in ([], ["--tenant", "blu"], ["--tenant", "blue"]):
        assert run("rm", *words, "--yes", root=lab.path).exit_code == 2
    assert [len(there(each)) for each in paths] == [0, 0, 3, 3]
