"""FskvAdapter against the classes of the installed LMCache: base class, factory, memory objects, keys."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import pathlib
import select
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import read_only
from key_files import write_keys
from lmcache_lab import FACTS
from world import damage, wait_for

pytest.importorskip("lmcache", reason="LMCache has an environment of its own: make test-lmcache")

import torch
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker
from lmcache.integration.vllm.vllm_multi_process_adapter import ParallelStrategy
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.platform import consume_fd
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

try:
    from lmcache.v1.check import check_mode_test_l2_adapter as check
except ModuleNotFoundError:  # since 0.5.7
    from lmcache.inprocess.v1.check import check_mode_test_l2_adapter as check

from fskv.engines.lmcache import FskvAdapter, server
from fskv.engines.lmcache import adapter as module
from fskv.engines.lmcache.identity import _MAX_DEADLINE_S, chunk_of
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

# Keys and values, layers, tokens, hidden: 4608 bytes of bfloat16.
SHAPE = torch.Size([2, 3, 16, 24])
NBYTES = SHAPE.numel() * 2
ALIGNMENT = 4096  # LMCache's: objects of 4608 bytes are 8192 apart
NUM_PLACES = 24
ENTRY = {**FACTS, "block_size": 16, "isa": "vec16", "weights_id": "w"}


class World:
    """An adapter as LMCache makes it, and the L1 memory that it was given."""

    def __init__(self, root, models=None, **options):
        self.l1 = torch.zeros(NUM_PLACES * 2 * ALIGNMENT, dtype=torch.uint8)
        params = {
            "root": str(root),
            "maintenance": "off",
            "weights_fixed": True,
            "models": models or {"m": ENTRY, "other": {**ENTRY, "weights_id": "o"}},
            **options,
        }
        given = {"module_path": "fskv.engines.lmcache", "class_name": "FskvAdapter"}
        given["adapter_params"] = json.loads(json.dumps(params))
        desc = L1MemoryDesc(self.l1.data_ptr(), self.l1.numel(), ALIGNMENT)
        self.adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(given), desc)

    def objects(self, *places, fill=None, shape=SHAPE, dtype=torch.bfloat16):
        found = []
        for place in places:
            raw = self.l1[place * 2 * ALIGNMENT :][: shape.numel() * dtype.itemsize]
            meta = MemoryObjMetadata(
                shape, dtype, raw.data_ptr(), raw.numel(), 1, 0, MemoryFormat.KV_2LTD
            )
            meta.shapes, meta.dtypes = [shape], [dtype]
            obj = TensorMemoryObj(raw, meta, parent_allocator=None)
            if fill is not None:
                torch.manual_seed(fill + place)
                raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
            found.append(obj)
        return found

    def done(self, fd, query, task):
        ready, _, _ = select.select([fd], [], [], 60)
        assert ready, "no event"
        consume_fd(fd)
        return query(task)

    def store(self, names, objects):
        task = self.adapter.submit_store_task(names, objects)
        fd = self.adapter.get_store_event_fd()
        return self.done(fd, lambda t: self.adapter.pop_completed_store_tasks()[t], task)

    def lookup(self, names, shape=SHAPE, dtype=torch.bfloat16):
        groups = {name.object_group_id for name in names}
        descs = {group: MemoryLayoutDesc([shape], [dtype]) for group in groups}
        task = self.adapter.submit_lookup_and_lock_task(names, descs)
        fd = self.adapter.get_lookup_and_lock_event_fd()
        found = self.done(fd, self.adapter.query_lookup_and_lock_result, task)
        assert self.adapter.query_lookup_and_lock_result(task) is None, "told once"
        return bits(found)

    def load(self, names, objects):
        task = self.adapter.submit_load_task(names, objects)
        fd = self.adapter.get_load_event_fd()
        return bits(self.done(fd, self.adapter.query_load_result, task))


def bits(bitmap):
    return [bitmap.test(place) for place in range(len(bitmap))]


def keys(numbers, **fields):
    hasher, fields = TokenHasher(16), {"model_name": "m", "kv_rank": 0x01000100, **fields}
    return [ObjectKey(hasher.hash_tokens([number] * 16), **fields) for number in numbers]


@pytest.fixture
def make(tmp_path):
    made = []
    (tmp_path / "kv").mkdir()

    def make(**options):
        world = World(tmp_path / "kv", **options)
        made.append(world)
        return world

    yield make
    for world in made:
        world.adapter.close()


def chunk_files(tmp_path):
    return sorted(pathlib.Path(tmp_path / "kv").glob("*/*/chunks/*/*.kv"))


def test_objects_go_from_lmcaches_memory_to_files_and_back(make, tmp_path):
    writer, reader = make(), make()
    result = writer.store(keys(range(4)), writer.objects(3, 7, 0, 9, fill=1))
    assert result.is_successful()
    assert result.bytes_transferred() == 4 * NBYTES
    assert len(chunk_files(tmp_path)) == 4
    assert reader.lookup(keys([0, 1, 9, 2, 3])) == [True, True, False, True, True]
    before = reader.l1.clone()
    got = reader.objects(1, 2, 4, 15)
    assert reader.load(keys(range(4)), got) == [True] * 4
    for source, target in zip(writer.objects(3, 7, 0, 9), got, strict=True):
        assert torch.equal(source.raw_data, target.raw_data)
        at = target.data_ptr - reader.l1.data_ptr()
        before[at : at + NBYTES] = target.raw_data
    assert torch.equal(reader.l1, before), "nothing beside the objects was touched"


def test_a_server_that_only_loads_changes_nothing(make, tmp_path):
    writer = make()
    assert writer.store(keys(range(2)), writer.objects(3, 7, fill=1)).is_successful()
    read_only.make_old(tmp_path / "kv")
    before = read_only.look(tmp_path / "kv")
    with read_only.mounted(tmp_path / "kv", tmp_path / "ro") as at:
        reader = World(at, store=False, maintenance="on")
        assert reader.lookup(keys(range(3))) == [True, True, False]
        assert reader.load(keys(range(2)), reader.objects(1, 2)) == [True] * 2
        assert torch.equal(reader.objects(1)[0].raw_data, writer.objects(3)[0].raw_data)
        assert not reader.store(keys([5]), reader.objects(4, fill=3)).is_successful()
        reader.adapter.close()
    assert read_only.look(tmp_path / "kv") == before
    assert writer.store(keys([5]), writer.objects(4, fill=3)).is_successful(), "the control"
    assert read_only.look(tmp_path / "kv") != before


def test_with_a_key_file_objects_come_back_after_a_restart_and_in_clear_they_are_not_found(
    make, tmp_path
):
    key_file = write_keys(tmp_path / "keys", "one")
    writer = make(key_file=key_file)
    assert writer.store(keys(range(2)), writer.objects(3, 7, fill=1)).is_successful()
    reader = make(key_file=key_file)
    assert reader.lookup(keys(range(3))) == [True, True, False]
    assert reader.load(keys(range(2)), reader.objects(1, 2)) == [True] * 2
    assert torch.equal(reader.objects(1)[0].raw_data, writer.objects(3)[0].raw_data)
    assert make().lookup(keys(range(2))) == [False] * 2
    other = make(key_file=write_keys(tmp_path / "other", "two"))
    assert other.load(keys(range(2)), other.objects(1, 2)) == [False] * 2


def test_a_load_is_good_key_by_key(make, tmp_path):
    """The control is in it: what was not damaged is good."""
    world = make()
    assert world.store(keys(range(4)), world.objects(*range(4), fill=2)).is_successful()
    paths = chunk_files(tmp_path)
    damage(paths[0], 4096 + 9)
    paths[1].unlink()
    got = world.objects(*range(10, 15))
    good = world.load(keys([0, 1, 2, 3, 8]), got)
    assert good.count(True) == 2
    assert good[4] is False
    for place, one in enumerate(good[:4]):
        same = torch.equal(got[place].raw_data, world.objects(place)[0].raw_data)
        assert same or not one
    bad = [place for place in range(4) if not good[place]]
    assert world.lookup(keys(bad)) == [False] * 2
    assert world.store(keys(bad), world.objects(*bad)).is_successful(), "stored again"
    assert world.load(keys(bad), got[:2]) == [True] * 2


def test_a_store_is_good_only_if_every_object_is_stored(make):
    world = make()
    outside = TensorMemoryObj(
        torch.zeros(NBYTES, dtype=torch.uint8), world.objects(0)[0].meta, parent_allocator=None
    )
    assert not world.store(keys([1]), [outside]).is_successful()
    for names in (keys([1, 2], model_name="unheard of"), [*keys([1]), *keys([2], model_name="x")]):
        assert not world.store(names, world.objects(0, 1)).is_successful()
    assert world.store(keys([1, 2]), world.objects(0, 1)).is_successful(), "the control"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"model_name": "other"}),
        ({}, {"object_group_id": 1}),
        ({}, {"cache_salt": "alice"}),
        ({"cache_salt": "bob"}, {"cache_salt": "alice"}),
        ({"kv_rank": 0x02000200}, {"kv_rank": 0x02010201}),
        ({}, {"kv_rank": 0x02000200}),
    ],
)
def test_nothing_is_served_under_another_key(make, one, other):
    """The control is in it: under its own key it is."""
    world = make()
    assert world.store(keys([5], **one), world.objects(0, fill=3)).is_successful()
    assert world.lookup(keys([5], **other)) == [False]
    assert world.load(keys([5], **other), world.objects(1)) == [False]
    assert world.lookup(keys([5], **one)) == [True]


def test_two_servers_of_one_engine_do_not_share_what_has_one_key(make):
    """Ranks 0 and 2 of 4: LMCache gives their objects equal keys. The control: each loads its own."""
    names = []
    for each in (ParallelStrategy(False, 4, rank, 4, 1, 2) for rank in (0, 2)):
        place = (each.kv_world_size, each.kv_worker_id)
        names.append(keys([5], kv_rank=ObjectKey.ComputeKVRank(*place, *place)))
    assert names[0] == names[1]
    servers = [make(models={"m": {**ENTRY, "server": [index, 2]}}) for index in (0, 1)]
    assert servers[0].store(names[0], servers[0].objects(0, fill=3)).is_successful()
    assert servers[1].load(names[1], servers[1].objects(0)) == [False]
    assert servers[1].lookup(names[1]) == [False]
    assert servers[0].load(names[0], servers[0].objects(1)) == [True]


def test_a_key_that_is_refused_costs_no_other(make, caplog):
    """LMCache's field for a rank has room for 255. The control is in it: the other key is good."""
    world = make()
    both = [*keys([1]), *keys([2], kv_rank=ObjectKey.ComputeKVRank(256, 1, 256, 1))]
    assert not world.store(both, world.objects(0, 1, fill=6)).is_successful()
    assert world.lookup(both) == [True, False]
    assert world.load(both, world.objects(2, 3)) == [True, False]
    assert "a rank of more than 32 bits" in caplog.text


