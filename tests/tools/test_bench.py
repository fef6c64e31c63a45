"""`fskv bench`: rows as documented, verified bytes only, peers beside them, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import gds_lab
import pytest
from places import REPOSITORY
from world import wait_for

pytest.importorskip("torch")
cli = pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")

from fskv_tools.bench import (  # noqa: E402
    advice as bench_advice,
)
from fskv_tools.bench import (  # noqa: E402
    contestant as bench_contestant,
)
from fskv_tools.bench import (  # noqa: E402
    measure,
)
from fskv_tools.bench import (  # noqa: E402
    peers as bench_peers,
)
from fskv_tools.bench import (  # noqa: E402
    row as bench_row,
)
from fskv_tools.bench import (  # noqa: E402
    store as bench_store,
)
from fskv_tools.bench import (  # noqa: E402
    table as bench_table,
)
from fskv_tools.bench import (  # noqa: E402
    workspace as bench_workspace,
)
from fskv_tools.bench.contestant import Cell  # noqa: E402
from fskv_tools.bench.row import Row, Spread  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from fskv.offload import mover  # noqa: E402
from fskv.root.filesystem import Space  # noqa: E402
from fskv.transports import evidence, host  # noqa: E402
from fskv.types import Status  # noqa: E402

TINY = [
    *("--total-mib", "1", "--rounds", "2", "--chunk-kib", "64", "--page-kib", "16"),
    *("--threads", "2", "--device", "cpu"),
]


def run(directory, *options):
    return CliRunner().invoke(cli.app, ["bench", str(directory), *TINY, *options])


def rows_of(result):
    """Parse stdout, which must be the list of rows and nothing else."""
    rows = json.loads(result.stdout)
    fields = [field.name for field in dataclasses.fields(Row)]
    assert rows
    assert all(list(row) == fields for row in rows)
    for row in rows:
        rates = [rate for rate in (row["gb_per_s"], row["keys_per_s"]) if rate]
        assert len(rates) == (row["error"] is None)
        for rate in rates:
            assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    return rows


def fskv_rows(rows):
    return [row for row in rows if row["path"].startswith(("host", "presence"))]


def make_row(op="load", path="host O_DIRECT", rate=2.0, *, keys=None, **changes):
    fields = {
        "schema": 1,
        "op": op,
        "path": path,
        "chunk_nbytes": 2 << 20,
        "page_nbytes": 32768,
        "threads": 4,
        "num_chunks": 64,
        "rounds": 7,
        "gb_per_s": None if rate is None else Spread(rate, rate / 2, rate * 2),
        "keys_per_s": keys and Spread(keys, keys, keys),
        "verified": rate is not None and path.startswith("host"),
        "ratio_to_fs_io_c": None,
        "ratio_to_fio": None,
        "error": None,
    }
    return Row(**{**fields, **changes})


# --- a run ----------------------------------------------------------------------------------


def test_a_run_reports_every_operation_verified_and_leaves_nothing(tmp_path):
    result = run(tmp_path, "--json", "--direct-io", "off")
    assert result.exit_code == 0, result.stderr
    rows = rows_of(result)
    assert [row["op"] for row in rows] == [
        *("lookup-known", "lookup-unknown", "lookup-unknown"),
        *("store", "load", "load-warm", "load-request", "load-serial"),
    ]
    assert all(row["verified"] and row["rounds"] == 2 for row in rows)
    stored = rows[3]
    assert (stored["path"], stored["chunk_nbytes"], stored["page_nbytes"]) == (
        *("host buffered", 65536, 16384),
    )
    assert (stored["threads"], stored["num_chunks"], stored["ratio_to_fio"]) == (2, 16, None)
    assert "beats recomputing" in result.stderr
    assert os.listdir(tmp_path) == []


def test_without_json_there_is_a_table_and_advice(tmp_path):
    result = run(tmp_path, "--direct-io", "off", "--bytes-per-token", "1000")
    assert result.exit_code == 0, result.stderr
    for words in ("host buffered", "load-serial", "lookup-unknown", "1000 bytes of KV per token"):
        assert words in result.stdout
    assert re.search(
        r'io_threads "auto" would be \d+ with such chunks: a file opens and is read in \d',
        result.stdout,
    )
    assert result.stderr == ""  # progress is for terminals
    assert os.listdir(tmp_path) == []


def test_every_chunk_size_page_size_and_number_of_threads_is_measured(tmp_path):
    result = run(
        tmp_path, *("--json", "--direct-io", "off", "--rounds", "1"),
        *("--chunk-kib", "64,128", "--page-kib", "16,128", "--threads", "1,3"),
    )  # fmt: skip
    rows = [row for row in rows_of(result) if row["op"] == "load"]
    cells = {(r["chunk_nbytes"] >> 10, r["page_nbytes"] >> 10, r["threads"]) for r in rows}
    assert len(rows) == len(cells)
    assert cells == {(c, p, t) for c, p in [(64, 16), (128, 16), (128, 128)] for t in (1, 3)}
    assert all(row["num_chunks"] % row["threads"] == 0 for row in rows)


def test_o_direct_is_measured_beside_the_page_cache_where_it_works(tmp_path):
    rows = [row for row in rows_of(run(tmp_path, "--json")) if row["op"] == "load"]
    assert rows[-1]["path"] == "host buffered"
    only = run(tmp_path, "--json", "--direct-io", "on")
    if len(rows) == 1:
        assert only.exit_code == 2
        assert "direct_io" in only.stderr
    else:
        assert rows[0]["path"] == "host O_DIRECT"
        ops = [row["op"] for row in rows_of(only) if row["path"].startswith("host")]
        assert ops == ["store", "load", "load-request", "load-serial"]
    assert os.listdir(tmp_path) == []


# --- honesty --------------------------------------------------------------------------------


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


class _Skipping(mover.ChunkStore):
    """Says that every third chunk is there already."""

    num_puts = 0

    def put(self, chunk, first_block, slot, **how):
        type(self).num_puts += 1
        return (
            Status.EXISTS
            if self.num_puts % 3 == 0
            else super().put(chunk, first_block, slot, **how)
        )


class _Lossy(mover.ChunkStore):
    def get(self, chunk, *args):
        os.truncate(self.path(chunk), 4096)
        return super().get(chunk, *args)


@pytest.mark.parametrize(
    ("name", "broken", "words", "lookups_too"),
    [
        ("HostTransport", _Corrupting, "the loaded pages differ from the stored ones", False),
        ("ChunkStore", _Skipping, "chunks ended as exists", True),
        ("ChunkStore", _Lossy, "load: 16 of 16 chunks ended as corrupt", False),
    ],
)
def test_what_was_not_verified_is_no_result(
    tmp_path, monkeypatch, name, broken, words, lookups_too
):
    monkeypatch.setattr(host, "HostTransport", _InPython)
    monkeypatch.setattr(host if name == "HostTransport" else mover, name, broken)
    result = run(tmp_path, "--json", "--direct-io", "off")
    assert result.exit_code == 1
    rows = rows_of(result)
    for row in rows:
        if row["path"].startswith("host") or lookups_too:
            assert words in row["error"]
            assert (row["verified"], row["gb_per_s"], row["rounds"]) == (False, None, 0)
        else:
            assert row["verified"]
    assert "No advice" in result.stderr
    assert "Traceback" not in result.stderr
    shown = run(tmp_path, "--direct-io", "off")
    assert (shown.exit_code, words in shown.stdout) == (1, True)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_an_error_in_words(tmp_path, monkeypatch):
    def full(self, path, slot, nbytes, dir_fd=None):
        from fskv.errors import NoSpace

        raise NoSpace(f"{path}: No space left on device")

    monkeypatch.setattr(host.HostTransport, "write_part", full)
    monkeypatch.setattr(host, "HostTransport", _InPython)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "chunks ended as no_space" in result.stdout
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.output
    assert os.listdir(tmp_path) == []


def test_a_wrong_answer_of_the_index_is_no_result(tmp_path, monkeypatch):
    from fskv_tools.bench import lookup as bench_lookup

    def all_there(ranks, chunks, missed_before):
        return bench_lookup.Findings([True] * len(chunks), 0.001)

    monkeypatch.setattr(bench_lookup, "probe_chunks", all_there)
    result = run(tmp_path, "--json", "--direct-io", "off")
    assert result.exit_code == 1
    wrong = [row for row in rows_of(result) if row["error"]]
    assert {(row["path"], row["op"]) for row in wrong} == {
        ("presence index", "lookup-known"),
        ("presence index", "lookup-unknown"),
        ("presence probe", "lookup-unknown"),
    }


# --- peers ----------------------------------------------------------------------------------


class _FakeFsIoC:
    """Behaves like vLLM's extension as far as a bench sees; counts nothing, verifies nothing."""

    @staticmethod
    def batch_store_block(parts, paths, buffers, use_o_direct):
        for part, path, buffer in zip(parts, paths, buffers, strict=True):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(part, "xb") as file:
                file.write(buffer)
            os.rename(part, path)

    @staticmethod
    def batch_load_block(paths, buffers, use_o_direct):
        for path, buffer in zip(paths, buffers, strict=True):
            with open(path, "rb") as file:
                assert file.readinto(buffer) == len(buffer)

    @staticmethod
    def batch_lookup(paths):
        return [os.path.exists(path) for path in paths]


