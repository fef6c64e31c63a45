"""The same weights have one fingerprint on every node, and other weights another one."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from itertools import pairwise

import pytest

from fskv.errors import ConfigError
from fskv.fingerprint import weights_fingerprint

TENSOR_NBYTES = 64 << 10
CONFIG = {
    "_name_or_path": "/home/a/model",
    "transformers_version": "4.50.0",
    "rope_theta": 10000.0,
    "text_config": {"_name_or_path": "x", "head_dim": 128},
}


def write_json(path, tree):
    path.write_text(json.dumps(tree))


def write_safetensors(path, seed, num_tensors=4, nbytes=TENSOR_NBYTES):
    header = {"__metadata__": {"format": "pt"}}
    for i in range(num_tensors):
        offsets = [i * nbytes, (i + 1) * nbytes]
        header[f"t{i}"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = bytes((seed + i) % 251 for i in range(nbytes)) * num_tensors
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return 8 + len(text)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def sampled(path):
    found = weights_fingerprint(str(path), revision_commit=None)
    assert found.startswith("sampled:")
    return found


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    write_json(path / "config.json", CONFIG)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(shards):
        write_safetensors(path / name, seed=i)
    weight_map = {"a": shards[0], "b": shards[1]}
    write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})
    return path


SHARD = "model-00001-of-00002.safetensors"


def data_start(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# --- equal ------------------------------------------------------------------------------


def test_a_known_commit_is_the_whole_answer():
    commit = "0123456789abcdef" * 2 + "01234567"
    assert weights_fingerprint("org/model", revision_commit=commit) == f"commit:{commit}"


def test_a_copy_elsewhere_with_other_times_is_the_same(model, tmp_path):
    copy = tmp_path / "elsewhere" / "other name"
    shutil.copytree(model, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert sampled(copy) == sampled(model) == sampled(f"{model}/")


def test_a_snapshot_of_symbolic_links_is_the_same(model, tmp_path):
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(model.iterdir()):
        blob = tmp_path / f"blob{i}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(f"../../blob{i}")
    assert sampled(snapshot) == sampled(model)


def test_where_the_config_was_loaded_from_does_not_count(model):
    before = sampled(model)
    moved = {**CONFIG, "_name_or_path": "/elsewhere", "transformers_version": "5.0.0"}
    moved["text_config"] = {"_name_or_path": "y", "head_dim": 128}
    write_json(model / "config.json", moved)
    assert sampled(model) == before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "generation_config.json", ".x"])
def test_files_that_do_not_shape_kv_do_not_count(model, name):
    before = sampled(model)
    (model / name).write_text("{}")
    assert sampled(model) == before


# --- different --------------------------------------------------------------------------


def start_of_a_tensor(model):
    path = model / SHARD
    overwrite(path, data_start(path) + TENSOR_NBYTES, b"\xff")


def middle_of_a_tensor(model):
    path = model / SHARD
    overwrite(path, data_start(path) + TENSOR_NBYTES + TENSOR_NBYTES // 2 + 4095, b"\xff")


def last_byte(model):
    path = model / SHARD
    overwrite(path, path.stat().st_size - 1, b"\xff")


def metadata_in_a_header(model):
    path = model / SHARD
    path.write_bytes(path.read_bytes().replace(b'"pt"', b'"tf"'))


def one_byte_longer(model):
    path = model / SHARD
    path.write_bytes(path.read_bytes() + b"\0")


def rope(model):
    write_json(model / "config.json", {**CONFIG, "rope_theta": 500000.0})


def no_config(model):
    (model / "config.json").unlink()


def swapped_shards(model):
    one, two = (model / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    spare = model / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)


def renamed_shard(model):
    (model / "model.safetensors.index.json").unlink()
    (model / SHARD).rename(model / "model-a.safetensors")


def removed_shard(model):
    (model / "model.safetensors.index.json").unlink()
    (model / SHARD).unlink()


def added_shard(model):
    write_safetensors(model / "extra.safetensors", seed=9)


def other_weight_map(model):
    weight_map = {"b": SHARD, "a": "model-00002-of-00002.safetensors"}
    write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})


def quantised(model):
    write_json(model / "hf_quant_config.json", {"kv_cache_quant_algo": "FP8"})


def quantised_gptq(model):
    write_json(model / "quantize_config.json", {"bits": 4})


@pytest.mark.parametrize(
    "change",
    [
        start_of_a_tensor,
        middle_of_a_tensor,
        last_byte,
        metadata_in_a_header,
        one_byte_longer,
        rope,
        no_config,
        swapped_shards,
        renamed_shard,
        removed_shard,
        added_shard,
        other_weight_map,
        quantised,
        quantised_gptq,
    ],
)
def test_other_weights_or_configuration_have_another_fingerprint(model, change):
    before = sampled(model)
    change(model)
    assert sampled(model) != before


def test_unsampled_bytes_are_not_seen_as_the_docstring_says(model):
    before = sampled(model)
    path = model / SHARD
    overwrite(path, data_start(path) + TENSOR_NBYTES + 8192, b"\xff")
    assert sampled(model) == before
    assert "unsampled" in weights_fingerprint.__doc__


def test_a_file_of_very_many_tensors_is_sampled_evenly_and_bounded(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    start = write_safetensors(path, seed=0, num_tensors=10_000, nbytes=16)
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args[1:]) or pread(*args))
    before = sampled(tmp_path)
    samples = [offset for nbytes, offset in reads if nbytes == 4096 and offset >= start]
    assert len(samples) == 4096 + 1
    assert samples[0] == start
    assert samples[4095] >= path.stat().st_size - 16
    gaps = [b - a for a, b in pairwise(samples)]
    assert max(gaps) <= 64
    overwrite(path, start, b"\xff")
    assert sampled(tmp_path) != before


# --- without safetensors ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "model.pth"])
@pytest.mark.parametrize("as_file", [False, True])
def test_other_formats_are_sampled_from_start_to_end(tmp_path, name, as_file):
    path = tmp_path / name
    path.write_bytes(bytes(2 << 20))
    target = path if as_file else tmp_path
    seen = {sampled(target)}
    last_sample = (2 << 20) - 4096
    for offset in (0, last_sample * 128 // 255, (2 << 20) - 1):
        overwrite(path, offset, b"\xff")
        seen.add(sampled(target))
    path.write_bytes(bytes((2 << 20) - 1))
    seen.add(sampled(target))
    assert len(seen) == 5


@pytest.mark.parametrize("size", [0, 1, 255, 4096, 4097])
def test_small_files_have_fingerprints_too(tmp_path, size):
    (tmp_path / "model.bin").write_bytes(bytes(size))
    before = sampled(tmp_path)
    (tmp_path / "model.bin").write_bytes(bytes(size + 1))
    assert sampled(tmp_path) != before


def test_bin_files_next_to_safetensors_count_because_load_format_may_choose_them(model):
    before = sampled(model)
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert sampled(model) != before


def test_a_single_file_keeps_its_fingerprint_when_renamed(tmp_path):
    one, two = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(bytes(10000))
    two.write_bytes(bytes(10000))
    assert sampled(one) == sampled(two)


# --- errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("commit", [None, "main", "", "A" * 40, "a" * 39])
def test_a_hub_id_without_a_commit_asks_for_weights_id(commit):
    with pytest.raises(ConfigError, match="weights_id"):
        weights_fingerprint("meta-llama/Llama-3-8B", revision_commit=commit)


def test_a_directory_without_weights_asks_for_weights_id(tmp_path):
    write_json(tmp_path / "config.json", CONFIG)
    with pytest.raises(ConfigError, match="weights_id"):
        weights_fingerprint(str(tmp_path), revision_commit=None)


def header(tree):
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text


HUGE = 2**60


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\0\0",
        (2).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        (0).to_bytes(8, "little") + b"{}",
        HUGE.to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{]",
        (2).to_bytes(8, "little") + b"\xff\xff",
        header([]),
        header({"t": 1}),
        header({"t": {"data_offsets": [0]}}),
        header({"t": {"data_offsets": [0, HUGE]}}),
        header({"t": {"data_offsets": [-1, 0]}}),
        header({"t": {"data_offsets": ["0", "1"]}}),
        header({"t": {"data_offsets": [1, 0]}}) + b"xx",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_a_damaged_header_is_an_error_that_names_the_file_and_allocates_little(model, content):
    (model / SHARD).write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=SHARD):
            weights_fingerprint(str(model), revision_commit=None)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_header_longer_than_safetensors_allows_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(2 << 30)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="header"):
            weights_fingerprint(str(tmp_path), revision_commit=None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "\udcff", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900]
)
def test_a_damaged_json_file_is_an_error_that_names_it(model, name, text):
    (model / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        sampled(model)
    assert name in str(error.value) or text.startswith('{"a"')
    assert str(model) in str(error.value)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", 3, "..", "a\0b"])
def test_an_index_cannot_lead_out_of_the_directory(model, name):
    write_json(model / "model.safetensors.index.json", {"weight_map": {"a": name}})
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json|regular file"):
        weights_fingerprint(str(model), revision_commit=None)


def test_a_shard_that_the_index_names_and_nobody_has_is_an_error(model):
    (model / SHARD).unlink()
    with pytest.raises(ConfigError, match=SHARD):
        weights_fingerprint(str(model), revision_commit=None)


def test_a_dangling_link_a_loop_a_directory_and_a_fifo_are_errors_that_name_the_file(model):
    path = model / SHARD
    for make in (
        lambda: path.symlink_to("nowhere"),
        lambda: path.symlink_to(SHARD),
        path.mkdir,
        lambda: os.mkfifo(path),
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make()
        with pytest.raises(ConfigError, match=SHARD):
            weights_fingerprint(str(model), revision_commit=None)


def test_real_safetensors_files_are_understood(tmp_path):
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    tensors = {"a": numpy.zeros((64, 64), "float32"), "b": numpy.ones((3,), "float16")}
    save_file(tensors, tmp_path / "model.safetensors")
    before = sampled(tmp_path)
    tensors["b"][0] = 2
    save_file(tensors, tmp_path / "model.safetensors")
    assert sampled(tmp_path) != before
