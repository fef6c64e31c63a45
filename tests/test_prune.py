"""The least recently used files go, exactly those, and one that cannot go does not keep the others."""

from __future__ import annotations

import os
import random
import subprocess

import pytest
from capacity_lab import make_namespace, run, write_chunk

from fskv import prune
from fskv.index.snapshot import Catalogue
from fskv.prune import execute, plan

NS = 1_000_000_000


@pytest.fixture
def namespace(tmp_path):
    return make_namespace(tmp_path)


def catalogue_of(namespace):
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(0))
    return catalogue


def files(namespace):
    return {
        f"{where}/{name}" for where, _, names in os.walk(f"{namespace}/chunks") for name in names
    }


def carry_out(chosen, may_go_on=lambda: True):
    return run(execute(chosen, may_go_on))


def prune_until(catalogues, nbytes, num_files=0):
    """As the holder of the lease does: plan after plan."""
    stuck = set()
    done_nbytes = done_files = 0
    for _ in range(100):
        chosen = plan(catalogues, nbytes - done_nbytes, num_files - done_files, stuck)
        if not chosen.candidates:
            break
        pruned = carry_out(chosen)
        stuck |= set(pruned.failures)
        done_nbytes += pruned.nbytes + pruned.vanished_nbytes
        done_files += pruned.num_files
    else:
        pytest.fail("no end")
    return stuck


