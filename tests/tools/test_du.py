"""`fskv du` against what os.walk and os.stat say."""

from __future__ import annotations

import os
import time

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


def test_a_bound_and_those_who_hold_it_are_told(lab, shared):
    where = lab.namespace()
    lab.chunks(where, range(5))
    for name, namespace in ((unique_name(), where.id), (f"{unique_name()}2", None)):
        limits = Limits(max_nbytes=120 << 10)
        shared.publish(Heartbeat(name, namespace, None, limits))
    done = run("du", "--json", root=lab.path)
    (limit,) = lines(done, "bound", scope="root")
    assert (limit["limit"], done.lines[-1]["heartbeats"]) == (120 << 10, 2)
    shown = " ".join(run("du", root=lab.path).stdout.split())
    assert "1 engine, 1 watcher" in shown
    assert "bound root: 0 B of 120 KiB in use" in shown


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
