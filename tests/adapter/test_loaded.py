"""What an engine has loaded is told from what was asked for, and from what lies there meanwhile."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import shutil
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import engine_lab as lab
import pytest
import world

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")

import torch
from vllm.config import LoadConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as NewRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from fskv.engines.vllm.identity import _model_extra, reuses_kv, weights_text
from fskv.engines.vllm.loaded import (
    check_unchanged,
    checkpoint_of,
    code_digests,
    find_loaded,
    loaded_files,
)
from fskv.engines.vllm.weights import changing_methods
from fskv.errors import ConfigError
from fskv.identity.checkpoint_place import model_name

pytestmark = world.VLLM


@pytest.fixture
def checkpoint(tmp_path):
    shutil.copytree(lab.checkpoint("llama"), tmp_path / "model")
    return tmp_path / "model"


def config_of(model, **fields):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), hf_config=SimpleNamespace(), revision=None),
        kv_transfer_config=object(),
        parallel_config=SimpleNamespace(worker_extension_cls=""),
        speculative_config=None,
        load_config=None,
        **fields,
    )


class Model:
    def load_weights(self, weights):
        return f"model {weights}"


class Runner:
    def __init__(self):
        self.model = Model()

    def get_model(self):
        return self.model

    def reload_weights(self, path):
        return f"runner {path}"


@pytest.fixture
def worker_of(monkeypatch):
    """Make vLLM's worker base class, and nothing else of a worker."""
    from fskv.engines.around import around
    from fskv.engines.vllm import loaded

    def construct(self, vllm_config):
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.model_runner = Runner()

    monkeypatch.setattr(WorkerBase, "__init__", construct)
    monkeypatch.setattr(loaded, "_loaded", [])
    around(WorkerBase, "__init__", loaded.note_worker)
    noted = WorkerBase.__init__
    around(WorkerBase, "__init__", loaded.note_worker)
    assert WorkerBase.__init__ is noted  # once
    return WorkerBase


def test_a_worker_is_found_by_its_configuration_and_only_if_it_was_noted(worker_of, checkpoint):
    mine, others = config_of(checkpoint), config_of(checkpoint)
    workers = [worker_of(mine), worker_of(others)]
    assert find_loaded(copy.copy(mine)).worker() is workers[0]  # a MultiConnector copies
    assert find_loaded(others).worker() is workers[1]
    assert find_loaded(mine).model is workers[0].model_runner.model
    del workers
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        find_loaded(mine)
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        find_loaded(config_of(checkpoint))


def _replaced(path):
    shutil.copy2(path / "model.safetensors", path / "new")
    os.replace(path / "new", path / "model.safetensors")


def _edited(path):
    with open(path / "model.safetensors", "r+b") as file:
        file.write(file.read(1))


def _turned(path):
    """Another directory under the same name, with equal files."""
    shutil.copytree(path, path.parent / "next")
    path.rename(path.parent / "old")
    (path.parent / "next").rename(path)


@pytest.mark.parametrize("change", [
    None, _replaced, _edited, _turned,
    lambda path: _replaced(path.parent / "draft"),
    lambda path: (path / "config.json").write_text((path / "config.json").read_text()),
    lambda path: (path / "extra.safetensors").write_bytes(b"x"),
    lambda path: (path / "generation_config.json").unlink(),
])  # fmt: skip
def test_files_that_are_other_ones_than_before_the_load_stop_the_start(
    worker_of, checkpoint, change
):
    shutil.copytree(checkpoint, checkpoint.parent / "draft")
    config = config_of(checkpoint)
    draft = SimpleNamespace(model=str(checkpoint.parent / "draft"))
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    worker = worker_of(config)
    loaded = find_loaded(config)
    if change is None:  # the control
        (checkpoint / "notes.md").write_text("what nothing reads")
        check_unchanged(loaded, config)
        return
    change(checkpoint)
    with pytest.raises(ConfigError, match="changed while the engine loaded it"):
        check_unchanged(loaded, config)
    del worker


CHANGE = [
    *("reset_weights", "discard", "start_draft_weight_update", "start_weight_update"),
    *("update_weights_from_ipc", "update_named_param", "load_state", "apply_model"),
]
READ = ["compute_weight_checksums", "get_weights", "check_weights", "supports_weight_updates"]
READ += ["reset_prefix_cache", "execute_model", "save_sharded_state", "compare_weights"]


