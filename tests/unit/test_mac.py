"""Sealed chunk files: only what a holder of a key wrote for that name is served, and keys stay secret."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import blake3
import msgpack
import pytest
import xxhash
from mac_lab import SECRETS, Tools, key, key_file, key_lines, keys
from places import LAB
from world import damage, make_identity, wait_for

from fskv import namespace
from fskv.config import StoreConfig
from fskv.errors import ChunkCorrupt, ChunkUnknownKey, ConfigError
from fskv.format import chunk_file, mac
from fskv.format import key_file as key_file_module
from fskv.format.chunk_file import peek_header
from fskv.format.integrity import BLAKE3_128
from fskv.format.key_file import KeyFile, open_key_file, read_keys
from fskv.format.mac import parse_keys
from fskv.types import Status

forgeries = pytest.importorskip("trials.forgeries")

ROW = 65536

# --- forged and replayed files ----------------------------------------------------------


def test_of_many_forged_and_replayed_files_none_is_served(tmp_path):
    score = forgeries.run(str(tmp_path), 480, seed=11)
    assert score.num_tried == 480
    assert set(score.tried) == set(forgeries.KINDS)
    assert (score.num_served, score.genuine_refused) == (0, 0), score.served


@pytest.mark.parametrize("check", list(forgeries.CONTROLS))
def test_negative_control_without_a_check_the_kinds_that_rest_on_it_are_served(tmp_path, check):
    switched_off, kinds = forgeries.CONTROLS[check]
    with switched_off():
        score = forgeries.run(str(tmp_path), 160, seed=11)
    assert all(score.served[kind] for kind in kinds), score.served


def test_every_kind_of_forgery_has_a_control_that_serves_it_or_is_no_file_of_the_format():
    covered = {kind for _, kinds in forgeries.CONTROLS.values() for kind in kinds}
    assert forgeries.KINDS.keys() - covered == {"swapped codec or checksum"}


# --- the format, read with nothing of fskv's ------------------------------------------------


def read_sealed(path, secret):
    """Read a sealed file with struct, msgpack, xxhash and blake3 alone, as docs/format.md says it is."""
    row_key = blake3.blake3(secret, derive_key_context="fskv 2026-11 rows of a chunk file").digest()
    header_key = blake3.blake3(
        secret, derive_key_context="fskv 2026-11 header of a chunk file"
    ).digest()
    data = Path(path).read_bytes()
    magic, version, h, m, seal, checksum = struct.unpack_from("<8sIIIIQ", data)
    assert (magic, version, seal) == (b"\x89FSKV\r\n\x1a", 1, 64)
    blank = data[:24] + bytes(8) + data[32:h]
    assert xxhash.xxh3_64_intdigest(blank) == checksum
    assert blake3.blake3(blank[:-32], key=header_key).digest() == blank[-32:]
    meta, payload = msgpack.unpackb(data[32 : 32 + m]), data[h:]
    assert meta["checksum"] == BLAKE3_128.name == "blake3-128"
    rows = [payload[at : at + ROW] for at in range(0, len(payload), ROW)]
    found = b"".join(blake3.blake3(row, key=row_key).digest(16) for row in rows)
    assert found == meta["rows"]
    assert not any(data[32 + m : h - 64])
    return blank[-64:-32].rstrip(b"\0").decode(), meta, payload


def test_a_sealed_file_is_what_the_format_says(make_world):
    world = make_world(keys=keys("new", "old"))
    content = world.content(1)
    assert world.put(1, content) is Status.OK
    key_id, meta, payload = read_sealed(world.path(1), SECRETS["new"])
    assert (key_id, meta["key"]) == ("new", world.chunk(1).key_hash)
    assert payload[: len(content)] == content
    assert os.path.getsize(world.path(1)) == world.file_layout.file_nbytes
    with pytest.raises(AssertionError):  # the control: the reader above does judge
        read_sealed(world.path(1), SECRETS["old"])
    assert world.get(1) == (Status.OK, content)
    assert world.get(1, 1, 2) == (Status.OK, content[64000 : 3 * 64000])


def test_sealing_changes_no_name_or_byte_of_a_namespace_without_it():
    plain, sealed = make_identity(), make_identity(integrity=BLAKE3_128.name)
    assert "integrity" not in plain.to_manifest()
    assert plain.digest != sealed.digest
    assert sealed.to_manifest()["integrity"] == BLAKE3_128.name


def test_the_key_is_no_part_of_the_identity(make_world, tmp_path):
    one, other = make_world(keys=keys("old")), make_world(keys=keys("new"))
    assert one.directory == other.directory


# --- what becomes of a file that cannot be judged -------------------------------------------


def test_under_a_key_that_is_not_known_a_load_is_a_miss_and_the_file_stays(make_world):
    ahead, behind = make_world(keys=keys("new", "old")), make_world(keys=keys("old"))
    content = ahead.content(1)
    assert ahead.put(1, content) is Status.OK
    before = Path(ahead.path(1)).read_bytes()
    assert behind.get(1) == (Status.UNKNOWN_KEY, None)
    assert Path(ahead.path(1)).read_bytes() == before
    assert ahead.get(1) == (Status.OK, content)
    # What the other recomputes and stores then can be read by both.
    assert behind.put(1, content) is Status.OK
    assert ahead.get(1) == behind.get(1) == (Status.OK, content)


def test_a_file_under_a_retired_key_is_replaced_by_the_next_store_and_one_under_an_accepted_not(
    make_world,
):
    content = make_world(keys=keys("old")).content(1)
    first = make_world(keys=keys("old"))
    assert first.put(1, content) is Status.OK
    assert make_world(keys=keys("new", "old")).put(1, content) is Status.EXISTS
    last = make_world(keys=keys("new"))
    assert last.put(1, content) is Status.OK  # no load has met it before
    assert read_sealed(last.path(1), SECRETS["new"])[0] == "new"
    assert last.get(1) == (Status.OK, content)


@pytest.mark.parametrize("native", [False, True])
def test_a_forged_file_does_not_keep_the_genuine_one_from_being_stored(make_world, native):
    world, forger = make_world(keys=keys("new"), native=native), keys("third")().writer
    content = world.content(1)
    assert world.put(1, content) is Status.OK
    data = bytearray(Path(world.path(1)).read_bytes())
    at = world.base - 32
    data[24:32] = bytes(8)
    data[at : world.base] = forger.tag(bytes(data[:at]))
    struct.pack_into("<Q", data, 24, xxhash.xxh3_64_intdigest(data[: world.base]))
    Path(world.path(1)).write_bytes(data)
    assert world.put(1, content) is Status.OK
    assert world.get(1) == (Status.OK, content)


def test_a_wrong_mac_is_a_miss_and_the_file_is_discarded(make_world):
    world = make_world(keys=keys("new"))
    world.put(1, world.content(1))
    damage(world.path(1), world.base + 5)
    assert world.get(1) == (Status.CORRUPT, None)
    assert not os.path.exists(world.path(1))


def test_engines_with_and_without_keys_have_directories_of_their_own_and_refuse_moved_files(
    make_world,
):
    sealed, plain = make_world(keys=keys("new")), make_world()
    assert sealed.directory.path != plain.directory.path
    content = sealed.content(1)
    for source, target in ((sealed, plain), (plain, sealed)):
        source.put(1, content)
        moved = Path(source.path(1)).read_bytes()
        os.makedirs(os.path.dirname(target.path(1)), exist_ok=True)
        Path(target.path(1)).write_bytes(moved)
        status, found = target.get(1)
        assert status in (Status.STALE, Status.CORRUPT), status
        assert found is None


def test_an_older_file_of_the_same_name_and_key_is_served_and_is_the_same_kv(make_world):
    """Rollback: the name stands for the input, so what was right once is right (docs/security.md)."""
    world = make_world(keys=keys("new"))
    content = world.content(1)
    world.put(1, content)
    old = Path(world.path(1)).read_bytes()
    os.unlink(world.path(1))
    world.put(1, content)
    Path(world.path(1)).write_bytes(old)
    assert world.get(1) == (Status.OK, content)


@pytest.mark.parametrize("native", [False, True])
def test_jobs_move_sealed_chunks_whatever_moves_the_others(make_world, native):
    from fskv.config import Deadline
    from fskv.data_path.breaker import Breaker
    from fskv.data_path.runner import JobRunner

    world = make_world(keys=keys("new"), native=native, faults=False)
    runner = JobRunner(
        world.store,
        world.transport,
        num_threads=2,
        num_slots=4,
        max_queued_chunks=64,
        deadline=Deadline(60, 0, 60),
        breaker=Breaker(8, 5),
    )
    try:
        wanted = world.fill([1, 2, 3, 4], 7)
        runner.submit_store(1, [world.request(1, [1, 2, 3, 4])], None)
        outcomes = []

        def all_ended(number):
            runner.poll()
            outcomes.extend(runner.take_outcomes())
            return len(outcomes) == number

        wait_for(lambda: all_ended(1))
        assert read_sealed(world.path(1), SECRETS["new"])[2].startswith(wanted)
        runner.submit_load(2, [world.request(1, [11, 12, 13, 14])], None)
        wait_for(lambda: all_ended(2))
        assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK]
        assert world.pages([11, 12, 13, 14]) == wanted
    finally:
        runner.shutdown(5)


# --- secrets stay where they are --------------------------------------------------------------


def test_no_secret_is_in_a_repr_a_message_a_log_line_or_a_pickle(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    path = key_file(tmp_path / "keys", "new", "old")
    file = KeyFile(str(path), clock=iter(range(100)).__next__)
    texts = [repr(file), repr(file.keys()), repr(file.keys().writer), repr(list(file.keys()))]
    secret = SECRETS["new"].hex()
    for broken in (f"new {secret}ff\n", f"new {secret}\nnew {secret}\n", f"{secret} new\n", secret):
        path.write_text(broken)
        with pytest.raises(ConfigError) as caught:
            read_keys(str(path))
        texts += [str(caught.value), *traceback.format_exception(caught.value)]
        file.keys()
    for one in (file.keys(), file.keys().writer):
        with pytest.raises(TypeError):
            pickle.dumps(one)
    texts += [record.getMessage() for record in caplog.records]
    assert any("stay in use" in text for text in texts)
    derived = [
        value.hex() for one in list(file.keys()) for value in (one._row_key, one._header_key)
    ]
    for text in texts:
        for hidden in (*[s.hex() for s in SECRETS.values()], *derived):
            assert hidden[:16] not in text


def test_the_configuration_holds_the_path_of_the_keys_alone():
    config = StoreConfig.from_mapping({"root": "/mnt/kv", "mac_key_file": "/etc/fskv/keys"})
    assert config.mac_key_file == "/etc/fskv/keys"
    with pytest.raises(ConfigError, match="'transport': found \"gds\" with 'mac_key_file'"):
        StoreConfig.from_mapping(
            {"root": "/mnt/kv", "mac_key_file": "/etc/fskv/keys", "transport": "gds"}
        )


def test_every_comparison_that_decides_is_in_constant_time(make_world, monkeypatch):
    """All go through one function; with it saying no, nothing is served, whatever the bytes."""
    world = make_world(keys=keys("new"))
    world.put(1, world.content(1))
    asked = []
    monkeypatch.setattr(mac.hmac, "compare_digest", lambda a, b: asked.append(len(a)) or a == b)
    assert world.get(1)[0] is Status.OK
    assert asked == [32, 16 * world.file_layout.num_rows]


# --- the key file -------------------------------------------------------------------------------


def test_a_key_file_has_an_id_and_a_secret_in_each_line(tmp_path):
    text = f"# of the cluster\n\n{key_lines('new')}  old\t{SECRETS['old'].hex().upper()}  # until May\n"
    found = parse_keys(text.encode(), "keys")
    assert found.key_ids == ("new", "old")
    assert found.writer.key_id == "new"
    assert found.get("old").tag(b"x") == key("old").tag(b"x")
    assert found.get("old").tag(b"x") != key("new").tag(b"x")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# none\n",
        "new\n",
        f"{SECRETS['new'].hex()}\n",
        f"new {SECRETS['new'].hex()[:-2]}\n",
        f"new {SECRETS['new'].hex()} more\n",
        f"new {'zz' * 32}\n",
        f"new {'00' * 32}\n",
        f"ne/w {SECRETS['new'].hex()}\n",
        f"{'n' * 33} {SECRETS['new'].hex()}\n",
        key_lines("new", "new"),
        "".join(f"k{i} {SECRETS['new'].hex()}\n" for i in range(17)),
    ],
)
def test_a_key_file_that_is_not_meant_so_is_refused(text):
    with pytest.raises(ConfigError, match="mac_key_file"):
        parse_keys(text.encode(), "keys")


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644, 0o777])
def test_a_key_file_that_others_may_read_or_its_group_may_write_is_refused(tmp_path, mode):
    path = key_file(tmp_path / "keys", "new", mode=mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        read_keys(str(path))
    path.chmod(0o440)
    assert read_keys(str(path)).key_ids == ("new",)


def test_what_is_no_key_file_is_refused_and_waited_for_by_nobody(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "large").write_bytes(b"#" * (65 << 10))
    (tmp_path / "large").chmod(0o600)
    for name in ("absent", "fifo", "large", "."):
        with pytest.raises(ConfigError, match="mac_key_file"):
            read_keys(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_that_leads_into_the_root_is_refused_also_later(tmp_path):
    """With its control: outside of the root, the same link and the same keys are taken."""
    root, real, link = tmp_path / "root", tmp_path / "real root", tmp_path / "keys"
    real.mkdir()
    root.symlink_to(real)
    key_file(real / "keys", "old")
    link.symlink_to(root / "keys")
    with pytest.raises(ConfigError, match="leads into the root"):
        open_key_file(str(link), str(root))
    key_file(tmp_path / "outside", "new")
    link.unlink()
    link.symlink_to(tmp_path / "outside")
    clock = iter(range(100)).__next__
    file = KeyFile(str(link), clock, str(root))
    assert file.keys().key_ids == read_keys(str(tmp_path / "outside")).key_ids
    link.unlink()
    link.symlink_to(real / "keys")
    assert file.keys().key_ids == read_keys(str(tmp_path / "outside")).key_ids
    assert file.kept


def test_a_key_file_of_somebody_else_is_refused(tmp_path):
    path = key_file(tmp_path / "keys", "new")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        read_keys(str(path))


class Ticks:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_keys_follow_their_file_and_survive_a_slip(tmp_path, caplog):
    clock = Ticks()
    path = key_file(tmp_path / "keys", "old")
    file = KeyFile(str(path), clock)

    def after(change):
        change()
        clock.now += 2
        return file.keys().key_ids

    def swap(*names):
        key_file(tmp_path / "next", *names).rename(path)

    assert after(lambda: swap("old", "new")) == ("old", "new")
    assert after(lambda: swap("new", "old")) == ("new", "old")
    assert not file.kept
    for slip in (
        path.unlink,
        lambda: key_file(path, "third", mode=0o644),
        lambda: path.write_text("new 123"),
    ):
        assert after(slip) == ("new", "old")
        assert file.kept, "and is told"
    assert after(lambda: swap("new")) == ("new",)
    assert not file.kept
    assert after(lambda: None) == ("new",)
    assert sum("stay in use" in record.getMessage() for record in caplog.records) == 3


def test_a_look_that_ends_in_any_error_is_made_again(tmp_path, monkeypatch):
    """No memory, say: with the change taken as seen, the dropped key stayed for ever."""
    clock = Ticks()
    path = key_file(tmp_path / "keys", "old")
    file = KeyFile(str(path), clock)
    for _ in range(3):  # past the look that is made twice anyway
        clock.now += 2
        file.keys()
    key_file(tmp_path / "next", "new").rename(path)
    clock.now += 2
    with monkeypatch.context() as patched:
        patched.setattr(
            key_file_module, "parse_keys", lambda *_: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            file.keys()
    assert file.kept
    clock.now += 2
    assert file.keys().key_ids == ("new",)
    assert not file.kept


def test_a_key_that_was_dropped_goes_also_when_the_new_file_could_not_be_read_at_once(
    tmp_path, monkeypatch, caplog
):
    """No descriptor was left, say: with the state of the file taken as seen, the old key stayed for ever."""
    clock = Ticks()
    path = key_file(tmp_path / "keys", "old")
    file = KeyFile(str(path), clock)
    key_file(tmp_path / "next", "new").rename(path)
    opened = os.open

    def full(name, *rest, **options):
        if name == str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(name, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        for _ in range(5):
            clock.now += 2
            assert file.keys().key_ids == ("old",)
    assert sum("stay in use" in record.getMessage() for record in caplog.records) == 1
    clock.now += 2
    assert file.keys().key_ids == ("new",)


@pytest.mark.parametrize("at_start", [True, False])
def test_two_changes_within_one_tick_of_the_file_systems_clock_are_both_seen(
    tmp_path, monkeypatch, at_start
):
    """To swap two lines changes no length; written in place, all that a stat shows may be the same."""
    clock = Ticks()
    path = (
        key_file(tmp_path / "keys", "old", "new")
        if at_start
        else key_file(tmp_path / "keys", "old")
    )
    state = key_file_module._state
    # The largest granularity there is: none of its times changes.
    monkeypatch.setattr(key_file_module, "_state", lambda name: state(name)[:3])
    file = KeyFile(str(path), clock)
    if not at_start:
        path.write_text(key_lines("old", "new"))
        clock.now += 2
        assert file.keys().key_ids == ("old", "new")
    path.write_text(key_lines("new", "old"))
    clock.now += 2
    assert file.keys().key_ids == ("new", "old")


def test_a_key_file_that_never_stands_still_does_not_flood_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    clock = Ticks()
    path = key_file(tmp_path / "keys", "old")
    file = KeyFile(str(path), clock)

    def each_second(*changes):
        caplog.clear()
        for number in range(200):
            changes[number % len(changes)](number)
            clock.now += 1.5
            file.keys()
        return len(caplog.records)

    assert each_second(lambda number: os.utime(path, (number, number))) == 0
    swap = [
        lambda _, order=order: path.write_text(key_lines(*order))
        for order in (("old", "new"), ("new",))
    ]
    assert 1 <= each_second(*swap) <= 12
    assert 1 <= each_second(lambda number: path.write_text(f"new {number}\n")) <= 12


def test_the_file_is_not_looked_at_for_every_chunk_nor_by_two_at_once(tmp_path, monkeypatch):
    clock = Ticks()
    file = KeyFile(str(key_file(tmp_path / "keys", "old")), clock)
    looks = []
    monkeypatch.setattr(KeyFile, "_look", lambda self: looks.append(clock.now))
    for _ in range(1000):
        clock.now += 0.01
        file.keys()
    assert 5 <= len(looks) <= 11
    monkeypatch.setattr(KeyFile, "_look", lambda self: 1 / 0)
    clock.now += 100
    with pytest.raises(ZeroDivisionError):
        file.keys()
    monkeypatch.undo()
    clock.now += 2
    assert file.keys().key_ids == ("old",), "a look that raised was the last one"


@pytest.fixture
def slow_look(monkeypatch):
    """Hold every look at a key file, until the event of this is set; the other tells that one began."""
    began, go = threading.Event(), threading.Event()
    state = key_file_module._state

    def held(path):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert go.wait(60)
        return state(path)

    monkeypatch.setattr(key_file_module, "_state", held)
    yield began, go
    go.set()


def test_no_thread_gets_retired_keys_while_another_one_looks(tmp_path, slow_look, monkeypatch):
    """After an hour without a chunk the keys are an hour old: several threads begin at once, one looks."""
    monkeypatch.setattr(key_file_module, "_WAIT_S", 60.0)  # however busy the machine is
    began, go = slow_look
    path = key_file(tmp_path / "keys", "old")
    file = KeyFile(str(path), clock := Ticks())
    key_file(tmp_path / "next", "new").rename(path)
    clock.now += 3600
    seen = []
    looker, *others = (
        threading.Thread(target=lambda: seen.append(file.keys().key_ids)) for _ in range(4)
    )
    looker.start()
    assert began.wait(60)
    for thread in others:
        thread.start()
    time.sleep(0.05)  # those that would not wait are through by now
    go.set()
    for thread in (looker, *others):
        thread.join(60)
    assert seen == [("new",)] * 4


def test_a_key_file_that_hangs_costs_the_others_half_a_second_once(
    tmp_path, slow_look, monkeypatch
):
    began, go = slow_look
    path = key_file(tmp_path / "keys", "old")
    file = KeyFile(str(path), clock := Ticks())
    clock.now += 3600
    waits, real = [], file._looked.wait

    def wait(seconds):
        waits.append(seconds)
        clock.now += seconds
        return real(seconds)

    monkeypatch.setattr(file._looked, "wait", wait)
    looker = threading.Thread(target=file.keys)
    looker.start()
    assert began.wait(60)
    assert file.keys().key_ids == ("old",)
    assert waits == [0.5]
    for _ in range(1000):
        assert file.keys().key_ids == ("old",)
    assert waits == [0.5], "others waited, too"
    go.set()
    looker.join(60)


def test_the_extension_package_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match='extra "mac"'):
        read_keys(str(key_file(tmp_path / "keys", "new")))


# --- the tools ----------------------------------------------------------------------------------


def test_headers_without_the_key_can_be_shown_but_not_judged(make_world):
    world = make_world(keys=keys("new"))
    world.put(1, world.content(1))
    data = Path(world.path(1)).read_bytes()
    with pytest.raises(ChunkUnknownKey, match="'new': cannot be judged without the key"):
        chunk_file.parse_header(data)
    header = peek_header(data)
    assert (header.key_id, header.integrity, header.num_rows) == ("new", BLAKE3_128, 4)
    with pytest.raises(ChunkCorrupt):
        chunk_file.check_rows(memoryview(data)[world.base :], 0, header.row_digests)


@pytest.fixture
def tools(tmp_path, make_world):
    # The files of `World` have a layout digest of their own; the manifest's is another.
    from tool_lab import layout_of

    groups = make_identity().groups
    return Tools(
        tmp_path,
        lambda **options: make_world(
            layout_digest=layout_of(
                make_identity(groups=groups, integrity=BLAKE3_128.name), 0
            ).digest,
            **options,
        ),
    )


def run_tool(tools, *words, key_path=None, env=None):
    from tool_lab import run

    given = ["--mac-key-file", key_path] if key_path else []
    return run(*words, *given, root=tools.root, env=env)


def findings(done):
    return {
        os.path.basename(line["path"]): line["finding"]
        for line in done.lines
        if line["type"] == "bad"
    }


def test_verify_judges_with_the_key_and_without_it_neither_passes_nor_removes(tools):
    judged = run_tool(tools, "verify", "--read-data", "--json", key_path=tools.keys)
    assert (judged.exit_code, judged.summary["bad"]) == (0, 0)
    tools.forge()
    bad = run_tool(tools, "verify", "--read-data", "--json", key_path=tools.keys)
    assert findings(bad) == {os.path.basename(tools.bad): "corrupt"}
    by_env = run_tool(
        tools, "verify", "--read-data", "--json", env={"FSKV_MAC_KEY_FILE": tools.keys}
    )
    assert findings(by_env) == findings(bad)
    for given in (None, tools.other_keys):
        done = run_tool(
            tools, "verify", "--read-data", "--remove-bad", "--yes", "--json", key_path=given
        )
        assert set(findings(done).values()) == {"unreadable"}
        assert (done.summary["bad"], done.summary["removed"], done.exit_code) == (4, 0, 3)
        reasons = {line["reason"] for line in done.lines if line["type"] == "bad"}
        assert reasons == {"sealed with key 'new': cannot be judged without the key"}
    assert len(tools.world.chunk_files()) == 4
    done = run_tool(
        tools, "verify", "--read-data", "--remove-bad", "--yes", "--json", key_path=tools.keys
    )
    assert done.summary["removed"] == 1
    assert tools.bad not in tools.world.chunk_files()


def test_inspect_shows_the_rows_of_a_sealed_file_with_its_key_and_says_so_without(tools):
    good = run_tool(tools, "inspect", tools.bad, "--json", key_path=tools.keys)
    assert good.exit_code == 0
    header = good.lines[0]["header"]
    assert (header["checksum"], header["key_id"]) == (BLAKE3_128.name, "new")
    assert {line["status"] for line in good.lines if line["type"] == "row"} == {"ok"}
    tools.forge()
    bad = run_tool(tools, "inspect", tools.bad, "--json", key_path=tools.keys)
    assert bad.lines[0]["bad_rows"] == 1
    blind = run_tool(tools, "inspect", tools.bad, "--json")
    assert "cannot be judged without the key" in blind.lines[0]["reason"]
    assert blind.exit_code == 3


@pytest.mark.parametrize("given", [True, False])
def test_copy_and_import_take_sealed_files_only_with_the_key(tools, tmp_path, given):
    tools.forge()
    words = {"key_path": tools.keys} if given else {}
    done = (
        run_tool(tools, "copy", "--to", tmp_path / "kv2", "--create", "--json", **words)
        if ((tmp_path / "kv2").mkdir() or True)
        else None
    )
    counts = (done.summary["stored"], done.summary["bad"], done.summary["failed"])
    assert counts == ((3, 1, 0) if given else (0, 0, 4))
    archive = tmp_path / "all.tar"
    exported = run_tool(tools, "export", "-o", archive, "--json", key_path=tools.keys)
    assert (exported.summary["files"], exported.summary["bad"]) == (3, 1)
    (tmp_path / "kv3").mkdir()
    from tool_lab import run

    imported = run(
        "import",
        archive,
        "--create",
        "--json",
        *(["--mac-key-file", tools.keys] if given else []),
        root=tmp_path / "kv3",
    )
    counts = (imported.summary["stored"], imported.summary["bad"], imported.summary["failed"])
    assert counts == ((3, 0, 0) if given else (0, 0, 3))
    stored = list((tmp_path / "kv3").rglob("*.kv"))
    assert len(stored) == (3 if given else 0)
    for path in stored:
        read_sealed(path, SECRETS["new"])


def test_a_key_file_that_cannot_be_used_is_said_in_one_line(tools):
    os.chmod(tools.keys, 0o644)
    done = run_tool(tools, "verify", key_path=tools.keys)
    assert done.exit_code == 2
    assert "--mac-key-file" in done.stderr
    assert "0644" in done.stderr


# --- rotation, in two processes ---------------------------------------------------------------

NODE = LAB / "sealed_node.py"


def test_keys_rotate_while_two_processes_write_and_read_and_nothing_is_ever_missed(tmp_path):
    """Two stores in processes of their own, each with its own copy of the key file, as on two nodes."""
    root = tmp_path / "kv"
    root.mkdir()
    paths = [key_file(tmp_path / f"keys{i}", "old") for i in range(2)]
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(NODE), str(root), str(path), str(i)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for i, path in enumerate(paths)
        ]
        stack.callback(lambda: [node.kill() for node in nodes])

        def ask(node, word):
            node.stdin.write(f"{word}\n")
            node.stdin.flush()
            return json.loads(node.stdout.readline())

        def everywhere(*names):
            """Give one node after the other these keys, both working on throughout."""
            for i, path in enumerate(paths):
                key_file(tmp_path / f"next{i}", *names).rename(path)
                wait_for(lambda i=i: ask(nodes[i], "keys") == list(names))
                seen = [ask(node, "counts")["loads"] for node in nodes]
                wait_for(
                    lambda seen=seen: all(
                        ask(node, "counts")["loads"] > before + 20
                        for node, before in zip(nodes, seen, strict=True)
                    )
                )

        everywhere("old")
        everywhere("old", "new")
        everywhere("new", "old")
        wait_for(lambda: all(len(ask(node, "counts")["key_ids"]) == 2 for node in nodes))
        done = [ask(node, "counts") for node in nodes]
        for one in done:
            assert one["bad"] == {}, one
            assert one["foreign_loads"] > 0
            assert set(one["key_ids"]) == {"old", "new"}
        # The old key goes: what it sealed is a miss, is replaced by the next store, and all is served again.
        everywhere("new")
        for node in nodes:
            ask(node, "forget")
        wait_for(lambda: all(ask(node, "counts")["settled"] for node in nodes), 60)
        for node in nodes:
            counts = ask(node, "stop")
            assert set(counts["bad"]) <= {"unknown_key"}, counts
    ids = {peek_header(path.read_bytes()).key_id for path in root.rglob("*.kv")}
    assert ids == {"new"}


def test_negative_control_a_node_that_never_heard_of_the_new_key_misses(make_world):
    """Rotation in the wrong order is misses, and those are seen and counted: never wrong KV, never a stop."""
    ahead, behind = make_world(keys=keys("new")), make_world(keys=keys("old"))
    ahead.put(1, ahead.content(1))
    assert behind.get(1) == (Status.UNKNOWN_KEY, None)


def test_the_benchmark_of_the_cost_compares_every_byte_that_it_moves(tmp_path, capsys, monkeypatch):
    sealing = pytest.importorskip("benchmarks.sealing")
    pytest.importorskip("torch")
    words = ["--rounds", "1", "--chunks", "4", "--chunk-kib", "256", "--page-kib", "16", "--json"]
    words += ["--layers", "4", "--threads", "1", "--dir", str(tmp_path)]
    assert sealing.main(words) == 0
    found = json.loads(capsys.readouterr().out)["paths"]
    assert set(found) == {"XXH3", "XXH3, in Python", "sealed"}
    from fskv.transports.host import HostTransport

    monkeypatch.setattr(HostTransport, "scatter", lambda *_: None)
    assert sealing.main(words) == 2
    assert "differ from the stored ones" in capsys.readouterr().err


def test_a_namespace_of_an_integrity_that_nobody_knows_ends_no_command(tmp_path):
    """A later version's, or made up: it ended `verify`, `report` and `inspect` of the whole root."""
    from tool_lab import Lab, key_of, run

    lab = Lab(tmp_path / "kv")
    space = lab.namespace()
    lab.chunks(space, range(3))
    other = lab.namespace(model_name="other")
    manifest = other.identity.to_manifest() | {"integrity": "blake9-512"}
    digest = hashlib.sha256(namespace.canonical_json(manifest)).digest()
    lab.chunks(other, range(2), namespace_digest=digest)
    path = f"{other.directory.path.rpartition('@')[0]}@{digest.hex()[:16]}"
    os.rename(other.directory.path, path)
    Path(f"{path}/namespace.json").write_text(json.dumps(manifest))

    done = run("verify", "--read-data", "--json", root=lab.path)
    assert done.exit_code == 1
    problems = [line["problem"] for line in done.lines if line["type"] == "namespace"]
    assert len(problems) == 1
    assert "integrity: expected one that this version knows, found 'blake9-512'" in problems[0]
    assert (done.summary["bad"], findings(done)) == (0, {}), "the others are judged"
    assert run("report", "--html", tmp_path / "r.html", root=lab.path).exit_code == 1
    file = f"{path}/{namespace.chunk_path(key_of(1), 0, None)}"
    assert "blake9-512" in run("inspect", file, root=lab.path).stderr
