"""Encryption at rest: nothing is served but what this engine's keys have sealed for this chunk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct
import threading
import time
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path

import encrypted_reader
import msgpack
import numpy as np
import pytest
import xxhash
from key_files import key, write_keys
from test_jobs import Bench
from test_native import STORED, Chunks
from test_readers_agree import VALUES, Draft, others
from test_transport_faults import (
    NUMBERS,
    Lab,
    assert_pages_are_right,
    content,
    lab,  # noqa: F401
    labs,  # noqa: F401
)
from world import make_identity

from faults.transport import Script
from fskv.data_path.job import NativeEvent
from fskv.data_path.worker_keys import WorkerKeys
from fskv.native import _native
from fskv.root.key_file import read_keys
from fskv.types import Status

OK, CORRUPT, STALE, NO_KEY = Status.OK, Status.CORRUPT, Status.STALE, Status.NO_KEY
ROW, PLACES = 65536, 16
# 4 blocks of 33000 bytes: 3 rows, the last one short.
SMALL = {"pages": (25000, 8000), "group_idx": 3, "rank": 1, "faults": False, "direct_io": "off"}
NATIVE = pytest.mark.parametrize("native", [True, False], ids=["native", "python"])


# --- files that nobody wrote for this engine ---------------------------------------------------


def draft_of(data):
    header_nbytes, meta_nbytes = struct.unpack_from("<II", data, 12)
    meta = msgpack.unpackb(data[32 : 32 + meta_nbytes])
    fields = [(msgpack.packb(name), msgpack.packb(value)) for name, value in meta.items()]
    written_at = b"\xcf" + struct.pack(">Q", meta["written_at"])  # as fskv writes it
    return Draft([*fields[:-1], (fields[-1][0], written_at)], header_nbytes)


def meta_of(data):
    return {msgpack.unpackb(name): msgpack.unpackb(value) for name, value in draft_of(data).fields}


def forged(data, payload=None, **fields):
    """Return the file with other fields, and with right lengths and a right XXH3."""
    draft = draft_of(data)
    for name, value in fields.items():
        draft.fields[draft.index(name)] = msgpack.packb(name), msgpack.packb(value)
    return draft.bytes() + (data[draft.header_nbytes :] if payload is None else payload)


def flipped(data, bit, *, repair=False):
    """Return the file with one other bit, and perhaps with a right XXH3 again."""
    (h,) = struct.unpack_from("<I", data, 12)
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    if repair:
        changed[24:32] = bytes(8)
        changed[24:32] = struct.pack("<Q", xxhash.xxh3_64_intdigest(changed[:h]))
    return bytes(changed)


class Files:
    """The files of an engine's chunks, and what others wrote under the same keys."""

    def __init__(self, make_world, tmp_path, world, key_file):
        write_keys(tmp_path / "same", "b")
        renamed = (tmp_path / "same").read_text().replace("b ", "a ")
        (tmp_path / "same").write_text(renamed)
        writers = {
            "again": {},
            "partial": {},
            "retired key": {"key_file": write_keys(tmp_path / "retired", "b")},
            "same id": {"key_file": tmp_path / "same"},
            "other names": {"key_file": write_keys(tmp_path / "names", "a", names="others")},
            "clear": {"key_file": None},
            "tenant": {"identity": make_identity(tenant="another")},
            "group": {"group_idx": 4},
            "rank": {"rank": 2},
            "layout": {"layout_digest": b"M" * 16},
        }
        self.others = {}
        for who, how in writers.items():
            options = {**SMALL, "root": tmp_path / f"of {who}", "key_file": key_file, **how}
            self.others[who] = self.put(make_world(**options), who)
        self.mine = self.put(world, "again")

    @staticmethod
    def put(world, who):
        """Store all chunks; only `again` stores the right content. Returns the files."""
        first, seed, found = int(who == "partial"), 0 if who == "again" else 99, []
        for n in range(PLACES):
            content = world.content(n + seed)[first * world.file_layout.block_nbytes :]
            assert world.put(n, content, first) is OK
            found.append(Path(world.path(n)).read_bytes())
        return found


