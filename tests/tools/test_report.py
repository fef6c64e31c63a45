"""`fskv report`: the page says what is on disk, is complete in itself, and nothing in a root can break it."""

from __future__ import annotations

import html.parser
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest
from tool_lab import Lab, check_lines, fskv, run, spoil

pytest.importorskip("fskv_tools.report", reason="the command line is not installed")

from fskv_tools.report import style
from fskv_tools.report.file import check, write
from fskv_tools.report.plots import Tick, area, bar, columns, nice_steps
from fskv_tools.report.survey import EDGES, SAMPLE, Ages, _Sample
from metrics_lab import Engine, server

from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.index.scan import RECORD
from fskv.observe.metrics import LOAD_FAILURES, NAMESPACE_INFO
from fskv.root.process_id import HOST, TOKEN

VOID = {"meta", "br", "link", "img", "input", "hr", "source", "base", "embed", "wbr"}
LIVE = {"script", "iframe", "object", "embed", "link", "img", "form", "base", "video", "audio"}
DAY = 86400


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


class Page(html.parser.HTMLParser):
    """What a browser would see; collects every way in which the page is not well-formed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.faults, self.open = [], [], [], []
        self.glued = False
        self.feed(text)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.glued = tag == "wbr"  # no space: a place where a line may end
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
            if self.glued:
                data = self.texts.pop() + data
            self.texts.append(data)
        self.glued = False

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def svgs(text):
    """Return the outer SVGs as they stand in the page."""
    found, depth, start = [], 0, 0
    for match in re.finditer(r"<svg\b|</svg>", text):
        if match[0] == "<svg":
            start = match.start() if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                found.append(text[start : match.end()])
    return found


def check_page(text):
    """All that holds for every page; returns it parsed."""
    page = Page(text)
    assert page.faults == []
    assert not {tag for tag, _ in page.tags} & LIVE
    for tag, attrs in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
        for name in ("src", "href", "action", "data", "srcset", "xlink:href", "background"):
            assert name not in attrs, (tag, attrs)
    assert "url(" not in style.SHEET
    assert "@import" not in text
    assert "http-equiv" in text
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") and t == "meta")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert [t for t, _ in page.tags].count("style") == 1
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:
        for name in (attrs.get("aria-labelledby") or "").split():
            assert name in ids
    for svg in svgs(text):
        tree = ET.fromstring(svg)
        if tree.get("aria-hidden") != "true":
            assert tree.get("role") == "img"
            assert [child.tag for child in tree[:2]] == ["title", "desc"]
            assert all(child.text for child in tree[:2])
    return page


def report(lab, tmp_path, *words, name="out.html"):
    out = tmp_path / name
    done = run("report", "--html", out, *words, root=lab.path)
    text = out.read_text(encoding="utf-8") if out.exists() else None
    return done, text


def on_disk(root):
    """Count chunk files from outside: what `find` says."""
    files = [
        os.stat(os.path.join(folder, name))
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith(".kv")
    ]
    return len(files), sum(info.st_blocks * 512 for info in files)


# --- what it says -----------------------------------------------------------------------


def test_the_page_says_what_is_on_disk(lab, tmp_path):
    one = lab.namespace(arch="sm_90", model_name="org/one")
    two = lab.namespace(arch="sm_89", model_name="org/two", tenant="acme")
    lab.chunks(one, range(30))
    lab.chunks(one, range(30, 40), age_s=2.5 * DAY)
    lab.chunks(two, range(5), age_s=40.5 * DAY)
    lab.chunks(two, range(5), rank=1, age_s=40.5 * DAY)
    files, nbytes = on_disk(lab.path)
    done, text = report(lab, tmp_path, "--json")
    assert done.exit_code == 0, done.stderr
    page = check_page(text)
    summary = done.summary
    assert (summary["files"], summary["nbytes"], summary["chunks"]) == (files, nbytes, 45)
    assert f"{nbytes:,} bytes" in page.text
    assert f"in {files:,} files" in page.text
    for name in (one.id, two.id, "org/one", "org/two", "sm_90", "sm_89", "acme", "full"):
        assert name in page.text
    ages = {line["below_s"]: line["files"] for line in summary["by_age"]}
    assert ages == {3600: 30, 21600: 0, DAY: 0, 3 * DAY: 10, 7 * DAY: 0, 30 * DAY: 0} | {
        90 * DAY: 10,
        365 * DAY: 0,
        None: 0,
    }
    assert sum(line["nbytes"] for line in summary["by_age"]) == nbytes
    by_name = {line["namespace"]: line for line in done.lines if line["type"] == "namespace"}
    assert by_name[two.id]["files"] == 10
    assert by_name[two.id]["tenant"] == "acme"
    assert by_name[one.id]["kinds"] == {"full": by_name[one.id]["nbytes"]}
    check_lines("report", [dict(line) for line in done.lines])


def test_one_file_is_no_files_and_names_may_be_broken_between_their_parts(lab, tmp_path):
    """A narrow page broke `full/FullAttentionSpec` in a word; negative control: a name of one part."""
    for files, words in ((1, "about 1 file of "), (2, "about 2 files of ")):
        lab.chunk(lab.namespace(model_name="org/one_model"), files)
        done, text = report(lab, tmp_path)
        assert words in done.stderr
    page = check_page(text)
    assert "org/<wbr>one_<wbr>model</th>" in text
    assert '<th scope="row">full</th>' in text
    assert "org/one_model" in page.text


@pytest.mark.parametrize(
    "oldest_s", [61, 5000, 7200, DAY, 13 * DAY, 50 * DAY, 400 * DAY, 3000 * DAY]
)
def test_labels_of_the_time_axis_do_not_touch_on_a_page_of_480_pixels(lab, tmp_path, oldest_s):
    """There the axis has 360 pixels, and a character about 6. `10 m` and `now` were one word."""
    where = lab.namespace()
    lab.chunk(where, 1, age_s=oldest_s)
    drawn = report(lab, tmp_path)[1].partition('id="curve-t"')[2].partition("</figure>")[0]
    pattern = r'class="tick" x="([\d.]+)%" y="\d+" text-anchor="(\w+)">([^<]+)<'
    ends = []
    for at, anchor, label in re.findall(pattern, drawn):
        wide = 6 * len(label)
        left = 3.6 * float(at) - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        ends.append((left, left + wide))
    assert len(ends) >= 2
    assert all(b[0] - a[1] >= 3 for a, b in itertools.pairwise(ends)), ends


def test_a_share_is_of_all_bytes_in_each_table(lab, tmp_path):
    for name in ("org/one", "org/two"):
        lab.chunks(lab.namespace(model_name=name), range(4))
    text = report(lab, tmp_path)[1]
    for section in ("By model", '<h2 id="namespaces">'):
        shown = text.partition(section)[2].partition("</table>")[0]
        assert re.findall(r'class="mark" x="0" y="0" width="([\d.]+)%"', shown) == ["50.00"] * 2, (
            section
        )


def test_reuse_is_the_time_between_storing_and_last_use(lab, tmp_path):
    where = lab.namespace()
    stored_at = 1_700_000_000  # what Lab writes into its headers
    for number, gap_s in enumerate((0, 30, 1800, 1800, 2 * DAY, 400 * DAY, -5000)):
        path = lab.chunk(where, number)
        os.utime(path, (stored_at + gap_s, stored_at + gap_s))
    summary = report(lab, tmp_path, "--json")[0].summary
    bins = {line["below_s"]: line["files"] for line in summary["reuse"]}
    assert (bins[600], bins[3600], bins[3 * DAY], bins[None]) == (2, 2, 1, 1)
    assert summary["sampled"] == 7  # one of them was used before it was stored


def test_a_page_is_replaced_as_a_whole_and_does_not_change_with_an_unchanged_root(lab, tmp_path):
    lab.chunks(lab.namespace(), range(5), age_s=5.2 * DAY)
    first = report(lab, tmp_path)[1]
    second = report(lab, tmp_path)[1]
    clock = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC|[\d.]+ [A-Za-z]+iB</dd?|[^<>]*iB[^<>]*")
    assert clock.sub("", first) == clock.sub("", second)
    assert os.listdir(tmp_path).count("out.html") == 1
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_an_empty_root_has_a_page(lab, tmp_path):
    done, text = report(lab, tmp_path)
    assert done.exit_code == 0, done.stderr
    page = check_page(text)
    assert "There is no chunk file." in page.text
    assert "Left out" in page.text


def test_hit_ratios_come_from_endpoints_and_one_without_an_answer_is_said_so(lab, tmp_path):
    where = lab.namespace(model_name="/a/path/that/the/server/has/another/name/for")
    engine = Engine()
    engine.traffic()
    with server(engine) as good:  # an engine that does not say which namespace is its own
        _, unnamed = report(lab, tmp_path, "--metrics", good.url)
    engine.set(NAMESPACE_INFO, 1, where.id)
    with server(engine) as good, server(engine, "html") as bad:
        done, text = report(lab, tmp_path, "--metrics", f"{good.url},{bad.url},127.0.0.1:1")
    assert done.exit_code == 0, done.stderr
    page = check_page(text)
    assert "60.0 %" in page.text
    assert "75.0 %" not in page.text, "of the chunks that were looked for"
    assert "its answer is no metrics" in page.text
    assert "refused" in page.text
    assert "Left out" not in page.text
    assert f"org/model {where.id} " in page.text
    assert "org/model it names none" in check_page(unnamed).text


def test_bounds_and_engines_are_those_of_the_heartbeats(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(4))
    shared = f"{lab.path}/.fskv-maintenance"
    os.makedirs(shared)
    files = SharedFiles(shared)
    mine = f"{HOST}-{os.getpid()}-{TOKEN}-1"
    files.publish(Heartbeat(mine, where.id, None, Limits(max_nbytes=10 << 20), 4000))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    files.publish(Heartbeat(f"{HOST}-{gone.pid}-{TOKEN}-2", where.id, None, Limits()))
    files.publish_usage(Usage(namespaces={where.id: (1, 1)}, unremovable=3))
    page = check_page(report(lab, tmp_path)[1])
    assert "1 alive of 2 with a heartbeat" in page.text
    assert "10.0 MiB" in page.text
    assert re.search(r"Files that cannot be removed 3 ", page.text)
    assert " gone" in page.text


# --- hostile roots ----------------------------------------------------------------------

EVIL = "<script>alert(1)</script>"


def test_names_and_manifests_cannot_put_anything_into_the_page(lab, tmp_path):
    evil = lab.namespace(
        model_name=f'a"><img src=x onerror=alert(1)>{EVIL}',
        tenant=f"</td></table>{EVIL}<style>*{{}}",
    )
    lab.chunks(evil, range(3))
    for name in (f"{EVIL[:8]}x@{'0' * 16}", f"</title>\u202e\x1b[31m@{'1' * 16}"):
        os.makedirs(f"{lab.path}/{name.replace('/', '_')}/m@{'2' * 16}")
        os.makedirs(f"{lab.path}/<b onload=x>/{name.replace('/', '_')}")
    with open(f"{evil.directory.path}/chunks/<svg onload=alert(1)>", "wb"):
        pass
    with open(f"{lab.path}/<script src=x>", "wb"):
        pass
    shared = f"{lab.path}/.fskv-maintenance"
    os.makedirs(shared)
    with open(f"{shared}/lease.json", "w", encoding="utf-8") as file:
        state = {"holder": EVIL, "host": EVIL, "pid": 1, "boot": EVIL, "since_ms": 1, "beat": 1}
        json.dump(state, file)
    engine = Engine()
    engine.traffic()
    engine.add(LOAD_FAILURES, 2, EVIL)
    with server(engine) as metrics:
        done, text = report(lab, tmp_path, "--metrics", metrics.url)
    assert done.exit_code == 1  # namespaces without an identity
    page = check_page(text)
    assert EVIL in page.text  # said, as text
    assert EVIL not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_negative_control_the_check_finds_what_is_not_escaped(lab, tmp_path, monkeypatch):
    from fskv_tools.report import page

    evil = lab.namespace(tenant="<img src=x>")
    lab.chunks(evil, range(3))
    monkeypatch.setattr(page, "text", lambda value: value)
    text = report(lab, tmp_path)[1]
    with pytest.raises(AssertionError):
        check_page(text)


def test_a_root_full_of_strange_entries_is_reported_and_left_alone(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(10))
    strange = spoil(lab, where)
    shard = f"{where.directory.path}/chunks/abc"
    with open(f"{shard}/{HOST}-1-{TOKEN}-1.part", "wb") as file:
        file.write(bytes(5000))
    os.utime(f"{shard}/{HOST}-1-{TOKEN}-1.part", (1, 1))
    bad = lab.chunk(where, 10)
    with open(bad, "r+b") as file:
        file.seek(40)
        file.write(b"damaged")
    ahead = lab.chunk(where, 11)
    os.utime(ahead, (time.time() + 10 * DAY,) * 2)
    before = {os.fsencode(path): os.lstat(path).st_ino for path in strange}
    done = fskv("report", "--html", tmp_path / "out.html", "--json", root=lab.path)
    assert done.exit_code == 1, done.stderr
    check_page((tmp_path / "out.html").read_text(encoding="utf-8"))
    summary = done.summary
    assert (summary["files"], summary["damaged"], summary["undated"]) == (12, 1, 1)
    assert (summary["parts"], summary["old_parts"]) == (1, 1)
    # All that spoil put in, but for the file outside; "strange" counts once, with what is in it.
    assert summary["foreign"] == len(strange) - 1
    for folder in ("", "/tmp", "/chunks"):
        with open(f"{where.directory.path}{folder}/foreign", "wb"):
            pass
    again = run("report", "--json", root=lab.path).summary
    assert again["foreign"] == summary["foreign"] + 3
    assert {path: os.lstat(path).st_ino for path in before} == before


@pytest.mark.parametrize("kind", ["missing", "foreign", "newer"])
def test_what_is_no_root_is_said_and_no_page_is_written(tmp_path, kind):
    root = tmp_path / "kv"
    if kind != "missing":
        root.mkdir()
        (root / "fskv.json").write_text('{"format": 99}' if kind == "newer" else "[")
    done = run("report", "--html", tmp_path / "out.html", root=root)
    assert done.exit_code == 10
    assert not (tmp_path / "out.html").exists()


# --- the file ---------------------------------------------------------------------------


def test_only_a_plain_file_is_written_over(lab, tmp_path):
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "link.html").symlink_to(target)
    (tmp_path / "folder.html").mkdir()
    os.mkfifo(tmp_path / "fifo.html")
    for name in ("link.html", "folder.html", "fifo.html", "no/such/folder.html", ""):
        done = run("report", "--html", f"{tmp_path}/{name}", root=lab.path)
        assert done.exit_code == 2, name
    for inside in ("out.html", "a/out.html"):
        os.makedirs(f"{lab.path}/a", exist_ok=True)
        assert run("report", "--html", f"{lab.path}/{inside}", root=lab.path).exit_code == 2
    assert target.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == [
        "fifo.html",
        "folder.html",
        "kv",
        "link.html",
        "precious",
    ]
    assert run("report", root=lab.path).exit_code == 2
    assert run("report", "--json", root=lab.path).exit_code == 0


def test_a_page_goes_to_no_pipe(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("report", "--html", "-", root=lab.path)
    assert (done.exit_code, "'-'" in done.stderr) == (2, True)
    assert not (tmp_path / "-").exists()


def test_a_page_that_could_not_be_written_leaves_the_old_one_and_no_part(tmp_path, monkeypatch):
    out = str(tmp_path / "out.html")
    write(out, "old")
    for error in (OSError(28, "full"), KeyboardInterrupt()):

        def fail(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(type(error)):
                write(out, "new")
        assert os.listdir(tmp_path) == ["out.html"]
        assert (tmp_path / "out.html").read_text() == "old"
    assert check(out, "/nonexistent") == out
    assert write(out, "new \udcff") == len("new \\udcff")


@pytest.mark.parametrize("call", ["survey._walk", "os.rename"], ids=["looking", "publishing"])
def test_ctrl_c_leaves_nothing_behind(lab, tmp_path, call):
    spaces = [lab.namespace(model_name=f"org/{n}") for n in range(20)]
    for where in spaces:
        lab.chunks(where, range(30))
    code = (
        "import os, time; from fskv_tools.report import survey; from fskv_tools.cli import main\n"
        f"real = {call}\n"
        "def slow(*args, **more):\n"
        "    print('there', flush=True); time.sleep(1); return real(*args, **more)\n"
        f"{call} = slow\n"
        "main()"
    )
    words = ["report", "--root", lab.path, "--html", str(tmp_path / "out.html")]
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"there\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert b"Traceback" not in err
    assert os.listdir(tmp_path) == ["kv"]


# --- its parts --------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, two):
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_text_can_be_read_and_marks_be_seen_in_light_and_dark(colours):
    for name in ("text", "soft", "good", "warn", "bad"):  # WCAG 2.2: 4.5 for text
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert contrast(colours["mark"], colours["card"]) >= 3  # and 3 for graphics
    assert contrast("#777777", "#888888") < 3  # the measure itself


def test_both_colour_schemes_are_in_the_sheet():
    assert "prefers-color-scheme:dark" in style.SHEET
    assert "color-scheme:light dark" in style.SHEET
    assert style.LIGHT.keys() == style.DARK.keys()
    used = set(re.findall(r"var\(--(\w+)\)", style.SHEET))
    assert used == set(style.LIGHT)


def test_grid_lines_are_round_and_cover_the_data():
    for base in (10.0, 1024.0):
        for most in (1e-9, 0.7, 1, 3, 99, 100, 1023, 1024, 1025, 5.5e9, 7.7e12, 2**62):
            steps = nice_steps(most, base=base)
            assert steps[0] == 0
            assert steps[-1] >= most * (1 - 1e-9)
            assert 2 <= len(steps) <= 9
    assert nice_steps(0) == nice_steps(float("nan")) == [0.0, 1.0]
    assert nice_steps(3 << 30, base=1024.0)[1] == 1 << 30


def test_plots_are_svg_whatever_they_are_given():
    for values in ([], [0, 0], [1], [float(1 << 60), 1e-9]):
        labels = ["<a&\"'>"] * len(values)
        ET.fromstring(columns("n", "<t>", "&", values, labels, labels, str))
        points = [(at / max(1, len(values)), value) for at, value in enumerate(values)]
        ET.fromstring(area("n", "<t>", "&", points, [Tick(0.5, "<")], str))
    rects = [
        r for r in ET.fromstring(columns("n", "t", "d", [1, 2], "ab", "ab", str)) if r.tag == "rect"
    ]
    assert float(rects[1].get("height")) == pytest.approx(2 * float(rects[0].get("height")))
    assert 'width="50.00%"' in bar(0.5)
    assert 'width="100.00%"' in bar(7.0, over=True)


def test_ages_are_exact_sums_over_their_steps():
    import numpy as np

    now_ns = 2_000_000_000 * 10**9
    rng = np.random.default_rng(5)
    records = np.zeros(5000, RECORD)
    age_s = np.concatenate([rng.uniform(0, 400 * DAY, 4990), [0, 1e9, *[3 * DAY] * 8]])
    records["mtime_ns"] = now_ns - (age_s * 1e9).astype(np.int64)
    records["nbytes"] = rng.integers(1, 1 << 40, 5000)
    records["mtime_ns"][:7] = 0
    ages = Ages()
    for part in np.array_split(records, 9):
        ages.add(part, now_ns)
    dated = records[7:]
    found_s = (now_ns - dated["mtime_ns"]) / 1e9
    for low, high in ((0, 3600), (DAY, 3 * DAY), (3 * DAY, 7 * DAY), (365 * DAY, float("inf"))):
        which = (found_s >= low) & (found_s < high)
        part = ages.between(low, high)
        assert (part.files, part.nbytes) == (which.sum(), dated["nbytes"][which].sum())
    assert (ages.undated.files, ages.undated.nbytes) == (7, records["nbytes"][:7].sum())
    for age, nbytes in ages.curve([0.0, 3600.0, 3.0 * DAY, 90.0 * DAY]):
        assert nbytes == dated["nbytes"][found_s >= age].sum()
    assert ages.oldest_s == EDGES[-1]
    assert Ages().oldest_s == 0


def test_a_sample_is_bounded_and_every_file_has_the_same_chance():
    import numpy as np

    sample = _Sample(200)
    for start in range(0, 20_000, 100):
        records = np.zeros(100, RECORD)
        records["nbytes"] = np.arange(start, start + 100)
        sample.offer(type("N", (), {"id": "n"}), records)
    drawn = np.array([int(record["nbytes"]) for _, record in sample.files()])
    assert len(set(drawn.tolist())) == 200
    assert 0.4 < (drawn < 10_000).mean() < 0.6
    assert SAMPLE <= 10_000


def test_a_hundred_thousand_files_are_aggregated_without_being_held(tmp_path, monkeypatch):
    """Memory follows the largest directory, not the root: shards are made up, so that this takes seconds."""
    import tracemalloc

    import numpy as np
    from fskv_tools.report import survey
    from fskv_tools.root_view import Namespace, RootView

    from fskv.index.scan import Shard

    lab = Lab(tmp_path / "kv")
    lab.namespace()

    def shards(count):
        def made(self, start):
            for idx in range(count):
                records = np.zeros(250, RECORD)
                records["group"] = np.arange(250)
                records["nbytes"] = 4096
                records["mtime_ns"] = time.time_ns() - idx * 10**12
                yield Shard(idx, 1, records)

        return made

    peaks = []
    for count in (40, 400):
        monkeypatch.setattr(Namespace, "shards", shards(count))
        tracemalloc.start()
        found = survey.survey(RootView.open(lab.path))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.files == 250 * count
        assert found.nbytes == 250 * count * 4096
    assert peaks[1] < peaks[0] + (2 << 20)
