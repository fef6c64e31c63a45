"""Real engines with `key_file`: their own keys alone open what they stored, and no file tells of a prompt."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from dataclasses import replace
from itertools import cycle

import engine_lab as lab
import places
import pytest
import world
import xxhash
from fskv_tools.block_hashes import block_hashes
from key_files import key, write_keys
from test_engine_events import CHUNK_TOKENS, Router
from tool_lab import run as fskv
from world import wait_for

from fskv.format import chunk_file
from fskv.format.integrity import CHECKSUM, KEY_ID_NBYTES, xxh3_rows
from fskv.namespace import Identity

pytestmark = [*world.VLLM, pytest.mark.timeout(600)]
lab.needs_vllm()

NAME = "gpt_oss"
MODEL = lab.MODELS[NAME]
MAIN = MODEL.main_prompt()
OTHER = MODEL.tokens("other", MODEL.prompt_tokens)


def stored(root: str) -> dict:
    """Make a root on which an engine with the key `old` has stored the main prompt."""
    path = write_keys(places.run_directory / "old.keys", "old")
    return lab.stored(NAME, root, key_file=path)


def ids_of(root: str) -> set[str]:
    """Return the ids of the keys with which files are encrypted; all must be."""
    headers = [chunk_file.parse_header(content) for content in lab.snapshot(root).values()]
    assert all(header.encrypted for header in headers)
    return {one.row_digests[:KEY_ID_NBYTES].rstrip(b"\0").decode() for one in headers}


def prune(root: str) -> None:
    """Remove half of a root's files."""
    half = sum(os.path.getsize(path) for path in lab.chunks(root)) // 2
    done = fskv("prune", "--max-size", half, "--yes", root=root)
    assert done.exit_code == 0, done.stderr


def names_of(root: str, prompt: list[int]) -> list[bytes]:
    """Return what would tell that a prompt was here: hashes of its blocks, and names made of them."""
    (manifest,) = lab.identities(root)
    hashes = list(block_hashes(Identity.from_manifest(manifest), prompt))
    raw = [*hashes, *map(xxhash.xxh3_128_digest, hashes)]
    return raw + [one.hex().encode() for one in raw]


def found_in(contents: dict[str, bytes], secrets: list[bytes]) -> set[str]:
    return {
        path
        for path, content in contents.items()
        if any(one in content or one in os.fsencode(path) for one in secrets)
    }