def of_others(files, n):
    """Yield (kind, statuses, file): files of others, as they are and with a header that fits."""
    mine, meta, h = files.mine[n], meta_of(files.mine[n]), draft_of(files.mine[n]).header_nbytes
    fits = {name: meta[name] for name in ("namespace", "layout", "group", "rank", "key")}
    seal, tags = meta["rows"][:48], meta["rows"][48:]
    as_found = {"again": OK, "partial": Status.MISSING, "retired key": NO_KEY, "same id": CORRUPT}
    for who, theirs in files.others.items():
        yield f"of {who}", {as_found.get(who, STALE)}, theirs[n]
        adopted = STALE if who == "clear" else as_found.get(who, CORRUPT)
        yield f"of {who}, adopted", {adopted}, forged(theirs[n], **fits)
        yield f"rows of {who}", {CORRUPT}, mine[:h] + theirs[n][h:]
        if who != "clear":
            rows, first = meta_of(theirs[n])["rows"], int(who == "partial")
            taken = forged(mine, theirs[n][h:], rows=rows, first_block=first)
            yield f"rows and tags of {who}", {as_found.get(who, CORRUPT)}, taken
    another = files.mine[(n + 1) % PLACES]
    other_rows = meta_of(another)["rows"]
    yield "another name", {STALE}, another
    yield "another name, adopted", {CORRUPT}, forged(another, **fits)
    yield "header of another", {STALE}, another[:h] + mine[h:]
    yield "rows of another", {CORRUPT}, mine[:h] + another[h:]
    yield "a row of another", {CORRUPT}, mine[:h] + another[h : h + ROW] + mine[h + ROW :]
    payload, moved = another[h : h + ROW] + mine[h + ROW :], other_rows[48:64] + tags[16:]
    yield "with its tag", {CORRUPT}, forged(mine, payload, rows=seal + moved)
    yield "first block", {CORRUPT}, forged(mine, first_block=1)
    yield "whole", {CORRUPT}, forged(files.others["partial"][n], first_block=0)
    rows = [mine[at : at + ROW] for at in range(h, len(mine), ROW)]
    tag = [tags[at : at + 16] for at in range(0, len(tags), 16)]
    for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (0, 0, 2)):
        payload = b"".join(rows[i] for i in order)[: len(mine) - h].ljust(len(mine) - h, b"\0")
        yield "rows exchanged", {CORRUPT}, mine[:h] + payload
        moved = seal + b"".join(tag[i] for i in order)
        yield "rows and tags exchanged", {CORRUPT}, forged(mine, payload, rows=moved)
    id_of_c = b"c".ljust(16, b"\0")
    yield "id of another key", {CORRUPT}, forged(mine, rows=id_of_c + seal[16:] + tags)
    for id_ in (b"b".ljust(16, b"\0"), bytes(16), b"a\0a".ljust(16, b"\0"), b"a" * 16):
        yield "unknown id", {NO_KEY}, forged(mine, rows=id_ + seal[16:] + tags)


def of_values(files, n):
    """Yield fields with other values; with all chunks it is every field with every value.

    No tag covers the last two fields, which say nothing about KV.
    """
    file, fields = files.mine[n], draft_of(files.mine[n]).fields
    every = [(at, value) for at, one in enumerate(fields) for value in [*VALUES, *others(one[1])]]
    for at, other in every[n::PLACES]:
        field, value = (msgpack.unpackb(packed) for packed in fields[at])
        same = field in ("creator", "written_at")
        with contextlib.suppress(Exception):
            same |= repr(msgpack.unpackb(other)) == repr(value)
        draft = draft_of(file)
        draft.fields[at] = fields[at][0], other
        if (header := draft.bytes()) is not None:
            wanted = {CORRUPT, STALE, *([OK] if same else ())}
            yield f"field {field}", wanted, header + file[draft.header_nbytes :]


