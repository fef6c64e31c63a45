"""The least recently used files go, exactly those, and one that cannot go does not keep the others."""

from __future__ import annotations

import os
import random
import time

import pytest
from capacity_lab import make_namespace, run, write_chunk

from fskv.bounds import evict
from fskv.bounds.evict import Need
from fskv.index import scan
from fskv.index.snapshot import Catalogue
from fskv.root.filesystem import clamp_mtime

NS = 1_000_000_000


def catalogue_of(namespace):
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(0))
    return catalogue


def files(namespace):
    return {
        f"{where}/{name}" for where, _, names in os.walk(f"{namespace}/chunks") for name in names
    }


def prune(catalogues, nbytes, root="/", **options):
    return run(evict.evict(catalogues, Need(nbytes), str(root), **options))


def prune_until(catalogues, nbytes):
    assert prune(catalogues, nbytes).failures == {}


@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_least_recently_used_go_even_if_used_meanwhile(tmp_path, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(evict, "_BATCH", rng.choice((1, 7, 256)))
    monkeypatch.setattr(evict, "_STEP_FILES", rng.choice((3, 20, 16384)))
    namespaces = [make_namespace(tmp_path, f"cpu/m{n}@{n:016x}") for n in range(3)]
    last_use, sizes = {}, {}
    most = 10 if seed % 3 == 0 else 10_000  # where clocks are coarse many are equally old
    for n, seconds in enumerate(rng.choices(range(1, most), k=120)):
        size = 4096 * rng.randint(1, 4)
        path = write_chunk(rng.choice(namespaces), n, size, mtime_ns=seconds * NS)
        last_use[path], sizes[path] = seconds, size
    catalogues = [catalogue_of(namespace) for namespace in namespaces]
    used = rng.sample(sorted(sizes), rng.choice((0, 5, 60)))  # after they were remembered
    for path in used:
        os.utime(path, ns=(20_000 * NS, 20_000 * NS))
        last_use[path] = 20_000
    nbytes = rng.randrange(sum(sizes[path] for path in sizes.keys() - set(used)))
    prune_until(catalogues, nbytes)
    left = set().union(*map(files, namespaces))
    gone = sizes.keys() - left
    assert nbytes <= sum(sizes[path] for path in gone) < nbytes + 4 * 4096
    assert max(map(last_use.get, gone), default=0) <= min(map(last_use.get, left))
    assert sum(catalogue.num_files for catalogue in catalogues) == len(left)


def test_a_look_before_removal_is_what_saves_a_file_that_was_used(namespace, monkeypatch):
    """With its negative control: who trusts what is remembered removes the hottest file."""
    for trusting in (False, True):
        hot = write_chunk(namespace, 1, mtime_ns=1 * NS)
        cold = write_chunk(namespace, 2, mtime_ns=2 * NS)
        catalogue = catalogue_of(namespace)
        os.utime(hot, ns=(9 * NS, 9 * NS))
        if trusting:
            monkeypatch.setattr(
                evict, "_look", lambda _, records, row, __: records["mtime_ns"][row]
            )
        prune_until([catalogue], 1)
        assert files(namespace) == ({cold} if trusting else {hot})


@pytest.mark.parametrize("dead", [True, False], ids=["", "negative control"])
def test_what_nobody_can_use_again_goes_before_all_others(tmp_path, dead):
    """Also what was touched meanwhile; and it says nothing about the age of what is in use."""
    old, young = (make_namespace(tmp_path, f"cpu/m@{n:016x}") for n in range(2))
    kept = {write_chunk(old, n, mtime_ns=(n + 1) * NS) for n in range(3)}
    goes = {write_chunk(young, n, mtime_ns=(n + 100) * NS) for n in range(3)}
    catalogues = [catalogue_of(old), catalogue_of(young)]
    for path in goes:
        os.utime(path, ns=(900 * NS, 900 * NS))
    first = [catalogues.pop()] if dead else []
    assert prune(catalogues, 3 * 4096, first=first).last_use_ns == (0 if dead else 3 * NS)
    assert files(old) | files(young) == (kept if dead else goes)
    if dead:
        assert prune(catalogues, 1, first=first).last_use_ns == 1 * NS


def test_the_files_of_all_ranks_go_together_when_the_last_used_of_them_is_due(namespace):
    names = ["abc" + digit * 29 for digit in "012"]
    paths = [
        [write_chunk(namespace, name, rank=rank, mtime_ns=s * NS) for rank, s in enumerate(seconds)]
        for name, seconds in zip(names, [(1, 50), (10, 11), (60, 61)], strict=True)
    ]
    catalogue = catalogue_of(namespace)
    prune_until([catalogue], 4096)
    assert files(namespace) == {*paths[0], *paths[2]}
    prune_until([catalogue], 4096)
    assert files(namespace) == {*paths[2]}


@pytest.mark.parametrize("believed", [False, True], ids=["", "negative control"])
def test_a_file_of_the_future_goes_first_and_stops_nothing(namespace, monkeypatch, believed):
    """In the control it is as if it were used all the time, and never goes."""
    if believed:
        monkeypatch.setattr(scan, "clamp_mtime", lambda mtime_ns, _: clamp_mtime(mtime_ns, 0))
    future = write_chunk(namespace, 100)
    others = [write_chunk(namespace, n, mtime_ns=(n + 1) * NS) for n in range(3)]
    hour = write_chunk(namespace, 200, mtime_ns=time.time_ns() + 3600 * NS)
    os.utime(future, (13_569_465_600, 13_569_465_600))  # more than 64 bits hold in ns
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    prune_until([catalogue], 2 * 4096)
    left = [future, *others[2:]] if believed else others[1:]
    assert files(namespace) == {*left, hour}


def test_what_was_removed_before_the_root_went_away_is_known(namespace, tmp_path, monkeypatch):
    """It is told to everybody, and counted no more."""
    (tmp_path / "fskv.json").touch()
    monkeypatch.setattr(evict, "_BATCH", 2)
    for n in range(6):
        write_chunk(namespace, n, mtime_ns=n * NS)
    catalogue = catalogue_of(namespace)
    steps = iter(range(10))

    def leaves():
        if next(steps) == 2:  # each step asks first
            os.rename(tmp_path, f"{tmp_path}.away")
        return True

    told = []
    pruned = prune([catalogue], 6 * 4096, tmp_path, may_go_on=leaves, told=told.append)
    os.rename(f"{tmp_path}.away", tmp_path)
    assert isinstance(pruned.away, FileNotFoundError)
    assert (pruned.num_files, catalogue.num_files, len(files(namespace))) == (2, 4, 4)
    assert [len(chunks) for step in told for chunks in step.removed.values()] == [2]


def test_it_stops_when_the_lease_is_lost(namespace, monkeypatch):
    monkeypatch.setattr(evict, "_BATCH", 2)
    for n in range(20):
        write_chunk(namespace, n, mtime_ns=(n + 1) * NS)
    catalogue = catalogue_of(namespace)
    answers = iter([True, True, True])
    prune([catalogue], 20 * 4096, may_go_on=lambda: next(answers, False))
    assert len(files(namespace)) == catalogue.num_files == 16


def test_ranks_that_recorded_one_use_a_moment_apart_are_no_use_meanwhile(namespace):
    names = ["abc" + digit * 29 for digit in "01"]
    uses = [(10 * NS, 10 * NS + 1_000_000), (3600 * NS, 3600 * NS)]
    paths = [
        [write_chunk(namespace, name, rank=rank, mtime_ns=at) for rank, at in enumerate(each)]
        for name, each in zip(names, uses, strict=True)
    ]
    catalogue = catalogue_of(namespace)
    assert prune([catalogue], 2 * 4096).used_meanwhile == 0
    assert files(namespace) == {*paths[1]}
