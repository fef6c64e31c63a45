"""A snapshot is what was known, or nothing at all."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
import tracemalloc

import msgpack
import numpy as np
import pytest
import xxhash
from capacity_lab import age_directories, make_namespace, run, write_chunk

from fskv.bounds.evict import Need, plan
from fskv.index.scan import RECORD, Shard
from fskv.index.snapshot import Catalogue
from fskv.root.root import SNAPSHOT_FILE


def known(namespace, count=30):
    for number in range(count):
        write_chunk(namespace, number, rank=number % 3)
    age_directories(namespace)
    catalogue = Catalogue(namespace)
    run(catalogue.refresh(time.time_ns()))
    return catalogue


def state(catalogue):
    return (
        [(shard, records.tobytes()) for shard, records in catalogue.shards()],
        dict(catalogue._dir_mtimes),
        catalogue.nbytes,
        catalogue.num_files,
        catalogue.taken_at_ns,
    )


def is_none(catalogue):
    return (
        catalogue.num_files == catalogue.nbytes == catalogue.taken_at_ns == 0
        and not catalogue._dir_mtimes
    )


def test_a_loaded_snapshot_is_what_was_saved(namespace):
    catalogue = known(namespace)
    catalogue.save()
    loaded = Catalogue.load(namespace)
    assert state(loaded) == state(catalogue)
    assert loaded.num_files == 30
    assert os.stat(f"{namespace}/{SNAPSHOT_FILE}").st_mode & 0o777 == 0o600
    assert os.listdir(f"{namespace}/tmp") == []


def test_every_flipped_byte_is_noticed(namespace):
    known(namespace, 3).save()
    path = f"{namespace}/{SNAPSHOT_FILE}"
    content = pathlib.Path(path).read_bytes()
    assert Catalogue.load(namespace).num_files == 3
    # All of the frame and of the records, and a sample of the two long tables.
    places = [*range(120), *range(len(content) - 200, len(content))]
    places += random.Random(1).sample(range(len(content)), 600)
    for at in places:
        with open(path, "wb") as file:
            file.write(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        assert is_none(Catalogue.load(namespace)), at
    for length in [0, 1, 9, 10, 11, 100, *random.Random(2).sample(range(len(content)), 100)]:
        with open(path, "wb") as file:
            file.write(content[:length])
        assert is_none(Catalogue.load(namespace)), length
    with open(path, "wb") as file:
        file.write(content + b"x")
    assert Catalogue.load(namespace).num_files == 0
    with open(path, "wb") as file:
        file.write(content)
    assert Catalogue.load(namespace).num_files == 3  # the negative control


def test_what_is_no_snapshot_counts_as_none(namespace, tmp_path):
    path = f"{namespace}/{SNAPSHOT_FILE}"
    known(namespace, 3).save()
    good = pathlib.Path(path).read_bytes()
    (tmp_path / "other").write_bytes(good)
    tree = msgpack.unpackb(good)

    def is_refused():
        return Catalogue.load(namespace).num_files == 0

    for changes in (
        {"snapshot": 2},
        {"records": b""},
        {"counts": b""},
        {"counts": np.full(4096, 2**32 - 1, "<u4").tobytes()},
        {"dir_mtimes": "text"},
        {"taken_at_ns": -1},
        {"taken_at_ns": 1 << 63},
        {"taken_at_ns": None},
        {"digest": None},
        {"more": 1},
    ):
        with open(path, "wb") as file:
            file.write(msgpack.packb(tree | changes))
        assert is_refused(), changes
    for content in (b"\x81", b"\xdd\xff\xff\xff\xff" + b"\x91" * 100_000, b"\x93\1\2\3", b"{}"):
        with open(path, "wb") as file:
            file.write(content)
        assert is_refused(), content[:9]
    os.unlink(path)
    os.symlink(tmp_path / "other", path)
    assert is_refused()
    os.unlink(path)
    os.mkdir(path)
    assert is_refused()
    os.rmdir(path)
    os.mkfifo(path)
    assert is_refused()


def forged(namespace, changes=lambda records: None, count=3000):
    """Save a snapshot of records that `changes` has changed; its digest is right."""
    catalogue = Catalogue(namespace)
    records = np.zeros(count, RECORD)
    numbers = np.random.default_rng(0).bytes(8 * count)
    records["name"] = [b"\xab\xc0" + numbers[8 * n : 8 * n + 8] + bytes(6) for n in range(count)]
    records["rank1"] = 1
    changes(records)
    catalogue.take(Shard(0xABC, 1, records[: count // 2]))
    records["name"][count // 2 :] = [
        b"\xab\xd0" + bytes(name)[2:] for name in records["name"][count // 2 :]
    ]
    catalogue.take(Shard(0xABD, 1, records[count // 2 :]))
    catalogue.save()


def _set(field, value, at=1000):
    def change(records):
        records[field][at] = value

    return change


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        (lambda records: None, 3000),
        (_set("group", 999_999), 3000),
        (_set("group", 1_000_000), 0),
        (_set("rank1", 1_000_000), 3000),
        (_set("rank1", 1_000_001), 0),
        (_set("nbytes", 1 << 62), 0),
        (_set("name", b"\xab\xb0" + bytes(14)), 0),
        (_set("name", b"\xab\xd0" + bytes(14)), 0),
        (lambda records: records.__setitem__(7, records[6]), 0),
    ],
)
def test_records_that_no_directory_can_have_are_refused(namespace, changes, taken):
    """A right digest proves nothing: it is no secret."""
    forged(namespace, changes)
    assert Catalogue.load(namespace).num_files == taken


_LOAD = r"""
import re, sys
from fskv.index import snapshot
if sys.argv[2] == "believed":
    snapshot._Possible.check = lambda self, records: None
