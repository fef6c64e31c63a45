"""The tables of inputs and exact outputs in docs/format.md are what the code makes.

Every check takes the document's text, so that each can be shown to fail on a doctored one.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import hashlib
import json
import random
import re
import struct
import types
import unicodedata

import pytest
from test_docs import fenced, rows, text_of

from fskv import namespace
from fskv.bounds.lease import LeaseState
from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.errors import (
    ChunkCorrupt,
    ChunkStale,
    ConfigError,
    IdentityMismatch,
    RootError,
    chunk_error_from_os,
)
from fskv.format.chunk_file import ChunkHeader, FileLayout, encode_header, parse_header
from fskv.format.integrity import xxh3_rows
from fskv.namespace import ChunkName, Identity
from fskv.root.root import Root, manifest_bytes
from fskv.types import Status
from tools.check.expect import Expected

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
        least = 928 + 8 * len(group.page_nbytes) + 8 * one.num_rows
        assert one.header_nbytes == -(-least // 4096) * 4096, "as the document's formula says"
    return len(said)


_HASH, _NAMESPACE = (hashlib.sha256(text).digest() for text in (b"example", b"namespace"))


def chunk() -> tuple[bytes, bytes]:
    """Return header and payload of the document's worked example."""
    layout = FileLayout(2, (24, 40), bytes(range(16)))
    payload = bytes(range(128)).ljust(layout.payload_nbytes, b"\0")
    header = ChunkHeader(
        key_hash=_HASH,
        group_idx=1,
        rank=0,
        namespace_digest=_NAMESPACE,
        layout_digest=layout.digest,
        num_blocks=2,
        page_nbytes=(24, 40),
        first_block=0,
        payload_nbytes=layout.payload_nbytes,
        row_digests=xxh3_rows(memoryview(payload)),
        creator="fskv/0.1.0",
        written_at_ms=1767225600000,
    )
    return encode_header(header, layout.header_nbytes), payload


def check_example(text: str) -> int:
    """The bytes and the name of the worked example are those that the code makes of the same input."""
    made, payload = chunk()
    (dump,) = fenced(text, "hex")
    shown = b"".join(bytes.fromhex(line[10:58]) for line in dump.splitlines())
    for line in dump.splitlines():
        at = int(line[:8], 16)
        printable = "".join(chr(c) if 32 <= c < 127 else "." for c in made[at : at + 16])
        assert line.endswith(f"|{printable[: len(shown) - at]}|")
    assert shown == made[: len(shown)]
    assert not any(made[len(shown) :])
    assert f"`{namespace.chunk_path(_HASH, 1, None)}`" in text
    assert f"the file has {len(made) + len(payload)} bytes" in " ".join(text.split())
    return len(shown)