def test_nothing_is_served_under_another_layout(make):
    world = make()
    assert world.store(keys([5]), world.objects(0, fill=3)).is_successful()
    for shape, dtype in (
        (torch.Size([2, 3, 24, 16]), torch.bfloat16),
        (torch.Size([2, 3, 16, 24]), torch.float16),
        (torch.Size([2, 3, 16, 12]), torch.float32),
    ):
        assert world.lookup(keys([5]), shape, dtype) == [False]
        assert world.load(keys([5]), world.objects(1, shape=shape, dtype=dtype)) == [False]
    assert world.load(keys([5]), world.objects(1)) == [True], "the control"


def test_what_a_serde_made_is_refused(make, caplog):
    world = make()
    flat = world.objects(0, fill=4, shape=torch.Size([NBYTES // 2]), dtype=torch.uint8)
    assert not world.store(keys([1]), flat).is_successful()
    narrowed = world.objects(1, fill=4)
    narrowed[0].set_used_size(100)
    assert not world.store(keys([1]), narrowed).is_successful()
    assert not world.load(keys([1]), narrowed)[0]
    assert "'serde'" in caplog.text
    assert world.store(keys([1]), world.objects(2)).is_successful(), "the control"


def test_the_test_that_lmcache_brings_passes(make, monkeypatch, capsys):
    world = make(models={"m": ENTRY})
    monkeypatch.setattr(
        check, "_create_object_key", lambda model, name: keys([hash(name) & 0xFFFFFFFF])[0]
    )
    check._test_single_adapter(
        world.adapter, "m", 4, world.l1[: 8 * 4096].view(torch.float32), obj_size=1024
    )
    said = capsys.readouterr().out
    assert said.count("4/4") == 8, said  # absent, found, loaded, content; and the table
    assert "FAIL" not in said


def test_a_root_that_cannot_be_opened_costs_the_task_and_is_tried_again(make, tmp_path):
    world = make()
    (tmp_path / "kv").rename(tmp_path / "gone")
    assert world.lookup(keys([1])) == [False]
    assert not world.store(keys([1]), world.objects(0)).is_successful()
    assert not (tmp_path / "kv").exists()
    (tmp_path / "gone").rename(tmp_path / "kv")
    wait_for(lambda: world.store(keys([1]), world.objects(0)).is_successful(), 60)
    assert world.lookup(keys([1])) == [True]


def test_lookups_wait_together_for_a_namespace_that_hangs(make, monkeypatch):
    """On a mount that does not answer. One after another they would take twenty times as long."""
    world = make(lookup_timeout_s=0.05)  # of which a lookup waits ten
    held, opened = threading.Event(), module.KvStore
    monkeypatch.setattr(
        module, "KvStore", lambda *args, **options: (held.wait(60), opened(*args, **options))[1]
    )
    descs = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}
    tasks = [world.adapter.submit_lookup_and_lock_task(keys([n]), descs) for n in range(40)]
    began, answers = time.monotonic(), {}
    while len(answers) < len(tasks):
        for task in tasks:
            found = world.adapter.query_lookup_and_lock_result(task)
            if found is not None:
                answers[task] = bits(found)
        time.sleep(0.01)
    assert time.monotonic() - began < 5, "half a second for all of them"
    assert list(answers.values()) == [[False]] * len(tasks)
    consume_fd(world.adapter.get_lookup_and_lock_event_fd())
    held.set()
    wait_for(lambda: world.store(keys([1]), world.objects(0)).is_successful(), 60)
    wait_for(lambda: world.lookup(keys([1])) == [True])  # the control


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "control"])
def test_a_task_that_waited_for_a_namespace_gets_none_after_close(
    make, monkeypatch, tmp_path, closed
):
    """LMCache unmaps its memory then, or uses it again. The control: without close() it is stored."""
    world = make()
    held, opened = threading.Event(), FskvAdapter._opened

    def slow(*args):
        store = opened(*args)
        held.wait(60)
        return store

    monkeypatch.setattr(FskvAdapter, "_opened", slow)
    world.adapter.submit_store_task(keys([1]), world.objects(0, fill=1))
    wait_for(lambda: world.adapter._stores, 60)
    (opening,) = world.adapter._stores.values()
    if closed:
        world.adapter.close()
    held.set()
    assert (opening.result(60) is None) is closed
    if closed:
        for thread in world.adapter._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not chunk_files(tmp_path)
    else:
        wait_for(lambda: chunk_files(tmp_path), 60)


