"""The walk finds every chunk, trips over nothing, and passes over what has not changed."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import stat
import time

import pytest
from capacity_lab import age_directories, make_namespace, run, write_chunk

from fskv.index import scan
from fskv.index.scan import file_name, list_shard, walk
from fskv.index.snapshot import Catalogue

LATER_NS = 1 << 62


@pytest.fixture
def namespace(tmp_path):
    return make_namespace(tmp_path)


def found(shards):
    return sorted(file_name(record) for shard in shards for record in shard.records)


async def collect(*args, **options):
    return [shard async for shard in walk(*args, **options)]


def walk_all(namespace, seen=lambda _: 0, *, now_ns=LATER_NS, start=0):
    return run(collect(namespace, seen, now_ns=now_ns, start=start))


def chunk_names(namespace):
    """What is a chunk file, by a reading of docs/format.md of its own."""
    name = re.compile(r"[0-9a-f]{32}\.g(0|[1-9][0-9]{0,5})(\.r(0|[1-9][0-9]{0,5}))?\.kv")
    return sorted(
        entry.name
        for shard in os.scandir(f"{namespace}/chunks")
        if re.fullmatch("[0-9a-f]{3}", shard.name) and shard.is_dir()
        for entry in os.scandir(shard.path)
        if name.fullmatch(entry.name)
        and entry.is_file(follow_symlinks=False)
        and entry.name.startswith(shard.name)
    )


def litter(namespace, rng):
    """Put a random selection of what can go wrong into the shards; returns how many things."""
    digits = "%032x"
    shards = sorted(os.listdir(f"{namespace}/chunks"))
    kinds = [
        lambda d, n: os.symlink("/nowhere", f"{d}/{n}.g0.kv"),
        lambda d, n: os.symlink("loop.g0.kv", f"{d}/loop.g0.kv"),
        lambda d, n: os.mkdir(f"{d}/{n}.g1.kv"),
        lambda d, n: os.mkfifo(f"{d}/{n}.g2.kv"),
        lambda d, n: open(f"{d}/README", "w").close(),
        lambda d, n: open(f"{d}/{n}.g01.kv", "w").close(),
        lambda d, n: open(f"{d}/{n}.g1000000.kv", "w").close(),
        lambda d, n: open(f"{d}/{n.upper()}A.g0.kv", "w").close(),
        lambda d, n: open(f"{d}/{'f' if n[0] != 'f' else '0'}{n[1:]}.g0.kv", "w").close(),
        lambda d, n: open(os.fsencode(d) + b"/\xff\xfe.kv", "w").close(),
        lambda d, n: open(os.fsencode(d) + b"/\xff\xfe.part", "w").close(),
        lambda d, n: open(f"{d}/.nfs000000000001", "w").close(),
        lambda d, n: open(f"{d}/node-1-00000000-1.part", "w").close(),
        lambda d, n: os.mkdir(f"{d}/node-1-00000000-2.part"),
        lambda d, n: open(f"{d}/{n}.g0.kv\n", "w").close(),
        lambda d, n: socket.socket(socket.AF_UNIX).bind(os.path.relpath(f"{d}/{n}.g7.kv")),
    ]
    for kind in rng.sample(kinds, 8):
        shard = rng.choice(shards)
        name = shard + (digits % rng.getrandbits(128))[3:]
        kind(f"{namespace}/chunks/{shard}", name)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("seed", range(12))
def test_a_walk_finds_the_chunks_and_nothing_else_in_any_litter(namespace, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.chdir(namespace)  # a socket's path is short
    for _ in range(40):
        write_chunk(
            namespace,
            rng.randbytes(16).hex(),
            nbytes=rng.choice((0, 1, 5000)),
            group=rng.choice((0, 3, 999_999)),
            rank=rng.choice((None, 0, 12)),
            mtime_ns=rng.randrange(1 << 60),
        )
    litter(namespace, rng)
    os.mkdir(f"{namespace}/chunks/ABC")
    open(f"{namespace}/chunks/README", "w").close()
    shards = walk_all(namespace)
    assert found(shards) == chunk_names(namespace)
    assert not any(shard.error for shard in shards)
    for shard in shards:
        for record in shard.records:
            info = os.lstat(f"{namespace}/chunks/{shard.idx:03x}/{file_name(record)}")
            assert record["mtime_ns"] == info.st_mtime_ns
            assert record["nbytes"] == (info.st_blocks * 512 or info.st_size)
    # The same in Python, with no extension built.
    monkeypatch.setattr(scan, "_list_in_c", None)
    again = walk_all(namespace)
    assert [s.idx for s in again] == [s.idx for s in shards]
    for ours, theirs in zip(shards, again, strict=True):
        assert sorted(r.tobytes() for r in ours.records) == sorted(
            r.tobytes() for r in theirs.records
        )
        assert sorted(p.path for p in ours.parts) == sorted(p.path for p in theirs.parts)
        assert ours.num_foreign == theirs.num_foreign


def test_what_is_named_part_and_is_no_file_is_foreign_and_an_nfs_leftover_is_nothing(namespace):
    write_chunk(namespace, "abc" + "0" * 29)
    directory = f"{namespace}/chunks/abc"
    os.mkdir(f"{directory}/x.part")
    open(f"{directory}/y.part", "w").close()
    open(f"{directory}/.nfs123", "w").close()
    shard = list_shard(directory, 0xABC)
    assert [part.path for part in shard.parts] == [f"{directory}/y.part"]
    assert shard.num_foreign == 1


def test_a_chunk_in_a_wrong_directory_is_foreign_and_not_counted(namespace):
    path = write_chunk(namespace, "abc" + "0" * 29)
    os.mkdir(f"{namespace}/chunks/abd")
    os.rename(path, path.replace("/abc/", "/abd/"))
    shards = walk_all(namespace)
    assert found(shards) == []
    assert [shard.foreign for shard in shards if shard.foreign] == [[os.path.basename(path)]]


def test_a_file_in_the_place_of_a_directory_of_chunks_is_foreign_and_no_error(namespace):
    write_chunk(namespace, 1)
    open(f"{namespace}/chunks/fff", "w").close()
    os.symlink("/nowhere", f"{namespace}/chunks/ffe")
    os.symlink("ffd", f"{namespace}/chunks/ffd")
    shards = walk_all(namespace)
    assert len(found(shards)) == 1
    assert {shard.idx: shard.foreign for shard in shards if shard.foreign} == {0xFFF: ["fff"]}
    assert {shard.idx for shard in shards if shard.error} == {0xFFD}  # a loop: ELOOP


def test_a_directory_that_cannot_be_listed_is_reported_and_the_others_are_found(
    namespace, monkeypatch
):
    paths = [write_chunk(namespace, number) for number in range(20)]
    bad = os.path.dirname(paths[0])
    hidden = {p for p in paths if os.path.dirname(p) == bad}
    for lister in ("_list_in_c", "_list_in_python"):
        real = getattr(scan, lister)

        def fail(path, *rest, real=real):
            if os.fsdecode(path) == bad:
                raise PermissionError(13, "denied", bad)
            return real(path, *rest)

        monkeypatch.setattr(scan, lister, fail)
    shards = walk_all(namespace)
    assert found(shards) == sorted(os.path.basename(p) for p in paths if p not in hidden)
    (failed,) = [shard for shard in shards if shard.error]
    assert failed.dir_mtime_ns == scan.UNSETTLED  # to be listed again
    catalogue = Catalogue(namespace)
    assert len(run(catalogue.refresh(LATER_NS))) == 1
    monkeypatch.undo()
    assert run(catalogue.refresh(LATER_NS)) == []
    assert catalogue.num_files == 20


def test_a_walk_is_resumed_at_any_shard(namespace):
    for number in range(300):
        write_chunk(namespace, number)
    everything = walk_all(namespace)
    assert [s.idx for s in everything] == sorted(s.idx for s in everything)
    for start in (0, 1, everything[100].idx, everything[100].idx + 1, 4095, 4096):
        rest = walk_all(namespace, start=start)
        assert found(rest) == found(s for s in everything if s.idx >= start)

    async def part_then_rest():
        first = []
        async for shard in walk(namespace, now_ns=LATER_NS):
            first.append(shard)
            if len(first) == 70:  # in the middle of a batch
                break
        rest = await collect(namespace, lambda _: 0, now_ns=LATER_NS, start=first[-1].idx + 1)
        return first + rest

    assert found(run(part_then_rest())) == chunk_names(namespace)


def count_listings(monkeypatch):
    listed = []
    real = scan.list_shard
    monkeypatch.setattr(scan, "list_shard", lambda path, idx: listed.append(idx) or real(path, idx))
    return listed


def test_only_directories_that_changed_are_listed_again(namespace, monkeypatch):
    paths = [write_chunk(namespace, number) for number in range(50)]
    age_directories(namespace)
    catalogue = Catalogue(namespace)
    now = time.time_ns()
    listed = count_listings(monkeypatch)
    run(catalogue.refresh(now))
    assert len(listed) == len({os.path.dirname(path) for path in paths})
    listed.clear()
    run(catalogue.refresh(now))
    assert listed == []
    os.unlink(paths[7])
    added = write_chunk(namespace, 1000)
    run(catalogue.refresh(time.time_ns()))
    changed = {int(os.path.basename(os.path.dirname(p)), 16) for p in (paths[7], added)}
    assert set(listed) == changed
    assert catalogue.num_files == 50


@pytest.mark.parametrize("tick_ns", [4_000_000, 1_000_000_000])
@pytest.mark.parametrize("rule", [True, False])
def test_a_file_that_came_in_the_tick_of_the_listing_is_found(
    namespace, monkeypatch, tick_ns, rule
):
    """With `rule` off, the negative control: it is lost for good."""
    if not rule:
        monkeypatch.setattr(scan, "_TICK_NS", -(1 << 61))
        monkeypatch.setattr(scan, "_COARSE_TICK_NS", -(1 << 61))
    path = write_chunk(namespace, "abc" + "0" * 29)
    directory = os.path.dirname(path)
    tick = time.time_ns() // tick_ns * tick_ns
    os.utime(directory, ns=(tick, tick))
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(tick + tick_ns // 2))
    assert catalogue.num_files == 1
    write_chunk(namespace, "abc" + "1" * 29)
    os.utime(directory, ns=(tick, tick))  # what a clock with such ticks makes of it
    run(catalogue.refresh(tick + 10 * tick_ns))
    assert catalogue.num_files == (2 if rule else 1)


def test_what_changes_behind_a_linked_directory_is_seen(namespace, tmp_path):
    path = write_chunk(namespace, "abc" + "0" * 29)
    directory = os.path.dirname(path)
    shutil.move(directory, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", directory)
    age_directories(namespace)
    os.utime(tmp_path / "elsewhere", ns=(10**18 + 1, 10**18 + 1))
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    assert catalogue.num_files == 1
    write_chunk(namespace, "abc" + "1" * 29)
    run(catalogue.refresh(time.time_ns()))
    assert catalogue.num_files == 2


def test_directories_and_files_that_vanish_meanwhile_are_no_errors(namespace, monkeypatch):
    paths = [write_chunk(namespace, number) for number in range(100)]
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    real = scan.list_shard
    seen = []

    def vanish(path, idx):
        if not seen:
            for other in {os.path.dirname(p) for p in paths[:50]}:
                shutil.rmtree(other, ignore_errors=True)
        seen.append(idx)
        return real(path, idx)

    monkeypatch.setattr(scan, "list_shard", vanish)
    assert run(catalogue.refresh(time.time_ns())) == []
    assert catalogue.num_files == len(chunk_names(namespace)) < 100
    shutil.rmtree(f"{namespace}/chunks")
    assert run(catalogue.refresh(time.time_ns())) == []
    assert catalogue.num_files == catalogue.nbytes == 0
    shutil.rmtree(namespace)
    with pytest.raises(FileNotFoundError):
        run(catalogue.refresh(time.time_ns()))


def test_a_sparse_file_counts_what_it_takes_on_disk(namespace):
    path = write_chunk(namespace, 1)
    with open(path, "r+b") as file:
        file.truncate(1 << 30)
    assert stat.S_ISREG(os.lstat(path).st_mode)
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(LATER_NS))
    assert catalogue.nbytes == os.lstat(path).st_blocks * 512 < 1 << 20