def of_damage(files, n, rng):
    """Yield flips in each region, with a right XXH3 too, and cuts."""
    file, (h, m) = files.mine[n], struct.unpack_from("<II", files.mine[n], 12)
    seal = file.index(meta_of(file)["rows"])
    tags, tail = seal + 48, seal + 96
    for where, region, wanted in [
        ("magic", (0, 8), {CORRUPT}),
        ("version", (8, 12), {STALE}),
        ("length", (12, 16), {CORRUPT, STALE}),
        ("header", (16, h), {CORRUPT}),
        ("rows", (h, len(file)), {CORRUPT}),
    ]:
        yield f"flip: {where}", wanted, flipped(file, rng.randrange(8 * region[0], 8 * region[1]))
    for where, region, wanted in [
        ("map", (32, seal), {CORRUPT, STALE}),
        ("id", (seal, seal + 16), {NO_KEY, CORRUPT}),  # "a" may become "c"
        ("salt", (seal + 16, tags), {CORRUPT}),
        ("tags", (tags, tail), {CORRUPT}),
        ("tail", (tail, 32 + m), {OK, CORRUPT}),
        ("zeros", (32 + m, h), {CORRUPT}),
    ]:
        bit = rng.randrange(8 * region[0], 8 * region[1])
        yield f"repaired flip: {where}", wanted, flipped(file, bit, repair=True)
    yield "cut", {CORRUPT}, file[: rng.randrange(len(file))]
    yield "longer", {CORRUPT}, file + bytes(rng.choice([1, 4096]))


def cases(files, n, thorough):
    """Yield all (kind, statuses, file) under the name of chunk `n`."""
    rng = random.Random(n)
    yield "untouched", {OK}, files.mine[n]
    yield from of_others(files, n)
    yield from chain.from_iterable(of_damage(files, n, rng) for _ in range(33 if thorough else 1))
    if thorough:
        yield from of_values(files, n)


@pytest.fixture
def load_all(make_world, tmp_path, key_file):
    """Load every case with a JobRunner. Returns (kind, wanted, status, what the pages hold) of each.

    In the pages are the right bytes, no new ones, or wrong ones.
    """
    with contextlib.ExitStack() as stack:

        def load(native, thorough=True, change=lambda world: None):
            world = make_world(root=tmp_path / "mine", native=native, key_file=key_file, **SMALL)
            bench = Bench(world, failures=1_000_000, num_slots=PLACES)
            bench.clock.now = time.monotonic()  # the queue outside the interpreter has this clock
            stack.callback(bench.runner._pool.close)
            files, found = Files(make_world, tmp_path, world, key_file), []
            contents = [world.content(n) for n in range(PLACES)]
            change(world)
            for batch in zip_longest(*(cases(files, n, thorough) for n in range(PLACES))):
                there = [(n, *case) for n, case in enumerate(batch) if case]
                for n, _, _, file in there:
                    Path(world.path(n)).write_bytes(file)
                bench.outcomes.clear()
                bench.finish(bench.load(range(PLACES)))
                said = {outcome.file: outcome.status for outcome in bench.outcomes}
                for n, kind, wanted, _ in there:
                    right = world.pages(bench.blocks(n)) == contents[n]
                    pages = "right" if right else "none" if bench.poisoned(n) else "wrong"
                    found.append((kind, wanted, said[world.chunk(n)], pages))
            return found

        yield load


@NATIVE
def test_of_10000_files_none_is_served_that_was_not_sealed_for_this_chunk(load_all, native):
    found = load_all(native)
    assert len(found) > 10_000
    for kind, wanted, status, pages in found:
        assert status in wanted, kind
        assert pages == ("right" if status is OK else "none"), kind
    served = Counter(kind for kind, _, status, _ in found if status is OK)
    whole = {"untouched", "of again", "of again, adopted", "rows and tags of again"}
    assert {kind for kind in whole if served[kind] == PLACES} == whole


def test_negative_control_without_the_check_of_tags_wrong_bytes_are_served(load_all):
    def trust(world):
        crypt = world.keys._crypt
        world.keys._crypt = lambda *what, **how: max(crypt(*what, **how), 1 << 30)

    found = load_all(native=False, thorough=False, change=trust)
    wrong = {kind for kind, _, status, pages in found if (status, pages) == (OK, "wrong")}
    assert {"flip: rows", "rows exchanged", "rows of another", "of same id"} <= wrong


@NATIVE
def test_in_a_clear_namespace_no_encrypted_file_is_served(make_world, tmp_path, key_file, native):
    sealed = make_world(root=tmp_path / "sealed", key_file=key_file, **SMALL)
    clear = make_world(root=tmp_path / "clear", native=native, **SMALL)
    for world in (sealed, clear):
        assert world.put(1, world.content(1)) is OK
    file, fits = (Path(world.path(1)).read_bytes() for world in (sealed, clear))
    adopted = forged(file, namespace=meta_of(fits)["namespace"])
    for bad, status in [
        (file, STALE),
        (adopted, STALE),
        (forged(adopted, checksum="xxh3-64"), CORRUPT),
    ]:
        Path(clear.path(1)).write_bytes(bad)
        assert not native or Chunks(clear).load(1, range(4)) is None
        assert clear.get(1) == (status, None)
    Path(clear.path(1)).write_bytes(fits)
    assert clear.get(1) == (OK, clear.content(1))


