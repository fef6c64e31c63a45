"""Engines of two GPU architectures share a root, its bound and its prune, and never KV."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import architectures
import engine_lab as lab
import pytest
import tool_lab
from architectures import FIRST, OTHER
from capacity_lab import disk_nbytes
from world import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]
lab.needs_vllm()


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """The phases, which have run, on a root."""
    root = tmp_path_factory.mktemp("root")
    done = architectures.Phases(
        {FIRST: str(root), OTHER: str(root)}, tmp_path_factory.mktemp("talk")
    )
    done.run()
    return done


def test_two_architectures_on_one_mount(phases):
    assert "".join(row[0] for row in phases.rows) == "ABCDEFGHIJ"


@pytest.mark.parametrize("how", ["once", "watched"])
@pytest.mark.parametrize("used_last", ["both", OTHER])
def test_the_bound_and_prune_take_what_was_used_least_recently_of_either(
    phases, tmp_path, how, used_last
):
    """As a control: where one was used after the other, all that goes is the other's."""
    root = tmp_path / "root"
    # Not the catalogues: what they remember of a last use is younger than the times that are set here.
    remembered = shutil.ignore_patterns(".fskv-*", "snapshot.msgpack")
    shutil.copytree(phases.roots[FIRST], root, ignore=remembered)
    names = {}
    for arch in (FIRST, OTHER):
        paths = sorted(root.joinpath(arch).rglob("*.kv"), key=lambda path: path.name)
        names[arch] = [path.name for path in paths]
        for number, path in enumerate(paths):
            then = 1_600_000_000 + 3600 * number + (10**8 if arch == used_last else 0)
            os.utime(path, (then, then))
    assert names[FIRST] == names[OTHER]
    bound = disk_nbytes(root) // 2
    if how == "once":
        assert tool_lab.fskv("prune", "--max-size", bound, "--yes", root=root).exit_code == 0
    else:
        watched(root, bound)
    left = {arch: sorted(path.name for path in (root / arch).rglob("*.kv")) for arch in names}
    assert left[FIRST] + left[OTHER], "all is gone"
    if used_last == "both":
        assert abs(len(left[FIRST]) - len(left[OTHER])) <= 1
    else:
        assert left[OTHER] == names[OTHER][-len(left[OTHER]) :]
        assert len(left[FIRST]) <= 1
    for arch, found in left.items():
        assert found == names[arch][len(names[arch]) - len(found) :], "not what was used last"


def steady(root, seconds=1.0):
    """Whether nothing was removed for a second."""
    before = disk_nbytes(root)
    time.sleep(seconds)
    return disk_nbytes(root) == before


def watched(root, bound):
    command = [sys.executable, "-m", "fskv_tools", "prune", "--watch", "--yes"]
    watcher = subprocess.Popen(
        [*command, "--max-size", str(bound), "--root", str(root)], stdout=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: disk_nbytes(root) <= bound, 60)
        wait_for(lambda: steady(root), 60)  # a little more goes than must
    finally:
        watcher.terminate()
        watcher.wait(60)


def test_negative_control_called_alike_they_poison_each_other(tmp_path):
    root = str(tmp_path)
    right = lab.generates(architectures.run(OTHER, [architectures.ask("main")], None))
    architectures.run(FIRST, [architectures.ask("main"), *lab.SETTLE], root)
    result = architectures.run(OTHER, [architectures.ask("main")], root, called=FIRST)
    answer = lab.generates(result)["main"]
    assert answer["num_cached_tokens"] > 0
    assert answer["tokens"] != right["main"]["tokens"]