@pytest.mark.parametrize("through", ["runner", "model", "draft", *CHANGE])
def test_whoever_changes_weights_is_noticed_before_it_begins(
    worker_of, checkpoint, tmp_path, monkeypatch, through
):
    draft = Model()
    monkeypatch.setattr(worker_of, "get_draft_model", lambda self: draft, raising=False)
    for name in CHANGE + READ:
        monkeypatch.setattr(worker_of, name, lambda self, name=name: name, raising=False)
    config = config_of(checkpoint)
    worker = worker_of(config)
    loaded = find_loaded(config)
    mark = tmp_path / "mark"
    mark.touch()
    loaded.watch_weights(str(mark))
    assert [getattr(worker, name)() for name in READ] == READ
    assert loaded.weights.counts == (0, 0)
    assert mark.stat().st_size == 0
    if through == "runner":
        assert worker.model_runner.reload_weights("there") == "runner there"
    elif through in ("model", "draft"):  # as trainers do it
        model = worker.model_runner.model if through == "model" else draft
        assert model.load_weights("given") == "model given"
    else:
        assert getattr(worker, through)() == through
    assert loaded.weights.counts[0] == 1
    # what a tier looks at
    assert mark.read_bytes() == (b"yx." if through == "discard" else b"x.")


def test_an_engine_that_ended_keeps_no_memory_in_its_process(worker_of, checkpoint):
    worker, mover = worker_of(config_of(checkpoint)), Runner()
    loaded = find_loaded(worker.vllm_config)
    loaded.watch_weights()
    loaded.weights.before_loss.append(mover.get_model)
    kept = [weakref.ref(worker), weakref.ref(mover)]
    del worker, mover, loaded
    gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.parametrize(
    ("name", "kwargs", "counts"),
    [
        ("sleep", {}, (0, 1)),  # the weights come back as they were
        ("sleep", {"level": 2}, (1, 1)),
        ("discard", {}, (1, 1)),
        ("discard", {"tags": ("kv_cache",)}, (0, 1)),
        ("discard", {"tags": ("kv_cache", "weights")}, (1, 1)),
        ("wake_up", {}, (0, 0)),
    ],
)
def test_pages_that_are_taken_away_are_lost_and_weights_with_them_but_for_a_light_sleep(
    worker_of, checkpoint, monkeypatch, name, kwargs, counts
):
    monkeypatch.setattr(worker_of, name, lambda self, level=1, tags=(): None, raising=False)
    config = config_of(checkpoint)
    worker = worker_of(config)
    weights = find_loaded(config).weights
    find_loaded(config).watch_weights()
    getattr(worker, name)(**kwargs)
    assert weights.counts == counts


def test_the_methods_of_vllm_s_workers_that_change_weights_are_found_by_their_names():
    of_worker = set(changing_methods(Worker))
    known = {
        "load_model",
        "reload_weights",
        "reset_weights",
        "start_weight_update",
        "update_weights",
    }
    assert known | {"start_draft_weight_update", "sleep", "discard"} <= of_worker
    reads = {"compute_weight_checksums", "supports_draft_weight_updates", "execute_model"}
    assert not of_worker & (reads | {"get_model", "_check_weight_transfer_engine", "profile"})
    for runner in (GPUModelRunner, NewRunner):
        assert {"load_model", "reload_weights"} <= set(changing_methods(runner))
        assert "execute_model" not in changing_methods(runner)

    class Serves(torch.nn.Module):
        def apply_pooling(self, features): ...

        def apply_markov_bias_gathered(self, logits): ...

        def wake_up(self): ...

        def load_from_a_peer(self): ...

    served = set(changing_methods(Serves))
    assert served == {"load_from_a_peer", "load_state_dict", "apply", "_apply"}, (
        "each request calls these"
    )
    of_model = set(changing_methods(LlamaForCausalLM))
    assert {"load_weights", "load_state_dict", "apply"} <= of_model
    assert not of_model & {"forward", "parameters", "named_parameters", "compute_logits"}


@pytest.mark.parametrize(
    ("caching", "runner", "supported", "reused"),
    [
        (True, "generate", True, True),
        (False, "generate", True, False),
        (True, "pooling", False, False),
        (True, "pooling", True, True),
        (True, "generate", False, True),  # experimental: whoever turns it on has it
    ],
)
def test_where_kv_is_used_again_and_where_not(caching, runner, supported, reused):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        model_config=SimpleNamespace(runner_type=runner, is_prefix_caching_supported=supported),
    )
    assert reuses_kv(config) is reused


