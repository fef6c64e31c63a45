"""The same weights have one fingerprint on every node, and other weights another one."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import threading
import time

import pytest
from memory import bounded_memory

from fskv.errors import ConfigError
from fskv.identity import checkpoint_samples, fingerprint
from fskv.identity.checkpoint_samples import samples
from fskv.identity.fingerprint import checkpoint_state, kv_config, weights_fingerprint

TENSOR_NBYTES = 64 << 10
CONFIG = {
    "_name_or_path": "/home/a/model",
    "transformers_version": "4.50.0",
    "rope_theta": 10000.0,
    "text_config": {"_name_or_path": "x", "head_dim": 128},
}


def write_json(path, tree):
    path.write_text(json.dumps(tree))


def write_safetensors(path, seed, num_tensors=4, nbytes=TENSOR_NBYTES, sparse=False):
    header = {"__metadata__": {"format": "pt"}}
    for i in range(num_tensors):
        offsets = [i * nbytes, (i + 1) * nbytes]
        header[f"t{i}"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": offsets}
    text = json.dumps(header).encode()
    if sparse:
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + num_tensors * nbytes)
        return 8 + len(text)
    data = bytes((seed + i) % 251 for i in range(nbytes)) * num_tensors
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return 8 + len(text)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def sampled(path):
    found = weights_fingerprint(str(path))
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


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "chat_template.jinja", "engine.log", "LICENSE.txt", "model.onnx"),
        *("tf_model.h5", ".hidden.json", ".cache/a.json", "__pycache__/a.py"),
        "tower/.git/config.json",
    ],
)
def test_files_that_do_not_shape_kv_do_not_count(model, name):
    before = sampled(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_text("{}")
    assert sampled(model) == before


def test_the_format_of_json_does_not_count(model):
    write_json(model / "a.json", {"a": 1, "b": [1, 2]})
    before = sampled(model)
    (model / "a.json").write_text('{\n  "b": [1, 2],\n "a": 1, "transformers_version": "9"}\n')
    assert sampled(model) == before


def test_a_copy_that_follows_links_to_directories_is_the_same(model, tmp_path):
    (model / "tower").mkdir()
    write_json(model / "tower" / "config.json", CONFIG)
    (model / "other").symlink_to("tower")
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert not (copy / "other").is_symlink()
    assert sampled(copy) == sampled(model)


def test_directories_that_contain_themselves_are_entered_once(model):
    before = sampled(model)
    (model / "self").symlink_to(".")
    (model / "tower").mkdir()
    (model / "tower" / "up").symlink_to("..")
    (model / "loop").symlink_to("loop")
    assert sampled(model) == before
    assert sorted(checkpoint_state(str(model))) == sorted(
        ["config.json", "model.safetensors.index.json", SHARD, SHARD.replace("00001-", "00002-")]
    )


def test_the_order_of_the_threads_does_not_count(model, monkeypatch):
    write_safetensors(model / SHARD, seed=3, num_tensors=300, nbytes=60_000)
    before = sampled(model)
    digest = fingerprint._Planned.digest

    def late(*batch):
        time.sleep(random.random() / 100)
        return digest(*batch)

    monkeypatch.setattr(fingerprint._Planned, "digest", late)
    assert {sampled(model) for _ in range(3)} == {before}
    monkeypatch.setattr(fingerprint, "_NUM_THREADS", 1)
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


def other_weight_map(model):
    weight_map = {"b": SHARD, "a": "model-00002-of-00002.safetensors"}
    write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})


def config_in_a_linked_directory(model):
    (model.parent / "elsewhere").mkdir()
    write_json(model.parent / "elsewhere" / "config.json", {"rope_theta": 3})
    (model / "tower").symlink_to("../elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        start_of_a_tensor,
        middle_of_a_tensor,
        last_byte,
        metadata_in_a_header,
        one_byte_longer,
        swapped_shards,
        renamed_shard,
        removed_shard,
        other_weight_map,
        config_in_a_linked_directory,
    ],
)
def test_other_weights_or_configuration_have_another_fingerprint(model, change):
    before = sampled(model)
    change(model)
    assert sampled(model) != before


@pytest.mark.parametrize(
    "name",
    [
        *("extra.safetensors", "tower/model.safetensors", "tower/config.json", "notes.json"),
        *("hf_quant_config.json", "quantize_config.json", "preprocessor_config.json"),
        *("generation_config.json", "audio/front_end.yaml", "modeling_x.py", "layers/mlp.py"),
        *("tokenizer.model", "vocab.txt", "mel_filters.npz", "pytorch_model.bin"),
    ],
)
def test_a_further_file_gives_another_fingerprint(model, name):
    before = sampled(model)
    (model / name).parent.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        write_safetensors(model / name, seed=9)
    else:
        (model / name).write_bytes(b"{")  # of JSON that does not parse the bytes count
    assert sampled(model) != before


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("config.json", b'{"rope_theta": 1.0}', b'{"rope_theta": 2.0}'),
        ("modeling_x.py", b"scale = 1", b"scale = 3"),
        ("preprocessor_config.json", b'{"size": 1}', b'{"size": 2}'),
        ("notes.json", b'{"a": ', b'{"b": '),
        ("notes.json", b'{"a":' * 900 + b"1" + b"}" * 900, b'{"b":' * 900 + b"1" + b"}" * 900),
        ("notes.json", b"\xff1", b"\xff2"),
        ("notes.json", b"[" * 100_000, b"[" * 100_001),
        ("notes.json", b"9" * 5000, b"9" * 5001),  # more digits than Python reads
        ("vocab.json", b'["' + b"a" * (9 << 20) + b'"]', b'["' + b"a" * (9 << 20) + b'b"]'),
    ],
)
def test_what_is_in_settings_and_code_counts(model, name, one, other):
    (model / name).write_bytes(one)
    before = sampled(model)
    (model / name).write_bytes(other)
    assert sampled(model) != before


def test_settings_of_gigabytes_are_sampled(model):
    path = model / "huge.json"
    path.touch()
    os.truncate(path, 1 << 30)  # sparse
    with bounded_memory(32 << 20):
        before = sampled(model)
    overwrite(path, 512 << 20, b"x")
    assert sampled(model) != before


# --- without safetensors ----------------------------------------------------------------


OTHER_SIZE = (2 << 20) + 5
SAMPLED = [512 << 10, 1 << 20, 3 << 19, 2 << 20]  # where 4 KiB are read, besides the front


def other_format(path):
    """Write a file that begins as its suffix says, and is zeros else."""
    magic = b"GGUF" if path.suffix == ".gguf" else b"PK\3\4"
    path.write_bytes(magic + bytes(OTHER_SIZE - len(magic)))
    return path


def assert_each_change_is_seen(path, target, offsets):
    seen = {sampled(target)}
    for count, offset in enumerate(offsets, 2):
        overwrite(path, offset, b"\xff")
        seen.add(sampled(target))
        assert len(seen) == count, offset


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf", "model.pth"])
@pytest.mark.parametrize("as_file", [False, True])
def test_other_formats_are_sampled_from_start_to_end(tmp_path, name, as_file):
    path = other_format(tmp_path / name)
    target = path if as_file else tmp_path
    ends = [at + 4095 for at in SAMPLED[:-1]]
    assert_each_change_is_seen(path, target, [0, 4095, *SAMPLED, *ends, OTHER_SIZE - 1])
    before = sampled(target)
    os.truncate(path, OTHER_SIZE - 1)
    assert sampled(target) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_negative_control_a_change_where_nothing_is_read_is_not_seen(tmp_path, name, monkeypatch):
    path = other_format(tmp_path / name)
    with pytest.raises(AssertionError, match="200000"):
        assert_each_change_is_seen(path, tmp_path, [SAMPLED[0], 200_000])
    # A sampling with gaps of more than 512 KiB would be noticed.
    monkeypatch.setattr(checkpoint_samples, "DENSE_NBYTES", 1 << 20)
    with pytest.raises(AssertionError, match=str(SAMPLED[0])):
        assert_each_change_is_seen(other_format(path), tmp_path, SAMPLED)


def test_one_value_of_a_small_tensor_in_a_file_of_torch_is_seen(tmp_path):
    """It lies between two samples; torch.save keeps a checksum of each tensor at the end of the file."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "pytorch_model.bin"

    def fingerprint(value):
        tensors = {f"w{n}": torch.zeros(1 << 20) for n in range(3)}
        tensors["w1"][300_000] = value
        torch.save(tensors, path)
        return sampled(tmp_path), path.read_bytes()

    (one, first), (other, second) = fingerprint(0.0), fingerprint(1.0)
    differs = [n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert min(differs) < len(first) // 2 < max(differs), "the value, and the checksum"
    assert one != other


def test_a_single_file_keeps_its_fingerprint_when_renamed(tmp_path):
    one, two = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(bytes(10000))
    two.write_bytes(bytes(10000))
    assert sampled(one) == sampled(two)


OTHER = "model-00002-of-00002.safetensors"


# --- the state before and after ---------------------------------------------------------


def test_the_state_has_what_is_read_by_relative_name(model):
    (model / "tower").mkdir()
    (model / "tower" / "modeling.py").write_text("pass")
    (model / "README.md").write_text("pass")
    write_safetensors(model / "consolidated.safetensors", seed=5)
    state = checkpoint_state(str(model))
    assert set(state) == {
        *("config.json", "model.safetensors.index.json", SHARD, OTHER, "consolidated.safetensors"),
        "tower/modeling.py",
    }
    found = os.stat(model / SHARD)
    assert state[SHARD] == (
        *(found.st_dev, found.st_ino, found.st_size),
        *(found.st_mtime_ns, found.st_ctime_ns),
    )
    sampled(model)
    assert checkpoint_state(f"{model}/") == state


def replaced_by_rename(model):
    shutil.copy2(model / SHARD, model / "new")
    (model / "new").replace(model / SHARD)


def rewritten_in_place_with_the_old_time(model):
    found = (model / SHARD).stat()
    overwrite(model / SHARD, found.st_size - 1, b"\xff")
    os.utime(model / SHARD, ns=(found.st_atime_ns, found.st_mtime_ns))


def link_led_elsewhere(model):
    blob = model.parent / "blob"
    shutil.copy2(model / SHARD, blob)
    (model / SHARD).unlink()
    (model / SHARD).symlink_to(blob)


def code_added(model):
    (model / "modeling_x.py").write_text("pass")


def shard_gone(model):
    (model / SHARD).unlink()


@pytest.mark.parametrize(
    "change",
    [
        replaced_by_rename,
        rewritten_in_place_with_the_old_time,
        link_led_elsewhere,
        code_added,
        shard_gone,
    ],
)
def test_a_replacement_changes_the_state(model, change):
    before = checkpoint_state(str(model))
    change(model)
    assert checkpoint_state(str(model)) != before


def test_a_file_behind_a_link_that_is_replaced_changes_the_state(model):
    link_led_elsewhere(model)
    before = checkpoint_state(str(model))
    shutil.copy2(model.parent / "blob", model.parent / "new")
    (model.parent / "new").replace(model.parent / "blob")
    assert checkpoint_state(str(model)) != before


def test_a_dangling_link_a_fifo_and_a_single_file_have_states(model):
    (model / "a.safetensors").symlink_to("nowhere")
    os.mkfifo(model / "b.safetensors")
    state = checkpoint_state(str(model))
    assert state["a.safetensors"] == ()
    assert len(state["b.safetensors"]) == 5
    assert checkpoint_state(str(model / SHARD)) == {SHARD: state[SHARD]}


@pytest.mark.parametrize("path", ["/nowhere/at/all", "meta-llama/Llama-3-8B", ""])
def test_what_is_not_there_has_no_state(path):
    with pytest.raises(ConfigError):
        checkpoint_state(path)


def test_a_file_that_changes_between_its_table_and_its_samples_is_an_error(model, monkeypatch):
    def then_changed(file):
        found = samples(file)
        os.utime(file.path, (1, 1))
        return found

    monkeypatch.setattr(fingerprint, "samples", then_changed)
    with pytest.raises(ConfigError, match="changed while it was read"):
        sampled(model)


# --- what of config.json touches KV -----------------------------------------------------


PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
}
OUTSIDE_KV = [
    *({"bos_token_id": 5}, {"eos_token_id": [1, 2]}, {"pad_token_id": None}, {"use_cache": False}),
    *({"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"tie_word_embeddings": True}),
    *({"id2label": {"0": "a"}}, {"label2id": {"a": 0}}, {"max_position_embeddings": 4096}),
    *({"_name_or_path": "/x"}, {"transformers_version": "9"}, {"_commit_hash": "a"}),
]


@pytest.mark.parametrize("change", OUTSIDE_KV, ids=lambda change: next(iter(change)))
def test_what_cannot_touch_kv_is_dropped_from_plain_decoders(model, change):
    assert kv_config({**PLAIN, **change}) == kv_config(PLAIN)
    write_json(model / "config.json", PLAIN)
    before = sampled(model)
    write_json(model / "config.json", {**PLAIN, **change})
    assert sampled(model) == before


@pytest.mark.parametrize("change", OUTSIDE_KV[:10], ids=lambda change: next(iter(change)))
@pytest.mark.parametrize(
    "unknown",
    [
        {"architectures": ["LongcatFlashNgramForCausalLM"]},  # n-grams end at eos_token_id
        {"architectures": ["LlamaForCausalLM", "OtherForCausalLM"]},
        {"architectures": []},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": None},
        {"auto_map": {"AutoModel": "modeling_x.X"}},
    ],
)
def test_it_stays_where_nobody_read_the_model(unknown, change):
    other = {**PLAIN, **unknown}
    assert kv_config({**other, **change}) != kv_config(other)


@pytest.mark.parametrize(
    "change",
    [
        *({"hidden_size": 65}, {"rope_theta": 500000.0}, {"architectures": ["Qwen2ForCausalLM"]}),
        *({"model_type": "qwen2"}, {"sliding_window": 64}, {"quantization_config": {"dtype": "x"}}),
        {"text_config": {"eos_token_id": 3}},
    ],
)
def test_all_else_stays(change):
    assert kv_config({**PLAIN, **change}) != kv_config(PLAIN)


@pytest.mark.parametrize(
    ("rope", "kept"),
    [
        ({}, False),
        ({"rope_scaling": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
        ({"rope_parameters": {"full": {"rope_type": "default"}, "local": {}}}, False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, True),
        ({"rope_parameters": {"full": {"rope_type": "linear"}, "local": {}}}, True),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, True),
        ({"rope_scaling": {"rope_type": None}}, True),
        ({"rope_scaling": ["yarn"]}, True),
        ({"dual_chunk_attention_config": {"chunk_size": 4}}, True),
    ],
)
def test_the_longest_position_stays_where_rope_scales_by_it(rope, kept):
    assert ("max_position_embeddings" in kv_config({**PLAIN, **rope})) == kept


def test_a_configuration_is_not_changed_by_looking_at_it():
    tree = {**PLAIN, "text_config": {"_name_or_path": "x", "a": [{"transformers_version": "1"}]}}
    before = json.dumps(tree)
    assert kv_config(tree)["text_config"] == {"a": [{}]}
    assert json.dumps(tree) == before


# --- progress ---------------------------------------------------------------------------


def test_a_long_fingerprint_says_how_far_it_is_and_a_short_one_nothing(model, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    write_safetensors(model / SHARD, seed=3, num_tensors=300, nbytes=60_000)
    sampled(model)
    assert not caplog.messages
    monkeypatch.setattr(fingerprint, "_QUIET_S", -1.0)
    sampled(model)
    (message,) = caplog.messages  # the next one would come after 5 s
    assert message.startswith("fskv: fingerprint: ")
    assert " % read, " in message


def test_threads_end_with_the_fingerprint_and_with_an_error(model, monkeypatch):
    num_before = threading.active_count()
    write_safetensors(model / SHARD, seed=3, num_tensors=300, nbytes=60_000)
    sampled(model)

    def broken(*batch):
        raise ConfigError("broken")

    monkeypatch.setattr(fingerprint._Planned, "digest", broken)
    with pytest.raises(ConfigError, match="broken"):
        sampled(model)
    deadline = time.monotonic() + 30
    while threading.active_count() > num_before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == num_before


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
    with bounded_memory(32 << 20), pytest.raises(ConfigError, match=SHARD):
        weights_fingerprint(str(model), revision_commit=None)


def test_a_header_longer_than_safetensors_allows_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(2 << 30)  # sparse
    with bounded_memory(1 << 20), pytest.raises(ConfigError, match="header"):
        weights_fingerprint(str(tmp_path), revision_commit=None)


@pytest.mark.parametrize(
    "text", ["", "{", "\udcff", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900]
)
def test_a_damaged_configuration_is_an_error_that_names_it(model, text):
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        sampled(model)
    assert str(model / "config.json") in str(error.value)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", 3, "..", "a\0b"])
def test_an_index_cannot_lead_out_of_the_directory(model, name):
    secret = model.parent / "secret.safetensors"
    write_safetensors(secret, seed=1)
    write_json(model / "model.safetensors.index.json", {"weight_map": {"a": name}})
    before = sampled(model)
    write_safetensors(secret, seed=2)
    assert sampled(model) == before


def test_a_tree_deeper_than_any_model_is_an_error(model):
    path = model
    for _ in range(17):
        path /= "d"
        path.mkdir()
    with pytest.raises(ConfigError, match="subfolders"):
        sampled(model)


def test_more_files_than_any_model_has_are_an_error(model, monkeypatch):
    monkeypatch.setattr(fingerprint, "_MAX_ENTRIES", 50)
    for i in range(5):
        (model / f"d{i}").mkdir()
        for j in range(5):
            if j != i:
                (model / f"d{i}" / f"to{j}").symlink_to(f"../d{j}")
    with pytest.raises(ConfigError, match="directory of one model"):
        sampled(model)
    with pytest.raises(ConfigError, match="directory of one model"):
        checkpoint_state(str(model))


@pytest.mark.parametrize("name", ["modeling.py", "a.json", "tower/b.bin"])
def test_a_fifo_in_place_of_any_file_that_is_read_is_an_error(model, name):
    (model / "tower").mkdir()
    os.mkfifo(model / name)
    with pytest.raises(ConfigError, match="expected a regular file"):
        sampled(model)


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


@pytest.mark.parametrize("seed", range(2))
def test_a_change_of_any_one_of_thousands_of_tensors_is_seen(tmp_path, seed):
    path = tmp_path / "model.safetensors"
    random_ = random.Random(seed)
    start = write_safetensors(path, seed=0, num_tensors=6000, nbytes=60_000, sparse=True)
    seen = {sampled(tmp_path)}
    for _ in range(4):
        overwrite(path, start + random_.randrange(6000) * 60_000, random_.randbytes(60_000))
        found = sampled(tmp_path)
        assert found not in seen
        seen.add(found)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_other_weights_of_as_many_bytes_as_lie_between_two_samples_are_seen(tmp_path, name):
    path = other_format(tmp_path / name)
    before = sampled(tmp_path)
    random_ = random.Random(name)
    for _ in range(10):
        at = random_.randrange(OTHER_SIZE - (512 << 10))
        overwrite(path, at, b"\xff" * (512 << 10))
        assert sampled(tmp_path) != before
        other_format(path)