@pytest.mark.parametrize(
    ("check", "least", "old", "new"),
    [
        (check_canonical, 10, "1e+22,1e+23", "1e+22,1E+23"),
        (check_canonical, 10, '{"\\u007f":3,"\\uff5e":2,', '{"\\uff5e":2,"\\u007f":3,'),
        (check_models, 13, "`Ubergro_e`", "`Ubergrosse`"),
        (check_models, 13, "`a_b_c_._-`", "`ab_cB_._-`"),
        (check_namespace, 6, '"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'),
        (check_namespace, 6, "`4096`, `266240`", "`4096`, `266241`"),
        (check_example, 100, "00000080  a6", "00000080  a7"),
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


def test_no_version_of_unicode_gives_an_identity_another_directory(monkeypatch):
    """Any data do, after `?` for what Unicode 3.2 does not have: so the document says."""
    rng, old = random.Random(1), unicodedata.ucd_3_2_0
    points = [chr(n) for n in range(0x110000) if not 0xD800 <= n < 0xE000]
    marks = [point for point in points if unicodedata.combining(point)]
    names = ["".join(points[at : at + 24]) for at in range(0, len(points), 24)]
    names += ["".join(rng.choices([*marks, *"aé.-"], k=20)) for _ in range(5000)]
    for name in names:
        known = "".join(char if old.category(char) != "Cn" else "?" for char in name)
        split = unicodedata.normalize("NFKD", known)
        bare = "".join(char for char in split if not unicodedata.combining(char))
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", bare)[-40:].lstrip("._-").rstrip("_") or "unknown"
        assert namespace.sanitise(name, 40, "unknown") == safe, ascii(name)

    # Negative control: with the data of this Python the document's vectors are not what the code makes.
    monkeypatch.setattr(namespace, "unicodedata", types.SimpleNamespace(ucd_3_2_0=unicodedata))
    with pytest.raises(AssertionError):
        check_models(FORMAT)


def deep(levels: int, inner: object = 1) -> object:
    tree = inner
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


_OPTIONAL = {"canonical_format", "tenant", "model_runner", "extra"}
_OF_A_GROUP = [field.name for field in dataclasses.fields(namespace.GroupIdentity)]
_REFUSED = [
    *((f"groups.1.{name}", ...) for name in _OF_A_GROUP),
    *((name, None) for name in (*sorted(_OPTIONAL), "engine", "tokens_per_hash", "groups")),
    *((name, "") for name in ("tenant", "model_runner", "engine", "groups.0.kind")),
    *(("extra", {}), ("integrity", "xxh3-64"), ("format", 2), ("format", 1.0)),
    *(("tokens_per_hash", value) for value in (True, 16.0, -1, "16", 2**256)),
    *(("new", 1), ("groups.0.new", 1), ("groups.1.group_idx", 0), ("topology.tp", -1)),
    *(("model_config.x", 2**256), ("model_config.x", -(2**256)), ("model_config.x", deep(32))),
    *(("model_config.x", "\ud83d"), ("model_config.\udcff", 1), ("model_name", "caf\udce9")),
    *(
        ("groups.0.layer_names.0", ""),
        ("model_config.x", deep(32, [])),
        ("groups.0.page_nbytes.0", 0),
    ),
    *(("groups.0.page_nbytes.0", 2**40), ("groups.1.group_idx", 10**6)),
    *(("blocks_per_chunk", 0), ("blocks_per_chunk", 2**31 + 1)),
]
_TAKEN = [
    *(("model_config.x", value) for value in (2**256 - 1, -(2**256 - 1), deep(31), "", 1.0, None)),
    *(("model_config.", 1), ("topology.tp", 0), ("groups.0.page_nbytes", []), ("tenant", ...)),
    *(("extra.x", {}), ("topology", {}), ("groups.1.group_idx", 7)),
    *(("model_config.x", deep(31, [])), ("groups.0.page_nbytes.0", 2**40 - 1)),
    *(("groups.1.group_idx", 999999), ("blocks_per_chunk", 2**31), ("blocks_per_chunk", 1)),
    *(("engine", "another"), ("weights", "x"), ("topology.new", 1), ("topology", {"tp": 1})),
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
    "source",
    [
        *('{"a": 1, "a": 1}', '{"a": 1, "\\u0061": 2}', "\ufeff{}", '["\x01"]', ""),
        *("[NaN]", "[Infinity]", "[01]", "[1.]", "[1,]"),
    ],
)
def test_what_is_no_json_for_all_is_none(source):
    with pytest.raises(ValueError, match=r"\w"):
        namespace.parse_json(source)


def test_negative_control_keys_that_only_look_alike_are_two():
    tree = namespace.parse_json('{"\\u00e9": 1, "e\\u0301": 2}')
    assert tree == {"\u00e9": 1, "e\u0301": 2}


def test_a_reader_takes_a_manifest_in_utf_8_and_no_other_encoding():
    text = json.dumps(example(FORMAT), ensure_ascii=False)
    assert not text.isascii()
    identity = Identity.from_manifest(namespace.parse_json(text.encode()))
    assert identity.digest == Identity.from_manifest(example(FORMAT)).digest
    assert manifest_bytes(identity).isascii()
    for other in ("utf-16", "utf-8-sig"):
        with pytest.raises(ValueError, match="no "):
            namespace.parse_json(text.encode(other))


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        ('{"format": 1}', True),
        ('{"x": "\\ud83d", "y": 1e400, "z": ' + 100 * "[" + 100 * "]" + ', "format": 1}', True),
        (f'{{"x": "\u00e9", "n": {2**300}, "format": 1}}', True),
        *((text, False) for text in ('{"format": 1.0}', '{"format": true}', '{"format": "1"}')),
        *((text, False) for text in ('{"format": 2}', "{}", "1", "", '{"format": 1, "x": NaN}')),
        *((text, False) for text in ('{"format": 1, "format": 1}', '\ufeff{"format": 1}')),
    ],
)
def test_a_root_is_one_of_format_1_whatever_else_its_file_says(tmp_path, content, taken):
    (tmp_path / "fskv.json").write_text(content, encoding="utf-8")
    if taken:
        Root.open(str(tmp_path), create=False, writable=False)
    else:
        with pytest.raises(RootError, match=r"format|damaged"):
            Root.open(str(tmp_path), create=False, writable=False)