def test_a_task_that_waited_too_long_does_not_touch_lmcaches_memory(make, monkeypatch, tmp_path):
    """LMCache's lock on it has ended by then, and another object may be there. The control is at the end."""
    world = make()
    assert world.store(keys([1]), world.objects(0, fill=1)).is_successful()
    monkeypatch.setattr(module, "_BEGIN_S", 0.0)
    before = world.l1.clone()
    assert not world.store(keys([2]), world.objects(1)).is_successful()
    assert world.load(keys([1]), world.objects(2)) == [False]
    assert torch.equal(world.l1, before)
    assert len(chunk_files(tmp_path)) == 1
    monkeypatch.undo()
    assert world.load(keys([1]), world.objects(2)) == [True]


def watched(tmp_path, *names):
    """Models with checkpoints that are looked at; returns their words and their files."""
    own = {name: word for name, word in ENTRY.items() if name != "weights_id"}
    models, files = {}, {}
    for name in names:
        (tmp_path / name).mkdir()
        files[name] = tmp_path / name / "model.bin"
        files[name].write_bytes(bytes(range(256)) * 64)
        models[name] = {**own, "checkpoint": str(tmp_path / name)}
    return models, files


def in_doubt(model):
    labels = {"model": model, "world": "1", "group": "0"}
    return REGISTRY.get_sample_value("lmcache:fskv_weights_in_doubt", labels)