found = snapshot.Catalogue.load(sys.argv[1])
# Not ru_maxrss, which a process inherits from the one that started it.
print(found.num_files, int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) >> 10)
"""


@pytest.mark.parametrize("believed", [False, True])
def test_a_snapshot_of_holes_costs_no_memory(namespace, believed):
    """With `believed`, the negative control: 120 MiB of nothing, with a right digest, are taken."""
    count = 120 << 20
    counts = np.full(4096, count // RECORD.itemsize // 4096, "<u4")
    count = int(counts.sum()) * RECORD.itemsize
    mtimes = np.zeros(4096, "<i8").tobytes()
    hasher = xxhash.xxh3_64((1).to_bytes(8, "little") + mtimes + counts.tobytes())
    hasher.update(bytes(count))
    head = {"snapshot": 1, "taken_at_ns": 1, "dir_mtimes": mtimes, "counts": counts.tobytes()}
    packer = msgpack.Packer()
    packed = packer.pack_map_header(6)
    packed += b"".join(
        packer.pack(x) for pair in (head | {"digest": hasher.digest()}).items() for x in pair
    )
    packed += packer.pack("records") + b"\xc6" + count.to_bytes(4, "big")
    with open(f"{namespace}/{SNAPSHOT_FILE}", "wb") as file:
        file.write(packed)
        file.truncate(len(packed) + count)
    words = [sys.executable, "-c", _LOAD, namespace, "believed" if believed else "checked"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    files, mebibytes = map(int, done.stdout.split())
    assert files == believed * count // RECORD.itemsize
    assert (mebibytes > 140) is believed


def test_a_catalogue_of_nothing_costs_next_to_nothing(tmp_path):
    """Hundreds of old, empty namespaces are common where models and versions come and go."""
    count = 200
    namespaces = [make_namespace(tmp_path, f"cpu/m@{n:016x}") for n in range(count)]
    tracemalloc.start()
    try:
        catalogues = [Catalogue.load(namespace) for namespace in namespaces]
        assert tracemalloc.get_traced_memory()[0] < 4096 * count
        one = write_chunk(namespaces[7], 1)
        for catalogue in catalogues[:50]:
            run(catalogue.refresh(time.time_ns()))
    finally:
        tracemalloc.stop()
    chosen = plan(catalogues, Need(1 << 40))
    assert [c.catalogue for c in chosen] == [catalogues[7]]
    assert catalogues[7].num_files == 1
    os.unlink(one)
    run(catalogues[7].refresh(time.time_ns()))
    assert catalogues[7].num_files == catalogues[7].nbytes == 0
    assert catalogues[7].shards() == []


def test_a_file_costs_about_40_bytes_of_memory(namespace):
    count = 100_000
    records = np.zeros(count, RECORD)
    tracemalloc.start()
    try:
        catalogue = Catalogue(namespace)
        for idx in range(100):
            catalogue.take(Shard(idx, 1, records[idx * 1000 : (idx + 1) * 1000]))
        in_memory = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert catalogue.num_files == count
    assert in_memory < 48 * count
    catalogue.save()
    assert os.stat(catalogue.path).st_size < 41 * count
