"""`fskv report`: the page says what is on disk, is complete in itself, and nothing in a root can break it."""

from __future__ import annotations

import html.parser
import json
import os
import sys

import pytest
from tool_lab import run

pytest.importorskip("jinja2")

from fskv_tools.terminal import iec

from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Limits
from fskv.root.process_id import HOST, TOKEN

VOID = {"meta", "br"}
LIVE = {"script", "iframe", "object", "embed", "link", "form", "base", "video", "audio"}
DAY = 86400


class Page(html.parser.HTMLParser):
    """What a browser would see; collects every way in which the page is not well-formed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.faults, self.open = [], [], [], []
        self.feed(text)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if len({name for name, _ in attrs}) != len(attrs):
            self.faults.append(f"{tag} has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"{tag} is closed where it is not open")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def check_page(text):
    """All that holds for every page; returns it parsed."""
    found = Page(text)
    assert found.faults == []
    assert not {tag for tag, _ in found.tags} & LIVE
    for tag, attrs in found.tags:
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
        for name in ("src", "href", "action", "data", "srcset", "xlink:href", "background"):
            assert name not in attrs, (tag, attrs)
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv") and t == "meta")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert [t for t, _ in found.tags].count("style") == 1
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert sorted(ids) == sorted(
        {a["aria-labelledby"] for _, a in found.tags if "aria-labelledby" in a}
    )
    return found


def report(lab, tmp_path, *words):
    out = tmp_path / "out.html"
    done = run("report", "--html", out, *words, root=lab.path)
    text = out.read_text(encoding="utf-8") if out.exists() else None
    return done, text


# --- what it says -----------------------------------------------------------------------


def test_the_page_says_what_is_on_disk(lab, tmp_path):
    one = lab.namespace(arch="sm_90", model_name="org/one")
    two = lab.namespace(arch="sm_89", model_name="org/two", tenant="acme")
    paths = lab.chunks(one, range(30)) + lab.chunks(one, range(30, 40), age_s=2.5 * DAY)
    paths += lab.chunks(two, range(5), age_s=40.5 * DAY)
    paths += lab.chunks(two, range(5), rank=1, age_s=40.5 * DAY)
    nbytes = sum(os.stat(path).st_blocks * 512 for path in paths)
    done, text = report(lab, tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "50 files in the root" in done.stderr
    found = check_page(text)
    for told in (
        *(f"{nbytes:,} bytes", "Chunk files 50 in 2 namespaces", "Nothing is wrong."),
        *(one.id, two.id, "acme"),
    ):
        assert told in found.text, told
    assert "Bounds" not in found.text  # nobody declares one
    sizes = [sum(os.stat(p).st_blocks * 512 for p in part) for part in (paths[30:], paths[40:])]
    for ages, unused in (("1h", "6h", "1d"), sizes[0]), (("7d", "30d"), sizes[1]), (("180d",), 0):
        for age in ages:
            assert f" {age} {100 * unused / nbytes:.1f} % {iec(unused)}" in found.text


def test_an_empty_root_has_a_page_in_the_working_directory_by_default(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("report", root=lab.path)
    assert done.exit_code == 0, done.stderr
    assert f"{tmp_path}/fskv-report.html: " in done.stderr
    found = check_page((tmp_path / "fskv-report.html").read_text(encoding="utf-8"))
    assert [a["id"] for _, a in found.tags if "id" in a] == ["health", "namespaces"]


# --- hostile roots ----------------------------------------------------------------------

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def hostile(lab, shared):
    evil = lab.namespace(
        model_name=f'a"><img src=x onerror=alert(1)>{EVIL}',
        tenant=f"</td></table>{EVIL}<style>*{{}}",
    )
    lab.chunks(evil, range(3))
    for name in (f"{EVIL[:8]}x@{'0' * 16}", f"</title>\u202e\x1b[31m@{'1' * 16}"):
        os.makedirs(f"{lab.path}/{name.replace('/', '_')}/m@{'2' * 16}")
        os.makedirs(f"{lab.path}/<b onload=x>/{name.replace('/', '_')}")
    with open(f"{lab.path}/.fskv-x", "wb"):
        pass
    shard = os.path.dirname(lab.chunk(evil, 9))
    with open(f"{shard}/<svg onload=alert(1)>", "wb"):
        pass
    with open(f"{lab.path}/{SHARED_DIR}/lease.json", "w", encoding="utf-8") as file:
        state = {"holder": EVIL, "host": EVIL, "pid": 1, "boot": EVIL, "since_ms": 1, "beat": 1}
        json.dump(state, file)
    mine = f"{HOST}-{os.getpid()}-{TOKEN}-1"
    shared.publish(Heartbeat(mine, evil.id, EVIL, Limits()))


@pytest.mark.usefixtures("hostile")
def test_names_and_manifests_cannot_put_anything_into_the_page(lab, tmp_path):
    done, text = report(lab, tmp_path)
    assert done.exit_code == 1  # namespaces without an identity
    found = check_page(text)
    assert EVIL in found.text  # said, as text
    assert EVIL not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("escaped", [True, False])
def test_negative_control_the_check_finds_what_is_not_escaped(lab, tmp_path, monkeypatch, escaped):
    import jinja2

    real = jinja2.Environment

    def environment(**options):
        return real(**{**options, "autoescape": escaped})

    monkeypatch.setattr(jinja2, "Environment", environment)
    text = report(lab, tmp_path)[1]
    if escaped:
        check_page(text)
    else:
        with pytest.raises(AssertionError):
            check_page(text)


def test_what_draws_a_page_is_named_where_it_is_not_installed(lab, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done, text = report(lab, tmp_path)
    assert (done.exit_code, text) == (1, None)
    assert done.stderr.startswith("fskv: report: jinja2 is not installed; ")
    assert "pip install '.[report]'" in done.stderr


# --- the file ---------------------------------------------------------------------------


def test_only_a_plain_file_outside_of_the_root_is_written_over(lab, tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "link.html").symlink_to(target)
    (tmp_path / "folder.html").mkdir()
    os.mkfifo(tmp_path / "fifo.html")
    os.makedirs(f"{lab.path}/a")
    there = set(os.listdir(tmp_path))
    for name in (
        *("link.html", "folder.html", "fifo.html", "no/such/folder.html", ""),
        *("kv/out.html", "kv/a/out.html"),
    ):
        done = run("report", "--html", f"{tmp_path}/{name}", root=lab.path)
        assert done.exit_code == 2, name
    assert run("report", "--html", "-", root=lab.path).exit_code == 2
    assert target.read_text() == "precious"
    assert set(os.listdir(tmp_path)) == there


# --- its parts --------------------------------------------------------------------------