def test_a_model_that_was_stopped_is_seen_in_the_status_and_in_the_metrics(
    make, monkeypatch, tmp_path
):
    """No transfer publishes it: there is none any more. The control is the other model."""
    monkeypatch.setattr(module, "_WATCH_S", 0.02)
    models, files = watched(tmp_path, "stopped", "goes on")
    world = make(models=models)
    both = [key for name in models for key in keys([1], model_name=name)]
    assert world.store(both, world.objects(0, 1)).is_successful()
    said = world.adapter.report_status()
    assert (said["is_healthy"], said["stopped_models"]) == (True, [])
    assert in_doubt("stopped") == 0
    files["stopped"].write_bytes(bytes(range(255, -1, -1)) * 64)
    wait_for(lambda: in_doubt("stopped") == 1)
    said = world.adapter.report_status()
    assert (said["is_healthy"], said["stopped_models"]) == (False, ["stopped"])
    assert in_doubt("goes on") == 0
    assert world.lookup(both) == world.load(both, world.objects(2, 3)) == [False, True]
    assert not world.store(keys([2], model_name="stopped"), world.objects(0)).is_successful()
    assert make(models=models).lookup(both) == [False, True], "another namespace"


def test_another_kind_of_objects_than_there_may_be_says_so(make, monkeypatch, caplog):
    """Models that nobody named take no place. The control: the first kind is stored."""
    monkeypatch.setattr(module, "_MAX_KINDS", 1)
    world = make()
    for name in ("x", "y"):
        assert not world.store(keys([1], model_name=name), world.objects(0)).is_successful()
    assert world.store(keys([1]), world.objects(0)).is_successful()
    assert not world.store(keys([1], model_name="other"), world.objects(0)).is_successful()
    assert "there are 1 kinds of objects, so another one is neither stored nor" in caplog.text
    assert world.lookup(keys([1])) == [True]


