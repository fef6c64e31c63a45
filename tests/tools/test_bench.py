"""`fskv bench`: rates of verified bytes only, the advice that follows, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import sys

import gds_lab
import pytest
from fskv_tools.bench import advice, measure
from tool_lab import run as run_fskv

from fskv.data_path.transports import evidence, host
from fskv.errors import ConfigError, NoSpace
from fskv.offload import mover
from fskv.root.filesystem import Space
from fskv.types import Status

TINY = ("--total-mib", "1", "--rounds", "2", "--chunk-kib", "128", "--threads", "2")


def run(directory, *options):
    return run_fskv("bench", directory, *TINY, *options)


def of(done, kind):
    return [line for line in done.lines if line["type"] == kind]


def make_rates(mode="O_DIRECT", load=2.0, **changes):
    spread = load if isinstance(load, dict) else dict.fromkeys(("median", "min", "max"), load)
    fields = {"transport": "host", "threads": 4, "chunk_nbytes": 2 << 20, "num_chunks": 32}
    return advice.Rates(mode=mode, store=spread, load=spread, **{**fields, **changes})


# --- a run ------------------------------------------------------------------------------------


def test_every_size_number_of_threads_and_mode_is_measured_and_nothing_is_left(tmp_path):
    done = run(tmp_path, "--json", "--chunk-kib", "64,128", "--threads", "1,3")
    assert done.exit_code == 0, done.stderr
    found = of(done, "rates")
    modes = {line["mode"] for line in found}
    assert "buffered" in modes
    cells = [(line["mode"], line["chunk_nbytes"] >> 10, line["threads"]) for line in found]
    assert sorted(cells) == [(m, c, t) for m in sorted(modes) for c in (64, 128) for t in (1, 3)]
    for line in found:
        assert line["num_chunks"] % line["threads"] == 0
        for op in ("store", "load"):
            assert 0 < line[op]["min"] <= line[op]["median"] <= line[op]["max"]
    options = [line["option"] for line in of(done, "advice")]
    assert options[-3:] == ["io_threads", "hybrid_chunk_size", "load_deadline_s"]
    assert os.listdir(tmp_path) == []


def test_without_json_there_are_two_tables_and_a_sentence(tmp_path):
    done = run(tmp_path, "--threads", "1,2", "--bytes-per-token", "1000")
    assert (done.exit_code, done.stderr) == (0, "")
    for words in ("host buffered", "io_threads", "1000 bytes of KV a token"):
        assert words in done.stdout


def test_it_needs_no_torch_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # what makes an import of it fail
    assert run(tmp_path).exit_code == 0
    done = run(tmp_path, "--cuda")
    assert (done.exit_code, done.stderr) == (2, "fskv: --cuda: torch is not installed\n")


def test_where_o_direct_does_not_work_the_page_cache_is_measured(tmp_path, monkeypatch):
    real = measure.Contestant

    def refuse(*args, way, **options):
        if way[1] == "on":
            raise ConfigError("option 'direct_io': found on, expected off")
        return real(*args, way=way, **options)

    monkeypatch.setattr(measure, "Contestant", refuse)
    done = run(tmp_path, "--json")
    assert done.exit_code == 0
    assert {line["mode"] for line in of(done, "rates")} == {"buffered"}
    assert "not measured: option 'direct_io'" in done.stderr


@pytest.mark.parametrize("works", [True, False])
def test_gds_is_measured_where_the_pages_are_on_a_gpu(tmp_path, monkeypatch, works):
    """kvikio and its files are real, the GPU is simulated; without GDS there is a sentence and no rate."""
    gds_lab.simulated(monkeypatch)
    # The GPU has no cuFile: as if that had carried the probe.
    monkeypatch.setattr(evidence, "bounces", lambda facts: not works)
    done = run(tmp_path, "--json", "--cuda")
    assert done.exit_code == 0, done.stderr
    transports = {line["transport"] for line in of(done, "rates")}
    assert transports == ({"host", "gds"} if works else {"host"})
    assert ("not measured: " in done.stderr) is not works


# --- honesty ----------------------------------------------------------------------------------


class _InPython(host.HostTransport):
    """Every chunk comes by the methods below."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.native = dataclasses.replace(self.native, pages=None)


class _Corrupting(_InPython):
    """Loads one bit wrong, after every check of the store."""

    def scatter(self, slot, base, table):
        slot.array[base] ^= 1
        super().scatter(slot, base, table)


class _Full(_InPython):
    def write_part(self, path, slot, nbytes, dir_fd=None):
        raise NoSpace(f"{path}: No space left on device")


class _Skipping(mover.ChunkStore):
    """Says of each chunk that it is there already."""

    def put(self, chunk, first_block, slot, **how):
        return Status.EXISTS


