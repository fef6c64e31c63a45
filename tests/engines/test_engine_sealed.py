"""Sealed chunks on a real engine: keys rotate while it runs, forgeries are recomputed, no key leaks."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib

import engine_lab as lab
import pytest

from fskv.format.chunk_file import encode_header, peek_header
from fskv.format.mac import MacKey

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
lab.needs_vllm()

SECRETS = {name: hashlib.sha256(name.encode()).digest() for name in ("old", "new", "forger")}
MODEL = lab.MODELS["llama"]


def write_keys(path: pathlib.Path, *names: str) -> None:
    part = path.with_name("part")
    part.write_text("".join(f"{name} {SECRETS[name].hex()}\n" for name in names))
    part.chmod(0o600)
    part.rename(path)


def zero_sealed(path: str, key: MacKey) -> None:
    """Replace a file by one of zeros that holds in every check, sealed by `key`."""
    content = pathlib.Path(path).read_bytes()
    header = peek_header(content)
    payload = bytes(header.payload_nbytes)
    fields = {"row_digests": header.integrity.rows(memoryview(payload), key), "key_id": key.key_id}
    forged = dataclasses.replace(header, **fields)
    pathlib.Path(path).write_bytes(encode_header(forged, header.header_nbytes, key) + payload)


def key_ids(root: str) -> set[str | None]:
    return {peek_header(pathlib.Path(path).read_bytes()).key_id for path in lab.chunks(root)}


def test_keys_rotate_under_a_running_engine_and_forged_files_are_recomputed(tmp_path):
    main = MODEL.main_prompt()
    wanted = lab.reference(MODEL.name)["main"]["tokens"]
    root = str(tmp_path / "root")
    os.mkdir(root)
    keys = tmp_path / "keys"
    write_keys(keys, "old")
    transfer = lab.connector(
        root, mac_key_file=str(keys), quarantine_s=0.5, **lab.options_for("llama")
    )
    talk = lab.Conversation(tmp_path)
    reset = {"reset_prefix_cache": True}
    pauses = {}

    def part(label: str) -> None:
        """Let the parent do something; then the prompt again, with what is on disk alone."""
        pauses[label] = talk.pause()
        talk.say({"sleep": 2.5}, lab.generate(main, label), reset, {"metrics": True})

    talk.say(lab.generate(main, "cold"), reset, {"metrics": True})
    for label in (
        *("warm", "both_keys", "new_first", "forged", "healed", "genuine_zeros", "restored"),
        *("old_retired", "sealed_anew"),
    ):
        part(label)
    engine = lab.start_engine(
        lab.request(MODEL, talk.steps, transfer=transfer), str(tmp_path / "engine")
    )
    stored: dict[str, bytes] = {}
    seen: dict[str, set[str | None]] = {}

    def on_disk(label: str) -> None:
        seen[label] = key_ids(root)

    def forge(name: str, secret: str) -> None:
        for path in lab.chunks(root):
            zero_sealed(path, MacKey(name, SECRETS[secret]))

    def keep() -> None:
        stored.update(lab.snapshot(root))
        on_disk("cold")

    def retire() -> None:
        lab.restore(stored)
        write_keys(keys, "new")

    between = {
        "warm": keep,
        "both_keys": lambda: write_keys(keys, "old", "new"),
        "new_first": lambda: write_keys(keys, "new", "old"),
        "forged": lambda: forge("old", "forger"),
        "healed": lambda: on_disk("forged"),
        "genuine_zeros": lambda: forge("old", "old"),
        "restored": lambda: lab.restore(stored),
        "old_retired": retire,
        "sealed_anew": lambda: on_disk("retired"),
    }
    for label, number in pauses.items():
        talk.resume(engine, number, between[label])
    result = engine.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
    done = lab.generates(result)
    counted = dict(zip(["cold", *pauses], lab.metrics(result), strict=True))

    def failures(label: str, reason: str) -> float:
        return lab.counter(counted[label], "load_failures", reason=reason)

    for label in done.keys() - {"genuine_zeros"}:
        assert done[label]["tokens"] == wanted, label
    # The control: zeros that the key's own holder sealed are served, so the files do decide the tokens.
    assert done["genuine_zeros"]["tokens"] != wanted
    hits = done["warm"]["num_cached_tokens"]
    assert hits > 0
    for label in ("both_keys", "new_first", "healed", "genuine_zeros", "restored", "sealed_anew"):
        assert done[label]["num_cached_tokens"] == hits, label
    assert sum(failures("new_first", reason) for reason in ("corrupt", "unknown_key", "stale")) == 0
    assert failures("forged", "corrupt") > 0
    assert failures("old_retired", "unknown_key") > 0
    assert seen == {"cold": {"old"}, "forged": {"new"}, "retired": {"new"}}

    # No key is in what the engine wrote, said or left on disk.
    said = pathlib.Path(result["log_path"]).read_text(errors="replace")
    assert "sealed with key 'old'" in said
    texts = [said.encode(), *(p.read_bytes() for p in pathlib.Path(root).rglob("*") if p.is_file())]
    for secret in SECRETS.values():
        assert not any(secret.hex()[:16].encode() in text or secret in text for text in texts)
