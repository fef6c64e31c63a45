"""One format, one judgement: three readers say the same of thousands of crafted headers.

The C reader of the load path, the Python reader behind it, and `document_reader`, which knows docs/format.md
alone, are asked about the same real files. Their checksums are right: what stands behind them decides.

| compared | on what |
|---|---|
| Python with the document | good, missing, stale, corrupt |
| C with the document | it takes nothing that is not good; it takes what is good and written as fskv writes |

The C reader has no word for what it does not take: it leaves that to the Python reader.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import random
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections import Counter

import document_reader
import msgpack
import outside
import pytest
import xxhash
from document_reader import CORRUPT, GOOD, MISSING, STALE, Corrupt, Map, Wanted
from places import REPOSITORY
from world import World

from fskv.data_path import store
from fskv.data_path.job import NativeEvent
from fskv.data_path.transports import host
from fskv.format import chunk_file
from fskv.types import Status

WORDS = {
    Status.OK: GOOD,
    Status.MISSING: MISSING,
    Status.STALE: STALE,
    Status.CORRUPT: CORRUPT,
}


@pytest.fixture(autouse=True)
def silence(monkeypatch):
    monkeypatch.setattr(store.logger, "level", logging.CRITICAL)
    monkeypatch.setattr(store.logger, "disabled", True)


# --- headers ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Draft:
    """A header that is not yet bytes. Names and values are encoded already."""

    fields: list[tuple[bytes, bytes]]
    header_nbytes: int
    count: int | None = None  # in the map's head, if not that of the fields
    head: str = "fix"  # "fix", "map 16" or "map 32"
    more: bytes = b""  # inside the map, behind the fields
    meta_delta: int = 0
    patches: dict[int, bytes] = dataclasses.field(default_factory=dict)  # in the finished header
    magic: bytes = b"\x89FSKV\r\n\x1a"
    version: int = 1
    checksum_xor: int = 0

    def meta(self):
        count = len(self.fields) if self.count is None else self.count
        if self.head == "fix" and count < 16:
            head = bytes([0x80 | count])
        elif self.head != "map 32":
            head = b"\xde" + struct.pack(">H", count & 0xFFFF)
        else:
            head = b"\xdf" + struct.pack(">I", count)
        return head + b"".join(name + value for name, value in self.fields) + self.more

    def bytes(self):
        """Return the header; None where it does not fit."""
        meta = self.meta()
        if 32 + len(meta) > self.header_nbytes:
            return None
        data = bytearray(self.header_nbytes)
        prefix = self.magic, self.version, self.header_nbytes, (len(meta) + self.meta_delta) % 2**32
        struct.pack_into("<8sIIIIQ", data, 0, *prefix, 0, 0)
        data[32 : 32 + len(meta)] = meta
        for where, patch in self.patches.items():
            at = where % self.header_nbytes
            data[at : at + len(patch)] = patch
        del data[self.header_nbytes :]
        data[24:32] = bytes(8)
        checksum = xxhash.xxh3_64_intdigest(data) ^ self.checksum_xor
        struct.pack_into("<Q", data, 24, checksum)
        return bytes(data)

    def index(self, name):
        return [packed for packed, _ in self.fields].index(msgpack.packb(name))


def integers(value):
    """Return every encoding of an integer."""
    kinds = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
    found = [msgpack.packb(value)]
    for code, kind in kinds.items():
        try:
            found.append(bytes([code]) + struct.pack(f">{kind}", value))
        except struct.error:
            continue
    return found


def strings(value, codes):
    """Return every encoding of some bytes, as a text (0xd9) or as binary (0xc4)."""
    found = [bytes([0xA0 | len(value)]) + value] if codes == 0xD9 and len(value) < 32 else []
    for more, kind in enumerate("BHI"):
        if len(value) < 256 ** struct.calcsize(kind):
            found.append(bytes([codes + more]) + struct.pack(f">{kind}", len(value)) + value)
    return found


NUMBERS = [
    *(0, 1, 2, 127, 128, 255, 256, 4096, 65535, 65536, -1, -32, -33, -(2**63)),
    *(2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40 - 1, 2**40, 2**50, 2**50 + 4096),
    *(2**62 - 1, 2**62, 2**62 + 1, 2**63, 2**64 - 1),
]
TEXTS = [
    *(b"", b"xxh3-64", b"sha256-128", b"xxh3-128", b"x" * 31, b"x" * 32, b"x" * 255, b"x" * 256),
    *(b"x" * 1023, b"x" * 1024, b"x" * 1025, "é".encode() * 512, "é".encode() * 512 + b"x"),
    *("\U0001f600".encode() * 64, b"\xff", b"\xc3", b"\xc0\x80", b"\xed\xa0\x80"),
    b"\xf4\x90\x80\x80",
]
BINARIES = [bytes(n) for n in (0, 1, 7, 8, 9, 16, 24, 63, 64, 65, 255, 256, 257, 1025)]
BINARIES += [struct.pack("<Q", n) for n in (1, 2**40 - 1, 2**40, 2**64 - 1)]
NO_SCALARS = [
    *(b"\x90", b"\x91\x00", b"\xdc\x00\x00", b"\xdd\x00\x00\x00\x00", b"\x80", b"\x81\xa1a\x00"),
    *(b"\xde\x00\x00", b"\xdf\x00\x00\x00\x00", b"\xc1", b"\xd4\x05x", b"\xd5\x05xx"),
    *(b"\xc7\x00\x05", b"\xc8\x00\x00\x05", b"\xc9\x00\x00\x00\x00\x05"),
    *(b"\xd6\xff\x00\x00\x00\x01", b"\xc7\x00\xff"),
    *(b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12), b"\xd8\x01" + bytes(16)),
]
CUT_OFF = [b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc5\x40\x00", b"\xcf\x00", b""]
SCALARS = [
    *(b"\xc0", b"\xc2", b"\xc3"),
    *(b"\xca" + struct.pack(">f", x) for x in (0.0, 65536.0, 1.0)),
    *(b"\xcb" + struct.pack(">d", x) for x in (0.0, -0.0, 65536.0, 1.0, float("nan"), 4096.0)),
    *(code for number in NUMBERS for code in integers(number)),
    *(code for text in TEXTS for code in strings(text, 0xD9)[:2]),
    *(code for binary in BINARIES for code in strings(binary, 0xC4)[:2]),
]
VALUES = [*SCALARS, *NO_SCALARS, *CUT_OFF]


def others(packed):
    """Return a value's other encodings, and values that look like it but are of another type."""
    value = msgpack.unpackb(packed)
    if type(value) is int:
        return [*integers(value), msgpack.packb(float(value)), msgpack.packb(str(value))]
    raw = value.encode() if isinstance(value, str) else value
    return [*strings(raw, 0xD9), *strings(raw, 0xC4), *strings(raw + b"\0", 0xC4)]


