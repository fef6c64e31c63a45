"""The least recently used files go, exactly those, and one that cannot go does not keep the others."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import time

import pytest
from capacity_lab import make_namespace, run, write_chunk

from fskv.bounds import evict
from fskv.bounds.evict import execute, plan
from fskv.index import scan
from fskv.index.snapshot import Catalogue
from fskv.root import remove

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
    return run(execute(chosen, may_go_on, "/"))


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
    monkeypatch.setattr(evict, "_BATCH", rng.choice((1, 7, 256)))
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
            monkeypatch.setattr(
                evict, "_look", lambda _, records, row, __: records["mtime_ns"][row]
            )
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


@pytest.mark.parametrize("how", ["immutable", "EIO", "no stat"])
def test_one_file_that_cannot_be_removed_does_not_stop_it(namespace, monkeypatch, how):
    paths = [write_chunk(namespace, n, mtime_ns=(n + 1) * NS) for n in range(10)]
    stubborn = paths[0]
    if how == "immutable":
        if subprocess.run(["chattr", "+i", stubborn], capture_output=True).returncode:
            pytest.skip("chattr +i needs root and a file system that knows it")
    else:
        call = "stat" if how == "no stat" else "unlink"
        error = OSError(5, "I/O error") if how == "EIO" else OverflowError("too large")
        real = getattr(os, call)

        def fail(path, **options):
            if path == os.path.basename(stubborn):
                raise error
            return real(path, **options)

        monkeypatch.setattr(os, call, fail)
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


@pytest.mark.parametrize("believed", [False, True])
def test_a_file_of_the_future_goes_first_and_stops_nothing(namespace, monkeypatch, believed):
    """With `believed`, the negative control: it is as if it were used all the time, and never goes."""
    if believed:
        monkeypatch.setattr(scan, "FUTURE_NS", 1 << 63)
    future = [write_chunk(namespace, 100 + n) for n in range(3)]
    others = [write_chunk(namespace, n, mtime_ns=(n + 1) * NS) for n in range(6)]
    hour = [write_chunk(namespace, 200, mtime_ns=time.time_ns() + 3600 * NS)]
    for path, seconds in zip(future, (13_569_465_600, 9_000_000_000, 4_000_000_000), strict=True):
        os.utime(path, (seconds, seconds))
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    stuck = prune_until([catalogue], 5 * 4096)
    assert stuck == set()
    left = {*future, *others[5:]} if believed else set(others[2:])
    assert files(namespace) == left | set(hour)


def test_a_year_that_64_bits_cannot_hold_stops_nothing_where_the_time_is_not_known(namespace):
    future = write_chunk(namespace, 100)
    cold = write_chunk(namespace, 1, mtime_ns=1 * NS)
    late = write_chunk(namespace, 2, mtime_ns=2 * NS)
    catalogue = catalogue_of(namespace)  # refreshed at 0
    for path in (cold, future):  # one after it was remembered
        os.utime(path, (13_569_465_600, 13_569_465_600))
    assert prune_until([catalogue], 4096) == set()
    assert files(namespace) == {cold, future}
    assert late not in files(namespace)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("when", ["_changed", "most_nbytes"])
def test_a_root_that_goes_away_while_it_is_counted_has_its_files(
    namespace, monkeypatch, when, back
):
    for n in range(3):
        write_chunk(namespace, n)
    catalogue = catalogue_of(namespace)
    real = getattr(scan, when)

    def leaving(*arguments):
        found = real(*arguments)
        os.rename(namespace, f"{namespace}.away")
        return found

    monkeypatch.setattr(scan, when, leaving)
    failed = run(catalogue.refresh(time.time_ns(), every=True))
    monkeypatch.setattr(scan, when, real)
    assert (catalogue.num_files, len(failed)) == (3, 3)
    os.rename(f"{namespace}.away", namespace)
    if not back:  # the control: they are gone
        shutil.rmtree(f"{namespace}/chunks")
    assert run(catalogue.refresh(time.time_ns(), every=True)) == []
    assert catalogue.num_files == (3 if back else 0)


def test_a_directory_that_is_gone_took_its_files_with_it(namespace, tmp_path):
    (tmp_path / "fskv.json").touch()
    path = write_chunk(namespace, 1, mtime_ns=1 * NS)
    other = write_chunk(namespace, 2, mtime_ns=2 * NS)
    catalogue = catalogue_of(namespace)
    shutil.rmtree(os.path.dirname(path))
    pruned = run(execute(plan([catalogue], 2 * 4096), lambda: True, str(tmp_path)))
    assert (pruned.vanished_nbytes, pruned.nbytes, pruned.failures) == (4096, 4096, {})
    assert not os.path.exists(other)
    assert catalogue.num_files == 0


@pytest.mark.parametrize("away", ["root", "directory is stale", "namespace"])
def test_of_a_root_that_is_away_nothing_is_taken_for_gone(namespace, tmp_path, away, monkeypatch):
    """Bytes that come back would be granted twice. The control: a namespace that is removed is gone."""
    (tmp_path / "fskv.json").touch()
    for n in range(3):
        write_chunk(namespace, n, mtime_ns=n * NS)
    catalogue = catalogue_of(namespace)
    chosen = plan([catalogue], 3 * 4096)
    if "stale" in away:  # what NFS says while a server is back and its export is not
        monkeypatch.setattr(remove, "open_directory", fail(errno.ESTALE))
    else:
        os.rename(tmp_path if away == "root" else namespace, f"{tmp_path}.away")
    pruned = run(execute(chosen, lambda: True, str(tmp_path)))
    if away == "root":
        os.rename(f"{tmp_path}.away", tmp_path)
    gone = 3 if away == "namespace" else 0
    assert (pruned.vanished_nbytes, catalogue.num_files) == (gone * 4096, 3 - gone)
    assert (pruned.away is not None) == (away == "root")
    assert len(pruned.failures) == (3 if away == "directory is stale" else 0)


def fail(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_what_was_removed_before_the_root_went_away_is_known(namespace, tmp_path, monkeypatch):
    """It is told to everybody, and counted no more."""
    (tmp_path / "fskv.json").touch()
    monkeypatch.setattr(evict, "_BATCH", 2)
    for n in range(6):
        write_chunk(namespace, n, mtime_ns=n * NS)
    catalogue = catalogue_of(namespace)
    steps = iter(range(10))

    def leaves():
        if next(steps) == 1:
            os.rename(tmp_path, f"{tmp_path}.away")
        return True

    pruned = run(execute(plan([catalogue], 6 * 4096), leaves, str(tmp_path)))
    os.rename(f"{tmp_path}.away", tmp_path)
    assert isinstance(pruned.away, FileNotFoundError)
    assert (pruned.num_files, catalogue.num_files, len(files(namespace))) == (2, 4, 4)
    assert [len(chunks) for chunks in pruned.removed.values()] == [2]


def test_a_plan_in_a_worker_thread_is_the_same(namespace):
    for n in range(50):
        write_chunk(namespace, n, mtime_ns=(n + 1) * NS)
    catalogue = catalogue_of(namespace)

    async def both():
        return await asyncio.to_thread(plan, [catalogue], 20 * 4096), plan([catalogue], 20 * 4096)

    threaded, direct = run(both())
    assert threaded == direct
    assert len(direct.candidates) == 25


def test_a_file_whose_blocks_were_not_counted_yet_frees_what_it_was_counted_for(namespace):
    """As on ZFS, or nearly everything would go to free the bytes of a few fresh files."""
    then = time.time_ns() - 10 * NS
    paths = [write_chunk(namespace, n, 1) for n in range(5)]
    for n, path in enumerate(paths):
        os.truncate(path, 1 << 20)
        os.utime(path, ns=(then + n, then + n))
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    assert catalogue.nbytes == 5 << 20
    prune_until([catalogue], 2 << 20)
    assert files(namespace) == set(paths[2:])
    assert catalogue.nbytes == 3 << 20


def test_a_plan_of_nothing_is_nothing(namespace):
    assert plan([], 100).candidates == []
    assert plan([catalogue_of(namespace)], 100, 5).candidates == []
    write_chunk(namespace, 1)
    catalogue = catalogue_of(namespace)
    assert plan([catalogue], 0).candidates == []
    # More was freed than was asked for of one, and less of the other one.
    assert plan([catalogue], 4096, -100).candidates == plan([catalogue], 4096).candidates != []
    assert plan([catalogue], -1 << 40, 1).candidates == plan([catalogue], 0, 1).candidates != []
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
    monkeypatch.setattr(evict, "_BATCH", 2)
    for n in range(20):
        write_chunk(namespace, n, mtime_ns=(n + 1) * NS)
    catalogue = catalogue_of(namespace)
    answers = iter([True, True, False])
    carry_out(plan([catalogue], 20 * 4096), lambda: next(answers))
    assert len(files(namespace)) == catalogue.num_files == 16
