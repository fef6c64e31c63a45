"""The command line on an encrypted root: what it can say without a key, and all of it with one."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace

import pytest
from fskv_tools.block_hashes import block_hashes
from fskv_tools.check import sealed
from key_files import key, write_keys
from tool_lab import check_lines, fskv, run
from world import World, damage, make_identity

from fskv import namespace
from fskv.namespace import GroupIdentity
from fskv.root.key_file import read_keys
from fskv.types import FileId

TOKENS = random.Random(3).choices(range(1000), k=330)
GROUP = GroupIdentity(
    0, "full/FullAttentionSpec/bfloat16/none", None, 16, (40000, 24000), ("a", "b")
)
IDENTITY = make_identity(
    groups=(GROUP,), engine_version="0.32", hash_seed="default", blocks_per_chunk=2
)
HASHES = list(block_hashes(IDENTITY, TOKENS))[1::2]  # of the chunks' last blocks
ASK = ("explain", "--tokens", json.dumps(TOKENS))


class Prompted(World):
    """A root with the ten chunks of a prompt, as an engine with these options stores them."""

    def __init__(self, root, key_file=None, **changes):
        self.hide = read_keys(key_file).hide if key_file else lambda one: one
        super().__init__(
            root,
            identity=replace(IDENTITY, **changes),
            blocks_per_chunk=2,
            layout_digest=namespace.layout_digest(GROUP, 2),
            key_file=key_file,
        )
        for number in range(len(HASHES)):
            assert self.put(number, self.content(number)).good

    def chunk(self, number):
        return FileId(self.hide(HASHES[number]), 0, None)

    @property
    def id(self):
        return os.path.relpath(self.directory.path, self.root)


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path / "keys", "old")


@pytest.fixture
def world(tmp_path, keys):
    return Prompted(tmp_path / "kv", keys)


def verify(world, *words):
    return run("verify", "--json", *words, root=world.root)


def bad(done):
    return {line["path"]: line["finding"] for line in done.lines if line["type"] == "bad"}


def test_without_a_key_all_but_the_data_is_checked_and_that_is_said(world):
    done = verify(world, "--read-data")
    assert done.exit_code == 0
    assert (done.summary["files"], done.summary["data_files"]) == (10, 0)
    assert done.summary["encrypted"] == 10
    check_lines("verify", done.lines)
    said = run("verify", "--read-data", root=world.root).stderr
    assert "10 files encrypted: --key-file with its keys checks the data" in said
    assert "all good" not in said

    data, header, short = (world.path(number) for number in range(3))
    damage(data, os.path.getsize(data) - 9000)
    damage(header, 100)
    os.truncate(short, 9000)
    done = verify(world, "--read-data", "--remove-bad", "--yes")
    assert bad(done) == {header: "corrupt", short: "corrupt"}
    assert done.summary["removed"] == 2
    assert os.path.exists(data), "nobody knows without a key"


def test_with_the_key_every_byte_is_checked(world, keys):
    done = verify(world, "--read-data", "--key-file", keys)
    assert (done.exit_code, done.summary["data_files"], done.summary["encrypted"]) == (0, 10, 0)
    said = run("verify", "--read-data", "--key-file", keys, root=world.root).stderr
    assert "10 of them read whole: all good" in said
    path = world.path(3)
    size = os.path.getsize(path)
    for at in (4096, size // 2, size - 1):
        damage(path, at)
        assert bad(verify(world, "--read-data", "--key-file", keys)) == {path: "corrupt"}, at
        damage(path, at)
    damage(path, size - 1)
    done = verify(world, "--read-data", "--key-file", keys, "--remove-bad", "--yes")
    assert done.summary["removed"] == 1
    assert not os.path.exists(path)


@pytest.mark.parametrize(("names", "encrypted"), [("names", 0), ("others", 10)])
def test_what_a_key_file_cannot_open_is_no_damage_and_stays(world, tmp_path, names, encrypted):
    """A key file of other names is not of this namespace, whatever its keys are called."""
    other = write_keys(tmp_path / "other", "old" if encrypted else "new", names=names)
    if encrypted:
        path = tmp_path / "other"
        path.write_text(path.read_text().replace(key("old").hex(), key("another").hex()))
    done = verify(world, "--read-data", "--key-file", other, "--remove-bad", "--yes")
    assert set(bad(done).values()) == (set() if encrypted else {"unreadable"})
    assert done.exit_code == (0 if encrypted else 3)
    assert (done.summary["removed"], done.summary["encrypted"]) == (0, encrypted)
    assert len(world.chunk_files()) == 10


def test_explain_needs_the_key_file_and_finds_what_the_engine_would(world, keys, tmp_path):
    refused = run(*ASK, root=world.root)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "expected --key-file with its keys" in refused.stderr
    others = write_keys(tmp_path / "others", "old", names="others")
    assert run(*ASK, "--key-file", others, root=world.root).exit_code == 2
    done = run(*ASK, "--key-file", keys, "--json", root=world.root)
    assert (done.exit_code, done.summary["hit_tokens"]) == (0, 320), done.stderr
    check_lines("explain", done.lines)
    os.unlink(world.path(4))
    assert run(*ASK, "--key-file", keys, "--json", root=world.root).summary["hit_tokens"] == 128


def test_explain_compares_namespaces_with_and_without_a_key(world, keys):
    """Of a namespace in clear the encrypted one beside it is only asked with its key."""
    clear = Prompted(world.root, tenant="clear")
    for number in range(5, 10):
        os.unlink(clear.path(number))

    def neighbours(*options):
        done = run(*ASK, clear.id, "--json", *options, root=world.root)
        assert done.summary["hit_tokens"] == 160, done.stderr
        return [line for line in done.lines if line["type"] == "cause" and line["namespace"]]

    assert neighbours() == []
    assert [line["hit_tokens"] for line in neighbours("--key-file", keys)] == [320]


def test_inspect_shows_all_but_the_data(world):
    path = world.path(2)
    done = run("inspect", path, "--json")
    assert done.exit_code == 0
    rows = [line for line in done.lines if line["type"] == "row"]
    assert {row["status"] for row in rows} == {"encrypted"}
    assert {len(row["expected"]) for row in rows} == {32}
    assert {row["found"] for row in rows} == {None}
    file = done.lines[0]
    assert (file["header"]["checksum"], file["bad_rows"]) == ("aes-256-gcm", 0)
    check_lines("inspect", done.lines)
    assert "encrypted" in run("inspect", path).stdout
    os.truncate(path, 4096 + 65536 + 100)
    done = run("inspect", path, "--json")
    assert done.exit_code == 1
    assert [line["status"] for line in done.lines if line["type"] == "row"] == [
        "encrypted",
        "missing",
    ]


def test_a_copy_brings_encrypted_files_unopened_and_a_key_checks_them_there(world, keys, tmp_path):
    """Damage of data is only seen there: the control is that of a header, which stays behind."""
    damage(world.path(1), os.path.getsize(world.path(1)) - 9000)
    damage(world.path(2), 100)
    to = tmp_path / "to"
    to.mkdir()
    done = run("copy", "--to", to, "--create", "--json", root=world.root)
    assert (done.summary["stored"], done.summary["bad"]) == (9, 1)
    found = run("verify", "--json", "--read-data", "--key-file", keys, root=to)
    assert (found.summary["data_files"], found.summary["corrupt"]) == (9, 1)
    there = World.__new__(Prompted)
    Prompted.__init__(there, to, keys)
    assert there.get(5)[1] == world.content(5)


def test_the_doctor_looks_at_the_key_file_of_a_servers_line(world, keys):
    given = {"kv_connector": "FskvConnector", "kv_role": "kv_both"}
    given["kv_connector_extra_config"] = {"root": world.root, "key_file": keys}
    line = f"vllm serve M --kv-transfer-config '{json.dumps(given)}'"
    done = run("doctor", "--timeout", "120", "--config", line, "--json")
    assert (done.exit_code, done.summary["problem"]) == (0, 0), done.stdout
    os.chmod(keys, 0o644)
    done = run("doctor", "--timeout", "120", "--config", line, "--json")
    (found,) = [one["found"] for one in done.lines if one.get("level") == "problem"]
    assert "mode 0644, expected" in found


def test_other_commands_see_names_and_sizes_and_no_key_of_a_prompt(world):
    said = ""
    for words in (
        ("ls",),
        ("ls", "--chunks", world.id),
        ("du",),
        ("prune", "--max-size", "1MiB", "-y"),
    ):
        done = fskv(*words, root=world.root)
        assert done.exit_code == 0, done.stderr
        said += done.stdout + done.stderr
    assert 0 < len(world.chunk_files()) < 10
    assert world.hide(HASHES[0]).hex() not in said
    assert namespace.chunk_name(world.hide(HASHES[0])) in said, "the control: of files as they are"
    assert not any(one.hex() in said or namespace.chunk_name(one) in said for one in HASHES)
    assert fskv("rm", world.id, "--yes", root=world.root).exit_code == 0
    assert world.chunk_files() == []


BAD_FILES = {
    "no file": lambda path: path.unlink(),
    "readable by others": lambda path: path.chmod(0o644),
    "no key but of names": lambda path: path.write_text(f"names {key('names').hex()}\n"),
    "a short key": lambda path: path.write_text(path.read_text()[:-3]),
    "a key twice": lambda path: path.write_text(path.read_text().replace("old", "names")),
    "no text": lambda path: path.write_bytes(os.urandom(100)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("words", [("verify", "--read-data"), ASK], ids=["verify", "explain"])
def test_a_key_file_that_is_none_is_refused_in_a_sentence_without_a_key(
    world, tmp_path, words, kind
):
    BAD_FILES[kind](tmp_path / "keys")
    done = fskv(*words, "--key-file", tmp_path / "keys", root=world.root)
    assert done.exit_code == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert key("old").hex()[:16] not in done.stderr


def test_without_the_package_cryptography_verify_says_so_and_explain_works(
    world, keys, monkeypatch
):
    monkeypatch.setattr(sealed.importlib.util, "find_spec", lambda name: None)
    done = run("verify", "--key-file", keys, root=world.root)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pip install '.[encryption]'" in done.stderr
    assert run(*ASK, "--key-file", keys, root=world.root).exit_code == 0
