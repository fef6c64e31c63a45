"""An engine with `store` false: it loads what others stored, and writes nothing to the root."""

from __future__ import annotations

import logging
import os
import pathlib

import pytest
import read_only
from toy_engine import TOKENS_PER_CHUNK, Engine, chunks_of, identity
from world import damage, wait_for

from fskv import namespace
from fskv.data_path.transports.host import HostTransport
from fskv.errors import ConfigError, RootError
from fskv.observe import metrics

PROMPT = list(range(4 * TOKENS_PER_CHUNK))


@pytest.fixture
def engine(engine):
    options = {"max_bytes": None, "maintenance": "off"}
    return lambda *at, **more: engine(*at, **{**options, **more})


@pytest.fixture
def root(engine, tmp_path) -> str:
    return str(tmp_path / "kv")


@pytest.fixture(params=["mounted read-only", "writable"])
def seen_at(request, root, tmp_path):
    """Where the load-only engine sees the root: `store` decides alone, not the mount."""
    if request.param == "writable":
        yield root
        return
    with read_only.mounted(root, tmp_path / "ro") as at:
        yield at


def files(root: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(root).glob("cpu/*/chunks/*/*.kv"))


def use_all(one: Engine) -> bytes:
    """Load the prompt, note its use as an engine does that has it in its own cache, and take a store."""
    kv = one.run(PROMPT)
    one.kv.used(chunks_of(PROMPT), [], there=True)
    wait_for(lambda: one.kv.mover.idle)
    one.close()
    return kv


def test_it_loads_and_changes_nothing(engine, root, seen_at):
    kv = engine().run(PROMPT)
    read_only.make_old(root)
    before = read_only.look(root)
    reader = engine(seen_at, store=False, maintenance="on")
    assert reader.kv.lookup.capacity is None, "no maintenance process"
    assert use_all(reader) == kv
    assert (reader.num_loaded, reader.num_stored) == (4, 0)
    longer = [*PROMPT, *range(TOKENS_PER_CHUNK)]
    other = engine(seen_at, store=False)
    assert other.run(longer)[: len(kv)] == kv
    assert other.num_loaded == 4
    other.close()
    assert read_only.look(root) == before


def test_the_look_would_show_a_touch_and_the_mount_refuses_who_stores(engine, root, tmp_path):
    """The negative control of the test above, with `store` true."""
    kv = engine().run(PROMPT)
    read_only.make_old(root)
    before = read_only.look(root)
    assert use_all(engine()) == kv
    after = read_only.look(root)
    assert {name for name in before if before[name] != after[name]} > {
        str(path.relative_to(root)) for path in files(root)
    }
    with read_only.mounted(root, tmp_path / "ro") as at:
        with pytest.raises(RootError, match=r"mounted read-only.*'store' false"):
            engine(at)
        assert engine(at, store=False).run(PROMPT) == kv


@pytest.mark.parametrize("has_root", [True, False], ids=["another namespace", "an empty root"])
def test_a_namespace_that_is_not_there_is_found_once_somebody_made_it(
    engine, root, seen_at, has_root, caplog
):
    if has_root:
        engine(model="another").run(PROMPT)
    before = read_only.look(root)
    caplog.set_level(logging.WARNING)
    reader = engine(seen_at, store=False, lookup_timeout_s=1.0)
    kv = reader.run(PROMPT)
    assert reader.num_loaded == 0
    assert read_only.look(root) == before
    said = [record.getMessage() for record in caplog.records if "fskv" in record.name]
    # Threads of earlier tests may speak too.
    (line,) = [line for line in said if "finds nothing until another one has stored" in line]
    assert namespace.directory(identity("toy")) in line
    assert not reader.kv.lookup.breaker.open

    assert engine().run(PROMPT) == kv
    before = read_only.look(root)

    def is_found() -> bool:  # within the time for which a miss is believed
        assert reader.run(PROMPT) == kv
        return reader.num_loaded == 4

    wait_for(is_found)
    reader.close()
    assert read_only.look(root) == before


def test_a_root_that_goes_missing_opens_its_breaker_as_with_every_engine(engine, root):
    engine(model="another").run(PROMPT)
    reader = engine(store=False)
    assert reader.run(PROMPT) == reader.run(PROMPT)
    assert not reader.kv.lookup.breaker.open
    os.rename(root, f"{root}-away")
    for start in range(100, 120):
        reader.run([start, *PROMPT[1:]])
    assert reader.kv.lookup.breaker.open


@pytest.mark.parametrize("how", ["flip", "cut", "swap"])
def test_a_bad_file_costs_a_recompute_and_stays(engine, root, seen_at, how):
    kv = engine().run(PROMPT)
    paths = files(root)
    if how == "swap":
        os.rename(paths[0], f"{root}/aside")
        os.rename(paths[1], paths[0])
        os.rename(f"{root}/aside", paths[1])
    elif how == "flip":
        damage(paths[1], 4096 + 17)
    else:
        os.truncate(paths[1], paths[1].stat().st_size - 1)
    before = read_only.look(root)
    reader = engine(seen_at, store=False)
    assert reader.run(PROMPT) == kv
    assert reader.num_loaded < 4
    if how != "cut":  # one of another size is no hit
        counted = reader.kv.mover.counters.drain()
        reason = "stale" if how == "swap" else "corrupt"
        assert counted[metrics.LOAD_FAILURES, reason] >= 1
    reader.close()
    assert read_only.look(root) == before

    assert engine().run(PROMPT) == kv, "the control: who stores replaces it"
    assert read_only.look(root) != before
    assert engine(seen_at, store=False).run(PROMPT) == kv


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
def test_o_direct_is_tried_out_by_reading(tmp_path, direct_io, monkeypatch):
    probe_file = tmp_path / "fskv.json"
    probe_file.write_text('{"format": 1}\n')
    where = {"probe_dir": str(tmp_path / "none"), "probe_file": str(probe_file)}

    def description() -> str:
        return HostTransport([], 4096, direct_io=direct_io, **where).description

    real = os.open
    writer = HostTransport([], 4096, probe_dir=str(tmp_path), direct_io="auto")
    if direct_io != "on" or "O_DIRECT" in writer.description:
        same = writer.description if direct_io != "off" else "host staging (pageable), buffered"
        assert description() == same

    def no_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
    if direct_io == "on":
        with pytest.raises(ConfigError, match="a direct read in the root fails"):
            description()
    else:
        assert "buffered" in description()
