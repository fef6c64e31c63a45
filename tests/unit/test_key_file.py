"""The option `key_file`: what is refused, what changes while an engine runs, and the names in the root."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from key_files import key, write_keys
from test_encryption import NATIVE, NO_KEY, OK, meta_of
from test_native import STORED, Chunks
from toy_engine import chunks_of
from world import returns_in_time, wait_for

from fskv.config import StoreConfig
from fskv.data_path import worker_keys
from fskv.data_path.worker_keys import WorkerKeys, engine_keys
from fskv.errors import ConfigError, RootError
from fskv.namespace import chunk_name
from fskv.root.key_file import read_keys

SECRETS = NAMES, A, B, C = [key(name) for name in ("names", "a", "b", "c")]
LINES = [f"names {NAMES.hex()}", f"a {A.hex()}", f"c {C.hex()}"]
WRONG_LINES = {
    "no names": LINES[1:],
    "no key": LINES[:1],
    "nothing": [],
    "an id twice": [*LINES, f"a {B.hex()}"],
    "names twice": [*LINES, f"names {B.hex()}"],
    "a key twice": [*LINES, f"b {A.hex()}"],
    "the key of names again": [*LINES, f"b {NAMES.hex()}"],
    "no hex": [*LINES, "b " + "zz" * 32],
    "63 digits": [*LINES, f"b {B.hex()[:-1]}"],
    "65 digits": [*LINES, f"b {B.hex()}0"],
    "no id": [*LINES, B.hex()],
    "an id of 17": [*LINES, f"{'i' * 17} {B.hex()}"],
    "an odd id": [*LINES, f"\xfc {B.hex()}"],
    "too long": [*LINES, "#" * 65536],
    "garbage": [*LINES, "\x00\x89\xff"],
}


def refused(path):
    """Return the sentence, and see that no key is in it."""
    with pytest.raises(ConfigError) as caught:
        returns_in_time(lambda: WorkerKeys(str(path)))
    sentence = str(caught.value)
    assert sentence.startswith(f"option 'key_file': {path}")
    assert "\n" not in sentence
    assert not [one for one in SECRETS if one.hex()[:8] in sentence.lower()]
    return sentence


@pytest.mark.parametrize("wrong", WRONG_LINES)
def test_a_key_file_with_other_content_is_refused_in_a_sentence_without_keys(tmp_path, wrong):
    path = tmp_path / "keys"
    path.write_text("\n".join(WRONG_LINES[wrong]), encoding="latin-1")
    path.chmod(0o600)
    assert "expected" in refused(path)
    path.write_text("\n".join(["# keys", "", *LINES, f"  {'i' * 16}\t{B.hex().upper()} # new"]))
    assert dict(read_keys(str(path)).keys) == {b"a": A, b"c": C, b"i" * 16: B}


def test_of_a_key_file_that_is_half_written_the_first_keys_are_taken_or_none(tmp_path):
    path, taken = tmp_path / "keys", set()
    path.touch(0o600)
    whole = [(b"a", A), (b"c", C)]
    text = "".join(f"{line}  # a comment\n" for line in LINES)
    for half in range(len(text) + 1):
        path.write_text(text[:half])
        with contextlib.suppress(ConfigError):
            keys = read_keys(str(path))
            assert (keys.names, [*keys.keys]) == (NAMES, whole[: len(keys.keys)])
            taken.add(len(keys.keys))
    assert taken == {1, 2}


def test_a_key_file_that_others_may_read_or_that_is_none_is_refused(
    tmp_path, key_file, monkeypatch
):
    for mode in (0o644, 0o660, 0o604, 0o610, 0o602, 0o601, 0o777):
        key_file.chmod(mode)
        assert f"mode {mode:04o}, expected owner" in refused(key_file)
    for mode in (0o600, 0o640, 0o400, 0o440):  # of a mounted secret
        key_file.chmod(mode)
        (tmp_path / f"link{mode}").symlink_to(key_file)
        WorkerKeys(str(tmp_path / f"link{mode}"))
    if os.geteuid() == 0:
        os.chown(key_file, 12345, -1)
        WorkerKeys(str(key_file))  # root reads what it could read anyway
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 999)
            assert "owner 12345" in refused(key_file)
    assert "No such file" in refused(tmp_path / "missing")
    assert "expected a regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "expected a regular file" in refused(tmp_path / "fifo")
    for path in ("/mnt/kv/keys", "/mnt/kv/x/../keys", "keys", 7):
        with pytest.raises(ConfigError, match="option 'key_file'"):
            StoreConfig.from_mapping({"root": "/mnt/kv", "key_file": path})


def test_a_start_waits_for_no_root_that_hangs_while_the_key_file_is_looked_for_in_it(
    tmp_path, key_file, monkeypatch
):
    config = StoreConfig(root=str(tmp_path / "kv"), key_file=str(key_file))
    assert engine_keys(config) == read_keys(str(key_file))
    with pytest.raises(ConfigError, match="in 'root', expected another place"):
        engine_keys(replace(config, root=str(tmp_path)))
    hangs = threading.Event()
    monkeypatch.setattr(worker_keys, "START_UP_S", 0.1)
    monkeypatch.setattr(os.path, "realpath", lambda path: hangs.wait(60))
    with pytest.raises(RootError, match=r"did not answer within 0\.1 s"):
        engine_keys(config)
    hangs.set()


def test_without_libcrypto_one_sentence_says_so_and_a_library_in_use_stays(
    make_world, key_file, monkeypatch
):
    world = make_world(key_file=key_file)
    for library in ("libno-such.so", "libc.so.6"):  # the second one is there, without the functions
        monkeypatch.setattr(worker_keys, "_LIBRARIES", (library,))
        with pytest.raises(
            ConfigError, match=rf"option 'key_file': found no libcrypto \({library}"
        ):
            WorkerKeys(str(key_file))
    assert world.put(1, world.content(1)) is OK
    assert world.get(1) == (OK, world.content(1))


# --- other keys while an engine runs ----------------------------------------------------------------


@NATIVE
def test_a_new_key_writes_at_once_and_a_retired_one_reads_no_more(make_world, key_file, native):
    world = make_world(key_file=key_file, native=native, faults=False)
    in_c = Chunks(world) if native else None

    def served(number):
        if in_c is not None:
            assert (in_c.load(number, range(4)) is not None) is (world.get(number)[0] is OK)
        return world.get(number)

    def stored(number):
        kv = world.fill(range(4), seed=number)
        assert in_c.store(number, range(4)) == STORED if native else world.put(number, kv) is OK
        return kv, meta_of(Path(world.path(number)).read_bytes())["rows"][:16].rstrip(b"\0")

    old, id_ = stored(1)
    assert id_ == b"a"
    write_keys(key_file, "b", "a")
    world.keys.look()
    new, id_ = stored(2)
    assert id_ == b"b"
    assert (served(1), served(2)) == ((OK, old), (OK, new))
    write_keys(key_file, "b")
    world.keys.look()
    assert (served(1), served(2)) == ((NO_KEY, None), (OK, new))
    assert os.path.exists(world.path(1))  # others may have its key
    assert world.put(1, old) is OK  # and the next store replaces it
    assert served(1) == (OK, old)


def test_a_file_that_cannot_be_used_changes_nothing_and_is_said_once(make_world, key_file, caplog):
    world = make_world(key_file=key_file)
    assert world.put(1, world.content(1)) is OK

    def said():
        caplog.clear()
        for _ in range(3):
            returns_in_time(lambda: world.keys.look() or 1)
        assert world.get(1) == (OK, world.content(1))
        return [record.getMessage() for record in caplog.records]

    key_file.write_text("garbage")
    (line,) = said()
    assert line.endswith("the keys before it stay")
    key_file.unlink()
    os.mkfifo(key_file, 0o600)
    (line,) = said()
    assert "expected a regular file" in line
    with caplog.at_level(logging.INFO):
        write_keys(key_file, "b", "a", names="others")
        another, changed = said()
    assert "another key of names holds from the next start" in another
    assert "has changed: keys b, a; the first one writes" in changed
    assert not [one for one in SECRETS if one.hex()[:8] in another + changed]
    for _ in range(2):
        write_keys(key_file, "b", "a")
        assert said() == []
        key_file.write_text("garbage")
        assert len(said()) == 1  # anew, where it was mended in between


def test_a_refresh_waits_for_no_disk_and_a_mover_takes_new_keys(
    engine, tmp_path, key_file, monkeypatch
):
    monkeypatch.setattr(worker_keys, "_LOOK_S", 0.0)
    one = engine(key_file=str(key_file))
    kv = one.run(range(16))
    hangs, asked = threading.Event(), []

    def slow(path):
        asked.append(path)
        hangs.wait(60)
        return read_keys(path)

    monkeypatch.setattr(worker_keys, "read_keys", slow)
    write_keys(key_file, "b", "a")
    for _ in range(5):
        returns_in_time(lambda: one.run(range(16)))
    assert len(asked) == 1  # while it hangs no other look begins
    hangs.set()
    wait_for(lambda: one.kv.step() is not None and len(asked) > 3)
    assert one.run(range(16)) == kv
    one.run(range(100, 116))
    files = [meta_of(path.read_bytes()) for path in (tmp_path / "kv").rglob("*.kv")]
    assert {meta["rows"][:1] for meta in files} == {b"a", b"b"}


# --- names ------------------------------------------------------------------------------------------


def test_nothing_in_the_root_names_a_prompt_and_another_key_of_names_shares_nothing(
    engine, tmp_path, key_file
):
    tokens, root = range(24), tmp_path / "kv"
    other = write_keys(tmp_path / "other", "a", names="others")
    clear, first = engine(), engine(key_file=str(key_file))
    kv = clear.run(tokens)
    assert first.run(tokens) == engine(key_file=other).run(tokens) == kv
    assert first.num_loaded == 0
    second = engine(key_file=str(key_file))  # it finds them by name and length
    assert (second.run(tokens), second.num_loaded) == (kv, 3)

    files = {path: path.read_bytes() for path in root.rglob("*.kv")}
    keys = [chunk.key_hash for chunk in chunks_of(tokens)]
    plain = {chunk_name(key) for key in keys}
    in_clear = clear.kv.directory.path
    assert len({path.parents[2] for path in files}) == 3
    assert len({path.name for path in files}) == len(files) == 9
    for path, file in files.items():
        named = path.name[:32] in plain, meta_of(file)["key"] in keys, kv[:512] in file
        assert path.name[:32] == xxhash.xxh3_128_hexdigest(meta_of(file)["key"])
        if str(path).startswith(in_clear):
            assert named[:2] == (True, True)
        else:
            assert named == (False, False, False)
    for path in root.rglob("*"):
        if path.is_file() and not str(path).startswith(in_clear):
            content = path.read_bytes()
            assert not [key for key in keys if key in content or key.hex().encode() in content]
            assert not [one for one in SECRETS if one in content or one.hex().encode() in content]


def test_gds_is_not_for_encrypted_chunks_and_one_sentence_says_so(engine, key_file, caplog):
    one = engine(key_file=str(key_file), transport="gds")
    assert "not GDS: chunks are encrypted in host memory" in caplog.text
    assert one.run(range(16)) == one.run(range(16))
    assert one.num_loaded == 2