@pytest.mark.parametrize("seed", range(15))
def test_exactly_the_least_recently_used_go_even_if_used_meanwhile(tmp_path, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(prune, "_BATCH", rng.choice((1, 7, 256)))
    namespaces = [make_namespace(tmp_path, f"cpu/m{n}@{n:016x}") for n in range(3)]
    mtimes = rng.sample(range(1, 10_000), 120)
    if seed % 3 == 0:  # a file system with a coarse clock: many are equally old
        mtimes = [mtime // 1000 + 1 for mtime in mtimes]
    paths = [
        write_chunk(rng.choice(namespaces), n, 4096 * rng.randint(1, 4), mtime_ns=mtime * NS)
        for n, mtime in enumerate(mtimes)
    ]
    catalogues = [catalogue_of(namespace) for namespace in namespaces]
    for path in rng.sample(paths, rng.choice((0, 5, 60))):  # after they were remembered
        later = os.lstat(path).st_mtime_ns + rng.choice((0, 1, 300, 20_000)) * NS
        os.utime(path, ns=(later, later))
    nbytes = rng.randrange(4096 * 200)
    last_use = {path: os.lstat(path).st_mtime_ns for path in paths}
    sizes = {path: os.lstat(path).st_blocks * 512 for path in paths}
    prune_until(catalogues, nbytes)
    gone = set(paths) - set().union(*map(files, namespaces))
    freed = sum(sizes[path] for path in gone)
    assert freed >= nbytes
    if gone:
        newest = max(gone, key=last_use.__getitem__)
        assert freed - sizes[newest] < nbytes or any(
            last_use[p] == last_use[newest] and freed - sizes[p] < nbytes for p in gone
        )
        assert all(last_use[p] >= last_use[newest] for p in set(paths) - gone)
    for namespace, catalogue in zip(namespaces, catalogues, strict=True):
        assert catalogue.num_files == len(files(namespace))


def test_a_look_before_removal_is_what_saves_a_file_that_was_used(namespace, monkeypatch):
    """With its negative control: who trusts what is remembered removes the hottest file."""
    for trusting in (False, True):
        hot = write_chunk(namespace, 1, mtime_ns=1 * NS)
        cold = write_chunk(namespace, 2, mtime_ns=2 * NS)
        catalogue = catalogue_of(namespace)
        os.utime(hot, ns=(9 * NS, 9 * NS))
        if trusting:
            monkeypatch.setattr(prune, "_look", lambda _, records, row: records["mtime_ns"][row])
        prune_until([catalogue], 1)
        assert files(namespace) == ({cold} if trusting else {hot})


def test_the_files_of_all_ranks_go_together_when_the_last_used_of_them_is_due(namespace):
    names = ["abc" + digit * 29 for digit in "012"]
    paths = {
        (name, rank): write_chunk(namespace, name, rank=rank, mtime_ns=mtime * NS)
        for name, mtimes in zip(names, [(1, 50, 3), (10, 11, 12), (60, 61, 62)], strict=True)
        for rank, mtime in enumerate(mtimes)
    }
    catalogue = catalogue_of(namespace)
    pruned = carry_out(plan([catalogue], 4096))
    while not pruned.num_files:
        pruned = carry_out(plan([catalogue], 4096))
    assert {name for name, _ in paths if not os.path.exists(paths[name, 0])} == {names[1]}
    assert {rank for rank in range(3) if os.path.exists(paths[names[1], rank])} == set()
    assert pruned.removed == {namespace: [(bytes.fromhex(names[1]), 0)]}
    prune_until([catalogue], 4096)
    assert len(files(namespace)) == 3
    assert all(os.path.exists(paths[names[2], rank]) for rank in range(3))


@pytest.mark.parametrize("how", ["immutable", "patched"])
def test_one_file_that_cannot_be_removed_does_not_stop_it(namespace, monkeypatch, how):
    paths = [write_chunk(namespace, n, mtime_ns=(n + 1) * NS) for n in range(10)]
    stubborn = paths[0]
    if how == "immutable":
        if subprocess.run(["chattr", "+i", stubborn], capture_output=True).returncode:
            pytest.skip("chattr +i needs root and a file system that knows it")
    else:
        real = os.unlink

        def unlink(path, *rest):
            if path == stubborn:
                raise OSError(5, "I/O error", path)
            real(path, *rest)

        monkeypatch.setattr(os, "unlink", unlink)
    try:
        catalogue = catalogue_of(namespace)
        stuck = prune_until([catalogue], 3 * 4096)
        assert files(namespace) == {stubborn, *paths[4:]}
        assert stuck == {stubborn}
        assert catalogue.num_files == 7
        # All the rest goes, and then there is an end.
        prune_until([catalogue], 1 << 40)
        assert files(namespace) == {stubborn}
    finally:
        subprocess.run(["chattr", "-i", stubborn], capture_output=True)


def test_a_plan_of_nothing_is_nothing(namespace):
    assert plan([], 100).candidates == []
    assert plan([catalogue_of(namespace)], 100, 5).candidates == []
    write_chunk(namespace, 1)
    catalogue = catalogue_of(namespace)
    assert plan([catalogue], 0).candidates == []
    pruned = carry_out(plan([catalogue], 0))
    assert pruned.num_files == pruned.nbytes == 0
    assert len(files(namespace)) == 1


def test_what_counts_is_the_size_on_disk(namespace):
    sparse = write_chunk(namespace, 1, mtime_ns=1 * NS)
    with open(sparse, "r+b") as file:
        file.truncate(1 << 30)
    os.utime(sparse, ns=(1 * NS, 1 * NS))
    others = [write_chunk(namespace, n, 65536, mtime_ns=n * NS) for n in (2, 3)]
    catalogue = catalogue_of(namespace)
    prune_until([catalogue], 65536)
    assert files(namespace) == {others[1]}


def test_files_count_where_inodes_are_short(namespace):
    paths = [write_chunk(namespace, n, mtime_ns=(n + 1) * NS) for n in range(20)]
    prune_until([catalogue_of(namespace)], 0, num_files=7)
    assert files(namespace) == set(paths[7:])


def test_what_others_removed_counts_and_is_no_failure(namespace):
    paths = [write_chunk(namespace, n, mtime_ns=(n + 1) * NS) for n in range(5)]
    catalogue = catalogue_of(namespace)
    os.unlink(paths[0])
    pruned = carry_out(plan([catalogue], 2 * 4096))
    assert (pruned.vanished_nbytes, pruned.nbytes, pruned.failures) == (4096, 4096, {})
    assert files(namespace) == set(paths[2:])
    assert catalogue.num_files == 3


def test_it_stops_when_the_lease_is_lost(namespace, monkeypatch):
    monkeypatch.setattr(prune, "_BATCH", 2)
    for n in range(20):
        write_chunk(namespace, n, mtime_ns=(n + 1) * NS)
    catalogue = catalogue_of(namespace)
    answers = iter([True, True, False])
    carry_out(plan([catalogue], 20 * 4096), lambda: next(answers))
    assert len(files(namespace)) == catalogue.num_files == 16