def contents_of(root: str) -> dict[str, bytes]:
    paths = [path for path in pathlib.Path(root).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def pieces(root: str) -> list[bytes]:
    """Return a piece of the KV of each file of a root in clear, from the last block that has any."""
    return [content.rstrip(b"\0")[-512:-448] for content in lab.payloads(root).values()]


def test_one_key_file_serves_through_a_rotation_on_a_running_engine(root, tmp_path):
    stored(root)
    assert ids_of(root) == {"old"}
    keys, log = tmp_path / "keys", tmp_path / "engine" / "engine.log"
    write_keys(keys, "old")

    def rotate(talk: lab.Conversation, *ids: str) -> None:
        talk.meanwhile(lambda: write_keys(keys, *ids))
        said = f"keys {', '.join(ids)}; the first one writes"
        talk.say(lab.generate([5, 6], said), {"read": str(log), "until": said})

    main, other = lab.generate(MAIN, "warm"), lab.generate(OTHER, "other")
    talk = lab.Conversation(tmp_path)
    talk.say(main, lab.METRICS, lab.RESET)
    rotate(talk, "new", "old")
    talk.say(other, *lab.SETTLE, lab.RESET, {**main, "label": "both"}, lab.RESET)
    rotate(talk, "new")
    talk.say({**main, "label": "retired"}, *lab.SETTLE, lab.METRICS, lab.RESET)
    talk.say({**main, "label": "healed"}, {**other, "label": "new"}, lab.METRICS)
    transfer = lab.connector(root, key_file=str(keys))
    result = talk.run(MODEL, transfer=transfer, changes={"quick_keys": True})

    done, (before, retired, healed) = lab.generates(result), lab.metrics(result)
    for label in ("warm", "both", "retired", "healed"):
        assert done[label]["tokens"] == lab.main_tokens(NAME), label
    full = done["warm"]["num_cached_tokens"]
    assert full == done["both"]["num_cached_tokens"] == done["healed"]["num_cached_tokens"]
    assert full >= MODEL.prompt_tokens // 2
    assert lab.counter(before, "load_failures") == 0
    assert done["retired"]["num_cached_tokens"] < full
    assert lab.counter(retired, "load_failures", reason="no_key") > 0
    assert lab.counter(healed, "load_failures") == lab.counter(retired, "load_failures")
    assert done["new"]["num_cached_tokens"] == full
    assert done["new"]["tokens"] == done["other"]["tokens"]
    words = ("--key-file", keys, "--json")
    explained = fskv("explain", "--tokens", json.dumps(MAIN), *words, root=root)
    assert explained.summary["hit_tokens"] == full
    write_keys(keys, "new", "old")
    verified = fskv("verify", "--read-data", *words, root=root)
    assert verified.exit_code == 0, verified.stdout
    assert verified.summary["data_files"] == len(lab.chunks(root))


# Headers over zeros that pass their own checks, by the reason that is counted: what another one may write.
FORGERIES = {
    "corrupt": lambda header, zeros: header,
    "stale": lambda header, zeros: replace(header, checksum=CHECKSUM, row_digests=xxh3_rows(zeros)),
    "no_key": lambda header, zeros: replace(
        header,
        row_digests=b"theirs".ljust(KEY_ID_NBYTES, b"\0") + header.row_digests[KEY_ID_NBYTES:],
    ),
}


def test_what_others_write_is_recomputed_and_what_they_read_tells_of_no_prompt(root, tmp_path):
    """The control of the search: a root in clear, where it finds each file. There zeros change tokens."""
    first, clear = stored(root), tmp_path / "clear"
    lab.stored(NAME, clear)
    contents: dict[str, bytes] = {}

    def forge() -> None:
        for path, how in zip(lab.chunks(root), cycle(FORGERIES.values()), strict=False):
            header = chunk_file.parse_header(pathlib.Path(path).read_bytes())
            zeros = memoryview(bytes(header.payload_nbytes))
            forged = chunk_file.encode_header(how(header, zeros), header.header_nbytes)
            pathlib.Path(path).write_bytes(forged + zeros)

    def prune_and_read() -> None:
        wait_for(lambda: list(pathlib.Path(root).rglob("snapshot.msgpack")), 60)
        prune(root)
        contents.update(contents_of(root))

    main, talk = lab.generate(MAIN, "warm"), lab.Conversation(tmp_path)
    talk.say(main, lab.RESET)
    talk.meanwhile(forge)
    talk.say({**main, "label": "forged"}, *lab.SETTLE, lab.METRICS, lab.RESET)
    talk.meanwhile(prune_and_read)
    talk.say({**main, "label": "pruned"})
    key_file = write_keys(tmp_path / "keys", "old")
    result = talk.run(MODEL, transfer=lab.connector(root, key_file=key_file))
    done, (counted,) = lab.generates(result), lab.metrics(result)
    for label in ("warm", "forged", "pruned"):
        assert done[label]["tokens"] == lab.main_tokens(NAME), label
    assert done["forged"]["num_cached_tokens"] < done["warm"]["num_cached_tokens"]
    for reason in FORGERIES:
        assert lab.counter(counted, "load_failures", reason=reason) > 0, reason

    secrets = [one for name in ("names", "old") for one in (key(name), key(name).hex().encode())]
    secrets += names_of(root, MAIN) + pieces(str(clear))
    parts = {part for path in contents for part in pathlib.Path(path).parts}
    assert parts >= {"removed", "sights", "usage.json", "snapshot.msgpack", "namespace.json"}
    logs = {"first": lab.log_of(first).encode(), "second": lab.log_of(result).encode()}
    for seen in (contents, contents_of(root), logs):
        assert found_in(seen, secrets) == set()
    in_clear = contents_of(str(clear))
    files = {path for path in in_clear if path.endswith(".kv")}
    assert found_in(in_clear, names_of(str(clear), MAIN)) >= files  # a snapshot has names too
    assert found_in(in_clear, pieces(str(clear))) == files
    assert found_in({"keys": pathlib.Path(key_file).read_bytes()}, secrets) == {"keys"}


@pytest.mark.slow
def test_another_key_costs_a_recompute_and_other_names_are_another_namespace(root, tmp_path):
    stored(root)
    path = tmp_path / "keys"
    steps = [lab.generate(MAIN, "main"), *lab.SETTLE, lab.METRICS]

    def asked(num_namespaces: int, **options) -> dict:
        result = lab.run(lab.request(MODEL, steps, transfer=lab.connector(root, **options)))
        done = lab.generates(result)["main"]
        assert (done["tokens"], done["num_cached_tokens"]) == (lab.main_tokens(NAME), 0)
        assert len(lab.identities(root)) == num_namespaces
        return lab.metrics(result)[0]

    failed = asked(1, key_file=write_keys(path, "another"))
    count = lab.counter(failed, "load_failures", reason="no_key")
    assert lab.counter(failed, "load_failures") == count > 0
    for number, options in (2, {"key_file": write_keys(path, "old", names="others")}), (3, {}):
        assert lab.counter(asked(number, **options), "load_failures") == 0
    assert len({one.get("encryption") for one in lab.identities(root)}) == 3


@pytest.mark.slow
def test_a_router_hears_the_engines_own_hashes_of_hidden_chunks_also_when_they_are_pruned(
    root, tmp_path
):
    model, router = lab.MODELS["llama"], Router(root)
    prompt = model.main_prompt()
    num_chunks = model.prompt_tokens // CHUNK_TOKENS
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    options = {"hybrid_chunk_size": CHUNK_TOKENS, "self_describing_kv_events": True}

    def num_left() -> int:
        return len(lab.chunks(root))

    def wait_and_prune() -> None:
        wait_for(lambda: len(router.stored) == num_chunks, 60)
        prune(root)

    def wait_a_moment() -> None:
        with contextlib.suppress(AssertionError):
            wait_for(lambda: sum(map(len, router.removed)) == 2 * (num_chunks - num_left()), 1)

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(prompt, "cold"))
    talk.meanwhile(wait_and_prune)
    for number in range(40):  # the engine tells in its steps
        talk.say(lab.generate([number + 5], f"step {number}"))
        talk.meanwhile(wait_a_moment)
    try:
        talk.run(
            model,
            transfer=lab.connector(root, key_file=write_keys(tmp_path / "keys", "old"), **options),
            engine={"kv_events_config": events},
            env={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        )
    finally:
        router.close()
    (manifest,) = lab.identities(root)
    hashes = list(block_hashes(Identity.from_manifest(manifest), prompt))[: 2 * num_chunks]
    assert sorted(one for _, _, some in router.stored for one in some) == sorted(hashes)
    removed = [one for some in router.removed for one in some]
    assert len(removed) == 2 * (num_chunks - num_left()) > 0
    assert set(removed) < set(hashes)
    assert not any(there for _, there, _ in router.stored), "no file has the name of its hash"


@pytest.mark.slow
def test_the_tier_stores_and_loads_with_a_key_file_and_the_connector_opens_its_files(
    root, tmp_path
):
    options = {"key_file": write_keys(tmp_path / "keys", "old")}
    steps = [lab.generate(MAIN, "cold"), *lab.SETTLE, lab.RESET_TIERS]
    steps += [lab.generate(MAIN, "warm"), lab.METRICS]
    transfer = lab.tier(root, weights_fixed=True, **options)
    result = lab.run(lab.request(MODEL, steps, transfer=transfer))
    assert ids_of(root) == {"old"}
    before = lab.snapshot(root)
    steps = [lab.generate(MAIN, "other"), lab.METRICS]
    transfer = lab.connector(root, hybrid_chunk_size=128, **options)
    other = lab.run(lab.request(MODEL, steps, transfer=transfer))
    for one, label in ((result, "warm"), (other, "other")):
        done = lab.generates(one)[label]
        assert done["tokens"] == lab.main_tokens(NAME)
        assert done["num_cached_tokens"] >= MODEL.prompt_tokens // 2
        (counted,) = lab.metrics(one)
        assert lab.counter(counted, "loaded_chunks") > 0
        assert lab.counter(counted, "load_failures") == 0
    assert lab.snapshot(root).keys() == before.keys()


@pytest.mark.slow
def test_of_two_roots_one_may_be_encrypted_and_either_one_serves(roots, tmp_path):
    fast, slow = roots
    key_file = write_keys(tmp_path / "keys", "old")
    transfer = lab.multi(
        lab.connector(fast, name="fast", load_weight=2.0, key_file=key_file),
        lab.connector(slow, name="slow"),
    )
    main = lab.generate(MAIN, "cold")
    talk = lab.Conversation(tmp_path)
    talk.say(main, *lab.SETTLE, lab.RESET, {**main, "label": "warm"}, lab.METRICS, lab.RESET)
    ids: set[str] = set()
    talk.meanwhile(lambda: (ids.update(ids_of(fast)), lab.remove(fast)))
    talk.say({**main, "label": "lost"}, *lab.SETTLE, lab.METRICS)
    result = talk.run(MODEL, transfer=transfer)
    for label in ("cold", "warm", "lost"):
        assert lab.generates(result)[label]["tokens"] == lab.main_tokens(NAME), label
    first, last = lab.metrics(result)
    for counted, name in ((first, "fast"), (last, "slow")):
        assert lab.counter(counted, "loaded_chunks", connector=name) > 0
    assert ids == {"old"}
    assert ids_of(fast) == {"old"}, "what was loaded from the other one"
    lab.assert_sound(slow)
    assert found_in(contents_of(fast), names_of(slow, MAIN) + pieces(slow)) == set()
    assert found_in(contents_of(slow), pieces(slow))