# --- what is done to a good one: each takes a random generator and a draft -------------------------


def any_value(rng, draft):
    at = rng.randrange(len(draft.fields))
    name, value = draft.fields[at]
    draft.fields[at] = name, rng.choice([rng.choice(VALUES), rng.choice(others(value))])


def any_name(rng, draft):
    at = rng.randrange(len(draft.fields))
    name, value = draft.fields[at]
    raw = msgpack.unpackb(name).encode()
    odd = [b"\xc0", b"\x01", b"\x90", b"\xa1\xff", b"\xc4\x01k", msgpack.packb("x" * 1025)]
    draft.fields[at] = rng.choice([*strings(raw, 0xD9), *strings(raw, 0xC4), *odd]), value


def order(rng, draft):
    rng.shuffle(draft.fields)


def twice(rng, draft):
    name, value = rng.choice(draft.fields)
    draft.fields.insert(rng.randrange(16), (name, rng.choice([value, rng.choice(VALUES)])))


def missing(rng, draft):
    del draft.fields[rng.randrange(len(draft.fields))]


def unknown(rng, draft):
    names = [*TEXTS, b"new", b"k" * 1000]
    name = rng.choice(strings(rng.choice(names), 0xD9))
    value = rng.choice([rng.choice(SCALARS), rng.choice(VALUES)])
    draft.fields.insert(rng.randrange(len(draft.fields) + 1), (name, value))


def many(rng, draft):
    for n in range(rng.choice([1, 2, 48, 49, 50, 51])):
        draft.fields.append((msgpack.packb(f"n{n}"), b"\x00"))
    draft.head = rng.choice(["fix", "map 16", "map 32"])


def count(rng, draft):
    real = len(draft.fields)
    draft.count = rng.choice([0, real - 1, real + 1, real, 64, 65, 65535, 2**32 - 1])
    draft.head = rng.choice(["fix", "map 16", "map 32"])