def test_a_number_beyond_a_double_is_refused():
    text = re.sub(r'"scale": 0\.1', '"scale": 1e400', json.dumps(example(FORMAT)))
    with pytest.raises(IdentityMismatch):
        Identity.from_manifest(namespace.parse_json(text))


# --- the verdicts of a reader ------------------------------------------------------------------


def test_a_file_that_ends_in_its_header_is_corrupt_unless_it_is_of_another_version():
    header, _ = chunk()
    for nbytes in (0, 31, 32, 4095):
        with pytest.raises(ChunkCorrupt):
            parse_header(header[:nbytes])
    with pytest.raises(ChunkStale):
        parse_header(header[:8] + struct.pack("<I", 2) + header[12:32])
    assert parse_header(header).key_hash == _HASH


@pytest.mark.parametrize("wrong", [None, "name", "group_idx", "rank"])
def test_a_file_whose_header_is_not_that_of_its_name_is_stale(wrong):
    name = ChunkName(namespace.chunk_name(_HASH), 1, None)
    other = {"name": namespace.chunk_name(b"other"), "group_idx": 2, "rank": 1}
    header = parse_header(chunk()[0])
    if wrong is None:
        for rank in (None, 0):
            Expected().compare(header, name._replace(rank=rank))
    else:
        with pytest.raises(ChunkStale):
            Expected().compare(header, name._replace(**{wrong: other[wrong]}))


def test_what_is_not_there_is_missing_and_other_errors_say_nothing_about_a_file():
    found = {
        code: chunk_error_from_os(OSError(code, ""), "p").status
        for code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EIO)
    }
    assert found.pop(errno.ENOENT) is found.pop(errno.ENOTDIR) is Status.MISSING
    assert found.pop(errno.ELOOP) is Status.STALE
    assert not {*found.values()} & {Status.MISSING, Status.STALE, Status.CORRUPT}


# --- what engines tell each other -------------------------------------------------------------

_NAME = "host-1-00000000-1"
_HEARTBEAT = Heartbeat(_NAME, "sm_90/m@0123456789abcdef", None, Limits(1, 2, 3))
_USAGE = Usage(1, {"sm_90/m@0123456789abcdef": (1, 2)}, counted={_NAME: 3})


def check_shared_fields(text: str) -> None:
    _, _, section = text.partition("## What engines tell each other")
    for what in (Heartbeat, Limits, Usage, LeaseState):
        for field in dataclasses.fields(what):
            assert f"`{field.name}`" in section, f"{what.__name__}.{field.name}"


def test_every_field_of_a_heartbeat_of_limits_of_the_usage_and_of_the_lease_is_described():
    check_shared_fields(FORMAT)
    with pytest.raises(AssertionError):
        check_shared_fields(FORMAT.replace("`pruned_nbytes`", "what was pruned"))


def without(tree: dict, path: str) -> dict:
    tree = copy.deepcopy(tree)
    *parents, name = path.split(".")
    del (tree[parents[0]] if parents else tree)[name]
    return tree


def read_back(directory, heartbeat: dict, usage: dict) -> tuple[bool, bool]:
    """Say whether a heartbeat and a usage that are written so are understood."""
    (directory / f"heartbeat-{_NAME}.json").write_text(json.dumps(heartbeat))
    (directory / "usage.json").write_text(json.dumps(usage))
    files = SharedFiles(str(directory))
    return files.heartbeats() != [], files.usage() is not None


def test_a_heartbeat_and_a_usage_need_every_field_and_may_have_more(tmp_path):
    heartbeat, usage = dataclasses.asdict(_HEARTBEAT), dataclasses.asdict(_USAGE)
    assert read_back(tmp_path, heartbeat, usage) == (True, True)
    assert read_back(tmp_path, {**heartbeat, "new": 1}, {**usage, "new": 1}) == (True, True)
    for path in (*heartbeat, *(f"limits.{name}" for name in heartbeat["limits"])):
        assert read_back(tmp_path, without(heartbeat, path), usage) == (False, True), path
    for path in usage:
        assert read_back(tmp_path, heartbeat, without(usage, path)) == (True, False), path
