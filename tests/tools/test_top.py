"""`fskv top`: whatever a root or an endpoint does, the screen goes on, fits, and gives the terminal back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
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

from fskv_tools import endpoint, terminal
from fskv_tools.exits import UsageError
from fskv_tools.root_view import RootView
from fskv_tools.top import count, frame, line, state, watch
from fskv_tools.top.count import Counter
from fskv_tools.top.grid import Column, Section, shorten, stack, table
from metrics_lab import Engine, server
from rich.cells import cell_len
from rich.text import Text
from world import wait_for

from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.index import scan
from fskv.observe import metrics
from fskv.root.filesystem import Space
from fskv.root.process_id import HOST, TOKEN
from fskv.sizes import Share

GIB = 1 << 30
HANG_S = 60  # generous: nothing here should take more than seconds


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


class Neighbours:
    """Engines that share a root: what they would write to it."""

    def __init__(self, lab, *spaces):
        self.shared = f"{lab.path}/.fskv-maintenance"
        os.makedirs(f"{self.shared}/removed")
        self.files = SharedFiles(self.shared)
        self.ids = [where.id for where in spaces]
        self.me = f"{HOST}-{os.getpid()}-{TOKEN}-1"
        self.written = self.beat = 0
        self.publish()

    def publish(self, written=0, pruned=0):
        self.written += written
        self.beat += 1
        limits = Limits(max_nbytes=4 * GIB, keep_free=Share(1.0))
        for number, name in enumerate([self.me, "node-9-4711-ab12cd34-5"]):
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

    def prune(self, digest16, chunks):
        name = f"{digest16}-{self.me}{self.beat}.bin"
        with open(f"{self.shared}/removed/{name}", "wb") as file:
            file.write(bytes(20 * chunks))


@contextlib.contextmanager
def going_on(step, every_s=0.1):
    """Call `step` again and again on a thread."""
    stop = threading.Event()

    def loop():
        while not stop.wait(every_s):
            step()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def top(lab, *words, interval=0.3, **options):
    return run("top", "--interval", interval, *words, root=lab.path, **options)


# --- the root ---------------------------------------------------------------------------


def test_a_root_without_engines_is_counted_by_the_command_itself(lab):
    one, two = lab.namespace(), lab.namespace(model_name="org/other", tenant="acme")
    paths = lab.chunks(one, range(20)) + lab.chunks(two, range(5), rank=3)
    done = top(lab, "--json", "--count", 2)
    assert done.exit_code == 0, done.stderr
    last = done.lines[-2]
    assert last["counted_by"] == "top"
    assert last["files"] == len(paths)
    assert last["nbytes"] == sum(os.stat(path).st_blocks * 512 for path in paths)
    sizes = {line["namespace"]: line["files"] for line in last["namespaces"]}
    assert sizes == {one.id: 20, two.id: 5}
    assert last["free_nbytes"] > 0
    assert (last["lease"], last["engines"], last["bounds"]) == (None, [], [])
    assert done.summary["samples"] == 2
    check_lines("top", [dict(line) for line in done.lines])


def test_a_second_count_sees_what_came_and_went(lab):
    where = lab.namespace()
    paths = lab.chunks(where, range(10))
    counter, view = Counter(), RootView.open(lab.path)
    assert counter.count(view).sizes[where.id][1] == 10
    os.unlink(paths[0])
    lab.chunks(where, range(10, 13))
    nbytes, files = counter.count(view).sizes[where.id]
    assert files == 12
    assert nbytes == 12 * os.stat(paths[1]).st_blocks * 512


def test_a_sparse_file_counts_for_no_more_than_the_file_system_here_too(lab):
    where = lab.namespace()
    paths = lab.chunks(where, range(3))
    for path in paths:
        with open(path, "wb"):
            os.truncate(path, 1 << 43)  # ext4: more than there is, and less than the largest
    total = Space.of(lab.path).total_nbytes
    assert os.stat(paths[0]).st_size > total  # the control: what it would count for
    assert Counter().count(RootView.open(lab.path)).sizes[where.id] == (3 * total, 3)


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
    done = top(lab, "--json", "--count", 1)
    sample = done.lines[0]
    assert sample["unlistable"] == (what is not None)
    assert done.summary["unanswered"] == (what is not None)
    assert done.exit_code == (3 if what else 0)
    sizes = {line["namespace"]: line["files"] for line in sample["namespaces"]}
    closed_sizes = {} if what == "an architecture" else {one.id: 4, other.id: None}
    assert sizes == (closed_sizes if what else {one.id: 4, other.id: 0})
    done = top(lab, "--once")
    assert done.exit_code == (3 if what else 0)
    said = "directories that could not be listed: 1; sizes may be too small"
    assert (said in done.stdout.splitlines()) is (what is not None)
    assert ("no namespace seen" in done.stdout) is (what == "an architecture")


def deny(monkeypatch, path):
    """Let nobody list directory `path`: root would be allowed to, whatever its mode."""

    def closed(real):
        def listed(*arguments):
            if {path, os.fsencode(path)} & {*arguments}:
                raise PermissionError(13, "Permission denied", path)
            return real(*arguments)

        return listed

    monkeypatch.setattr(os, "scandir", closed(os.scandir))
    monkeypatch.setattr(count, "opened", closed(count.opened))
    for name in ("_list_in_c", "_list_in_python"):
        monkeypatch.setattr(scan, name, closed(getattr(scan, name)))


@pytest.mark.parametrize("what", ["an architecture", "chunks", "a directory of chunks"])
def test_what_can_be_listed_no_more_has_the_size_that_it_had(lab, monkeypatch, what):
    where = lab.namespace()
    paths = lab.chunks(where, range(4))
    counter, view = Counter(), RootView.open(lab.path)
    before = counter.count(view)
    assert (before.sizes[where.id][1], before.unlistable) == (4, 0)
    shard = pathlib.Path(paths[0]).parent
    closed = {"chunks": shard.parent, "an architecture": shard.parents[2]}.get(what, shard)
    with monkeypatch.context() as patch:
        deny(patch, str(closed))
        assert counter.count(view) == (before.sizes, 1)
    assert counter.count(view) == before


def test_what_the_count_does_not_name_is_in_the_totals(lab):
    where = lab.namespace()
    neighbours = Neighbours(lab, where)
    named = top(lab, "--json", "--count", 1).lines[0]  # the control: nothing is left unnamed
    assert (named["nbytes"], named["files"]) == (GIB, 100)
    usage = neighbours.files.usage()
    neighbours.files.publish_usage(replace(usage, others=(7 * GIB, 9)))
    sample = top(lab, "--json", "--count", 1).lines[0]
    assert (sample["nbytes"], sample["files"]) == (8 * GIB, 109)
    (root,) = [bound for bound in sample["bounds"] if bound["kind"] == "root"]
    assert root["used"] == sample["nbytes"]


def test_growth_rates_bounds_and_signs_of_life_come_from_what_engines_tell(lab):
    one, two = lab.namespace(), lab.namespace(model_name="org/other")
    neighbours = Neighbours(lab, one, two)

    def step():
        neighbours.publish(written=1 << 20, pruned=neighbours.beat << 10)
        neighbours.prune(two.identity.digest16, 7)

    with going_on(step):
        done = top(lab, "--json", "--count", 3)
    first, last = done.lines[0], done.lines[-2]
    assert last["counted_by"] == "engines"
    assert last["nbytes"] > first["nbytes"] > 2 * GIB
    # 1 MiB of each engine, ten times a second at most.
    assert all(0 < n["growth"] <= 22 << 20 for n in last["namespaces"])
    assert 0 < last["pruned"] <= 11 << 10
    by_name = {n["namespace"]: n for n in last["namespaces"]}
    assert by_name[two.id]["pruned_chunks"] > 0
    assert by_name[one.id]["pruned_chunks"] == 0
    assert last["stored"] > 0
    assert by_name[one.id]["stored"] > 0
    engines = {engine["name"]: engine for engine in last["engines"]}
    assert {engine["status"] for engine in engines.values()} == {"alive"}
    other = engines["node-9-4711-ab12cd34-5"]
    assert (other["host"], other["pid"], other["disk_full"]) == ("node-9", 4711, 1)
    bounds = {bound["kind"]: bound for bound in last["bounds"]}
    assert bounds["root"]["limit"] == 4 * GIB
    assert bounds["root"]["used"] == last["nbytes"]
    assert bounds["free"]["limit"] < last["total_nbytes"]
    assert last["lease"]["status"] == "alive"


def test_an_engine_that_is_gone_or_silent_is_told_apart(lab):
    where = lab.namespace()
    neighbours = Neighbours(lab, where)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    # What it declared holds no more.
    gone = Heartbeat(f"{HOST}-{dead.pid}-{TOKEN}-1", where.id, None, Limits(max_nbytes=GIB))
    neighbours.files.publish(gone)
    line = top(lab, "--json", "--count", 1).lines[0]
    engines = {e["name"]: e["status"] for e in line["engines"]}
    assert [b["limit"] for b in line["bounds"] if b["kind"] == "root"] == [4 * GIB]
    assert engines == {
        neighbours.me: "alive",
        "node-9-4711-ab12cd34-5": "not known yet",  # nobody can say within a second
        gone.name: "gone",
    }
    history = state.History("/x")
    look = watch_of(lab).answer
    history._take(look)
    later = look_after(look, seconds=16)
    history._take(later)
    found = {engine.name: engine.status for engine in history._engines(later)}
    assert found["node-9-4711-ab12cd34-5"] == "silent"


def watch_of(lab):
    watched = watch.watch_root(lab.path, 3600)
    watched.start()
    assert watched.wait(HANG_S)
    watched.stop()  # its answer stays
    return watched


def look_after(look, seconds):
    from dataclasses import replace

    return replace(look, at_s=look.at_s + seconds)


def test_hostile_files_between_engines_are_left_out(lab):
    where = lab.namespace()
    lab.chunks(where, range(3))
    neighbours = Neighbours(lab, where)
    spoil(lab, where)
    beats, removed = f"{neighbours.shared}/heartbeat-", f"{neighbours.shared}/removed"
    for number, content in enumerate(
        (b"", b"{", b"[" * 100_000, b'{"name": 1}', b"\xff" * 2_000_000)
    ):
        with open(f"{beats}bad-{number}.json", "wb") as file:
            file.write(content)
    os.mkfifo(f"{beats}fifo.json")
    os.symlink("/dev/zero", f"{beats}zero.json")
    os.mkfifo(f"{removed}/{'0' * 16}-x.bin")
    os.symlink("/dev/zero", f"{removed}/{'1' * 16}-x.bin")
    done = fskv("top", "--once", "--interval", "0.3", root=lab.path, timeout_s=HANG_S)
    assert done.exit_code == 0, done.stderr
    assert all(c.isprintable() or c == "\n" for c in done.stdout)
    for content in (b"[", b'{"holder": [], "host": 1}', b"x" * 10_000):
        os.unlink(f"{neighbours.shared}/lease.json")
        with open(f"{neighbours.shared}/lease.json", "wb") as file:
            file.write(content)
        assert top(lab, "--json", "--count", 1).lines[0]["lease"] is None
    os.unlink(f"{neighbours.shared}/lease.json")
    os.mkfifo(f"{neighbours.shared}/lease.json")
    done = fskv("top", "--json", "--count", 1, "--interval", "0.3", root=lab.path, timeout_s=HANG_S)
    assert done.exit_code == 0
    assert done.lines[0]["lease"] is None
    os.unlink(f"{neighbours.shared}/usage.json")
    os.symlink("/dev/zero", f"{neighbours.shared}/usage.json")
    assert top(lab, "--json", "--count", 1).lines[0]["counted_by"] == "top"


def test_a_root_that_hangs_is_said_to_and_the_frames_go_on(lab, monkeypatch):
    lab.chunks(lab.namespace(), range(3))
    hang, go_on = threading.Event(), threading.Event()
    look_at = watch.look_at

    def slow(view):
        if hang.is_set():
            go_on.wait()  # as a system call on a dead mount: nothing ends it
        return look_at(view)

    monkeypatch.setattr(watch, "look_at", slow)
    monkeypatch.setattr(state, "SLOW_S", 0.2)
    watched = watch.watch_root(lab.path, 0.05)
    watched.start()
    assert watched.wait(HANG_S)
    history = state.History(lab.path)
    assert history.state(watched, None, []).silent_s == 0
    hang.set()
    deadline = time.monotonic() + HANG_S
    while not (shown := history.state(watched, None, [])).silent_s:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert shown.space is not None  # what was known is still shown
    assert "no answer from the root for" in text_of(frame.lines(shown, 80, 24))
    watched.stop()
    go_on.set()


def test_a_root_that_never_answers_is_partial_and_a_missing_one_is_no_root(
    lab, monkeypatch, tmp_path
):
    from fskv_tools.commands import top as command

    monkeypatch.setattr(command, "_FIRST_S", 0.1)
    monkeypatch.setattr(state, "SLOW_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(watch, "look_at", lambda _view: go_on.wait())
    done = top(lab, "--once", interval=0.5)
    go_on.set()
    assert done.exit_code == 3
    assert "no answer from the root" in done.stdout
    monkeypatch.undo()
    assert run("top", "--once", root=tmp_path / "missing").exit_code == 10
    assert run("top", "--once", root=tmp_path).exit_code == 10


def test_a_root_that_goes_away_and_comes_back_is_shown_again(lab, monkeypatch):
    lab.chunks(lab.namespace(), range(3))
    watched = watch.watch_root(lab.path, 0.05)
    watched.start()
    assert watched.wait(HANG_S)
    history = state.History(lab.path)
    os.rename(lab.path, f"{lab.path}-away")
    assert watched.wait(HANG_S, watched.answers + 2)
    assert history.state(watched, None, []).problem
    os.rename(f"{lab.path}-away", lab.path)
    assert watched.wait(HANG_S, watched.answers + 2)
    assert history.state(watched, None, []).problem is None
    watched.stop()


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
    change = endpoint.between(before, sample(engine, 12.0))
    assert change.seconds == 2
    assert change.total(metrics.LOOKUP_HITS) == 120
    assert change.token_hit_ratio == 0.6
    assert change.rate(metrics.LOADED_BYTES) == 60 << 20
    assert change.load_s == pytest.approx(0.002)
    assert change.by_label(metrics.LOAD_FAILURES) == {"corrupt": 2}
    assert change.by_label(metrics.STORES_SKIPPED) == {"capacity": 5}
    assert 0.001 < change.quantile(endpoint.LOOKUP_DELAY, 0.5) <= 0.01
    assert 0.01 < change.quantile(endpoint.LOOKUP_DELAY, 0.99) <= 0.1
    assert change.quantile(endpoint.FIRST_TOKEN, 0.5) is None
    assert before.models == ("org/model",)


def test_numbers_too_great_for_anything_are_left_out():
    huge = 'vllm:fskv_lookup_hits_total{{rank="{}"}} {}\n'
    text = "# TYPE vllm:fskv_lookup_hits counter\n"
    text += "".join(huge.format(rank, value) for rank, value in enumerate(["1e308", "1e308", "7"]))
    assert endpoint.since_start(endpoint.read(text, 1.0)).total(metrics.LOOKUP_HITS) == 7


HOSTILE = """
# TYPE vllm:fskv_lookup_hits counter
vllm:fskv_lookup_hits_total 1
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="{lowest}"}} 0
vllm:time_to_first_token_seconds_bucket{{le="{highest}"}} 10
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} 10
# TYPE vllm:fskv_loaded_chunks counter
vllm:fskv_loaded_chunks_total {chunks}
# TYPE vllm:fskv_load_seconds counter
vllm:fskv_load_seconds_total 10
"""


@pytest.mark.parametrize(
    ("lowest", "highest", "chunks", "quantile", "load_s"),
    [
        ("-1e308", "1e308", "1e-300", None, None),
        ("-Inf", "1e308", "1e-320", None, None),
        ("1", "2", "5", 1.5, 2.0),  # the control
    ],
)
def test_what_is_reckoned_of_hostile_numbers_is_a_number_or_none(
    lowest, highest, chunks, quantile, load_s
):
    text = HOSTILE.format(lowest=lowest, highest=highest, chunks=chunks)
    change = endpoint.since_start(endpoint.read(text, 1.0))
    one = state.EndpointState("http://a:1/metrics", None, 0, 0, (), change, change)
    told = line.fields(state.State(0, "/kv", endpoints=(one,)))
    told = json.loads(json.dumps(told, allow_nan=False))["endpoints"][0]["total"]
    assert (told["ttft_p50_s"], told["load_s"]) == (quantile, load_s)


def test_a_line_of_json_holds_no_number_that_json_has_not(capsys):
    with pytest.raises(ValueError, match="JSON compliant"):
        terminal.emit("sample", load_s=float("inf"))
    assert capsys.readouterr().out == ""


def test_a_hit_ratio_is_one_at_most():
    """vLLM counts the two at different moments."""
    engine = Engine()
    engine.add("vllm:external_prefix_cache_hits", 2500)
    engine.add("vllm:external_prefix_cache_queries", 2000)
    assert endpoint.since_start(sample(engine)).token_hit_ratio == 1.0


@pytest.mark.parametrize("found", [0, 500])
def test_a_hit_ratio_is_of_tokens_as_a_computed_prompt_is_one_missed_chunk(found):
    """Two prompts of 1000 tokens, 10 chunks each: half of one is loaded, or nothing."""
    engine = Engine()
    engine.add(metrics.LOOKUP_HITS, found // 100)
    engine.add(metrics.LOOKUP_MISSES, 2, "absent")
    engine.add("vllm:external_prefix_cache_hits", found)
    engine.add("vllm:external_prefix_cache_queries", 2000)
    change = endpoint.since_start(sample(engine))
    assert change.token_hit_ratio == found / 2000
    up = replace(busy().endpoints[0], recent=change, total=change)
    shown = text_of(frame.lines(state.State(0, "/kv", endpoints=(up,)), 160, 40))
    assert shown.count(frame.share(found / 2000)) >= 2, "in HITS and in ALL"
    assert "71.4 %" not in shown, "of the chunks that were looked for"


def test_every_metric_of_fskv_is_read_and_gauges_have_no_past():
    engine = Engine()
    numbers = [metric for metric in metrics.ALL_METRICS if metric.kind != "histogram"]
    for metric in metrics.ALL_METRICS:
        if metric.kind == "counter":
            engine.add(metric, 7, "absent" if metric.label else None)
        elif metric.kind == "histogram":
            engine.observe(f"vllm:{metric.name}", 0.05)
        else:
            engine.set(metric, 7, "absent" if metric.label else None)
    now = sample(engine)
    for metric in metrics.ALL_METRICS:
        if metric.kind == "histogram":
            assert endpoint.since_start(now).quantile(metric.name, 0.5) is not None, metric.name
    for metric in numbers:
        assert now.value(metric, "absent" if metric.label else "") == 7, metric.name
    again = endpoint.between(now, sample(engine, 1.0))
    for metric in numbers:
        assert again.total(metric) == (7 if metric.kind == "gauge" else 0), metric.name


def test_a_counter_that_began_again_counts_from_zero():
    engine = Engine()
    for _ in range(5):
        engine.traffic()
    before = sample(engine, 1.0)
    engine.restart()
    engine.traffic()
    change = endpoint.between(before, sample(engine, 2.0))
    assert change.total(metrics.LOOKUP_HITS) == 30
    assert change.token_hit_ratio == 0.6
    assert all(amount >= 0 for amount in change.sums.values())
    assert all(n >= 0 for table in change.buckets.values() for n in table.values())


def test_quantiles_are_those_of_prometheus():
    infinite = float("inf")
    assert endpoint.quantile({1.0: 10, 2.0: 20, infinite: 20}, 0.5) == 1.0
    assert endpoint.quantile({1.0: 10, 2.0: 20, infinite: 20}, 0.75) == 1.5
    assert endpoint.quantile({1.0: 10, infinite: 20}, 0.99) == 1.0  # not known above the last bound
    assert endpoint.quantile({}, 0.5) is None
    assert endpoint.quantile({1.0: 0, infinite: 0}, 0.5) is None
    assert endpoint.quantile({2.0: 5, 1.0: 9, infinite: 3}, 0.5) == pytest.approx(
        0.5
    )  # not cumulative


BAD = (
    "silent",
    "error",
    "redirect",
    "not http",
    "garbage",
    "half",
    "html",
    "empty",
    "dripping",
    "dripping headers",
    "endless",
)


@pytest.mark.parametrize("mode", BAD)
def test_an_endpoint_of_any_kind_costs_a_sentence_and_bounded_time_and_memory(mode):
    engine = Engine()
    with server(engine, mode) as made:
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


def test_negative_control_a_good_endpoint_is_read():
    engine = Engine()
    engine.traffic()
    with server(engine) as made:
        assert endpoint.read(endpoint.fetch(made.url, 5), 0.0).has_fskv


def test_the_screen_lives_through_everything_that_an_endpoint_does(lab):
    lab.namespace()
    engine = Engine()
    engine.traffic()
    history = state.History(lab.path)
    root = watch_of(lab)
    with server(engine) as made:
        watched = watch.watch_endpoint(made.url, 0.05, 0.3)
        watched.start()

        def now(answers=2):
            assert watched.wait(HANG_S, watched.answers + answers)
            return history.state(root, None, [(made.url, watched)])

        def comes_up():  # a look takes no longer than 0.3 s, and some are longer on a busy machine
            wait_for(lambda: now(1).endpoints[0].is_up, HANG_S)

        comes_up()
        for mode in BAD:
            made.mode = mode
            one = now(3).endpoints[0]
            assert not one.is_up, mode
            assert "60.0 %" not in text_of(frame.lines(now(), 140, 50)), mode
            made.mode = "good"
            engine.restart()
            engine.traffic()
            comes_up()
        watched.stop()
    # Its process ends, and another one takes its port.
    watched = watch.watch_endpoint(made.url, 0.05, 0.3)
    watched.start()
    assert watched.wait(HANG_S, 2)
    assert "refused" in watch.words(watched.problem)
    with server(engine, port=made.server_port):
        wait_for(lambda: watched.answer is not None and watched.problem is None, HANG_S)
    watched.stop()


def test_metrics_show_in_a_frame_and_in_json(lab):
    lab.namespace()
    engine = Engine()
    engine.traffic()
    engine.add(metrics.LOAD_FAILURES, 3, "corrupt")
    with server(engine) as made, server(engine, "garbage") as bad, going_on(engine.traffic):
        done = top(lab, "--json", "--count", 2, "--metrics", f"{made.url},{bad.url}")
        shown = top(lab, "--once", "--metrics", made.url, env={"COLUMNS": "140", "LINES": "50"})
        engine.set(metrics.BREAKER_OPEN, 1)
    good, garbage = done.lines[-2]["endpoints"]
    assert good["recent"]["token_hit_ratio"] == 0.6
    assert good["recent"]["loaded_nbytes"] > 0
    assert good["recent"]["seconds"] > 0
    assert good["total"]["load_failures"] == {"corrupt": 3}
    assert good["recent"]["load_failures"] == {}
    assert (good["breaker_open"], good["threads_hung"], good["models"]) == (False, 0, ["org/model"])
    assert garbage["problem"]
    assert (garbage["recent"], garbage["total"]) == (None, None)
    assert "60.0 %" in shown.stdout
    assert "failed: corrupt 3" in shown.stdout


def test_urls_are_checked_before_anything_is_asked(lab):
    assert endpoint.addresses("a:8000, https://b/x,a:8000") == [
        "http://a:8000/metrics",
        "https://b/x",
    ]
    for bad in (
        "file:///etc/passwd",
        "ftp://x",
        "http://",
        "http://u:p@h",
        "http://h:99999",
        "a b",
        "",
        ",",
    ):
        with pytest.raises(UsageError):
            endpoint.addresses(bad)
        assert top(lab, "--once", "--metrics", bad).exit_code == 2


# --- how it looks -----------------------------------------------------------------------


def text_of(lines):
    return "\n".join(line.plain for line in lines)


def busy(num=30):
    """A state with more of everything than fits."""
    space = Space(100 * GIB, 10 * GIB, 1000, 100)
    ids = [f"sm_90/organisation--a-model-with-a-long-name-{n}@{n:016x}" for n in range(num)]
    engines = tuple(
        state.EngineState(
            f"e{n}", f"gpu-node-{n:03}.cluster", n, ids[n], "t", n << 30, 1e8, n % 3,
            [state.ALIVE, state.SILENT, state.GONE, state.UNKNOWN][n % 4], 17.0,
        )
        for n in range(num)
    )  # fmt: skip
    spaces = tuple(
        state.NamespaceState(name, "tenant" * (n % 2), n << 33, 10**7, -1e9, 3e9, 12345.0)
        for n, name in enumerate(ids)
    )
    from fskv.bounds.limits import Scope

    bounds = (
        Scope("root", None, 100 * GIB, 99 * GIB),
        Scope("tenant", "t" * 90, GIB, 2 * GIB),
        Scope("free", None, 0, 0),
    )
    engine = Engine()
    for _ in range(3):
        engine.traffic()
    for reason in ("corrupt", "timed_out", "io_error", "stale", "absent", "denied", "breaker"):
        engine.add(metrics.LOAD_FAILURES, 10**6, reason)
        engine.add(metrics.STORES_SKIPPED, 10**6, reason)
    now = sample(engine, 1.0)
    change = endpoint.since_start(now)
    up = state.EndpointState(
        "http://" + "h" * 60 + ":1/metrics", None, 0, 0, ("m",), change, change
    )
    down = state.EndpointState("http://b:1/metrics", "no answer within 5 s " * 9, 0, 9)
    lease = state.LeaseView("gpu-node-001.cluster", 12345, 0, state.ALIVE, 0.0)
    return state.State(
        1_800_000_000 * 10**9, "/mnt/" + "deep/" * 30, None, 5.0, 12.0, space, spaces, bounds, engines,
        lease, "engines", 1, 5e8, Usage(unremovable=3), (up, down),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (140, 50), (40, 10), (20, 4), (1, 1), (300, 100)]
)
def test_a_frame_fits_whatever_there_is_to_show(width, height):
    for shown in (busy(), busy(0), busy(1), state.State(0, "/kv"), state.State(0, "/\u4e2d" * 90)):
        for ascii_only in (False, True):
            lines = frame.lines(shown, width, height, ascii_only=ascii_only)
            assert len(lines) <= height
            assert max((cell_len(line.plain) for line in lines), default=0) <= width
            assert not ascii_only or "/\u4e2d" in shown.path or text_of(lines).isascii()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_why_an_endpoint_has_no_metrics_is_not_cut(width):
    down = state.EndpointState("http://" + "h" * 60 + ":1/metrics", "Connection refused", 0, 0)
    shown = text_of(frame.lines(state.State(0, "/kv", endpoints=(down,)), width, 24))
    assert "no metrics\n  connection refused" in shown
    shown = text_of(
        frame.lines(
            state.State(0, "/kv", endpoints=(replace(down, problem="HTTP 302"),)), width, 24
        )
    )
    assert shown.endswith("HTTP 302")


def test_what_matters_most_is_on_a_small_screen_and_what_is_left_out_is_counted():
    small, large = (text_of(frame.lines(busy(), *size)) for size in ((80, 24), (140, 50)))
    for shown in (small, large):
        for title in ("BOUND", "NAMESPACE", "ENGINE", "METRICS"):
            assert title in shown
        assert "no answer from the root for 5 s" in shown
        assert "more" in shown
        assert "200 %" in shown  # a bound that was lowered is said to be exceeded
        assert "silent for 17 s" in shown  # who is in trouble comes first
    assert "TTFT P50" in large or "P99" in large
    assert "TENANT" in large
    assert len(re.findall(r"and \d+ more", large)) <= 3


def test_a_narrow_screen_keeps_what_is_since_the_start_and_no_empty_column():
    (up, _) = busy().endpoints
    engine = Engine()
    engine.traffic()
    then = sample(engine, 1.0)
    idle = replace(up, recent=endpoint.between(then, replace(then, at_s=2.0)))

    def titles(one, width):
        shown = text_of(frame.lines(state.State(0, "/kv", endpoints=(one,)), width, 40))
        (head,) = [line for line in shown.splitlines() if line.startswith("METRICS")]
        return head.split()

    assert {"ALL", "FAILED"} <= {*titles(idle, 60)}
    assert not {"HITS", "HUNG"} & {*titles(idle, 160)}
    # The control: with traffic in the interval, and with a thread that hangs, they are there.
    engine.set(metrics.THREADS_HUNG, 2)
    live = replace(up, recent=(change := endpoint.since_start(sample(engine, 1.0))), total=change)
    assert {"HITS", "HUNG"} <= {*titles(live, 160)}


def test_a_directory_of_chunks_that_is_a_link_is_not_counted(lab):
    where, other = lab.namespace(), lab.namespace(model_name="org/other")
    lab.chunks(where, range(4))
    before = Counter().count(RootView(lab.path)).sizes
    assert before[where.id][1] == 4, "the control"
    chunks = f"{other.directory.path}/chunks"
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(chunks)
    os.symlink(f"{where.directory.path}/chunks", chunks)
    assert Counter().count(RootView(lab.path)).sizes == {where.id: before[where.id]}


@pytest.mark.parametrize("denied", [True, False])
def test_heartbeats_that_may_not_be_read_are_not_taken_for_none(lab, monkeypatch, denied):
    def refused(_):
        raise PermissionError(13, "Permission denied")

    if denied:
        monkeypatch.setattr(SharedFiles, "heartbeats", refused)
    shown = top(lab, "--once").stdout
    assert ("tell each other cannot be read: Permission denied" in shown) is denied
    assert ("no engine holds the lease" in shown) is not denied
    told = top(lab, "--json", "--count", 1)
    assert (told.exit_code, told.summary["unanswered"]) == ((3, 1) if denied else (0, 0))
    done = run("report", "--html", f"{lab.path}.html", root=lab.path)
    assert done.exit_code == (3 if denied else 0)
    with open(f"{lab.path}.html", encoding="utf-8") as file:
        page = file.read()
    assert ("No engine has a heartbeat" in page) is not denied
    assert ("No living engine declares one" in page) is not denied


def test_files_that_cannot_be_removed_have_a_line_that_no_narrow_screen_cuts():
    told = replace(busy(), usage=Usage(unremovable=3))
    shown = text_of(frame.lines(told, 60, 40))
    assert "3 files cannot be removed" in shown.splitlines()
    assert "cannot be removed" not in text_of(frame.lines(replace(told, usage=Usage()), 60, 40))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50)])
def test_once_fits_the_size_and_leaves_a_line_for_the_prompt(lab, width, height):
    spaces = [lab.namespace(model_name=f"org/a-rather-long-name-{n}") for n in range(40)]
    Neighbours(lab, *spaces)
    env = {"COLUMNS": str(width), "LINES": str(height)}
    done = fskv("top", "--once", "--interval", "0.2", root=lab.path, env=env, timeout_s=HANG_S)
    lines = done.stdout.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < height
    assert "more" in done.stdout
    assert "\x1b" not in done.stdout


def test_once_without_a_terminal_or_utf8_shows_everything(lab):
    spaces = [lab.namespace(model_name=f"org/{n}") for n in range(60)]
    Neighbours(lab, *spaces)
    env = {"PYTHONIOENCODING": "ascii"}
    done = fskv("top", "--once", "--interval", "0.2", root=lab.path, env=env, timeout_s=HANG_S)
    assert done.exit_code == 0
    assert done.stdout.isascii()
    assert all(where.id in done.stdout for where in spaces)


def test_names_are_shortened_in_the_middle_and_columns_go_by_importance():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert shorten("\u4e2d\u4e2d\u4e2d\u4e2d", 5) in ("\u4e2d…\u4e2d", "\u4e2d\u4e2d…")
    assert [len(shorten("abcdef", n)) for n in range(7)] == list(range(7))
    columns = (
        Column("NAME", least=6),
        Column("A", rank=2),
        Column("B", rank=1),
        Column("C", rank=3),
    )
    cells = [[Text("long-name-here"), Text("aaaa"), Text("bbbb"), Text("")]]
    head, rows = table(columns, cells, 80)
    assert head.plain.split() == ["NAME", "A", "B"]  # C is empty everywhere
    assert table(columns, cells, 14)[0].plain.split() == ["NAME", "B"]
    assert rows[0].plain.split() == ["long-name-here", "aaaa", "bbbb"]
    sections = [Section(Text(f"s{n}"), tuple(Text(f"{n}.{m}") for m in range(9))) for n in range(3)]
    for height in range(40):
        assert len(stack([Text("head")], sections, height)) <= height


# --- the terminal -----------------------------------------------------------------------


class Terminal:
    """`fskv top` on a pty, as a person would have it."""

    def __init__(self, lab, *words, size=(24, 80), before=(), term="xterm-256color"):
        self.master, self.slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.slave)
        command = [
            sys.executable,
            "-m",
            "fskv_tools",
            "top",
            "--root",
            lab.path,
            "--interval",
            "0.2",
        ]
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        env["TERM"] = term
        self.child = subprocess.Popen(
            ["setsid", "--ctty", *command, *words],  # the terminal is its own: Ctrl-C
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
    ("end", "code"),
    [("q", 0), ("Ctrl-C", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("--count", 0)],
)
def test_however_it_ends_the_terminal_is_as_it_was(lab, end, code):
    lab.chunks(lab.namespace(), range(3))
    terminal = Terminal(lab, *(["--count", "2"] if end == "--count" else []))
    terminal.read_until(b"NAMESPACE")
    assert b"\x1b[?1049h" in terminal.seen  # the alternate screen
    if end != "--count":
        now = termios.tcgetattr(terminal.slave)
        assert not now[3] & (termios.ICANON | termios.ECHO)  # the test sees the mode
        terminal.type(b"xyz")  # other keys do nothing
    if end == "q":
        terminal.type(b"q")
    elif end == "Ctrl-C":
        terminal.type(b"\x03")
    elif end.startswith("SIG"):
        terminal.child.send_signal(getattr(signal, end))
    found, mode = terminal.end()
    assert found == code
    assert mode == terminal.before
    left = terminal.seen.rindex(b"\x1b[?1049l")
    assert left > terminal.seen.rindex(b"\x1b[?1049h")
    assert terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l")  # the cursor
    assert b"Traceback" not in terminal.seen


def test_a_new_size_is_drawn_and_an_error_gives_the_terminal_back(lab):
    lab.chunks(lab.namespace(model_name="org/" + "x" * 60), range(3))
    terminal = Terminal(lab, "--interval", "30")
    terminal.read_until(b"FILES")
    assert b"x" * 60 not in terminal.seen
    terminal.resize(50, 140)
    terminal.child.send_signal(signal.SIGWINCH)
    terminal.read_until(b"x" * 60)
    terminal.type(b"q")
    code, mode = terminal.end()
    assert code == 0
    assert mode == terminal.before


def test_without_a_screen_it_says_what_to_do(lab):
    done = fskv("top", root=lab.path, timeout_s=HANG_S)
    assert done.exit_code == 2
    assert "--once" in done.stderr
    terminal = Terminal(lab, term="dumb")
    assert terminal.end()[0] == 2
    assert run("top", "--once", "--count", 2, root=lab.path).exit_code == 2


def test_json_can_be_piped_to_somebody_who_goes_away(lab):
    lab.namespace()
    command = [sys.executable, "-m", "fskv_tools", "top", "--json", "--interval", "0.1"]
    child = subprocess.Popen(
        [*command, "--root", lab.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert json.loads(child.stdout.readline())["type"] == "sample"
    child.stdout.close()
    assert b"Traceback" not in child.stderr.read()
    assert child.wait(HANG_S) in (
        1,
        130,
    )  # typer turns a broken pipe into 1 before cli.main sees it
    child.stderr.close()