# --- the format -------------------------------------------------------------------------------


KNOWN = """
names 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f
2026 202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f
"""
KNOWN_NAME = "chunks/512/5125bd4ed683b1bac98a82a649cf32cb.g1.r2.kv"
KNOWN_SHA256 = "111fa71dfc68fbf0391d88853eec0defba61c9110a0890ea458dd2cde88cd690"


def test_a_file_of_known_keys_has_these_bytes_and_this_name_and_is_read(make_world, tmp_path):
    path = tmp_path / "keys"
    path.write_text(KNOWN)
    path.chmod(0o600)
    names, keys = encrypted_reader.read_keys(path)
    identity = make_identity(encryption=encrypted_reader.encryption(names))
    key = encrypted_reader.hide(names, b"the engine's key")
    assert key == read_keys(str(path)).hide(b"the engine's key")
    payload = struct.pack("<33000I", *range(33000)) + bytes(135168 - 132000)
    meta = {
        "key": key,
        "group": 1,
        "rank": 2,
        "namespace": identity.digest,
        "layout": b"L" * 16,
        "blocks": 4,
        "pages": struct.pack("<2Q", 25000, 8000),
        "first_block": 0,
        "payload": len(payload),
        "codec": 0,
        "checksum": "aes-256-gcm",
        "row": ROW,
    }
    meta["rows"], rows = encrypted_reader.encrypt(keys, meta, bytes(range(64, 96)), payload)
    meta |= {"creator": "known", "written_at": 1767225600000}
    fields = [(msgpack.packb(name), msgpack.packb(value)) for name, value in meta.items()]
    fields[-1] = fields[-1][0], b"\xcf" + struct.pack(">Q", meta["written_at"])
    file = Draft(fields, 4096).bytes() + rows
    assert hashlib.sha256(file).hexdigest() == KNOWN_SHA256
    for native in (True, False):
        world = make_world(key_file=path, native=native, **{**SMALL, "group_idx": 1, "rank": 2})
        chunk = int.from_bytes(key, "big")
        assert world.path(chunk) == f"{world.directory.path}/{KNOWN_NAME}"
        Path(world.path(chunk)).parent.mkdir(exist_ok=True)
        Path(world.path(chunk)).write_bytes(file)
        assert world.get(chunk) == (OK, payload[:132000])
        assert not native or Chunks(world).load(chunk, range(4)) == [NativeEvent.LOADED]


LAYOUTS = [
    # pages, blocks, group, rank
    ((24, 40), 2, 0, None),  # one row
    ((30000, 10000), 4, 3, 1),
    ((65536,), 2, 7, 0),  # blocks begin where rows do
    ((8,) * 600, 3, 999999, 127),  # a header of two pages
    ((1 << 20,), 3, 1, 2),
]


@pytest.mark.parametrize(("pages", "blocks", "group", "rank"), LAYOUTS)
@NATIVE
def test_every_part_of_every_chunk_is_what_was_stored_for_all_readers(
    make_world, key_file, native, pages, blocks, group, rank
):
    how = {"pages": pages, "blocks_per_chunk": blocks, "group_idx": group, "rank": rank}
    world = make_world(native=native, faults=False, key_file=key_file, **how)
    reader = make_world(native=not native, faults=False, key_file=key_file, **how)
    block, lengths = world.file_layout.block_nbytes, set()
    for first in range(blocks):
        kv = world.fill(range(first, blocks), seed=first)
        if native:
            assert Chunks(world).store(first, range(first, blocks), first) == STORED
        else:
            assert world.put(first, kv, first) is OK
        file = Path(world.path(first)).read_bytes()
        lengths.add(len(file))
        meta, payload = encrypted_reader.read({b"a": key("a")}, file)
        assert payload == bytes(first * block) + kv + bytes(len(payload) - blocks * block)
        # The bytes are those that another writer would make of the same random bytes.
        found = encrypted_reader.encrypt({b"a": key("a")}, meta, meta["rows"][16:48], payload)
        assert file == forged(file, found[1], rows=found[0])
        for start in range(first, blocks):
            for num in range(1, blocks - start + 1):
                wanted = kv[(start - first) * block :][: num * block]
                for one in (world, reader):
                    assert one.get(first, start, num) == (OK, wanted)
        assert reader.get(first, 0)[0] is (OK if first == 0 else Status.MISSING)
        in_c = Chunks(world if native else reader)
        assert in_c.load(first, range(first, blocks), first) == [NativeEvent.LOADED]
        assert in_c.world.pages(range(first, blocks)) == kv
    assert lengths == {world.file_layout.file_nbytes}  # a lookup asks for a name and a length


