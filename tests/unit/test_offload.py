"""The core that every engine stands on, through its public interface: a toy engine on real files."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
from places import REPOSITORY
from toy_engine import TOKENS_PER_CHUNK, Engine, identity
from world import damage

from fskv.errors import ConfigError
from fskv.offload import open_store
from fskv.types import ChunkId, Presence

PROMPT = list(range(4 * TOKENS_PER_CHUNK))


@pytest.fixture
def engine(tmp_path):
    made = []

    def make(**options):
        root = tmp_path / "kv"
        root.mkdir(exist_ok=True)
        made.append(Engine(str(root), **{"max_bytes": "1 GiB", "keep_free": 0, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def files(tmp_path) -> list[pathlib.Path]:
    return sorted((tmp_path / "kv").glob("cpu/*/chunks/*/*.kv"))


def test_a_toy_engine_loads_what_another_one_stored(engine, tmp_path):
    first, second = engine(), engine()
    kv = first.run(PROMPT)
    assert (first.num_stored, first.num_loaded, len(files(tmp_path))) == (4, 0, 4)
    assert second.run(PROMPT) == kv
    assert (second.num_stored, second.num_loaded) == (0, 4)
    longer = [*PROMPT, *range(TOKENS_PER_CHUNK)]
    assert second.run(longer)[: len(kv)] == kv
    assert (second.num_stored, second.num_loaded) == (1, 8)


def test_another_model_loads_nothing_of_it(engine):
    first, other = engine(), engine(model="other")
    assert first.run(PROMPT) != other.run(PROMPT)
    assert other.num_loaded == 0


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "swap"])
def test_a_damaged_file_is_computed_and_stored_again(engine, tmp_path, how):
    kv = engine().run(PROMPT)
    paths = files(tmp_path)
    if how == "swap":
        os.rename(paths[0], tmp_path / "aside")
        os.rename(paths[1], paths[0])
        os.rename(tmp_path / "aside", paths[1])
    elif how == "flip":
        damage(paths[1], 4096 + 17)
    else:
        os.truncate(paths[1], 5000 if how == "cut" else 0)
    other = engine()
    assert other.run(PROMPT) == kv
    assert other.num_loaded < 4
    assert engine().run(PROMPT) == kv
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize("broken", [False, True])
def test_the_toy_would_show_a_wrong_byte(engine, tmp_path, monkeypatch, broken):
    """The negative control: without the check of rows, a flipped bit is in the KV."""
    kv = engine(io_threads=1).run(PROMPT)
    path = files(tmp_path)[0]
    damage(path, 4096 + 17)
    if broken:
        from fskv.format import chunk_file
        from fskv.transports import host

        monkeypatch.setattr(chunk_file, "check_digests", lambda *_: None)
        monkeypatch.setattr(host, "_native", None)
    assert (engine().run(PROMPT) == kv) is not broken


def test_a_bound_holds_and_a_stopped_lookup_serves_nothing(engine, tmp_path):
    small = engine(max_bytes="64 KiB")
    for number in range(12):
        small.run([number, *PROMPT[1:]])
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 64 << 10
    small.kv.lookup.stopped = True
    assert small.kv.lookup.ask(ChunkId(b"k" * 32, 0))[0] is Presence.MISS
    assert small.kv.lookup.begin_store([ChunkId(b"k" * 32, 0)]) == []


def test_memory_that_does_not_fit_the_identity_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="KV memory of group 0: found 0 tensors, expected 1"):
        open_store({"root": str(tmp_path)}, identity("toy"), {})


def test_the_toy_engine_is_small_and_knows_only_the_core():
    source = (REPOSITORY / "tests" / "lab" / "toy_engine.py").read_text()
    assert len(source.splitlines()) <= 150
    assert set(re.findall(r"^from (fskv[\w.]*) import", source, re.MULTILINE)) == {
        *("fskv.namespace", "fskv.offload", "fskv.types")
    }


def test_the_example_of_the_document_runs(tmp_path):
    text = (REPOSITORY / "docs" / "engine.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(example.splitlines()) <= 40  # 25 without the fields of the identity
    root = tmp_path / "kv"
    root.mkdir()
    program = example.replace("/mnt/kv", str(root))
    assert program != example
    for first in ("stored", "was there"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, f"{first}\nloaded\n"), done.stderr
