"""No tensor of a weights file is passed over, whatever its format, and no file is trusted."""

from __future__ import annotations

import bisect
import json
import os
import random
import struct
import tracemalloc
import zipfile

import pytest

from fskv.errors import ConfigError
from fskv.identity import checkpoint_samples
from fskv.identity.checkpoint_file import open_file
from fskv.identity.checkpoint_samples import samples

KIB, MIB = 1 << 10, 1 << 20


class Looks:
    """The samples of a file, asked from outside: which bytes are read?"""

    def __init__(self, path):
        with open_file(str(path)) as file:
            found = samples(file)
        self.starts, self.ends = list(found.starts), list(found.ends)
        size = os.path.getsize(path)
        previous = 0
        for start, end in zip(self.starts, self.ends, strict=True):
            assert previous <= start < end <= size
            assert end - start <= MIB
            previous = end

    def sees(self, begin, end):
        """Whether all of [begin, end) is read."""
        while begin < end:
            i = bisect.bisect_right(self.starts, begin) - 1
            if i < 0 or self.ends[i] <= begin:
                return False
            begin = self.ends[i]
        return True

    @property
    def nbytes(self):
        return sum(self.ends) - sum(self.starts)


def write_safetensors(path, tensors):
    """Write a sparse file of tensors (shape), one byte an element; return their (begin, end)."""
    entries, ranges, at = {}, [], 0
    for i, shape in enumerate(tensors):
        nbytes = 1
        for length in shape:
            nbytes *= length
        entries[f"t{i}"] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + nbytes]}
        ranges.append((at, at + nbytes))
        at += nbytes
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return [(8 + len(text) + begin, 8 + len(text) + end) for begin, end in ranges]


def assert_sees_each(looks, ranges):
    for begin, end in ranges:
        middle = (begin + end) // 2
        if end - begin <= 8 * KIB:
            assert looks.sees(begin, end)
        else:
            assert looks.sees(begin, begin + 4 * KIB)
            assert looks.sees(middle, middle + 4 * KIB)


# --- safetensors ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_every_one_of_20000_tensors_is_sampled(tmp_path, seed):
    random_ = random.Random(seed)
    sizes = [random_.choice((1, 16, 4096, 8193, 60_000, 500_000)) for _ in range(20_000)]
    ranges = write_safetensors(tmp_path / "m.safetensors", [[size] for size in sizes])
    assert_sees_each(Looks(tmp_path / "m.safetensors"), ranges)


def test_the_cap_of_version_1_would_be_noticed(tmp_path, monkeypatch):
    every = checkpoint_samples._tensor_looks

    def capped(file, tensors):
        looks = sorted(every(file, tensors))
        return [looks[round(i * (len(looks) - 1) / 4095)] for i in range(4096)]

    monkeypatch.setattr(checkpoint_samples, "_tensor_looks", capped)
    ranges = write_safetensors(tmp_path / "m.safetensors", [[60_000]] * 20_000)
    with pytest.raises(AssertionError):
        assert_sees_each(Looks(tmp_path / "m.safetensors"), ranges)


def test_every_expert_of_a_stack_is_sampled(tmp_path):
    shape = [128, 64, 4096]
    ((begin, _),) = write_safetensors(tmp_path / "m.safetensors", [shape])
    experts = [(begin + i * 256 * KIB, begin + (i + 1) * 256 * KIB) for i in range(128)]
    looks = Looks(tmp_path / "m.safetensors")
    assert_sees_each(looks, experts)
    assert looks.nbytes < 2 * MIB
    # The same bytes as one matrix have two samples: the test can tell.
    write_safetensors(tmp_path / "m.safetensors", [[128 * 64, 4096]])
    with pytest.raises(AssertionError):
        assert_sees_each(Looks(tmp_path / "m.safetensors"), experts)