def test_peers_that_are_not_there_are_named_and_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", None)  # what makes an import of it fail
    result = run(tmp_path, "--json", "--peers", "--direct-io", "off")
    assert result.exit_code == 0
    assert "fs_io_C is left out: vLLM is not installed" in result.stderr
    assert "fio is left out: it is not on PATH" in result.stderr
    rows = rows_of(result)
    assert {r["path"] for r in rows} == {
        *("presence index", "presence probe"),
        *("host buffered", "os.path.exists"),
    }
    assert all(row["ratio_to_fs_io_c"] is None for row in rows)


def test_a_vllm_without_the_extension_is_said_to_be_one(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert bench_peers.find_fs_io_c() == (None, "fs_io_C is left out: this vLLM comes without it")
    (tmp_path / "vllm" / "fs_io_C.abi3.so").write_bytes(b"no library")
    module, why = bench_peers.find_fs_io_c()
    assert module is None
    assert why.startswith("fs_io_C is left out: ")


def test_peers_are_measured_in_the_same_rounds_and_never_called_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "find_fs_io_c", lambda: (_FakeFsIoC, ""))
    result = run(tmp_path, "--json", "--peers", "--direct-io", "off")
    assert result.exit_code == 0
    rows = rows_of(result)
    peers = [row for row in rows if row not in fskv_rows(rows)]
    fs_io_c = [row for row in peers if row["path"] == "fs_io_C buffered"]
    assert [row["op"] for row in fs_io_c] == ["store", "load", "load-warm"]
    for row in peers:
        assert (row["verified"], row["ratio_to_fs_io_c"]) == (False, None)
        assert row["page_nbytes"] == row["chunk_nbytes"]
    own = {row["op"]: row for row in fskv_rows(rows)}
    for peer in fs_io_c:
        quotient = own[peer["op"]]["gb_per_s"]["median"] / peer["gb_per_s"]["median"]
        assert own[peer["op"]]["ratio_to_fs_io_c"] == pytest.approx(quotient)
    assert own["lookup-unknown"]["ratio_to_fs_io_c"] > 0
    assert own["load-serial"]["ratio_to_fs_io_c"] is None
    assert os.listdir(tmp_path) == []


