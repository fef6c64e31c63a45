"""The tables of inputs and exact outputs in docs/format.md are what the code makes.

Every check takes the document's text, so that each can be shown to fail on a doctored one.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import struct

import document_reader
import pytest
from test_docs import fenced, rows, text_of

from fskv import namespace
from fskv.chunk_file import ChunkHeader, FileLayout, encode_header, parse_header, row_digests
from fskv.claims import Book, Claim, Limits, Usage
from fskv.errors import ConfigError, IdentityMismatch
from fskv.lease import LeaseState
from fskv.mac import MacKey
from fskv.namespace import Identity
from fskv.root import manifest_bytes

FORMAT = text_of("docs/format.md")


def vectors(text: str, first_column: str) -> list[tuple[str, str]]:
    """Return the two code spans of each row of a table."""
    found = [(first, *cells) for first, cells in rows(text, first_column).items()]
    assert all(len(row) == 2 for row in found)
    return [(first.strip("`"), second.strip("`")) for first, second in found]


def check_canonical(text: str) -> int:
    found = vectors(text, "JSON")
    for source, canonical in found:
        assert namespace.canonical_json(namespace.parse_json(source)).decode() == canonical, source
        assert namespace.canonical_json(namespace.parse_json(canonical)).decode() == canonical
    return len(found)


def check_models(text: str) -> int:
    found = vectors(text, "model_name")
    for source, name in found:
        assert directory_of(json.loads(source)) == f"sm_90/{name}", source
    return len(found)


def directory_of(model_name: str, arch: str = "sm_90") -> str:
    identity = Identity.from_manifest({**example(FORMAT), "model_name": model_name, "arch": arch})
    return namespace.directory(identity).rpartition("@")[0]


def example(text: str) -> dict:
    (source,) = [part for part in fenced(text, "json") if '"groups"' in part]
    tree = namespace.parse_json(source)
    assert isinstance(tree, dict)
    return tree


def check_namespace(text: str) -> int:
    said, tree = dict(vectors(text, "of the namespace")), example(text)
    identity = Identity.from_manifest(tree)
    assert said["namespace digest"] == identity.digest.hex()
    assert said["directory"] == f"{namespace.directory(identity)}/"
    for group in identity.groups:
        layout = {
            "group": group.group_idx,
            "kind": group.kind,
            "tokens_per_block": group.tokens_per_block,
            "blocks": identity.blocks_per_chunk,
            "pages": list(group.page_nbytes),
            "layers": list(group.layer_names),
        }
        digest = hashlib.sha256(namespace.canonical_json(layout)).digest()[:16]
        assert said[f"layout digest of group {group.group_idx}"] == digest.hex()
        one = FileLayout(identity.blocks_per_chunk, group.page_nbytes, digest)
        lengths = f"{one.header_nbytes}`, `{one.file_nbytes}"
        assert said[f"H and length of a file of group {group.group_idx}"] == lengths
    return len(said)


def check_sealed(text: str) -> int:
    said = {name: bytes.fromhex(value) for name, value in vectors(text, "of the sealed file")}
    key = MacKey("example", bytes(range(32)))
    layout = FileLayout(2, (24, 40), bytes(range(16)), "blake3-128")
    payload = bytes(range(128)).ljust(layout.payload_nbytes, b"\0")
    digests = row_digests(memoryview(payload), key)
    made = encode_header(
        ChunkHeader(
            key_hash=hashlib.sha256(b"example").digest(),
            group_idx=1,
            rank=0,
            namespace_digest=hashlib.sha256(b"namespace").digest(),
            layout_digest=layout.digest,
            num_blocks=2,
            page_nbytes=(24, 40),
            first_block=0,
            payload_nbytes=layout.payload_nbytes,
            row_digests=digests,
            creator="fskv/0.1.0",
            written_at_ms=1767225600000,
            integrity="blake3-128",
        ),
        layout.header_nbytes,
        key,
    )
    (checksum,) = struct.unpack_from("<Q", made, 24)
    assert said["rows"] == digests
    assert said["checksum of the header, the 8 bytes at 24"] == struct.pack("<Q", checksum)
    assert said["tag, the header's last 32 bytes"] == made[-32:]
    # What the keys are for: the document's reader makes the same of them as the code.
    from blake3 import blake3

    assert blake3(payload, key=said["row key"]).digest(16) == digests
    taken = made[:24] + bytes(8) + made[32:-32]
    assert blake3(taken, key=said["header key"]).digest() == made[-32:]
    want = document_reader.Wanted(
        *(parse_header(made, {"example": key}).key_hash, 1, 0),
        *(hashlib.sha256(b"namespace").digest(), layout.digest, 2, (24, 40)),
        keys={"example": bytes(range(32))},
    )
    assert document_reader.judge(made + payload, want) == document_reader.GOOD
    return len(said)


@pytest.mark.parametrize(
    ("check", "least", "old", "new"),
    [
        (check_canonical, 10, "1e+22,1e+23", "1e+22,1E+23"),
        (check_canonical, 10, '{"\\u007f":3,"\\uff5e":2,', '{"\\uff5e":2,"\\u007f":3,'),
        (check_models, 10, "`Ubergro_e`", "`Ubergrosse`"),
        (check_namespace, 6, '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'),
        (check_namespace, 6, "`4096`, `266240`", "`4096`, `266241`"),
        (check_sealed, 5, "| row key | `", "| row key | `00"),
    ],
)
def test_every_vector_of_the_document_is_what_the_code_makes(check, least, old, new):
    assert check(FORMAT) >= least
    assert FORMAT.count(old) in (1, 2)
    with pytest.raises((AssertionError, ValueError)):
        check(FORMAT.replace(old, new, 1))


def test_a_long_name_keeps_its_end_and_an_architecture_is_reduced_too():
    assert directory_of("m" * 50 + "x" * 120) == "sm_90/" + "x" * 120
    assert directory_of("m", arch="GPU\u00e9/1 " + "y" * 60) == "y" * 40 + "/m"
    assert directory_of("m", arch="///") == "unknown/m"


def deep(levels: int) -> object:
    tree: object = 1
    for _ in range(levels):
        tree = [tree]
    return tree


def changed(path: str, value: object) -> dict:
    """Return the example with one value replaced, or with `...` removed."""
    tree = copy.deepcopy(example(FORMAT))
    where: object = tree
    *parents, name = [int(part) if part.isdigit() else part for part in path.split(".")]
    for parent in parents:
        where = where[parent]  # type: ignore[index]
    if value is ...:
        del where[name]  # type: ignore[attr-defined]
    else:
        where[name] = value  # type: ignore[index]
    return tree


_OPTIONAL = {"canonical_format", "tenant", "model_runner", "integrity", "extra"}
_REQUIRED = sorted(example(FORMAT).keys() - _OPTIONAL)
_OF_A_GROUP = (
    "group_idx",
    "kind",
    "window_tokens",
    "tokens_per_block",
    "page_nbytes",
    "layer_names",
)
_REFUSED = [
    *((name, ...) for name in (*sorted(_REQUIRED), *(f"groups.1.{name}" for name in _OF_A_GROUP))),
    *((name, None) for name in (*sorted(_OPTIONAL), "engine", "tokens_per_hash", "groups")),
    *((name, "") for name in ("tenant", "model_runner", "engine", "groups.0.kind")),
    *(("extra", {}), ("integrity", "sha256"), ("lora", "on"), ("format", 2), ("format", 1.0)),
    *(("tokens_per_hash", value) for value in (True, 16.0, -1, "16", 2**256)),
    *(("new", 1), ("groups.0.new", 1), ("groups.1.group_idx", 0), ("topology.tp", -1)),
    *(("model_config.x", 2**256), ("model_config.x", -(2**256)), ("model_config.x", deep(32))),
    *(("model_config.x", "\ud83d"), ("model_config.\udcff", 1), ("model_name", "caf\udce9")),
    ("groups.0.layer_names.0", ""),
]
_TAKEN = [
    *(("model_config.x", value) for value in (2**256 - 1, -(2**256 - 1), deep(31), "", 1.0, None)),
    *(("model_config.", 1), ("topology.tp", 0), ("groups.0.page_nbytes", []), ("tenant", ...)),
    *(("integrity", "blake3-128"), ("extra.x", {}), ("topology", {}), ("groups.1.group_idx", 7)),
]


@pytest.mark.parametrize(("path", "value"), _REFUSED, ids=lambda part: ascii(part)[:20])
def test_what_the_document_rules_out_is_refused(path, value):
    text = json.dumps(changed(path, value))
    with pytest.raises((IdentityMismatch, ConfigError)):
        Identity.from_manifest(namespace.parse_json(text))


@pytest.mark.parametrize(("path", "value"), _TAKEN, ids=lambda part: ascii(part)[:20])
def test_negative_control_what_it_allows_is_taken_and_is_another_namespace(path, value):
    text = json.dumps(changed(path, value))
    identity = Identity.from_manifest(namespace.parse_json(text))
    assert identity.digest != Identity.from_manifest(example(FORMAT)).digest
    again = Identity.from_manifest(namespace.parse_json(manifest_bytes(identity)))
    assert again.digest == identity.digest


@pytest.mark.parametrize(
    "source", ['{"a": 1, "a": 1}', "[NaN]", "[Infinity]", "[01]", "[1.]", '["\x01"]', "[1,]", ""]
)
def test_what_is_no_json_for_all_is_none(source):
    with pytest.raises(ValueError, match=r"\w"):
        namespace.parse_json(source)


def test_a_number_beyond_a_double_is_refused():
    text = re.sub(r'"scale": 0\.1', '"scale": 1e400', json.dumps(example(FORMAT)))
    with pytest.raises(IdentityMismatch):
        Identity.from_manifest(namespace.parse_json(text))


# --- what engines tell each other -------------------------------------------------------------

_NAME = "host-1-00000000-1"
_CLAIM = Claim(_NAME, "sm_90/m@0123456789abcdef", None, Limits(1, 2, 3, 4))
_USAGE = Usage({"sm_90/m@0123456789abcdef": (1, 2)}, {}, {_NAME: 3}, 4, 5, 6, 7, 8)
_MAY_BE_LEFT_OUT = {
    *("limits.namespaces", "limits.tenants", "limits.unused_s"),
    *("touch_interval_s", "touch_intervals"),
}


def check_shared_fields(text: str) -> None:
    _, _, section = text.partition("## What engines tell each other")
    for what in (Claim, Limits, Usage, LeaseState):
        for field in dataclasses.fields(what):
            assert f"`{field.name}`" in section, f"{what.__name__}.{field.name}"


def test_every_field_of_a_claim_of_limits_of_the_usage_and_of_the_lease_is_described():
    check_shared_fields(FORMAT)
    with pytest.raises(AssertionError):
        check_shared_fields(FORMAT.replace("`pruned_nbytes`", "what was pruned"))


def without(tree: dict, path: str) -> dict:
    tree = copy.deepcopy(tree)
    *parents, name = path.split(".")
    del (tree[parents[0]] if parents else tree)[name]
    return tree


def read_back(directory, claim: dict, usage: dict) -> tuple[bool, bool]:
    """Say whether a claim and a usage that are written so are understood."""
    (directory / "claims").mkdir(exist_ok=True)
    (directory / "claims" / f"{_NAME}.json").write_text(json.dumps(claim))
    (directory / "usage.json").write_text(json.dumps(usage))
    book = Book(str(directory))
    return book.claims() != [], book.usage() is not None


def test_a_claim_and_a_usage_need_the_fields_that_the_document_calls_required(tmp_path):
    claim, usage = dataclasses.asdict(_CLAIM), dataclasses.asdict(_USAGE)
    assert read_back(tmp_path, claim, usage) == (True, True)
    assert read_back(tmp_path, {**claim, "new": 1}, {**usage, "new": 1}) == (True, True)
    for path in (*claim, *(f"limits.{name}" for name in claim["limits"])):
        found = read_back(tmp_path, without(claim, path), usage)
        assert found == (path in _MAY_BE_LEFT_OUT, True), path
    for path in usage:
        found = read_back(tmp_path, claim, without(usage, path))
        assert found == (True, path in _MAY_BE_LEFT_OUT), path