def trailing(rng, draft):
    draft.more = rng.choice(
        [b"\0", b"\0" * rng.randrange(1, 40), rng.randbytes(9), b"\xc0", b"\x80"]
    )


def padding(rng, draft):
    start, stop = 32 + len(draft.meta()), draft.header_nbytes
    draft.patches[rng.choice([start, stop - 1, rng.randrange(start, stop)])] = b"\x01"


def tail(rng, draft):
    """What follows the row digests: creator, written_at, and the end."""
    at = 32 + draft.meta().index(b"\xa7creator")
    room = len(draft.meta()) + 32 - at
    start = at + rng.randrange(room)
    draft.patches[start] = rng.randbytes(rng.randrange(1, 32 + len(draft.meta()) - start + 1))


def good_tail(rng, draft):
    name = "".join(rng.choices("fskv/0123456789.", k=rng.randrange(64)))
    draft.fields[draft.index("creator")] = msgpack.packb("creator"), msgpack.packb(name)
    at_ms = b"\xcf" + struct.pack(">Q", rng.choice([rng.randrange(2**32, 2**62), 2**62, 2**62 + 1]))
    draft.fields[draft.index("written_at")] = msgpack.packb("written_at"), at_ms


def flip(rng, draft):
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(8, 32 + len(draft.meta()))
        draft.patches[at] = rng.randbytes(rng.choice([1, 1, 2, 5]))


def prefix(rng, draft):
    way = rng.randrange(6)
    if way == 0:
        draft.version = rng.choice([0, 2, 256, 2**32 - 1])
    elif way == 1:
        draft.magic = b"\x89FSKV\n\x1a\x1a"
    elif way == 2:
        draft.checksum_xor = 1 << rng.randrange(64)
    elif way == 3:
        draft.patches[20] = struct.pack("<I", rng.choice([1, 32, 64, 128, 2**32 - 1]))
    elif way == 4:
        lengths = [0, 4095, 4096, 8192, 12288, 16 << 20, (16 << 20) + 4096, 2**32 - 4096]
        draft.patches[12] = struct.pack("<I", rng.choice(lengths))
    else:
        lengths = [0, 1, draft.header_nbytes - 32, draft.header_nbytes - 31, 2**32 - 1]
        draft.patches[16] = struct.pack("<I", rng.choice(lengths))


def other_header_length(rng, draft):
    """A header that is longer or shorter, with all else right; the file's length stays."""
    draft.header_nbytes = max(4096, draft.header_nbytes + rng.choice([-4096, 4096]))


KINDS = [
    *(any_value, any_name, order, twice, missing, unknown, many, count, trailing),
    *(padding, tail, good_tail, flip, prefix, other_header_length),
]


# --- readers ------------------------------------------------------------------------------------


class Place:
    """One chunk file on disk, what an engine wants of it, and the three who read it."""

    def __init__(self, root, pages, blocks, first_block=0):
        self.world = World(
            root,
            pages=pages,
            blocks_per_chunk=blocks,
            num_blocks=blocks,
            group_idx=3,
            rank=1,
            direct_io="off",
            native=True,
            faults=False,
        )
        world, self.first = self.world, first_block
        self.num_blocks = blocks - first_block
        self.content = world.content(seed=blocks)
        assert world.put(7, self.content) is Status.OK
        self.path = world.path(7)
        with open(self.path, "rb") as file:
            self.file = file.read()
        self.base = world.base
        chunk = world.chunk(7)
        self.wanted = Wanted(
            key=chunk.key_hash,
            group=3,
            rank=1,
            namespace=world.directory.digest,
            layout=world.file_layout.digest,
            blocks=blocks,
            pages=tuple(pages),
            first_block=first_block,
        )
        self.slot = world.transport.new_slot(0)
        if world.transport.native is not None:
            self.plan = world.request(7, range(self.num_blocks), first_block).plan

    def draft(self):
        (meta_nbytes,) = struct.unpack_from("<I", self.file, 16)
        meta = msgpack.unpackb(self.file[32 : 32 + meta_nbytes])
        fields = [(msgpack.packb(name), msgpack.packb(value)) for name, value in meta.items()]
        return Draft(fields, self.base)

    def write(self, header):
        content = (header + self.file[self.base :] + bytes(8192))[: len(self.file)]
        with open(self.path, "wb") as file:
            file.write(content)
        return content

    def taken_in_c(self):
        """Whether the C reader serves the file; it leaves what it does not serve as it is."""
        world, guard = self.world, outside._native.Guard(True)
        transfer = world.store.transfer(None, world.chunk(7), self.plan, guard, is_load=True)
        for tensor in world.tensors:
            tensor.zero_()
        events = outside.run(transfer, self.slot)
        if events is None:
            return False
        assert events == [NativeEvent.LOADED]
        wanted = self.content[self.first * world.file_layout.block_nbytes :]
        assert world.pages(range(self.num_blocks)) == wanted
        return True

    def judged_in_python(self):
        """As a load does it; a bad file is discarded."""
        chunk = self.world.chunk(7)
        return WORDS[self.world.store.get(chunk, self.first, self.num_blocks, self.slot)[0]]

    def complaint(self, header):
        """Return (what the document says, what is wrong with the readers or None)."""
        content = self.write(header)
        said = document_reader.judge(content, self.wanted)
        in_c = self.world.transport.native is not None  # else two readers are compared
        taken = in_c and self.taken_in_c()
        python = self.judged_in_python()
        if python != said:
            return said, f"Python: {python}, the document: {said}"
        if taken and said != GOOD:
            return said, f"taken in C, the document: {said}"
        if in_c and not taken and said == GOOD and as_written(header):
            return said, "good and as fskv writes, and not taken in C"
        return said, None