def test_a_peer_that_fails_is_a_row_with_a_sentence_and_the_run_goes_on(tmp_path, monkeypatch):
    class Broken(_FakeFsIoC):
        @staticmethod
        def batch_load_block(paths, buffers, use_o_direct):
            raise OSError(5, "Input/output error")

    fio = tmp_path / "bin" / "fio"
    fio.parent.mkdir()
    fio.write_text("#!/bin/sh\necho 'fio: no such engine' >&2\nexit 1\n")
    fio.chmod(0o700)
    monkeypatch.setattr(bench_peers, "find_fs_io_c", lambda: (Broken, ""))
    monkeypatch.setenv("PATH", str(fio.parent), prepend=os.pathsep)
    root = tmp_path / "root"
    root.mkdir()
    result = run(root, "--json", "--peers", "--direct-io", "off")
    assert result.exit_code == 0  # fskv's own rows are good
    rows = rows_of(result)
    errors = {row["path"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {"fs_io_C buffered", "fio buffered"}
    assert "batches failed: [Errno 5] Input/output error" in errors["fs_io_C buffered"]
    assert errors["fio buffered"] == "fio: no such engine"
    assert all(row["verified"] for row in fskv_rows(rows))
    assert os.listdir(root) == []


def test_the_real_extension_stores_and_loads_the_bytes(tmp_path):
    module, why = bench_peers.find_fs_io_c()
    if module is None:
        pytest.skip(why)
    memory = bench_peers.PeerMemory(1 << 20)
    before = bytes(memory.view)
    cell = bench_contestant.Cell(1 << 16, 2, 16)
    peer = bench_peers.FsIoC(module, str(tmp_path), cell, memory, direct=False)
    peer._run(peer._store_batch)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == sorted(map(os.path.basename, peer._paths))
    memory.view[:] = bytes(len(memory.view))
    peer._run(peer._load_batch)
    assert bytes(memory.view) == before
    peer.close()
    assert not any(thread.is_alive() for thread in peer._threads)


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_the_real_fio_takes_the_command(tmp_path):
    cell = bench_contestant.Cell(1 << 20, 2, 32)
    fio = bench_peers.Fio(shutil.which("fio"), str(tmp_path / "fio"), cell, direct=False)
    fio.take_part(keep=True)
    assert [row.op for row in fio.rows()] == ["store", "load", "load-warm"]
    for row in fio.rows():
        assert row.error is None or "millisecond" in row.error  # a very fast disk
    assert os.listdir(tmp_path / "fio") == []


def test_fio_s_rate_is_all_its_bytes_by_its_slowest_job():
    jobs = [{"read": {"io_bytes": 6_000_000, "runtime": ms}} for ms in (2, 4)]
    output = "fio: a note\n" + json.dumps({"jobs": jobs})
    assert bench_peers.fio_gb_per_s(output, "read", 12_000_000) == 3.0
    for text, nbytes, words in [
        (output, 12_000_001, "moved 12000000 bytes"),
        ("nothing", 1, "not the JSON"),
        ('{"jobs": [{"read": {"io_bytes": 1, "runtime": 0}}]}', 1, "larger --total-mib"),
    ]:
        with pytest.raises(bench_contestant.RoundError, match=words):
            bench_peers.fio_gb_per_s(text, "read", nbytes)


# --- arithmetic -----------------------------------------------------------------------------


def test_a_ratio_is_to_the_peer_of_the_same_operation_size_threads_and_mode():
    own = make_row(rate=1.9)
    rows = bench_row.with_ratios(
        [
            own,
            make_row(path="host buffered", rate=5.0),
            make_row("store", rate=1.0),
            make_row(path="fs_io_C O_DIRECT", rate=2.0, page_nbytes=2 << 20),
            make_row(path="fs_io_C O_DIRECT", rate=9.0, threads=1),
            make_row(path="fs_io_C O_DIRECT", rate=9.0, chunk_nbytes=1 << 20),
            make_row(path="fio buffered", rate=10.0),
            make_row("store", path="fs_io_C O_DIRECT", rate=None, error="it failed"),
        ]
    )
    assert [(r.ratio_to_fs_io_c, r.ratio_to_fio) for r in rows[:3]] == [
        (0.95, None),
        (None, 0.5),
        (None, None),
    ]
    assert all(row.ratio_to_fs_io_c is None and row.ratio_to_fio is None for row in rows[3:])
    assert bench_row.ratio(Spread(1, 1, 1), Spread(0, 0, 0)) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None


def test_the_break_even_is_the_rate_over_the_bytes_of_a_token():
    assert bench_advice.break_even(1.31072, 131072) == pytest.approx(10_000)
    assert bench_advice.BYTES_PER_TOKEN == 32 * 2 * 8 * 128 * 2


def test_advice_takes_the_cheapest_setting_near_the_best_cold_load():
    rows = [
        make_row(rate=2.00, threads=8),
        make_row(rate=1.95, threads=4),
        make_row(rate=1.92, threads=4, chunk_nbytes=1 << 20),
        make_row(rate=1.00, threads=1),
        make_row(rate=1.99, path="host buffered", threads=1),
        make_row("store", rate=1.25, threads=4, chunk_nbytes=1 << 20),
        make_row("load-warm", rate=50.0, path="host buffered", threads=1),
        make_row(rate=90.0, path="fs_io_C O_DIRECT", threads=1),
        make_row(rate=80.0, threads=1, verified=False),
    ]
    advice = bench_advice.advise(rows, 131072)
    assert (advice.path, advice.threads, advice.chunk_nbytes) == ("host O_DIRECT", 4, 1 << 20)
    assert (advice.load_gb_per_s, advice.store_gb_per_s) == (1.92, 1.25)
    assert (advice.other_path, advice.other_load_gb_per_s) == ("host buffered", 1.99)
    assert advice.tokens_per_s == pytest.approx(1.92e9 / 131072)
    text = bench_advice.paragraph(advice, 131072)
    for words in ("O_DIRECT", "io_threads 4", "1024 KiB (about 8 tokens", "14,648 tokens/s"):
        assert words in text
    assert "\n" not in text


def test_the_advice_says_what_an_engine_takes_by_itself():
    advice = bench_advice.advise([make_row(rate=2.0, chunk_nbytes=2 << 20)], 131072)
    late = bench_advice.auto_threads(advice, 0.0063)
    assert late.startswith('io_threads "auto" would be 30 with such chunks: ')
    assert "6.3 ms" in late
    large = bench_advice.advise([make_row(rate=2.0, chunk_nbytes=8 << 20)], 131072)
    assert bench_advice.auto_threads(large, 1.0).startswith('io_threads "auto" would be 15 ')
    unknown = bench_advice.auto_threads(advice, None)
    assert unknown.startswith('io_threads "auto" would be 8 ')
    assert "could not be asked" in unknown
    assert bench_advice.auto_threads(None, 0.001) == ""


def test_advice_is_for_the_page_cache_where_that_is_clearly_faster_and_none_without_a_load():
    rows = [make_row(rate=1.0), make_row(rate=1.2, path="host buffered", threads=1)]
    advice = bench_advice.advise(rows, 1000)
    assert (advice.path, advice.threads) == ("host buffered", 1)
    assert 'direct_io "off"), 1 I/O thread (' in bench_advice.paragraph(advice, 1000)
    assert bench_advice.advise([make_row("store"), make_row(rate=None, error="x")], 1000) is None
    assert "No advice" in bench_advice.paragraph(None, 1000)


@pytest.mark.parametrize("works", [True, False])
def test_gds_takes_part_where_the_pages_are_on_a_gpu(tmp_path, monkeypatch, works):
    """kvikio and its files are real, the GPU is simulated; without one there is a sentence and no row."""
    gds_lab.simulated(monkeypatch)
    # The GPU has no cuFile: as if that had carried the probe.
    monkeypatch.setattr(evidence, "bounces", lambda facts: False)
    if not works:
        real = measure.KvMemory
        monkeypatch.setattr(measure, "KvMemory", lambda nbytes, page, _: real(nbytes, page, "cpu"))
    result = run(tmp_path, "--direct-io", "off", "--json", "--device", "cuda")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert all(row["error"] is None and row["verified"] for row in rows)
    of_gds = {row["op"] for row in rows if row["path"] == "gds buffered"}
    assert of_gds >= {"store", "load", "load-request"} if works else not of_gds
    for sentence in ("not GDS: the KV is not on CUDA", "GDS was not measured"):
        assert (sentence in result.stderr) is not works
    assert os.listdir(tmp_path) == []


def test_everybody_comes_first_equally_often():
    group = [types.SimpleNamespace(name=name) for name in "abc"]
    firsts = [measure.turn_order(group, number)[0].name for number in range(6)]
    assert firsts == list("abcabc")
    orders = ["".join(at.name for at in measure.turn_order(group, n)) for n in range(4)]
    assert orders == ["abc", "bac", "cab", "acb"]


def test_the_table_shows_ratios_only_where_there_are_peers():
    rows = [make_row(), make_row("lookup-known", "presence index", None, keys=1e6)]
    assert len(bench_table.table(rows).columns) == 6
    rows.append(make_row(path="fio O_DIRECT", rate=4.0))
    assert len(bench_table.table(bench_row.with_ratios(rows)).columns) == 7
    failed = [make_row(op, rate=None, error="broken") for op in ("store", "load")]
    (sentence,) = bench_table.errors(failed)
    assert "broken" in sentence


# --- what a user may get wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chunk-kib", "512,x"], "--chunk-kib: found '512,x'"),
        (["--page-kib", "0"], "--page-kib: found '0'"),
        (["--threads", "-1"], "--threads: found '-1'"),
        (["--threads", "65"], "--threads: found 65, expected 1 to 64"),
        (["--page-kib", "48"], "--page-kib: no page size divides a chunk of 64 KiB"),
        (["--device", "tpu"], "--device: found 'tpu'"),
        (["--direct-io", "maybe"], "--direct-io: found 'maybe'"),
        (["--total-mib", str(1 << 40)], "MiB are free"),
        (["--chunk-kib", "9" * 15, "--page-kib", "9" * 15], "MiB are free"),
    ],
)
def test_nonsense_is_one_sentence_and_exit_code_2(tmp_path, options, words):
    result = run(tmp_path, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_none_or_takes_no_files_is_named(tmp_path):
    for path, words in [(tmp_path / "no", "found no directory"), ("/proc", "cannot be written")]:
        result = run(path)
        assert result.exit_code == 2
        assert f"{path}: {words}" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_room_is_computed_before_anything_is_written(tmp_path, monkeypatch):
    settings = measure.Settings(
        directory=str(tmp_path),
        chunk_sizes=(1 << 20, 1 << 16),
        page_sizes=(1 << 16,),
        threads=(4,),
        rounds=1,
        total_nbytes=8 << 20,
        device="cpu",
        direct_io="auto",
        peers=False,
    )
    disk, memory = measure.room_needed(settings)
    assert 8 << 20 < disk < 64 << 20
    assert 16 << 20 < memory < 48 << 20
    found = [Space(1 << 30, disk, 0, 0), Space(1 << 30, disk - 1, 0, 0), Space(0, 0, 0, 0)]
    spaces = iter([*found, found[0]])
    monkeypatch.setattr(measure.Space, "of", classmethod(lambda cls, path: next(spaces)))
    measure.check_room(settings)
    with pytest.raises(ValueError, match=r"MiB are free, .* are needed; lower --total-mib"):
        measure.check_room(settings)
    measure.check_room(settings)
    monkeypatch.setattr(measure, "_available_memory", lambda: memory - 1)
    with pytest.raises(ValueError, match="of memory are free"):
        measure.check_room(settings)


# --- stopping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "code", "options"),
    [
        (signal.SIGINT, 130, []),
        pytest.param(signal.SIGTERM, 143, ["--peers"], marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, [], marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, ["--peers"], marks=pytest.mark.slow),
    ],
)
def test_a_stopped_bench_removes_what_it_wrote(tmp_path, signum, code, options):
    command = [sys.executable, "-m", "fskv_tools", "bench", str(tmp_path), "--json", *options]
    # Under nohup a hangup is ignored, and by what is started there as well.
    before = signal.signal(signum, signal.SIG_DFL)
    process = subprocess.Popen(
        [*command, "--total-mib", "16", "--chunk-kib", "512", "--rounds", "99"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    signal.signal(signum, before)
    try:
        wait_for(lambda: any(tmp_path.glob("*/*/*/*/*")) or process.poll() is not None, 60)
        process.send_signal(signum)
        process.send_signal(signum)  # the impatient
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    assert err.splitlines()[-2:] == ["stopping: what was written is removed", "fskv bench: stopped"]
    assert os.listdir(tmp_path) == []


def test_a_bench_that_is_stopped_in_a_store_waits_for_no_more_than_the_store(tmp_path, monkeypatch):
    cell = Cell(1 << 20, 1, 8)
    contestant = bench_store.StoreContestant(
        str(tmp_path / "x"), cell, 1 << 16, bench_store.KvMemory(cell.nbytes, 1 << 16, "cpu"), "off"
    )
    data = contestant._data

    def stop(*_):
        raise bench_workspace.Stopped(signal.SIGINT)

    monkeypatch.setattr(bench_store, "drain", stop)
    with pytest.raises(bench_workspace.Stopped):
        contestant.measure()
    assert not data.mover.idle
    start = time.monotonic()
    contestant.close()
    assert data.mover.idle
    assert time.monotonic() - start < bench_contestant.CLOSE_S  # it would be all of it


@pytest.mark.parametrize("every_s", [0.0, 3600.0])
def test_without_a_terminal_lines_say_how_far_it_is(tmp_path, monkeypatch, every_s):
    """Negative control: where it is not yet time for a line there is none."""
    monkeypatch.setattr(measure, "_SAY_S", every_s)
    said = [line for line in run(tmp_path, "--rounds", "1").stderr.splitlines() if " of " in line]
    total = int(said[-1].split(",")[0].split()[-1]) if said else 0
    assert len(said) == (total if every_s == 0 else 0)
    assert (total > 2) is (every_s == 0)


def test_a_signal_at_any_moment_of_a_run_leaves_nothing(tmp_path, monkeypatch):
    """Stop at each of the steps, the cleaning up itself included."""
    stops = []

    def stop_at(owner, name):
        real = getattr(owner, name)

        def stopping(*args, **kwargs):
            done = real(*args, **kwargs)
            if not stops:
                stops.append(name)
                os.kill(os.getpid(), signal.SIGTERM)
            return done

        monkeypatch.setattr(owner, name, stopping)

    for owner, name in [
        (os, "mkdir"),
        (measure, "StoreContestant"),
        (bench_store.StoreContestant, "_store"),
        (bench_store.StoreContestant, "_verify"),
        (bench_store.StoreContestant, "remove_files"),
        (bench_store.DataPath, "close"),
        (bench_workspace, "remove"),
        (shutil, "rmtree"),
    ]:
        stop_at(owner, name)
        result = run(tmp_path, "--direct-io", "off")
        monkeypatch.undo()
        assert (stops, result.exit_code) == ([name], 143)
        assert os.listdir(tmp_path) == [], name
        stops.clear()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- the document -----------------------------------------------------------------------------


def check_fields(text):
    """The table of docs/benchmarks.md has the fields of a row, in their order, and all operations."""
    section = re.search(r"^### The rows of `--json`$(.*?)^## ", text, re.DOTALL | re.MULTILINE)[1]
    names = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert names == [field.name for field in dataclasses.fields(Row)]
    for op in ("store", "load", "load-warm", "load-request", "load-serial"):
        assert f"`{op}`" in section
    for op in ("lookup-known", "lookup-unknown"):
        assert f"`{op}`" in section
    assert f"`schema` | {bench_row.SCHEMA}" in section


def test_every_field_of_a_row_is_in_the_document_and_no_other():
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    check_fields(text)
    for old, new in [("| `verified` |", "| `checked` |"), ("`load-serial`", "`serial`")]:
        assert old in text
        with pytest.raises(AssertionError):
            check_fields(text.replace(old, new))
