"""No tensor of a safetensors file is passed over, other files are sampled densely, and no file is trusted."""

from __future__ import annotations

import bisect
import json
import os
import random

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


# --- other files ------------------------------------------------------------------------


def test_a_file_of_exabytes_is_refused_before_anything_is_read(tmp_path):
    path = tmp_path / "m.bin"
    path.touch()
    os.truncate(path, 1 << 43)  # sparse
    with pytest.raises(ConfigError, match="weights_id"):
        Looks(path)