def test_the_files_that_are_loaded_are_those_of_vllm_s_rule_and_all_of_them_count(checkpoint):
    plain, path = SimpleNamespace(weights_id=None), str(checkpoint)
    model = config_of(checkpoint).model_config

    def files(load_format):
        return loaded_files(path, model, LoadConfig(load_format=load_format), object())

    before = weights_text(path, plain)
    assert files("hf") == files("safetensors") == ["model.safetensors"]
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "consolidated.safetensors")
    assert files("auto") == files("mistral") == ["consolidated.safetensors"]
    assert files("dummy") is None  # it has another loader
    with_both = weights_text(path, plain)
    # The model's own code may open others.
    (checkpoint / "tower").mkdir()
    (checkpoint / "tower" / "tower.pt").write_bytes(b"x" * 5000)
    assert len({before, with_both, weights_text(path, plain)}) == 3


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def hub(tmp_path, checkpoint, monkeypatch):
    """A cache of the hub, as huggingface_hub makes it; return the snapshot."""
    repository = tmp_path / "hub" / "models--some--llama"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_hub_s_name_and_the_path_of_its_snapshot_are_one_commit(hub, tmp_path):
    plain = SimpleNamespace(weights_id=None)
    offline = checkpoint_of(config_of(hub).model_config)
    load = SimpleNamespace(download_dir=str(tmp_path / "hub"))
    for revision in (None, "main", COMMIT):
        model = config_of("some/llama").model_config
        model.revision = revision
        online = checkpoint_of(model, load)
        assert weights_text(offline, plain) == weights_text(online, plain) == f"commit:{COMMIT}"
    assert model_name(str(hub)) == "some/llama"
    assert checkpoint_of(config_of("nobody/nothing").model_config, load) == "nobody/nothing"


def _in_the_link_s_place(weights):
    """As `sed -i` does, and `cp -L`."""
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)


def _through_the_link(weights):
    """As save_pretrained does."""
    content = weights.read_bytes()
    time.sleep(0.02)  # a clock of the file system ticks
    weights.write_bytes(content[:-1] + b"x")
    assert weights.is_symlink()


@pytest.mark.parametrize("edit", [_in_the_link_s_place, _through_the_link])
def test_a_snapshot_that_was_edited_is_not_its_commit(hub, tmp_path, edit):
    plain = SimpleNamespace(weights_id=None)
    assert weights_text(str(hub), plain) == f"commit:{COMMIT}"  # the control
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-a", str(tmp_path / "hub"), str(copied)], check=True)
    same = copied / hub.relative_to(tmp_path / "hub")
    assert weights_text(str(same), plain) == f"commit:{COMMIT}"  # a copy that keeps links and times
    edit(hub / "model.safetensors")
    assert weights_text(str(hub), plain).startswith("sampled:")


def test_a_hub_s_name_that_leads_elsewhere_after_the_load_stops_the_start(hub, worker_of, tmp_path):
    config = config_of("some/llama")
    config.load_config = SimpleNamespace(download_dir=str(tmp_path / "hub"))
    worker = worker_of(config)
    check_unchanged(find_loaded(config), config)
    newer = COMMIT[::-1]
    shutil.copytree(hub, hub.parent / newer, symlinks=True)
    (hub.parents[1] / "refs" / "main").write_text(newer)
    with pytest.raises(ConfigError, match="another one took its place"):
        check_unchanged(find_loaded(config), config)
    del worker


class Part:
    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return what writes a package of code and imports its models; all of it is forgotten at the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = []

    def write(package, **files):
        packages.append(package.partition(".")[0])
        folder = tmp_path / package.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"__init__": "", **files}.items():
            (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.model").Model()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


MODEL = "from .beside import SCALE\nclass Model: pass\n"


def test_code_of_others_counts_by_its_source(written):
    def digests(**changed):
        model = written("theirs", model=MODEL, **{"beside": "SCALE = 1\n", **changed})
        return code_digests([model, torch.nn.Linear(1, 1)], {"torch"})

    before = digests()
    assert list(before) == ["theirs"]
    assert code_digests([torch.nn.Linear(1, 1)], {"torch"}) == {}
    assert digests() == before
    assert digests(beside="SCALE = 2\n") != before
    assert digests(more="") != before


def test_of_a_checkpoint_s_code_the_model_s_counts_wherever_the_checkpoint_lies(written):
    """What else lies there depends on which process loaded what: a tokenizer."""

    def digests(folder="one", **changed):
        files = {"model": MODEL, "beside": "from .far import X\nSCALE = 1\n", "far": "X = 1\n"}
        return code_digests([written(f"transformers_modules.{folder}", **files | changed)], set())

    before = digests()
    assert list(before) == ["transformers_modules"]
    assert digests("other", tokenizer="") == before
    assert digests(far="X = 2\n") != before
    assert digests(far="X = 1\n") == before
    assert digests(model=MODEL + "\n") != before


def test_weights_of_another_repository_count_or_are_refused(checkpoint, monkeypatch):
    source = SimpleNamespace(
        model_or_path=str(checkpoint), revision=None, prefix="tower.", subfolder=None
    )
    model = Part(secondary_weights=[source])

    def named(weights_id=None):
        extra = _model_extra(model, [], SimpleNamespace(weights_id=weights_id))
        return extra.get("secondary_weights")

    ((prefix, _, before),) = named()
    assert prefix == "tower."
    world.damage(checkpoint / "model.safetensors", 5000)
    assert named() != [[prefix, None, before]]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source.model_or_path = "nobody/nothing"
    with pytest.raises(ConfigError, match=r"nobody/nothing.*weights_id"):
        named()
    assert named("mine") is None