def test_a_checkpoint_on_a_mount_that_hangs_holds_up_no_other(make, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_WATCH_S", 0.02)
    models, files = watched(tmp_path, "m", "other")
    held, changed = threading.Event(), Checkpoint.changed
    monkeypatch.setattr(
        Checkpoint,
        "changed",
        lambda self: held.wait(60) if self.place == models["m"]["checkpoint"] else changed(self),
    )
    world = make(models=models)
    both = [*keys([1]), *keys([1], model_name="other")]
    assert world.store(both, world.objects(0, 1)).is_successful()
    files["other"].write_bytes(bytes(range(255, -1, -1)) * 64)
    wait_for(lambda: world.lookup(both) == [True, False])
    held.set()


def test_what_the_servers_command_line_says_is_looked_at(make, monkeypatch):
    """A task may begin 60 s after it was submitted, and lasts 40 s here. The control is the last."""
    for seconds in ("100", "110"):
        words = ["--l1-read-ttl-seconds", seconds, "--l2-adapter", "{}"]
        monkeypatch.setattr(sys, "argv", ["lmcache", "server", *words])
        if seconds == "100":
            with pytest.raises(ConfigError, match="expected 110 at least"):
                make(load_deadline_s=40 / 15)
        else:
            make(load_deadline_s=40 / 15)


def test_the_arguments_that_are_looked_at_are_lmcaches_own():
    from lmcache.v1.distributed.config import add_storage_manager_args
    from lmcache.v1.multiprocess.config import add_mp_server_args, add_p2p_args

    theirs = argparse.ArgumentParser()
    for add in (add_mp_server_args, add_p2p_args, add_storage_manager_args):
        add(theirs)
    names = {name: action for action in theirs._actions for name in action.option_strings}
    ours = [name for action in server._Parser()._actions for name in action.option_strings]
    assert set(ours) <= set(names)
    # Where one of theirs begins one of ours, ours would take it for an abbreviation.
    assert not [(one, two) for one in set(names) - set(ours) for two in ours if two.startswith(one)]
    assert names["--engine-type"].choices == ["default", "blend"]
    for ttl, seconds in (("--l1-read-ttl-seconds", 300), ("--l1-write-ttl-seconds", 600)):
        assert names[ttl].default == seconds
        assert seconds >= module._BEGIN_S + _MAX_DEADLINE_S + module._MARGIN_S


def test_a_wrong_option_ends_the_start_in_one_sentence(make, caplog):
    with pytest.raises(ConfigError, match="'max_byte'") as refusal:
        make(max_byte=1)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value) in caplog.text


def test_every_call_of_the_base_class_is_answered_with_its_arguments():
    left = {"delete", "list_l2_keys", "register_listener", "set_backend_identity", "submit_touch"}
    for name, method in inspect.getmembers(L2AdapterInterface, inspect.isfunction):
        if name.startswith("_"):
            continue
        own = getattr(FskvAdapter, name)
        assert [*inspect.signature(own).parameters] == [*inspect.signature(method).parameters], name
        assert (name in vars(FskvAdapter)) != (name in left), name


def test_no_field_of_lmcaches_key_is_left_out_of_the_name_of_a_file():
    """`chunk_of` and `ObjectKind` have these. No weights are among them: docs/lmcache.md, on restarts."""
    assert {field.name for field in dataclasses.fields(ObjectKey)} == {
        *("chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt")
    }


# --- under which key vLLM found KV, and under which LMCache stores it ------------------------

BLOCK_TOKENS, CHUNK_TOKENS, NUM_CHUNKS, PLACEHOLDER = 2, 4, 2, 9


