"""`fskv top`: whatever a root or an endpoint does, the screen goes on, fits, and gives the terminal back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace

import pytest
from tool_lab import Lab, check_lines, fskv, run, spoil

pytest.importorskip("fskv_tools.top", reason="the command line is not installed")

from fskv_tools import endpoint, survey, terminal
from fskv_tools.commands import top as command
from fskv_tools.exits import UsageError
from fskv_tools.root_view import RootView
from fskv_tools.top import frame, watch
from metrics_lab import Engine, server
from prometheus_client import Gauge
from rich.cells import cell_len
from rich.console import Console
from world import wait_for

from fskv.bounds.limits import Heartbeat, Limits, Scope, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.index import scan
from fskv.observe import metrics
from fskv.root.filesystem import Space
from fskv.root.process_id import HOST, TOKEN
from fskv.sizes import Share

GIB = 1 << 30
HANG_S = 60  # generous: nothing here should take more than seconds
OTHER = "node-9-4711-ab12cd34-5"


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


class Neighbours:
    """Engines that share a root: what they would write to it."""

    def __init__(self, lab, *spaces):
        self.shared = f"{lab.path}/.fskv-maintenance"
        os.makedirs(self.shared)
        self.files = SharedFiles(self.shared)
        self.ids = [where.id for where in spaces]
        self.me = f"{HOST}-{os.getpid()}-{TOKEN}-1"
        self.written = self.beat = 0
        self.publish()

    def publish(self, written=0, pruned=0):
        self.written += written
        self.beat += 1
        limits = Limits(max_nbytes=4 * GIB, keep_free=Share(1.0))
        for number, name in enumerate([self.me, OTHER]):
            where = self.ids[number % len(self.ids)]
            beat = Heartbeat(name, where, None, limits, self.written, number, self.beat)
            self.files.publish(beat)
        sizes = dict.fromkeys(self.ids, (GIB + 2 * self.written, 100))
        usage = Usage(self.beat, sizes, at_ms=1_800_000_000_000, pruned_nbytes=pruned)
        self.files.publish_usage(usage)
        lease = {"holder": self.me, "host": HOST, "pid": os.getpid(), "boot": TOKEN}
        lease |= {"since_ms": 1, "beat": self.beat}
        with open(f"{self.shared}/lease.json", "w", encoding="ascii") as file:
            file.write(json.dumps(lease).ljust(1024) + "\n")


def top(lab, *words, **options):
    return run("top", "--once", "--interval", 0.2, *words, root=lab.path, **options)


def sample_of(lab, *words):
    """Return the survey of a JSON line."""
    return top(lab, "--json", *words).lines[0]["survey"]


def text_of(drawn, width, **options):
    """Return what is shown, as a person without colours sees it."""
    console = Console(width=width, color_system=None, highlight=False, **options)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()


# --- the root ---------------------------------------------------------------------------


def test_a_root_without_engines_is_counted_by_the_command_itself(lab):
    one, two = lab.namespace(), lab.namespace(model_name="org/other", tenant="acme")
    paths = lab.chunks(one, range(20)) + lab.chunks(two, range(5), rank=3)
    done = top(lab, "--json")
    assert done.exit_code == 0, done.stderr
    seen = done.lines[0]["survey"]
    assert seen["counted_by"] == "walk"
    assert seen["files"] == len(paths)
    assert seen["nbytes"] == sum(os.stat(path).st_blocks * 512 for path in paths)
    sizes = {line["namespace"]: line["files"] for line in seen["namespaces"]}
    assert sizes == {one.id: 20, two.id: 5}
    assert seen["free_nbytes"] > 0
    assert (seen["keeper"], seen["engines"], seen["bounds"]) == (None, [], [])
    check_lines("top", [dict(line) for line in done.lines])


def test_a_sparse_file_counts_for_no_more_than_the_file_system_here_too(lab):
    where = lab.namespace()
    paths = lab.chunks(where, range(3))
    for path in paths:
        with open(path, "wb"):
            os.truncate(path, 1 << 43)  # ext4: more than there is, and less than the largest
    total = Space.of(lab.path).total_nbytes
    assert os.stat(paths[0]).st_size > total  # the control: what it would count for
    assert survey.walk(RootView.open(lab.path)).sizes[where.id] == (3 * total, 3)


@pytest.mark.parametrize("what", ["an architecture", "a namespace", "chunks that are a link", None])
def test_what_the_command_cannot_list_is_said_and_no_zero(lab, monkeypatch, what):
    """None is the control."""
    one, other = lab.namespace(), lab.namespace(model_name="org/other")
    lab.chunks(one, range(4))
    chunks = f"{other.directory.path}/chunks"
    if what == "chunks that are a link":
        os.rmdir(chunks)
        os.symlink(f"{one.directory.path}/chunks", chunks)
    else:
        closed = {"an architecture": os.path.dirname(other.directory.path), "a namespace": chunks}
        deny(monkeypatch, closed.get(what, "/nowhere"))
    done = top(lab, "--json")
    seen = done.lines[0]["survey"]
    assert seen["unlistable"] == (what is not None)
    assert done.summary["unanswered"] == (what is not None)
    assert done.exit_code == (3 if what else 0)
    sizes = {line["namespace"]: line["files"] for line in seen["namespaces"]}
    closed_sizes = {} if what == "an architecture" else {one.id: 4, other.id: None}
    assert sizes == (closed_sizes if what else {one.id: 4, other.id: 0})
    shown = top(lab).stdout
    said = "directories that could not be listed: 1; sizes may be too small"
    assert (said in shown) is (what is not None)


def deny(monkeypatch, path):
    """Let nobody list directory `path`: root would be allowed to, whatever its mode."""

    def closed(real):
        def listed(*arguments):
            if {path, os.fsencode(path)} & {*arguments}:
                raise PermissionError(13, "Permission denied", path)
            return real(*arguments)

        return listed

    monkeypatch.setattr(os, "scandir", closed(os.scandir))
    monkeypatch.setattr(scan, "opened", closed(scan.opened))


def test_what_the_count_does_not_name_is_in_the_totals(lab):
    neighbours = Neighbours(lab, lab.namespace())
    named = sample_of(lab)  # the control: nothing is left unnamed
    assert (named["nbytes"], named["files"]) == (GIB, 100)
    usage = neighbours.files.usage()
    neighbours.files.publish_usage(replace(usage, others=(7 * GIB, 9)))
    seen = sample_of(lab)
    assert (seen["nbytes"], seen["files"]) == (8 * GIB, 109)
    (root,) = [bound for bound in seen["bounds"] if bound["kind"] == "root"]
    assert root["used"] == seen["nbytes"]


def test_growth_rates_bounds_and_signs_of_life_come_from_what_engines_tell(lab, monkeypatch):
    one, two = lab.namespace(), lab.namespace(model_name="org/other")
    neighbours = Neighbours(lab, one, two)
    now = [100.0]
    monkeypatch.setattr(survey.time, "monotonic", lambda: now[0])
    observer = survey.Observer(RootView.open(lab.path))
    first = observer.look()
    assert first.growth is None
    assert {one.status for one in first.engines} == {"alive", "not known yet"}
    assert [one.rate for one in first.engines] == [None, None]
    now[0] += 2
    neighbours.publish(written=1 << 20, pruned=1 << 10)
    last = observer.look()
    assert (last.counted_by, last.nbytes) == ("engines", first.nbytes + (4 << 20))
    assert [n.growth for n in last.namespaces] == [1 << 20, 1 << 20]
    assert (last.growth, last.pruned) == (2 << 20, 512)
    engines = {engine.name: engine for engine in last.engines}
    assert {engine.status for engine in engines.values()} == {"alive"}
    other = engines[OTHER]
    assert (other.host, other.pid, other.disk_full, other.rate) == ("node-9", 4711, 1, 1 << 19)
    bounds = {bound.kind: bound for bound in last.bounds}
    assert (bounds["root"].limit, bounds["root"].used) == (4 * GIB, last.nbytes)
    assert bounds["free"].limit < last.total_nbytes
    assert last.keeper["status"] == "alive"
    now[0] += 16
    engines = {engine.name: engine for engine in observer.look().engines}
    assert (engines[OTHER].status, engines[OTHER].silent_s) == ("silent", 16)


def test_an_engine_that_is_gone_is_said_to_be_and_its_bound_holds_no_more(lab):
    where = lab.namespace()
    neighbours = Neighbours(lab, where)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    gone = Heartbeat(f"{HOST}-{dead.pid}-{TOKEN}-1", where.id, None, Limits(max_nbytes=GIB))
    neighbours.files.publish(gone)
    seen = sample_of(lab)
    assert [b["limit"] for b in seen["bounds"] if b["kind"] == "root"] == [4 * GIB]
    assert {e["name"]: e["status"] for e in seen["engines"]} == {
        neighbours.me: "alive",
        OTHER: "not known yet",  # nobody can say within a second
        gone.name: "gone",
    }
    assert f"1 engine gone: {HOST}" in top(lab).stdout


def test_hostile_files_between_engines_are_left_out(lab):
    where = lab.namespace()
    lab.chunks(where, range(3))
    neighbours = Neighbours(lab, where)
    spoil(lab, where)
    beats = f"{neighbours.shared}/heartbeat-"
    for number, content in enumerate(
        (b"", b"{", b"[" * 100_000, b'{"name": 1}', b"\xff" * 2_000_000)
    ):
        with open(f"{beats}bad-{number}.json", "wb") as file:
            file.write(content)
    os.mkfifo(f"{beats}fifo.json")
    os.symlink("/dev/zero", f"{beats}zero.json")
    done = fskv("top", "--once", "--interval", "0.3", root=lab.path, timeout_s=HANG_S)
    assert done.exit_code == 0, done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stdout)
    lease = f"{neighbours.shared}/lease.json"
    for content in (b"[", b'{"holder": [], "host": 1}', b"x" * 10_000):
        os.unlink(lease)
        with open(lease, "wb") as file:
            file.write(content)
        assert sample_of(lab)["keeper"] is None
    os.unlink(lease)
    os.mkfifo(lease)
    assert sample_of(lab)["keeper"] is None
    os.unlink(f"{neighbours.shared}/usage.json")
    os.symlink("/dev/zero", f"{neighbours.shared}/usage.json")
    assert sample_of(lab)["counted_by"] == "walk"


@contextlib.contextmanager
def watching(lab, urls=()):
    with contextlib.closing(watch.Watches(lab.path, list(urls), 0.05)) as watches:
        assert watches.root.wait(time.monotonic() + HANG_S)
        yield watches


def test_a_root_that_hangs_is_said_to_and_the_frames_go_on(lab, monkeypatch):
    lab.chunks(lab.namespace(), range(3))
    hang, go_on = threading.Event(), threading.Event()
    look = survey.Observer.look

    def slow(*arguments):
        if hang.is_set():
            go_on.wait()  # as a system call on a dead mount: nothing ends it
        return look(*arguments)

    monkeypatch.setattr(survey.Observer, "look", slow)
    monkeypatch.setattr(watch, "SLOW_S", 0.3)
    with watching(lab) as watches:
        assert "no answer" not in text_of(frame.draw(watches.frame(), 80), 80)
        hang.set()
        wait_for(lambda: watches.frame().no_answer_s, HANG_S)
        shown = watches.frame()
        assert shown.survey is not None  # what was known is still shown
        assert "no answer from the root for" in text_of(frame.draw(shown, 80), 80)
        go_on.set()


def test_a_root_that_never_answers_is_partial_and_a_missing_one_is_no_root(
    lab, monkeypatch, tmp_path
):
    monkeypatch.setattr(command, "_FIRST_S", 0.1)
    monkeypatch.setattr(watch, "SLOW_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(survey.Observer, "look", lambda *_: go_on.wait())
    done = top(lab)
    go_on.set()
    assert done.exit_code == 3
    assert "no answer from the root" in done.stdout
    monkeypatch.undo()
    assert run("top", "--once", root=tmp_path / "missing").exit_code == 10
    assert run("top", "--once", root=tmp_path).exit_code == 10


def test_a_root_that_goes_away_and_comes_back_is_shown_again(lab):
    lab.chunks(lab.namespace(), range(3))
    with watching(lab) as watches:
        os.rename(lab.path, f"{lab.path}-away")
        wait_for(lambda: watches.frame().problem, HANG_S)
        assert watches.frame().partial
        os.rename(f"{lab.path}-away", lab.path)
        wait_for(lambda: not watches.frame().problem, HANG_S)


@pytest.mark.parametrize("denied", [True, False])
def test_heartbeats_that_may_not_be_read_are_not_taken_for_none(lab, monkeypatch, denied):
    def refused(_):
        raise PermissionError(13, "Permission denied")

    if denied:
        monkeypatch.setattr(SharedFiles, "heartbeats", refused)
    done = top(lab)
    assert ("tell each other cannot be read: Permission denied" in done.stdout) is denied
    assert done.exit_code == (3 if denied else 0)


# --- endpoints --------------------------------------------------------------------------


def sample(engine, at_s=0.0):
    return endpoint.read(engine.text.decode(), at_s)


def test_what_an_engine_publishes_is_what_is_shown():
    engine = Engine()
    engine.traffic()
    before = sample(engine, 10.0)
    for _ in range(4):
        engine.traffic()
    engine.add(metrics.LOAD_FAILURES, 2, "corrupt")
    engine.add(metrics.STORES_SKIPPED, 5, "capacity")
    engine.observe("vllm:fskv_load_latency_seconds", 0.02, 0.04)
    found = endpoint.traffic(sample(engine, 12.0), before)
    assert found.seconds == 2
    assert (found.hits, found.misses, found.hit_ratio) == (16, 4, 0.8)
    assert found.token_hit_ratio == 0.6
    assert found.rate(found.loaded_nbytes) == 60 << 20
    assert found.load_s == pytest.approx(0.03)
    assert found.first_token_s == pytest.approx(0.3)
    assert found.load_failures == {"corrupt": 2}
    assert found.stores_skipped == {"capacity": 5}
    assert found.missed == {"absent": 40}
    assert before.models == ["org/model"]


@pytest.mark.parametrize("unused", [0, 9])
def test_a_request_counts_once_and_one_whose_hit_was_not_used_not_at_all(unused):
    engine = Engine()
    engine.add(metrics.REQUESTS, 3, "hit")
    engine.add(metrics.REQUESTS, 1, "miss")
    engine.add(metrics.LOOKUP_MISSES, 90, "absent")  # chunks
    if unused:
        engine.add(metrics.REQUESTS, unused, "unused")
    assert endpoint.traffic(sample(engine)).hit_ratio == 0.75
    idle = Engine()
    idle.add(metrics.LOADED_BYTES, 0)
    assert endpoint.traffic(sample(idle)).hit_ratio is None


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        (None, "ok"),
        (metrics.OFF, "off"),
        (metrics.WEIGHTS_IN_DOUBT, "off: weights in doubt"),
        (metrics.BREAKER_OPEN, "breaker open"),
        (metrics.STORES_PAUSED, "stores paused"),
        (metrics.THREADS_HUNG, "1 threads hung"),
        ("prefix caching", "off: prefix caching"),
        ("nothing", "no metrics of fskv"),
    ],
)
def test_what_is_off_is_said(lab, condition, status):
    lab.namespace()
    engine = Engine()
    if condition != "nothing":
        engine.traffic()
    if isinstance(condition, metrics.Metric):
        engine.set(condition, 1)
    names = ["enable_prefix_caching", "engine"]
    config = Gauge("vllm:cache_config_info", "of a test", names, registry=engine.registry)
    config.labels(str(condition != "prefix caching"), "0").set(1)
    with server(engine) as made:
        done = top(lab, "--metrics", made.url)
    (row,) = [line for line in done.stdout.splitlines() if f":{made.server_port}" in line][:1]
    assert f" {status} " in row
    assert sample(engine).status == status


@pytest.mark.parametrize(("count", "load_s"), [("1e-320", None), ("0", None), ("5", 2.0)])
def test_what_is_reckoned_of_hostile_numbers_is_a_number_or_none(count, load_s):
    text = f"vllm:fskv_load_latency_seconds_sum 10\nvllm:fskv_load_latency_seconds_count {count}\n"
    for rank, nbytes in enumerate(("1e308", "NaN", "7")):
        text += f'vllm:fskv_loaded_bytes_total{{rank="{rank}"}} {nbytes}\n'
    found = endpoint.traffic(endpoint.read(text, 1.0))
    assert (found.load_s, found.loaded_nbytes) == (load_s, 7)


def test_a_line_of_json_holds_no_number_that_json_has_not(capsys):
    with pytest.raises(ValueError, match="JSON compliant"):
        terminal.emit("sample", load_s=float("inf"))
    assert capsys.readouterr().out == ""


def test_a_counter_that_began_again_counts_from_zero():
    engine = Engine()
    for _ in range(5):
        engine.traffic()
    before = sample(engine, 1.0)
    engine.restart()
    engine.traffic()
    found = endpoint.traffic(sample(engine, 2.0), before)
    assert (found.hits, found.misses, found.loaded_nbytes) == (4, 1, 30 << 20)
    assert found.token_hit_ratio == 0.6


BAD = ("silent", "error", "redirect", "not http", "garbage", "half", "html", "empty", "dripping")


@pytest.mark.parametrize("mode", [*BAD, "endless"])
def test_an_endpoint_of_any_kind_costs_a_sentence_and_bounded_time_and_memory(mode):
    with server(Engine(), mode) as made:
        began = time.monotonic()
        with pytest.raises(endpoint.NoMetrics) as problem:
            endpoint.read(endpoint.fetch(made.url, 0.5), 0.0)
        assert time.monotonic() - began < HANG_S
    words = str(problem.value)
    assert words
    assert words.isprintable()
    assert len(words) < 200


def test_an_endless_answer_is_cut_at_its_length_long_before_its_deadline():
    with server(Engine(), "endless") as made, pytest.raises(endpoint.NoMetrics, match="8 MiB"):
        endpoint.fetch(made.url, HANG_S)


def test_the_screen_lives_through_everything_that_an_endpoint_does(lab, monkeypatch):
    monkeypatch.setattr(endpoint.fetch, "__defaults__", (0.5, None))
    lab.namespace()
    engine = Engine()
    engine.traffic()
    with server(engine) as made, watching(lab, [made.url]) as watches:

        def ends():
            (one,) = watches.frame().endpoints
            return one

        for mode in BAD:
            made.mode = "good"
            engine.restart()
            engine.traffic()
            wait_for(lambda: ends().total, HANG_S)
            assert "80.0 %" in text_of(frame.draw(watches.frame(), 100), 100)
            made.mode = mode
            wait_for(lambda: ends().total is None, HANG_S)
            assert "80.0 %" not in text_of(frame.draw(watches.frame(), 100), 100), mode


def test_metrics_show_in_a_frame_and_in_json(lab):
    lab.namespace()
    engine = Engine()
    engine.traffic()
    engine.add(metrics.LOAD_FAILURES, 3, "corrupt")
    with server(engine) as made, server(engine, "garbage") as bad:
        done = top(lab, "--json", "--metrics", f"{made.url},{bad.url}")
        shown = top(lab, "--metrics", made.url, env={"COLUMNS": "80"})
    good, garbage = done.lines[0]["endpoints"]
    assert (good["total"]["hit_ratio"], good["total"]["token_hit_ratio"]) == (0.8, 0.6)
    assert good["total"]["load_failures"] == {"corrupt": 3}
    assert (good["recent"]["load_failures"], good["recent"]["hit_ratio"]) == ({}, None)
    assert good["recent"]["seconds"] > 0
    assert (good["status"], good["models"]) == ("ok", ["org/model"])
    assert garbage["status"]
    assert (garbage["recent"], garbage["total"]) == (None, None)
    for told in ("80.0 %", "60.0 %", "corrupt 3"):
        assert told in shown.stdout


def test_urls_are_checked_before_anything_is_asked(lab):
    assert endpoint.addresses("a:8000, https://b/x,a:8000") == [
        "http://a:8000/metrics",
        "https://b/x",
    ]
    for bad in (
        *("file:///etc/passwd", "ftp://x", "http://", "http://u:p@h", "http://h:99999", "a b"),
        *("", ","),
    ):
        with pytest.raises(UsageError):
            endpoint.addresses(bad)
        assert top(lab, "--metrics", bad).exit_code == 2


# --- how it looks -----------------------------------------------------------------------


def busy(num=30):
    """A frame with more of everything than fits."""
    ids = [f"sm_90/organisation--a-model-with-a-long-name-{n}@{n:016x}" for n in range(num)]
    status = [survey.ALIVE, survey.SILENT, survey.GONE, survey.UNKNOWN]
    engines = [
        survey.Engine(
            f"e{n}", f"gpu-node-{n:03}.cluster", n, ids[n], "t", n << 30, 1e8, n % 3,
            status[n % 4], 17.0,
        )
        for n in range(num)
    ]  # fmt: skip
    spaces = [
        survey.NamespaceSize(name, "tenant" * (n % 2), n << 33, 10**7, -1e9)
        for n, name in enumerate(ids)
    ]
    bounds = [Scope("tenant", "t" * 90, GIB, 2 * GIB), Scope("free", None, 0, 0)]
    keeper = {"host": "gpu-node-001.cluster", "pid": 12345, "status": survey.ALIVE}
    seen = survey.Survey(
        "2026-01-01T00:00:00.000Z", "/kv", None, num << 40, 10**9, 1e9, 5e8, GIB, 100 * GIB, "engines",
        None, 7, 3, keeper, bounds, spaces, engines,
    )  # fmt: skip
    engine = Engine()
    engine.traffic()
    engine.add(metrics.LOAD_FAILURES, 10**6, "corrupt")
    total = endpoint.traffic(sample(engine, 1.0))
    up = endpoint.Endpoint("http://" + "h" * 60 + ":1/metrics", "ok", ["m"], [], total, total)
    down = endpoint.Endpoint("http://b:1/metrics", "no answer within 5 s " * 9)
    return watch.Frame("/mnt/" + "deep/" * 30, "no such root", 5.0, 12.0, seen, [up, down])


def nothing(path="/kv"):
    return watch.Frame(path, None, 0.0, 0.0, None, [])


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 140, 300])
def test_a_frame_fits_whatever_there_is_to_show(width):
    for shown in (busy(), busy(0), nothing(), nothing("/\u4e2d" * 90)):
        for details in (True, False):
            drawn = frame.draw(shown, width, rows=4, rest=details)
            lines = text_of(drawn, width).splitlines()
            assert max((cell_len(line) for line in lines), default=0) <= width


@pytest.mark.parametrize("width", [60, 80, 200])
def test_what_matters_most_is_on_each_screen_and_what_is_left_out_is_counted(width):
    shown = text_of(frame.draw(busy(), width, rows=5, rest=False), width)
    for told in (
        *("How full", "Who works", "What hits", "no answer from the root for 5 s", "no such root"),
        *("200.0 %", "80.0 %", "silent 17 s", "and 25 more", "8 engines silent: gpu-node-001"),
        *("could not be listed: 7; sizes", "3 files cannot be removed"),
    ):
        assert told in shown.replace("\n", " "), told
    assert "Namespaces" not in shown  # behind a key
    whole = text_of(frame.draw(busy(), 200), 200)
    assert "Namespaces" in whole
    assert all(one.namespace in whole for one in busy().survey.namespaces)
    why = " ".join(text_of(frame.draw(busy(), width), width).replace("│", " ").split())
    assert why.count("within 5 s") >= 9 or width == 60  # why there are no numbers is not cut
    quiet = busy()
    quiet.survey.engines.clear()
    shown = text_of(frame.draw(quiet, width, rest=False), width)
    assert "no engine has a heartbeat here" in shown
    assert "Namespaces" in shown


def test_once_without_a_terminal_is_plain_and_shows_everything(lab):
    spaces = [lab.namespace(model_name=f"org/{n}") for n in range(60)]
    Neighbours(lab, *spaces)
    for encoding in ("ascii", "utf-8"):
        env = {"PYTHONIOENCODING": encoding, "COLUMNS": "100", "NO_COLOR": "1"}
        words = (
            ["--once"] if encoding == "ascii" else []
        )  # without a terminal it is one frame anyway
        done = fskv("top", *words, "--interval", "0.2", root=lab.path, env=env, timeout_s=HANG_S)
        assert done.exit_code == 0
        assert done.stdout.isascii() is (encoding == "ascii")
        assert "\x1b" not in done.stdout
        assert max(map(cell_len, done.stdout.splitlines())) <= 100
        assert all(where.id in done.stdout for where in spaces)


# --- the terminal -----------------------------------------------------------------------


class Terminal:
    """`fskv top` on a pty, as a person would have it."""

    def __init__(self, lab, *words, size=(24, 80), term="xterm-256color"):
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        command = [sys.executable, "-m", "fskv_tools", "top", "--root", lab.path]
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        env["TERM"] = term
        self.child = subprocess.Popen(
            # The terminal is its own: Ctrl-C.
            ["setsid", "--ctty", *command, "--interval", "0.2", *words],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=env,
        )
        self.seen = b""

    def resize(self, rows, columns):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, word, timeout_s=HANG_S):
        deadline = time.monotonic() + timeout_s
        while word not in self.seen:
            assert time.monotonic() < deadline, self.seen[-2000:]
            assert self._read(0.1) or self.child.poll() is None, self.seen[-2000:]

    def _read(self, timeout_s):
        ready, _, _ = select.select([self.master], [], [], timeout_s)
        if ready:
            self.seen += os.read(self.master, 65536)
        return bool(ready)

    def type(self, keys):
        os.write(self.master, keys)

    def end(self):
        deadline = time.monotonic() + HANG_S
        while self.child.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            self._read(0.05)
        while self._read(0.1):
            pass
        mode = termios.tcgetattr(self.slave)
        os.close(self.master)
        os.close(self.slave)
        return self.child.returncode, mode


@pytest.mark.parametrize(
    ("end", "code"), [("q", 0), ("Ctrl-C", 130), ("SIGTERM", 143), ("SIGHUP", 129)]
)
def test_however_it_ends_the_terminal_is_as_it_was(lab, end, code):
    where = lab.namespace()
    lab.chunks(where, range(3))
    Neighbours(lab, where)
    terminal = Terminal(lab)
    terminal.read_until(b"details")
    assert b"\x1b[?1049h" in terminal.seen  # the alternate screen
    assert b"Namespaces" not in terminal.seen
    now = termios.tcgetattr(terminal.slave)
    assert not now[3] & (termios.ICANON | termios.ECHO)  # the test sees the mode
    terminal.type(b"xyzd")  # other keys do nothing
    terminal.read_until(b"Namespaces")
    if end == "q":
        terminal.type(b"q")
    elif end == "Ctrl-C":
        terminal.type(b"\x03")
    else:
        terminal.child.send_signal(getattr(signal, end))
    found, mode = terminal.end()
    assert found == code
    assert mode == terminal.before
    left = terminal.seen.rindex(b"\x1b[?1049l")
    assert left > terminal.seen.rindex(b"\x1b[?1049h")
    assert terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l")  # the cursor
    assert b"Traceback" not in terminal.seen


def test_a_new_size_is_drawn_and_no_terminal_is_one_frame(lab):
    where = lab.namespace(model_name="org/" + "x" * 60)
    lab.chunks(where, range(3))
    terminal = Terminal(lab, "--interval", "30")
    terminal.read_until(b"details")
    terminal.type(b"d")
    terminal.read_until(b"overview")
    assert b"x" * 60 not in terminal.seen
    terminal.resize(50, 140)
    terminal.read_until(b"x" * 60)
    terminal.type(b"q")
    assert terminal.end() == (0, terminal.before)
    dumb = Terminal(lab, term="dumb")
    assert dumb.end()[0] == 0
    assert b"\x1b" not in dumb.seen
    assert b"Namespaces" in dumb.seen


def test_json_can_be_piped_to_somebody_who_goes_away(lab):
    lab.namespace()
    words = [sys.executable, "-m", "fskv_tools", "top", "--json", "--interval", "0.1"]
    child = subprocess.Popen(
        [*words, "--root", lab.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert json.loads(child.stdout.readline())["type"] == "sample"
    child.stdout.close()
    assert b"Traceback" not in child.stderr.read()
    # typer turns a broken pipe into 1 before cli.main sees it
    assert child.wait(HANG_S) in (1, 141)
    child.stderr.close()
