"""`fskv top`: whatever a root or an endpoint does, the screen goes on, fits, and gives the terminal back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace

import pytest
from fskv_tools import endpoint, survey
from fskv_tools.commands import top as command
from fskv_tools.exits import UsageError
from fskv_tools.root_view import RootView
from fskv_tools.terminal import emit
from fskv_tools.top import frame, live, watch
from metrics_lab import Engine, server
from prometheus_client import Gauge
from pseudo_terminal import HANG_S, Terminal
from rich.cells import cell_len
from rich.console import Console
from tool_lab import fskv, run
from world import wait_for

from fskv.bounds.limits import Heartbeat, Limits, Scope, Traffic, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.observe import metrics
from fskv.root.filesystem import Space
from fskv.root.process_id import HOST, TOKEN
from fskv.sizes import Share

GIB = 1 << 30
OTHER = "node-9-4711-ab12cd34-5"


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


def look(lab):
    return survey.Observer(RootView.open(lab.path)).look()


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
    done = top(lab)
    assert done.exit_code == 0, done.stderr
    assert "25 files counted 0 s ago" in done.stdout
    assert "no engine has a heartbeat here" in done.stdout
    seen = look(lab)
    assert seen.usage.nbytes == sum(os.stat(path).st_blocks * 512 for path in paths)
    assert {name: files for name, (_, files) in seen.namespaces.items()} == {one.id: 20, two.id: 5}
    assert (seen.keeper, seen.engines, seen.bounds) == (None, [], [])


def test_bytes_and_files_are_said_with_the_time_of_their_count(lab):
    """Engines add up bytes all the time; the number of files is as old as the last walk."""
    neighbours = Neighbours(lab, lab.namespace())
    usage = neighbours.files.usage()
    at_ms = time.time_ns() // 10**6 - 3 * 3_600_000
    neighbours.files.publish_usage(replace(usage, at_ms=at_ms))
    assert "100 files counted 3 h ago" in top(lab).stdout


def test_growth_rates_bounds_and_signs_of_life_come_from_what_engines_tell(lab, monkeypatch):
    one, two = lab.namespace(), lab.namespace(model_name="org/other")
    neighbours = Neighbours(lab, one, two)
    now = [100.0]
    monkeypatch.setattr(survey.time, "monotonic", lambda: now[0])
    observer = survey.Observer(RootView.open(lab.path))
    first = observer.look()
    assert (first.growth, [one.rate for one in first.engines]) == (None, [None, None])
    now[0] += 2
    neighbours.publish(written=1 << 20, pruned=1 << 10)
    last = observer.look()
    assert last.usage.nbytes == first.usage.nbytes + (4 << 20)
    assert (last.growth, last.pruned) == (2 << 20, 512)
    assert last.keeper == (f"{HOST}:{os.getpid()}", "alive")
    (other,) = [engine for engine in last.engines if engine.host == "node-9"]
    assert (other.pid, other.disk_full, other.rate) == (4711, 1, 1 << 19)
    bounds = {bound.kind: bound for bound in last.bounds}
    assert (bounds["root"].limit, bounds["root"].used) == (4 * GIB, last.usage.nbytes)
    assert bounds["free"].limit < last.space.total_nbytes


def test_who_is_silent_or_gone_is_said_and_bounds_no_more(lab):
    where = lab.namespace()
    neighbours = Neighbours(lab, where)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    tight = Limits(max_nbytes=GIB)
    for name in (f"{HOST}-{dead.pid}-{TOKEN}-1", "node-8-12-ab12cd34-5"):
        neighbours.files.publish(Heartbeat(name, where.id, None, tight))
    seen = look(lab)
    statuses = {(engine.host, engine.pid): engine.status for engine in seen.engines}
    assert statuses[HOST, dead.pid] == "gone"
    assert {status for key, status in statuses.items() if key[1] != dead.pid} == {"alive"}
    assert [b.limit for b in seen.bounds if b.kind == "root"] == [GIB]
    path = f"{neighbours.shared}/heartbeat-node-8-12-ab12cd34-5.json"
    os.utime(path, (time.time() - 90,) * 2)
    seen = look(lab)
    assert [one.status for one in seen.engines if one.host == "node-8"] == ["silent"]
    assert [b.limit for b in seen.bounds if b.kind == "root"] == [4 * GIB]
    shown = top(lab).stdout
    assert f"1 engine gone: {HOST}" in shown
    assert "1 engine silent: node-8" in shown


@contextlib.contextmanager
def watching(lab, urls=()):
    with contextlib.closing(watch.Watches(lab.path, list(urls), 0.05)) as watches:
        watches.root.wait(time.monotonic() + HANG_S)
        yield watches


def test_a_root_that_hangs_is_said_to_and_the_frames_go_on(lab, monkeypatch):
    lab.chunks(lab.namespace(), range(3))
    hang, go_on = threading.Event(), threading.Event()
    look = survey.Observer.look

    def slow(*arguments, **options):
        if hang.is_set():
            go_on.wait()  # as a system call on a dead mount: nothing ends it
        return look(*arguments, **options)

    monkeypatch.setattr(survey.Observer, "look", slow)
    monkeypatch.setattr(watch, "SLOW_S", 1.0)
    with watching(lab) as watches:
        assert "no answer" not in text_of(frame.draw(watches.frame(), 80), 80)
        hang.set()
        wait_for(lambda: watches.frame().no_answer_s, HANG_S)
        shown = watches.frame()
        assert shown.survey is not None  # what was known is still shown
        assert "no answer from the root for" in text_of(frame.draw(shown, 80), 80)
        go_on.set()


@pytest.mark.parametrize("heard", [True, False])
def test_a_first_walk_that_goes_on_is_waited_for(lab, monkeypatch, heard):
    """A root that is not heard of is the control."""
    monkeypatch.setattr(command, "_FIRST_S", 0.1)
    monkeypatch.setattr(watch, "SLOW_S", 0.5)
    look = survey.Observer.look

    def slow(self, *, told):
        for _ in range(15):
            time.sleep(0.1)
            if heard:
                told()
        return look(self)

    monkeypatch.setattr(survey.Observer, "look", slow)
    assert top(lab).exit_code == (0 if heard else 3)


def test_a_root_that_never_answers_is_partial_and_a_missing_one_is_no_root(
    lab, monkeypatch, tmp_path
):
    monkeypatch.setattr(command, "_FIRST_S", 0.1)
    monkeypatch.setattr(watch, "SLOW_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(survey.Observer, "look", lambda *_, **__: go_on.wait())
    done = top(lab)
    go_on.set()
    assert done.exit_code == 3
    assert "no answer from the root" in done.stdout
    monkeypatch.undo()
    assert run("top", "--once", root=tmp_path / "missing").exit_code == 10
    assert run("top", "--once", root=tmp_path).exit_code == 10


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
    found = endpoint.traffic(sample(engine, 12.0), before)
    assert (found.hit_ratio, found.token_hit_ratio) == (0.8, 0.6)
    assert (found.loaded, found.stored) == (60 << 20, 20 << 20)
    assert found.load_failures == {"corrupt": 2}
    assert before.labels("model_name") == ["org/model"]


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
        (metrics.THREADS_HUNG, "threads hung"),
        ("prefix caching", "off: prefix caching"),
        ("nothing", "no metrics of fskv"),
    ],
)
def test_what_is_off_is_said(condition, status):
    engine = Engine()
    if condition != "nothing":
        engine.traffic()
    if isinstance(condition, metrics.Metric):
        engine.set(condition, 1)
    names = ["enable_prefix_caching", "engine"]
    config = Gauge("vllm:cache_config_info", "of a test", names, registry=engine.registry)
    config.labels(str(condition != "prefix caching"), "0").set(1)
    assert sample(engine).status == status


@pytest.mark.parametrize(("asked", "ratio"), [("1e-320", None), ("0", None), ("20", 0.5)])
def test_what_is_reckoned_of_hostile_numbers_is_a_number_or_none(asked, ratio):
    text = f"vllm:external_prefix_cache_hits 10\nvllm:external_prefix_cache_queries {asked}\n"
    for rank, nbytes in enumerate(("1e308", "NaN", "8")):
        text += f'vllm:fskv_loaded_bytes_total{{rank="{rank}"}} {nbytes}\n'
    found = endpoint.traffic(endpoint.read(text, 3.0), endpoint.read("# TYPE \n", 1.0))
    assert (found.token_hit_ratio, found.loaded) == (ratio, 4)


def test_a_counter_that_began_again_counts_from_zero():
    engine = Engine()
    for _ in range(5):
        engine.traffic()
    before = sample(engine, 1.0)
    engine.restart()
    engine.traffic()
    found = endpoint.traffic(sample(engine, 2.0), before)
    assert (found.hit_ratio, found.token_hit_ratio, found.loaded) == (0.8, 0.6, 30 << 20)


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


def test_metrics_show_in_a_frame(lab):
    lab.namespace()
    engine = Engine()
    engine.traffic()
    engine.add(metrics.LOAD_FAILURES, 3, "corrupt")
    with server(engine) as made, server(engine, "garbage") as bad:
        words = f"{made.url},{bad.url}"
        shown = top(lab, "--metrics", words, env={"COLUMNS": "100"})
    for told in ("80.0 %", "60.0 %", "corrupt 3", "its answer is no metrics"):
        assert told in " ".join(shown.stdout.replace("\u2502", " ").split())
    assert shown.exit_code == 0


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
    status = [survey.ALIVE, survey.SILENT, survey.GONE]
    engines = [
        survey.Engine(f"gpu-node-{n:03}.cluster", n, ids[n], n << 30, 1e8, n % 3, status[n % 3])
        for n in range(num)
    ]
    spaces = {name: (n << 33, 10**7) if n else None for n, name in enumerate(ids)}
    bounds = [Scope("tenant", "t" * 90, GIB, 2 * GIB), Scope("free", None, 0, 0)]
    usage = Usage(others=(num << 40, 10**9), tenants=dict.fromkeys(ids, "tenant"), unremovable=3)
    space = Space(100 * GIB, GIB, 0, 0)
    keeper = ("gpu-node-001.cluster:12345", survey.ALIVE)
    seen = survey.Survey(
        10**18, "/kv", None, space, usage, 10**18, 1e9, 5e8, 2, 7, keeper, bounds, spaces, engines
    )
    engine = Engine()
    engine.traffic()
    engine.add(metrics.LOAD_FAILURES, 10**6, "corrupt")
    total = endpoint.traffic(sample(engine, 1.0))
    up = endpoint.Endpoint("http://" + "h" * 60 + ":1/metrics", "ok", ["m"], total, total)
    down = endpoint.Endpoint("http://b:1/metrics", "no answer within 5 s " * 9)
    return watch.Frame("/mnt/" + "deep/" * 30, "no such root", 5.0, seen, [up, down])


def nothing(path="/kv"):
    return watch.Frame(path, None, 0.0, None, [])


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 140, 300])
def test_a_frame_fits_whatever_there_is_to_show(width):
    for shown in (busy(), busy(0), nothing(), nothing("/\u4e2d" * 90)):
        lines = text_of(frame.draw(shown, width, 4), width).splitlines()
        assert max((cell_len(line) for line in lines), default=0) <= width


@pytest.mark.parametrize("width", [60, 80, 200])
def test_what_matters_most_is_shown_and_what_is_left_out_is_counted(width):
    shown = text_of(frame.draw(busy(), width, 5), width).replace("\n", " ")
    for told in (
        *("How full", "Who works", "What hits", "no answer from the root for 5 s"),
        *("200.0 %", "80.0 %", "and 26 more", "10 engines silent: gpu-node-001"),
        *("could not be listed: 7; sizes", "3 files cannot be removed", "2 damaged namespaces"),
    ):
        assert told in shown, told
    whole = text_of(frame.draw(busy(), 200), 200)
    assert all(name in whole for name in busy().survey.namespaces)
    why = " ".join(text_of(frame.draw(busy(), width), width).replace("\u2502", " ").split())
    assert why.count("within 5 s") >= 9 or width == 60  # why there are no numbers is not cut


@pytest.mark.parametrize("height", [24, 40, 60, 200])
def test_a_screen_is_filled_and_says_more_only_where_there_is_no_room(height):
    console = Console(width=140, height=height, color_system=None)
    text = text_of(live.fitting(busy(), console), 140)
    assert ("no room for namespaces" in text) is (height < 200)
    assert ("more" in text) is (height < 60)
    lines = text.splitlines()
    assert len(lines) <= max(height, 32)  # two rows of each table are always there
    assert len(lines) > height - 4 or height >= 60


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


def on_terminal(lab, *words, **how):
    return Terminal("top", "--root", lab.path, "--interval", "0.2", *words, **how)


@pytest.mark.parametrize(
    ("end", "code"), [("q", 0), ("Ctrl-C", 130), ("SIGTERM", 143), ("SIGHUP", 129)]
)
def test_however_it_ends_the_terminal_is_as_it_was(lab, end, code):
    where = lab.namespace()
    lab.chunks(where, range(3))
    Neighbours(lab, where)
    terminal = on_terminal(lab)
    terminal.read_until(b"Namespaces")
    assert b"\x1b[?1049h" in terminal.seen  # the alternate screen
    now = termios.tcgetattr(terminal.slave)
    assert not now[3] & (termios.ICANON | termios.ECHO)  # the test sees the mode
    terminal.type(b"xyzd\x1a")  # other keys do nothing, nor does Ctrl-Z
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
    terminal = on_terminal(lab, "--interval", "30")
    terminal.read_until(b"Namespaces")
    assert b"x" * 60 not in terminal.seen
    terminal.resize(50, 140)
    terminal.read_until(b"x" * 60)
    terminal.type(b"q")
    assert terminal.end() == (0, terminal.before)
    dumb = on_terminal(lab, term="dumb")
    assert dumb.end()[0] == 0
    assert b"\x1b" not in dumb.seen
    assert b"Namespaces" in dumb.seen


def test_a_line_of_json_holds_no_number_that_json_has_not(capsys):
    with pytest.raises(ValueError, match="JSON compliant"):
        emit("summary", load_s=float("inf"))
    assert capsys.readouterr().out == ""


def test_an_endless_answer_is_cut_at_its_length_long_before_its_deadline():
    with server(Engine(), "endless") as made, pytest.raises(endpoint.NoMetrics, match="8 MiB"):
        endpoint.fetch(made.url, HANG_S)


@pytest.mark.parametrize("unread", [True, False])
def test_the_mode_of_admission_and_what_is_never_read_are_shown(lab, unread):
    neighbours = Neighbours(lab, lab.namespace())
    hour = Traffic(1, 11 << 30, 0 if unread else 1 << 30)
    usage = replace(neighbours.files.usage(), last_hour=hour, max_nbytes=4 * GIB)
    chosen = {"first_sight": not unread, "first_hits": 5_000, "second_hits": 6_000}
    neighbours.files.publish_usage(replace(usage, **chosen))
    shown = " ".join(top(lab).stdout.split())
    assert ("of 11.0 GiB stored in an hour 0 B were loaded" in shown) is unread
    mode = "chunks seen twice" if unread else "all new chunks"
    assert f"stores {mode}: hits 5 at first sight, 6" in shown
    doctor = run("doctor", "--json", root=lab.path).stdout
    assert ("stored in an hour" in doctor) is unread