def asked():
    """All kinds of requests that differ in little: what a Request is made with, beside its tokens."""
    images = [
        [],
        *([("u", 0)], [("v", 0)], [("u", 1)], [("u", 4)], [("uu", 0)]),
        *([("u", 0), ("v", 2)], [("v", 0), ("u", 2)], [("u", 0), ("u", 2)], [("u", 0), ("v", 4)]),
    ]
    texts = [[1] * 8, [1, 1, 1, 2] * 2, [1] * 7 + [2], [PLACEHOLDER] * 8]
    tags = [None, {"lmcache.tag.user": "a"}, {"lmcache.tag.user": "b"}]
    loras = [None, LoRARequest("one", 1, "/one")]
    return itertools.product(texts, images, (None, "", "a", "ab"), tags, loras)


def vllms_request(number, block_hash, text, images, salt, tags, lora):
    tokens = [*text]
    features = []
    for name, offset in images:  # of one content, so of one length: 2 tokens
        tokens[offset : offset + 2] = [PLACEHOLDER] * 2
        place = PlaceholderRange(offset, 2)
        features.append(MultiModalFeatureSpec(None, "image", name, place, name))
    return Request(
        str(number),
        tokens,
        SamplingParams(extra_args={"kv_transfer_params": tags} if tags else None),
        None,
        mm_features=features,
        cache_salt=salt,
        lora_request=lora,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, block_hash),
    )


def two_names(block_hash, *, lora=False):
    """Return chunks that vLLM takes as equal and LMCache as different, and the other way round.

    Both are asked by their own functions. Each is a pair of names, vLLM's and LMCache's.
    """
    init_none_hash(block_hash)
    hasher = TokenHasher(CHUNK_TOKENS)
    of_vllm, of_lmcache = {}, {}
    for number, facts in enumerate(asked()):
        if facts[-1] is not None and not lora:
            continue
        request = vllms_request(number, block_hash, *facts)
        tracker = LMCacheMPRequestTracker(request)
        chunks = hasher.compute_chunk_hashes(tracker.get_token_ids())
        assert len(chunks) == NUM_CHUNKS
        for place, chunk in enumerate(chunks):
            found = request.block_hashes[(place + 1) * CHUNK_TOKENS // BLOCK_TOKENS - 1]
            stored = chunk_of(ObjectKey(chunk, "m", 0x01000100, cache_salt=tracker.cache_salt))
            of_vllm.setdefault(found, set()).add(stored)
            of_lmcache.setdefault(stored, set()).add(found)
    assert len(of_lmcache) > 50
    return (
        [names for names in of_vllm.values() if len(names) > 1],
        [names for names in of_lmcache.values() if len(names) > 1],
    )


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_what_is_one_chunk_for_vllm_is_one_for_lmcache_and_the_other_way_round(algorithm):
    """LMCache stores what vLLM found in its own cache, under the key of the request that asked."""
    pytest.importorskip("cbor2")
    assert two_names(get_hash_fn_by_name(algorithm)) == ([], [])


def test_negative_control_a_block_hash_that_says_less_is_found():
    """KV of one salt, or of one image, would be stored under the key of another."""
    laundered, _ = two_names(lambda parts: sha256(parts[:2]))
    assert laundered


def test_negative_control_adapters_are_not_in_lmcaches_keys():
    """Why `enable_lora` is refused."""
    laundered, too_equal = two_names(sha256, lora=True)
    assert not laundered
    assert too_equal


def test_vllm_makes_ids_of_requests_different(monkeypatch):
    """What docs/lmcache.md leaves to it. The control: told not to, it does not."""
    from vllm.v1.engine.input_processor import InputProcessor

    def internal():
        request = SimpleNamespace(request_id="a client's", external_req_id=None)
        InputProcessor.assign_request_id(request)
        return request.request_id

    assert len({internal() for _ in range(8)}) == 8
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert len({internal() for _ in range(8)}) == 1


def test_lmcaches_hash_of_a_chunk_holds_all_tokens_before_it():
    """What the identity leaves to LMCache's keys."""
    hasher = TokenHasher(4)
    plain = hasher.compute_chunk_hashes([*range(12)])
    assert hasher.compute_chunk_hashes([*range(8)]) == plain[:2]
    assert not set(hasher.compute_chunk_hashes([7, *range(1, 12)])) & set(plain)
    assert not set(TokenHasher(2).compute_chunk_hashes([*range(12)])) & set(plain)
    assert {len(each) for each in plain} == {32}