def as_written(header):
    """Whether the map is encoded as this project encodes it, whoever the creator is."""
    (meta_nbytes,) = struct.unpack_from("<I", header, 16)
    data = header[32 : 32 + meta_nbytes]
    try:
        meta = Map(data).fields()
    except Corrupt:
        return False
    plain = meta["creator"].isascii() and len(meta["creator"]) <= 64 and meta["written_at"] >= 2**32
    return plain and data == b"\x8f" + b"".join(
        msgpack.packb(name) + msgpack.packb(meta.get(name)) for name in NAMES
    )


NAMES = [
    *("key", "group", "rank", "namespace", "layout", "blocks", "pages", "first_block", "payload"),
    *("codec", "checksum", "row", "rows", "creator", "written_at"),
]


def crafted(place, seed, num, kinds=KINDS):
    """Yield (what was done, header)."""
    rng = random.Random(seed)
    while num > 0:
        draft = place.draft()
        done = rng.choices(kinds, k=rng.choice([1, 1, 1, 1, 2, 3]))
        try:
            for kind in done:
                kind(rng, draft)
        except (ValueError, UnicodeDecodeError, AttributeError, msgpack.UnpackException):
            continue  # what one kind has done leaves another nothing to do
        if (header := draft.bytes()) is not None:
            num -= 1
            yield " and ".join(kind.__name__ for kind in done), header


def every_value(place):
    """Yield (what was done, header): every field with every value, one at a time."""
    for at, (name, value) in enumerate(place.draft().fields):
        for other in [*VALUES, *others(value)]:
            draft = place.draft()
            draft.fields[at] = name, other
            if (header := draft.bytes()) is not None:
                yield f"{name} is {other[:40]!r}", header


def compare(place, cases):
    """Return how often each verdict came, and every complaint."""
    verdicts, complaints = Counter(), []
    for done, header in cases:
        said, wrong = place.complaint(header)
        verdicts[said] += 1
        if wrong:
            complaints.append(f"{done}: {wrong}")
    return verdicts, complaints


@pytest.fixture
def small(tmp_path):
    return Place(tmp_path / "kv", (24, 40), 2)


# --- they agree -----------------------------------------------------------------------------------


def test_the_three_readers_agree_on_every_value_of_every_field(small):
    verdicts, complaints = compare(small, every_value(small))
    assert complaints == []
    assert min(verdicts[word] for word in (GOOD, STALE, CORRUPT, MISSING)) >= 1
    assert verdicts.total() > 2000


@pytest.mark.parametrize(
    ("pages", "blocks", "first_block", "num"),
    [
        ((24, 40), 2, 0, 3000),
        ((24, 40), 2, 1, 500),  # a partial chunk is good here
        ((8,) * 600, 2, 0, 500),  # a header of two pages: a shorter one is there as well
        ((40000, 24000), 4, 0, 500),  # several rows
    ],
    ids=["small", "partial", "wide", "rows"],
)
def test_the_three_readers_agree_on_crafted_headers(tmp_path, pages, blocks, first_block, num):
    place = Place(tmp_path / "kv", pages, blocks, first_block)
    verdicts, complaints = compare(place, crafted(place, seed=num, num=num))
    assert complaints == []
    assert min(verdicts[word] for word in (GOOD, STALE, CORRUPT)) >= num // 100, verdicts


