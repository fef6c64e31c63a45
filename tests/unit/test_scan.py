"""The walk finds every chunk, trips over nothing, and passes over what has not changed."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import threading
import time
import types

import pytest
from capacity_lab import age_directories, run, write_chunk

from fskv.index import scan
from fskv.index.scan import file_name, list_shard, walk
from fskv.index.snapshot import Catalogue
from fskv.root.process_id import unique_name

LATER_NS = 1 << 62


def found(shards):
    return sorted(file_name(record) for shard in shards for record in shard.records)


async def collect(*args, **options):
    return [shard async for shard in walk(*args, **options)]


def walk_all(namespace, seen=types.MappingProxyType({}), *, now_ns=LATER_NS):
    return run(collect(namespace, seen, now_ns=now_ns))


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


def test_a_file_in_the_place_of_a_directory_of_chunks_is_foreign_and_no_error(namespace):
    write_chunk(namespace, 1)
    open(f"{namespace}/chunks/fff", "w").close()
    os.symlink("/nowhere", f"{namespace}/chunks/ffe")
    os.symlink("ffd", f"{namespace}/chunks/ffd")
    shards = walk_all(namespace)
    assert len(found(shards)) == 1
    foreign = {shard.idx: shard.foreign for shard in shards if shard.foreign}
    assert foreign == {0xFFF: ["fff"], 0xFFE: ["ffe"], 0xFFD: ["ffd"]}
    assert not any(shard.error for shard in shards)


def test_a_directory_that_cannot_be_listed_is_reported_and_the_others_are_found(
    namespace, monkeypatch
):
    paths = [write_chunk(namespace, number) for number in range(20)]
    bad = os.path.dirname(paths[0])
    hidden = {p for p in paths if os.path.dirname(p) == bad}
    real = scan._listed

    def fail(path, *rest):
        if path == bad:
            raise PermissionError(13, "denied", bad)
        return real(path, *rest)

    monkeypatch.setattr(scan, "_listed", fail)
    shards = walk_all(namespace)
    assert found(shards) == sorted(os.path.basename(p) for p in paths if p not in hidden)
    (failed,) = [shard for shard in shards if shard.error]
    assert failed.dir_mtime_ns == scan.UNSETTLED  # to be listed again
    catalogue = Catalogue(namespace)
    assert len(run(catalogue.refresh(LATER_NS))) == 1
    monkeypatch.undo()
    assert run(catalogue.refresh(LATER_NS)) == []
    assert catalogue.num_files == 20


def test_a_walk_is_in_order_and_may_be_given_up(namespace):
    for number in range(300):
        write_chunk(namespace, number)
    everything = walk_all(namespace)
    assert [s.idx for s in everything] == sorted(s.idx for s in everything)
    assert found(everything) == chunk_names(namespace)

    async def part():
        first = []
        async for shard in walk(namespace, {}, now_ns=LATER_NS):
            first.append(shard)
            if len(first) == 70:  # in the middle of a batch
                break
        return first

    assert [s.idx for s in run(part())] == [s.idx for s in everything[:70]]


def count_listings(monkeypatch):
    listed = []
    real = scan.list_shard
    monkeypatch.setattr(
        scan, "list_shard", lambda path, idx, *rest: listed.append(idx) or real(path, idx, *rest)
    )
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


@pytest.mark.parametrize("ahead_s", [60, -60])
def test_a_directory_of_the_future_is_listed_each_time(namespace, ahead_s):
    """A node has left it whose clock was ahead. The control: one of the past is believed."""
    directory = os.path.dirname(write_chunk(namespace, "abc" + "0" * 29))
    now_ns = time.time_ns()
    at_ns = now_ns + ahead_s * 10**9
    os.utime(directory, ns=(at_ns, at_ns))
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(now_ns + 120 * 10**9))  # whose count is in the snapshot
    write_chunk(namespace, "abc" + "1" * 29)
    os.utime(directory, ns=(at_ns, at_ns))  # no later stamp than that
    run(catalogue.refresh(now_ns))
    assert catalogue.num_files == 1 + (ahead_s > 0)


def test_what_is_behind_a_linked_directory_is_foreign(namespace, tmp_path):
    """With its control: the same directory in its place is ours."""
    path = write_chunk(namespace, "abc" + "0" * 29)
    directory = os.path.dirname(path)
    open(f"{directory}/node-1-00000000-1.part", "w").close()
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    assert catalogue.num_files == 1
    assert list(catalogue.parts) == [0xABC]
    shutil.move(directory, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", directory)
    for _ in range(2):
        run(catalogue.refresh(time.time_ns()))
        assert catalogue.num_files == catalogue.nbytes == 0
        assert catalogue.parts == {}
        assert catalogue.foreign == {0xABC: (1, ["abc"])}
    os.unlink(directory)
    shutil.move(tmp_path / "elsewhere", directory)
    run(catalogue.refresh(time.time_ns()))
    assert catalogue.num_files == 1
    assert catalogue.foreign == {}


def test_directories_and_files_that_vanish_meanwhile_are_no_errors(namespace, monkeypatch):
    paths = [write_chunk(namespace, number) for number in range(100)]
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    real = scan.list_shard
    first = threading.Lock()  # shards are listed on several threads

    def vanish(path, idx, *rest):
        with first:
            for other in {os.path.dirname(p) for p in paths[:50]}:
                shutil.rmtree(other, ignore_errors=True)
        return real(path, idx, *rest)

    monkeypatch.setattr(scan, "list_shard", vanish)
    assert run(catalogue.refresh(time.time_ns(), every=True)) == []
    assert catalogue.num_files == len(chunk_names(namespace)) < 100
    shutil.rmtree(f"{namespace}/chunks")
    assert run(catalogue.refresh(time.time_ns())) == []
    assert catalogue.num_files == catalogue.nbytes == 0
    shutil.rmtree(namespace)
    with pytest.raises(FileNotFoundError):
        run(catalogue.refresh(time.time_ns()))


NS = 1_000_000_000


@pytest.mark.parametrize(
    ("seconds", "known", "unknown"),  # by the clock of `now`, and where it is not known
    [
        (1_000_000_000, 1_000_000_000 * NS, 1_000_000_000 * NS),
        (1_800_000_000 + 3600, (1_800_000_000 + 3600) * NS, (1_800_000_000 + 3600) * NS),
        (1_800_000_000 + 90_000, 0, (1_800_000_000 + 90_000) * NS),
        (13_569_465_600, 0, (1 << 63) - 1),  # the year 2400: too many ns for 64 bits
        (-1_000_000_000, -1_000_000_000 * NS, -1_000_000_000 * NS),
    ],
)
def test_an_mtime_of_any_year_is_listed_and_one_of_the_future_is_none(
    namespace, seconds, known, unknown
):
    path = write_chunk(namespace, "abc" + "0" * 29)
    other = write_chunk(namespace, "abc" + "1" * 29, mtime_ns=7 * NS)
    os.utime(path, (seconds, seconds))
    if os.stat(path).st_mtime_ns != seconds * NS:
        pytest.skip("this file system does not know that year")
    directory = os.path.dirname(path)
    for now_ns, expected in ((1_800_000_000 * NS, known), (0, unknown)):
        shard = list_shard(directory, 0xABC, now_ns)
        assert shard.error is None
        mtimes = {file_name(record): record["mtime_ns"] for record in shard.records}
        assert mtimes == {os.path.basename(path): expected, os.path.basename(other): 7 * NS}


def test_a_directory_of_any_year_is_listed(namespace):
    path = write_chunk(namespace, "abc" + "0" * 29)
    catalogue = Catalogue(namespace)
    for count, seconds in enumerate((13_569_465_600, 0, -1_000_000_000), 1):
        write_chunk(namespace, "abc" + str(count) * 29)
        os.utime(os.path.dirname(path), (seconds, seconds))
        run(catalogue.refresh(time.time_ns()))
        assert catalogue.num_files == 1 + count


def blocks_to_come(namespace, count=5, age_s=0):
    """Files as ZFS shows them just after they were written: with their length, and one block."""
    paths = [write_chunk(namespace, number, 1) for number in range(count)]
    for path in paths:
        os.truncate(path, 1 << 20)
        then = time.time_ns() - age_s * NS
        os.utime(path, ns=(then, then))
        assert os.stat(path).st_blocks * 512 < 1 << 20
    age_directories(namespace)
    return paths


def fill(path):
    """What makes the blocks appear changes neither the length nor the directory, and here not the mtime."""
    info = os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"x" * info.st_size)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("rule", [True, False])
def test_a_young_file_counts_with_its_length_while_its_blocks_are_not_counted(
    namespace, monkeypatch, rule
):
    """With `rule` off, the negative control: most bytes are never counted."""
    if not rule:
        monkeypatch.setattr(scan, "_YOUNG_NS", -(1 << 60))
    paths = blocks_to_come(namespace)
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    assert (catalogue.nbytes == 5 << 20) == rule
    for path in paths:
        fill(path)
    run(catalogue.refresh(time.time_ns()))
    on_disk = sum(os.stat(path).st_blocks * 512 for path in paths)
    assert (catalogue.nbytes == on_disk) == rule


@pytest.mark.parametrize("here", [True, False])
def test_on_a_device_that_counts_files_count_by_their_blocks_alone(namespace, here):
    """Negative control: on another device they count with their lengths, as long as they are young."""
    (hole,) = blocks_to_come(namespace, count=1)
    (whole,) = [write_chunk(namespace, "abc" + "0" * 29, 1 << 16)]
    empty = write_chunk(namespace, "abc" + "1" * 29, 0)
    part = f"{os.path.dirname(empty)}/{unique_name()}.part"
    open(part, "w").close()
    for path in (empty, part):
        os.truncate(path, 1 << 40)
        os.utime(path, ns=(time.time_ns() + 3600 * NS,) * 2)
    on_disk = sum(os.stat(path).st_blocks * 512 for path in (hole, whole, empty, part))
    assert 1 << 16 <= on_disk < 1 << 17
    device = os.stat(namespace).st_dev
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns(), device=device if here else device + 1))
    assert (catalogue.nbytes == on_disk) == here
    assert (catalogue.nbytes > 1 << 30) != here
    fill(hole)  # what comes later is counted then
    run(catalogue.refresh(time.time_ns(), device=device if here else device + 1))
    assert (catalogue.nbytes == on_disk + os.stat(hole).st_blocks * 512 - 4096) == here


def test_young_files_with_all_their_blocks_are_listed_once(namespace, monkeypatch):
    for number in range(20):
        write_chunk(namespace, number, 4096)
    age_directories(namespace)
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    listed = count_listings(monkeypatch)
    run(catalogue.refresh(time.time_ns()))
    assert listed == []
    paths = blocks_to_come(namespace)  # the control: these wait for their blocks
    run(catalogue.refresh(time.time_ns()))
    for _ in range(2):
        listed.clear()
        run(catalogue.refresh(time.time_ns()))
        assert set(listed) == {int(os.path.basename(os.path.dirname(p)), 16) for p in paths}


def test_a_part_is_counted_as_it_is_after_it_has_grown(namespace, monkeypatch):
    """Its directory's mtime says nothing of that; a writer that died leaves it for an hour on other nodes."""
    directory = f"{namespace}/chunks/abc"
    os.makedirs(directory)
    part = f"{directory}/{unique_name()}.part"
    with open(part, "wb") as file:
        file.write(bytes(4096))
    age_directories(namespace)
    catalogue = Catalogue(namespace)
    now = time.time_ns()
    run(catalogue.refresh(now))
    with open(part, "ab") as file:
        file.write(bytes(1 << 20))
    run(catalogue.refresh(now))
    assert catalogue.nbytes == os.stat(part).st_blocks * 512
    os.utime(part, ns=(now - 61 * NS, now - 61 * NS))  # nobody writes it any more
    run(catalogue.refresh(now))
    listed = count_listings(monkeypatch)
    run(catalogue.refresh(now))
    assert listed == []