def test_100000_files_have_100000_keys_also_after_a_fork(key_file):
    keys, read, write = WorkerKeys(str(key_file)), *os.pipe()

    def salt():
        rows, seal = bytearray(16), bytearray(64)
        assert _native.crypt_rows(keys.ring, b"context", b"key", 0, rows, 0, seal, True) == 1
        return bytes(seal[16:48])

    def seals(num):
        return [salt() for _ in range(num)]

    before = seals(30_000)
    if (child := os.fork()) == 0:
        with open(write, "wb") as file:
            file.write(b"".join(seals(35_000)))
        os._exit(0)
    os.close(write)
    threads = [threading.Thread(target=lambda: before.extend(seals(17_500))) for _ in range(2)]
    for thread in threads:
        thread.start()
    with open(read, "rb") as file:
        theirs = file.read()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    found = before + [theirs[at : at + 32] for at in range(0, len(theirs), 32)]
    assert len(found) == len({*found}) == 100_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": b""},
        {"keys": bytes(47)},
        {"context": bytes(129)},
        {"key": bytes(256)},
        {"first_row": -1},
        {"first_row": 1},
        {"first_row": (1 << 63) - 1},
        {"seal": bytearray(63)},
    ],
)
def test_rows_without_a_place_for_their_tags_are_refused(wrong):
    good = {"keys": bytes(48), "context": b"", "key": b"k", "first_block": 0}
    good |= {"rows": bytearray(16), "first_row": 0, "seal": bytearray(64), "encrypt": True}
    with pytest.raises(ValueError, match="no place for tags"):
        _native.crypt_rows(*{**good, **wrong}.values())


# --- a store that fails, and is done again -----------------------------------------------------


def put_again(world, script):
    """Put a chunk until it is there, out of the same slot; returns the statuses before."""
    world.transport.script = Script(write=script)
    slot = world.transport.new_slot(0)
    slot.array[:] = 0xEE
    slot.array[world.base : world.base + len(world.content(1))] = np.frombuffer(
        world.content(1), np.uint8
    )
    os.makedirs(os.path.dirname(world.path(1)))
    said = []
    while (status := world.store.put(world.chunk(1), 0, slot)) is not OK:
        said.append(status)
    assert world.parts() == []
    return said


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("N", [Status.NO_SPACE]),
        ("E", [Status.IO_ERROR]),
        ("AEN", [Status.DENIED, Status.IO_ERROR, Status.NO_SPACE]),
        ("S", []),  # ESTALE: the store tries a second time by itself
        ("SS", [STALE]),
        ("M", []),  # its directory was gone
        ("MS", []),
    ],
)
def test_a_store_that_failed_is_whole_when_it_is_done_again(make_world, key_file, script, said):
    world = make_world(key_file=key_file)
    assert put_again(world, script) == said
    assert world.transport.num_done["write"] > len(script)
    assert world.get(1) == (OK, world.content(1))


def test_negative_control_what_was_not_decrypted_again_is_served_wrong(
    make_world, key_file, monkeypatch
):
    world = make_world(key_file=key_file)
    with monkeypatch.context() as without:
        without.setattr(WorkerKeys, "decrypt", lambda *_: None)
        put_again(world, "S")
    status, found = world.get(1)
    assert status is OK
    assert found != world.content(1)