class _Lossy(mover.ChunkStore):
    def get(self, chunk, *args):
        os.truncate(self.path(chunk), 4096)
        return super().get(chunk, *args)


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        ("HostTransport", _Corrupting, "the loaded bytes differ from the stored ones"),
        ("HostTransport", _Full, "chunks ended as no_space"),
        ("ChunkStore", _Skipping, "store: 8 chunks ended as exists"),
        ("ChunkStore", _Lossy, "load: 8 chunks ended as corrupt"),
    ],
)
def test_what_was_not_verified_is_no_rate(tmp_path, monkeypatch, name, broken, words):
    monkeypatch.setattr(host, "HostTransport", _InPython)
    monkeypatch.setattr(host if name == "HostTransport" else mover, name, broken)
    done = run(tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


# --- the advice -------------------------------------------------------------------------------


def advised(found, answer_s=0.0001, bytes_per_token=131072):
    return {one.option: one for one in advice.advise(found, answer_s, bytes_per_token)}


def test_the_cheapest_setting_near_the_best_load_is_advised():
    found = [
        make_rates(load=2.00, threads=8),
        make_rates(load=1.95, threads=4),
        make_rates(load=1.92, threads=4, chunk_nbytes=1 << 20),
        make_rates(load=1.00, threads=1),
        make_rates("buffered", load=1.99, threads=1),
    ]
    best = advice.best_of(found)
    assert best == found[2]
    assert advice.break_even(best, 131072) == pytest.approx(1.92e9 / 131072)
    options = advised(found)
    assert "transport" not in options  # one was measured
    assert options["direct_io"] == ("direct_io", None, options["direct_io"].why)
    assert options["direct_io"].why.startswith("no difference measured; ")
    found[-1] = make_rates("buffered", load=1.0, threads=1)
    options = advised(found)
    assert options["direct_io"].value == "auto"
    assert options["hybrid_chunk_size"].value is None
    assert advised([*found, make_rates("buffered", load=4.0)])["direct_io"].value == "off"
    gds = make_rates(transport="gds", load=4.0)
    assert advised([*found, gds])["transport"].value == "gds"


@pytest.mark.parametrize(
    ("answer_s", "loads", "value"),
    [
        (0.0001, {1: 1.0, 8: 2.0}, "auto"),  # takes 8
        (0.0001, {1: 2.0, 8: 1.95}, None),
        (0.0001, {1: 2.0, 4: 1.0, 8: 1.95}, "auto"),
        (0.0001, {1: 2.0, 8: 1.5}, "1"),
        (0.0063, {8: 1.0, 32: 2.0}, "auto"),  # takes 30
        (None, {8: 1.0, 32: 2.0}, "32"),  # takes 8
    ],
)
def test_auto_is_advised_unless_the_nearest_number_is_clearly_slower(answer_s, loads, value):
    found = [make_rates(threads=threads, load=load) for threads, load in loads.items()]
    assert advised(found, answer_s)["io_threads"].value == value


@pytest.mark.parametrize(("least", "value"), [(1.0, None), (1.8, "off")])
def test_ranges_that_overlap_are_no_difference(least, value):
    spread = {"median": 2.0, "min": least, "max": 2.2}
    found = [make_rates(load=1.5), make_rates("buffered", load=spread)]
    assert advised(found)["direct_io"].value == value


@pytest.mark.parametrize(("rate", "value"), [(2.0, "2"), (0.02, "3"), (0.002, "26")])
def test_a_slow_mount_gets_a_longer_deadline(rate, value):
    """64 MiB may take 5.2 s by default; twice what they took must be allowed."""
    assert advised([make_rates(load=rate)])["load_deadline_s"].value == value


# --- what a user may get wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chunk-kib", "512,x"], "--chunk-kib: found '512,x'"),
        (["--chunk-kib", "48"], "--chunk-kib: found 48, expected multiples of 64"),
        (["--threads", "-1"], "--threads: found '-1'"),
        (["--threads", "65"], "--threads: found 65, expected 1 to 64"),
        (["--total-mib", str(1 << 40)], "MiB are free"),
        (["--chunk-kib", str(64 * 10**12)], "MiB are free"),
    ],
)
def test_nonsense_is_one_sentence_and_exit_code_2(tmp_path, options, words):
    done = run(tmp_path, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_none_or_takes_no_files_is_named(tmp_path):
    for path, code, words in [
        (tmp_path / "no", 2, "found no directory"),
        ("/proc", 3, "cannot be written"),
    ]:
        done = run(path)
        assert done.exit_code == code
        assert f"{path}: {words}" in done.stderr


def test_room_is_looked_for_before_anything_is_written(tmp_path, monkeypatch):
    spaces = iter([Space(1 << 40, 18 << 20, 0, 0), Space(1 << 40, 17 << 20, 0, 0)])
    monkeypatch.setattr(measure.Space, "of", classmethod(lambda cls, path: next(spaces)))
    assert run(tmp_path).exit_code == 0
    assert run(tmp_path).exit_code == 2


# --- stopping ---------------------------------------------------------------------------------