def with_fields(place, **packed):
    draft = place.draft()
    for name, value in packed.items():
        draft.fields[draft.index(name)] = msgpack.packb(name), value
    return draft.bytes()


def test_a_damaged_row_is_corrupt_also_where_its_block_is_missing(small):
    partial = with_fields(small, first_block=b"\x01")
    assert small.complaint(partial) == (MISSING, None)
    small.file = small.file[:-1] + b"\x01"
    assert small.complaint(partial) == (CORRUPT, None)


def test_a_hole_and_an_end_that_are_no_zeros_are_good_where_their_rows_are(tmp_path):
    place = Place(tmp_path / "kv", (24, 40), 2, first_block=1)
    place.file = (
        place.file[: place.base] + b"\x01" * 64 + place.file[place.base + 64 : -1] + b"\x01"
    )
    assert place.complaint(with_fields(place, first_block=b"\x01")) == (CORRUPT, None)
    digest = msgpack.packb(xxhash.xxh3_64_digest(place.file[place.base :]))
    assert place.complaint(with_fields(place, first_block=b"\x01", rows=digest)) == (GOOD, None)


# --- negative controls ----------------------------------------------------------------------------


# Checks that a reader leaves out: what its source has, and what stands there instead.
LEFT_OUT = {
    "tail": (
        "        !check_tail(at + digests_nbytes, end, slot + layout->header_nbytes))\n",
        "        at + digests_nbytes > end)\n",
    ),
    "padding in C": (
        "           all_zero(end, payload);\n",
        "           end <= payload;\n",
    ),
    "codec's type": (" or [type(one) for one in fixed] != [int, str, int]:\n", ":\n"),
    "number of fields": (
        "    if num_fields > _MAX_FIELDS:\n",
        "    if num_fields > _MAX_FIELDS << 8:\n",
    ),
    "padding": (
        "    if raw[stop:] != bytes(header_nbytes - stop):\n",
        "    if stop > header_nbytes:\n",
    ),
}


def without(name, text):
    old, new = LEFT_OUT[name]
    assert text.count(old) == 1
    return text.replace(old, new)


def loaded(name, path, monkeypatch):
    """Import a module from a file, and forget it after the test."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def faulty_extension(name, directory, monkeypatch):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here (cc or gcc)")
    tree = shutil.copytree(REPOSITORY / "fskv" / "csrc", directory / "csrc")
    source = tree / "chunk_io.c"
    source.write_text(without(name, source.read_text()))
    library = directory / "_native.so"
    include = sysconfig.get_paths()["include"]
    flags = ["-std=gnu11", "-O1", "-w", "-shared", "-fPIC", f"-I{include}", "-o", str(library)]
    command = [compiler, *flags, *map(str, sorted(tree.glob("*.c"))), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return loaded("faulty._native", library, monkeypatch)


@pytest.mark.parametrize("name", ["tail", "padding in C"])
def test_negative_control_a_c_reader_that_looks_at_less_disagrees(tmp_path, monkeypatch, name):
    faulty = faulty_extension(name, tmp_path, monkeypatch)
    for module in (host, store, outside):
        monkeypatch.setattr(module, "_native", faulty)
    place = Place(tmp_path / "kv", (24, 40), 2)
    _, complaints = compare(place, crafted(place, seed=2, num=300, kinds=[tail, trailing, padding]))
    assert len(complaints) > 20
    assert {said.partition(": ")[2] for said in complaints} == {"taken in C, the document: corrupt"}


@pytest.mark.parametrize("name", ["codec's type", "number of fields", "padding"])
def test_negative_control_a_python_reader_that_takes_more_disagrees(
    small, tmp_path, monkeypatch, name
):
    source = tmp_path / "faulty_chunk_file.py"
    sound = REPOSITORY / "fskv" / "format" / "chunk_file.py"
    source.write_text(without(name, sound.read_text()))
    faulty = loaded("faulty_chunk_file", source, monkeypatch)
    monkeypatch.setattr(chunk_file, "parse_header", faulty.parse_header)
    kinds = [many, padding]
    cases = [*every_value(small), *crafted(small, seed=3, num=200, kinds=kinds)]
    _, complaints = compare(small, cases)
    assert complaints
    assert {said.rpartition(": Python")[2] for said in complaints} == {
        ": good, the document: corrupt"
    }
