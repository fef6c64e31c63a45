"""`fskv du` against what os.walk and os.stat say."""

from __future__ import annotations

import os
import time

import pytest
from capacity_lab import dead_name
from tool_lab import check_lines, run

from fskv.bounds.limits import Heartbeat, Limits
from fskv.namespace import GroupIdentity
from fskv.root.process_id import unique_name

DAY = 86400


def lines(done, kind, **fields):
    return [
        line
        for line in done.lines
        if line["type"] == kind and all(line[name] == value for name, value in fields.items())
    ]


def on_disk(paths):
    return sum(os.stat(path).st_blocks * 512 for path in paths)


def test_it_adds_up_to_what_is_on_disk_by_every_view(lab):
    groups = (
        GroupIdentity(0, "full", None, 16, (3000, 5000), ("a", "b")),
        GroupIdentity(1, "sliding_window", 128, 16, (70000,), ("c",)),
    )
    one = lab.namespace(groups=groups)
    other = lab.namespace(model_name="org/other", tenant="acme", arch="sm_90")
    full = [lab.chunk(one, n, age_s=DAY * n) for n in range(40)]
    window = lab.chunks(one, range(40), group=1)
    ranks = [lab.chunk(other, n, rank=r, age_s=10 * DAY) for n in range(5) for r in (0, 1)]
    done = run("du", "--json", root=lab.path)
    assert done.exit_code == 0, done.stderr
    for found, paths in (
        (lines(done, "use", by="namespace", namespace=one.id), full + window),
        (lines(done, "use", by="namespace", namespace=other.id), ranks),
        (lines(done, "use", by="tenant", tenant="acme"), ranks),
        (lines(done, "use", by="group", group="full"), full + ranks),
        (lines(done, "use", by="group", group="sliding_window"), window),
        (lines(done, "summary"), full + window + ranks),
    ):
        (line,) = found
        assert line["files"] == len(paths)
        assert line["nbytes_on_disk"] == on_disk(paths)
        now = time.time()
        for age, days in zip(line["unused"], (1, 7, 30), strict=True):
            old = [p for p in paths if os.stat(p).st_mtime < now - days * DAY]
            assert (age["age"], age["files"]) == (f"{days}d", len(old))
            assert age["nbytes_on_disk"] == on_disk(old)
    check_lines("du", done.lines)


def test_what_it_says_a_prune_would_free_is_what_a_prune_frees(lab, shared):
    where = lab.namespace()
    paths = [lab.chunk(where, n, age_s=DAY * n + 3600) for n in range(40)]
    bound = on_disk(paths) // 2
    shared.publish(Heartbeat(unique_name(), where.id, None, Limits(max_nbytes=bound)))
    done = run("du", "--json", "--unused-for", "20d", root=lab.path)
    (limit,) = lines(done, "bound", scope="root")
    assert limit["limit"] == bound
    assert done.lines[-1]["heartbeats"] == 1
    for target in lines(done, "target"):
        words = target["option"].split()
        plan = run("prune", *words, "--dry-run", "--json", root=lab.path)
        assert plan.summary["planned_files"] == target["files"] > 0
        assert plan.summary["planned_nbytes"] == target["nbytes_on_disk"]
    shown = run("du", "--unused-for", "20d", root=lab.path).stdout
    assert f"fskv prune --root {lab.path} --unused-for 20d" in " ".join(shown.split())
    (by_age, by_size) = lines(done, "target")
    freed = run("prune", *by_age["option"].split(), "--yes", "--json", root=lab.path)
    assert freed.summary["removed_nbytes"] == by_age["nbytes_on_disk"]
    assert by_size["nbytes_on_disk"] >= on_disk([]) + bound


@pytest.mark.parametrize(
    ("bound", "text"), [(120 << 10, "120KiB"), ((1 << 17) + 1, "131073B"), (3 << 40, None)]
)
def test_a_bound_is_told_as_people_write_it_where_it_would_free_anything(lab, shared, bound, text):
    where = lab.namespace()
    lab.chunks(where, range(5))
    for name, namespace in ((unique_name(), where.id), (f"{unique_name()}2", None)):
        limits = Limits(max_nbytes=bound)
        shared.publish(Heartbeat(name, namespace, None, limits))
    shown = " ".join(run("du", root=lab.path).stdout.split())
    assert "1 engine, 1 watcher" in shown
    assert shown.endswith(f"--max-size {text}") is (text is not None)
    assert ("would free" in shown) is (text is not None)
    if text:
        assert run("prune", "--max-size", text, "-n", root=lab.path).exit_code == 0


def test_garbage_is_counted_by_kind(lab):
    where, bad = lab.namespace(), lab.namespace(model_name="org/bad")
    shard = os.path.dirname(lab.chunk(where, 1))
    for name in (dead_name(), unique_name()):
        with open(f"{shard}/{name}.part", "w") as file:
            file.write("x" * 5000)
    with open(f"{bad.directory.path}/namespace.json", "w") as file:
        file.write('{"format": 2}')
    done = run("du", "--json", root=lab.path)
    (line,) = lines(done, "garbage", namespace=where.id)
    assert (line["orphaned_parts"], line["parts_in_progress"]) == (1, 1)
    assert line["orphaned_nbytes"] == line["in_progress_nbytes"] == 8192
    (line,) = lines(done, "garbage", namespace=bad.id)
    assert line["problem"]
    assert done.exit_code == 1
    (space,) = lines(done, "filesystem")
    info = os.statvfs(lab.path)
    assert space["nbytes"] == info.f_blocks * info.f_frsize