@pytest.mark.parametrize(
    "rule",
    [
        "open ENOSPC suffix=.part count=1",
        "pwrite ENOSPC suffix=.part count=1",
        "pwrite EIO suffix=.part after=1 count=1",
        "pwrite ESTALE suffix=.part count=1",
        "close EIO suffix=.part count=1",
        "rename EIO suffix=.kv count=1",
    ],
)
def test_a_store_that_failed_outside_the_interpreter_is_whole_when_python_does_it(
    lab,  # noqa: F811
    key_file,
    rule,
):
    lab.begin("native", key_file=str(key_file))
    lab.faults.set(rule)
    assert lab.store()["statuses"] == ["ok"] * len(NUMBERS)
    assert lab.faults.fired() == 1
    lab.faults.clear()
    assert lab.idle() == []
    answer = lab.load()
    assert answer["statuses"] == ["ok"] * len(NUMBERS)
    assert_pages_are_right(answer)
    assert len(sound_files(lab)) == len(NUMBERS)


# --- a libcrypto that fails ----------------------------------------------------------------------


def sound_files(lab):  # noqa: F811
    """Return the chunk files, of which each is whole, encrypted and what was stored."""
    for path in lab.chunk_files():
        payload = encrypted_reader.read({b"a": key("a")}, Path(path).read_bytes())[1]
        assert any(payload.startswith(content(number)) for number in NUMBERS)
    return lab.chunk_files()


@pytest.fixture(scope="module")
def failing_lab(native_library, tmp_path_factory):
    """A process whose libcrypto fails when it is told to; `crypto` tells it, and sees that it has failed."""
    work = tmp_path_factory.mktemp("failing_crypto")
    one = Lab(native_library("disk"), work)
    one.log = work / "driver.log"
    library = native_library("failing_crypto")

    def crypto(failing, passes=0, *, seen=False):
        assert (
            one.step("crypto", library=library, failing=failing, passes=passes)["failed"] > 0
        ) is seen

    one.crypto = crypto
    crypto("")
    yield one
    one.close()


# What fails when a chunk is encrypted, and when it is decrypted.
FAILING = {
    "HMAC": "HMAC",
    "EVP_CIPHER_CTX_new": "EVP_CIPHER_CTX_new",
    "EVP_CipherInit_ex": "EVP_CipherInit_ex",
    "EVP_CipherUpdate": "EVP_CipherUpdate",
    "EVP_CipherFinal_ex": "SET_TAG",
    "GET_TAG": "SET_TAG",
}


@pytest.mark.parametrize("transport", ["native", "host"])
@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("function", FAILING)
def test_a_libcrypto_that_fails_costs_a_recompute_and_no_file(
    failing_lab, key_file, transport, function, passes
):
    """The control is at the end: where the last call fails, it is the tag that is wrong."""
    lab = failing_lab  # noqa: F811
    lab.begin(transport, key_file=str(key_file))
    lab.crypto(function, passes)
    said = lab.store()["statuses"]
    assert {*said} - {"ok"} == {"io_error"}
    assert len(sound_files(lab)) == said.count("ok")
    assert lab.idle() == []
    lab.crypto("", seen=True)
    lab.store_well()
    files = sound_files(lab)
    assert len(files) == len(NUMBERS)
    lab.crypto(FAILING[function], passes)
    answer = lab.load()
    assert_pages_are_right(answer)
    assert {*answer["statuses"]} - {"ok"} == {"io_error"}
    lab.crypto("", seen=True)
    assert sound_files(lab) == files
    assert lab.load()["statuses"] == ["ok"] * len(NUMBERS)
    assert "failed (io_error): libcrypto fails" in lab.log.read_text()
    lab.crypto("EVP_CipherFinal_ex")
    assert lab.load()["statuses"] == ["corrupt"] * len(NUMBERS)
    assert lab.chunk_files() == []
    lab.crypto("", seen=True)


@pytest.mark.parametrize("transport", ["native", "host"])
@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_a_store_that_failed_and_cannot_be_decrypted_is_not_done_again(
    failing_lab, key_file, transport, error
):
    lab = failing_lab  # noqa: F811
    lab.begin(transport, key_file=str(key_file))
    lab.crypto("SET_TAG")
    lab.faults.set(f"rename {error} suffix=.kv count=1")
    said = lab.store()["statuses"]
    assert lab.faults.fired() == 1
    lab.crypto("", seen=True)
    assert said.count("ok") == len(sound_files(lab)) == 2
    lab.store_well()
    assert len(sound_files(lab)) == len(NUMBERS)