@pytest.mark.parametrize("shape", [[1 << 40, 1, 1], [0, 2, 2], [-5, 2, 2], ["a", 1, 1], None, 3])
def test_a_shape_that_is_not_true_costs_nothing(tmp_path, shape):
    path = tmp_path / "m.safetensors"
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, MIB]}
    text = json.dumps({"t": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(MIB))
    assert_sees_each(Looks(path), [(8 + len(text), 8 + len(text) + MIB)])


def test_tensors_that_claim_the_same_terabytes_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    size = 1 << 42
    entry = {"dtype": "U8", "shape": [1 << 20, 1, 1], "data_offsets": [0, size]}
    text = json.dumps({f"t{i}": entry for i in range(3)}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    with pytest.raises(ConfigError, match="weights_id"):
        Looks(path)


# --- gguf -------------------------------------------------------------------------------


def gguf_text(text):
    return struct.pack("<Q", len(text)) + text


def gguf_key(name, kind, value):
    return gguf_text(name) + struct.pack("<I", kind) + value


def gguf_list(kind, items):
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def gguf_head(tensors, *, version=3, alignment=None, name=b"tiny"):
    """Return the head of a gguf file for tensors of (nbytes, shape), and their (begin, end)."""
    keys = [gguf_key(b"general.name", 8, gguf_text(name))]
    for kind, size in checkpoint_samples._GGUF_SCALARS.items():
        keys.append(gguf_key(b"scalar.%d" % kind, kind, bytes(size)))
    keys.append(gguf_key(b"tokens", 9, gguf_list(8, [gguf_text(b"t%d" % i) for i in range(500)])))
    keys.append(gguf_key(b"scores", 9, gguf_list(6, [bytes(4)] * 500)))
    keys.append(gguf_key(b"nested", 9, gguf_list(9, [gguf_list(8, [gguf_text(b"x")])] * 3)))
    if alignment is not None:
        keys.append(gguf_key(b"general.alignment", 4, struct.pack("<I", alignment)))
    step = alignment or 32
    infos, offsets, at = [], [], 0
    for i, (nbytes, shape) in enumerate(tensors):
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(gguf_text(b"blk.%d.weight" % i) + dimensions + struct.pack("<IQ", 8, at))
        offsets.append((at, at + nbytes))
        at = -(-(at + nbytes) // step) * step
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(infos)
    head += bytes(-len(head) % step)
    return head, [(len(head) + begin, len(head) + end) for begin, end in offsets]


def write_gguf(path, tensors, **options):
    head, ranges = gguf_head(tensors, **options)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(ranges[-1][1])
    return ranges


@pytest.mark.parametrize(("version", "alignment"), [(2, None), (3, None), (3, 64), (3, 4096)])
def test_every_tensor_of_a_gguf_file_is_sampled(tmp_path, version, alignment):
    tensors = [(random.Random(i).choice((100, 9000, 300_000)), [100]) for i in range(5000)]
    ranges = write_gguf(tmp_path / "m.gguf", tensors, version=version, alignment=alignment)
    looks = Looks(tmp_path / "m.gguf")
    for begin, end in ranges:
        assert looks.sees(begin, min(end, begin + 4 * KIB))
        # A tensor is taken to reach to the next one, so its middle may lie half an alignment further.
        assert looks.sees((begin + end + (alignment or 32)) // 2, (begin + end) // 2 + 2 * KIB)
    assert looks.sees(0, ranges[0][0])


def test_every_expert_of_a_stack_in_gguf_is_sampled(tmp_path):
    ((begin, _),) = write_gguf(tmp_path / "m.gguf", [(64 * 256 * KIB, [64, 512, 512])])
    experts = [(begin + i * 256 * KIB, begin + (i + 1) * 256 * KIB) for i in range(64)]
    assert_sees_each(Looks(tmp_path / "m.gguf"), experts)


def test_a_gguf_file_whose_table_is_not_read_is_sampled_densely(tmp_path):
    tensors = [(300_000, [300_000])] * 50
    for damage in (
        lambda head: head[:4] + struct.pack("<I", 1) + head[8:],  # version 1
        lambda head: head[:4] + struct.pack(">I", 3) + head[8:],  # big endian
        lambda head: head[:16] + struct.pack("<Q", 2**63) + head[24:],  # keys
        lambda head: head[:8] + struct.pack("<Q", 2**63) + head[16:],  # tensors
        lambda head: head.replace(
            b"scores" + struct.pack("<I", 9), b"scores" + bytes([77, 0, 0, 0])
        ),
    ):
        head, ranges = gguf_head(tensors)
        with (tmp_path / "m.gguf").open("wb") as file:
            file.write(damage(head))
            file.truncate(ranges[-1][1])
        assert_dense(Looks(tmp_path / "m.gguf"), ranges[-1][1])


def test_a_truncated_gguf_file_is_sampled_densely(tmp_path):
    ranges = write_gguf(tmp_path / "m.gguf", [(300_000, [300_000])] * 50)
    os.truncate(tmp_path / "m.gguf", ranges[20][0])
    assert_dense(Looks(tmp_path / "m.gguf"), ranges[20][0])


# --- zip --------------------------------------------------------------------------------


def write_zip(path, sizes, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for i, size in enumerate(sizes):
            with archive.open(f"model/data/{i}", "w", force_zip64=i % 2 == 0) as member:
                member.write(random.Random(i).randbytes(size))
        infos = archive.infolist()
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        # 30 bytes, name, extra field: the member's own header
        content = path.read_bytes()
        begins = []
        for info in infos:
            name, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
            begins.append(info.header_offset + 30 + name + extra)
    return [(begin, begin + info.compress_size) for begin, info in zip(begins, infos, strict=True)]


def assert_sees_members(looks, ranges):
    for begin, end in ranges:
        middle = (begin + end) // 2
        if end - begin <= 60 * KIB:
            assert looks.sees(begin, end)
        else:
            assert looks.sees(begin, begin + 4 * KIB)
            assert looks.sees(middle, middle + 2 * KIB)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_member_of_a_zip_file_is_sampled(tmp_path, compression):
    sizes = [random.Random(i).choice((0, 1, 5000, 60_000, 300_000)) for i in range(300)]
    ranges = write_zip(tmp_path / "m.bin", sizes, compression=compression)
    looks = Looks(tmp_path / "m.bin")
    assert_sees_members(looks, ranges)


def test_the_directory_of_a_zip_file_is_read_whole_because_checksums_are_in_it(tmp_path):
    ranges = write_zip(tmp_path / "m.bin", [100_000, *[0] * 2000, 300_000])
    size = os.path.getsize(tmp_path / "m.bin")
    assert size - ranges[-1][1] > 64 * KIB  # its end alone would not do
    assert Looks(tmp_path / "m.bin").sees(ranges[-1][1], size)


def test_a_sparse_sampling_of_a_zip_file_would_be_noticed(tmp_path, monkeypatch):
    sizes = [300_000] * 20
    ranges = write_zip(tmp_path / "m.bin", sizes)
    monkeypatch.setattr(checkpoint_samples, "_in_zip", lambda file: [(0, 4096)])
    with pytest.raises(AssertionError):
        assert_sees_members(Looks(tmp_path / "m.bin"), ranges)


def test_what_torch_saves_is_understood(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = {f"t{i}": torch.full((200, 1000), float(i)) for i in range(40)}
    path = tmp_path / "m.pt"
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as archive:
        begins = sorted(info.header_offset for info in archive.infolist())
    looks = Looks(path)
    content = path.read_bytes()
    for i in range(1, 40):
        begin = content.index(struct.pack("<f", float(i)) * 1000)
        assert looks.sees(begin, begin + 4 * KIB)
        assert looks.sees(begin + 400_000, begin + 402_000)
    assert looks.nbytes < len(content) / 10
    assert len(begins) >= 40
    # torch's format before 1.6 has no directory
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert_dense(Looks(path), path.stat().st_size)


@pytest.mark.parametrize("keep", [0.3, 0.999])
def test_a_truncated_zip_file_is_sampled_densely(tmp_path, keep):
    write_zip(tmp_path / "m.bin", [300_000] * 20)
    size = int(os.path.getsize(tmp_path / "m.bin") * keep)
    os.truncate(tmp_path / "m.bin", size)
    assert_dense(Looks(tmp_path / "m.bin"), size)


def test_a_zip_directory_of_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "m.bin"
    size = 3 << 30
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, size - 4, 4, 0))
    tracemalloc.start()
    try:
        assert_dense(Looks(path), path.stat().st_size)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


# --- without a table --------------------------------------------------------------------


def assert_dense(looks, size):
    """No MiB in a row goes unseen: a sample of 4 KiB in each half of one, and the end."""
    for at in range(0, size, 512 * KIB):
        assert looks.sees(at, min(size, at + 4 * KIB))
    assert looks.sees(max(0, size - 4 * KIB), size)


@pytest.mark.parametrize("name", ["m.bin", "m.npy", "m.ckpt", "m.gguf", "m.pt"])
@pytest.mark.parametrize("size", [0, 1, 4097, 3 * MIB + 5])
def test_a_file_without_a_table_has_a_sample_in_each_512_kib(tmp_path, name, size):
    (tmp_path / name).write_bytes(b"x" * size)
    looks = Looks(tmp_path / name)
    assert_dense(looks, size)
    if size > MIB:
        assert looks.nbytes <= 9 * 4 * KIB


def test_a_file_of_exabytes_is_refused_before_anything_is_read(tmp_path):
    path = tmp_path / "m.bin"
    path.touch()
    os.truncate(path, 1 << 43)  # sparse
    with pytest.raises(ConfigError, match="weights_id"):
        Looks(path)


# --- damaged files ----------------------------------------------------------------------


def damaged(content, random_):
    """Return content with a few bytes, numbers or pieces changed."""
    content = bytearray(content)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(content))
        match random_.randrange(5):
            case 0:
                content[at] = random_.randrange(256)
            case 1:
                number = random_.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
                content[at : at + 8] = struct.pack("<Q", number)
            case 2:
                del content[at : at + random_.randrange(64)]
            case 3:
                content[at:at] = random_.randbytes(random_.randrange(64))
            case 4:
                del content[max(8, at) :]
    return bytes(content)


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "zip"])
def test_a_damaged_table_is_an_error_or_a_result_and_takes_little(tmp_path, kind):
    random_ = random.Random(kind)
    path = tmp_path / {"safetensors": "m.safetensors", "gguf": "m.gguf", "zip": "m.bin"}[kind]
    if kind == "safetensors":
        write_safetensors(path, [[3, 50, 20]] * 20)
    elif kind == "gguf":
        write_gguf(path, [(5000, [5000])] * 20)
    else:
        write_zip(path, [100, 9000, 70_000])
    good = path.read_bytes()
    # Damage is worth most where the tables are: the front, and of a zip file the end.
    front, back = (0, 700) if kind == "zip" else (min(len(good), 9000), 0)
    outcomes = set()
    tracemalloc.start()
    try:
        for _ in range(400):
            if back:
                path.write_bytes(good[:-back] + damaged(good[-back:], random_))
            else:
                path.write_bytes(damaged(good[:front], random_) + good[front:])
            try:
                Looks(path)
                outcomes.add("result")
            except ConfigError:
                outcomes.add("error")
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    assert outcomes == ({"result", "error"} if kind == "safetensors" else {"result"})
