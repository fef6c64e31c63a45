"""Which transport is taken, on what evidence, and that looking for one costs neither the start nor a file."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import json
import os
import threading
import time

import gds_lab
import pytest
import torch

from fskv.errors import ConfigError, RootError
from fskv.gds_io import SlotPool
from fskv.threads import Guard
from fskv.transports import choice, evidence, measure
from fskv.transports.choice import open_transports
from fskv.transports.evidence import Facts, NvidiaFs, describe, parse_stats
from fskv.transports.host import HostTransport
from fskv.transports.measure import Rates
from fskv.transports.split import SplitTransport

SLOT = 1 << 20


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A root with a tmp directory, and a cache directory of the test's own."""
    (tmp_path / "root" / "tmp").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "_MEASURE_S", 60.0)  # however busy the machine is
    return tmp_path


def kv():
    return [torch.randint(-128, 128, (64, 16384), dtype=torch.int8) for _ in range(2)]


def opened(place, tensors, **options):
    asked = {
        "transport": "auto",
        "gds_check": "host",
        "direct_io": "auto",
        "file_mode": 0o600,
        "fsync": False,
        "num_threads": 2,
        **options,
    }
    root = place / "root"
    return open_transports(tensors, SLOT, root=str(root), probe_dir=str(root / "tmp"), **asked)


def left_behind(place):
    return os.listdir(place / "root" / "tmp")


# --- evidence ---------------------------------------------------------------------------------

STATS = """GDS Version: 1.7.0.149
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.17.5)
Mellanox PeerDirect Supported: False
IO stats: Enabled, peer IO stats: Disabled
Reads\t\t\t\t: n=12 ok=11 err=1 readMiB=3 io_state_err=0
Reads\t\t\t\t: Bandwidth(MiB/s)=7 Avg-Latency(usec)=99
Sparse Reads\t\t        : n=4 io=0 holes=0 pages=0
Writes\t\t\t\t: n=8 ok=7 err=0 writeMiB=2 io_state_err=0 pg-cache=0
Writes\t\t\t\t: Bandwidth(MiB/s)=7 Avg-Latency(usec)=99
Mmap\t\t\t\t: n=5 ok=5 err=0 munmap=5
"""
SILENT = """IO stats: Disabled, peer IO stats: Disabled
Reads\t\t\t\t: err=0 io_state_err=0
Writes\t\t\t\t: err=0 io_state_err=0 pg-cache=0
"""


def test_the_counters_of_the_kernel_module_are_read():
    assert parse_stats(STATS) == NvidiaFs(11, 7)
    assert parse_stats(SILENT) == NvidiaFs(None, None)
    assert parse_stats("") == NvidiaFs(None, None)


CUFILE = {"num_posix": 0, "num_cufile": 2}
SEEN = {**CUFILE, "before": NvidiaFs(5, 5)}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts(**SEEN, after=NvidiaFs(6, 7)), "direct GDS (nvidia-fs: +1 reads, +2 writes)"),
        (Facts(**SEEN, after=NvidiaFs(6, 5)), "direct GDS for reads only"),
        (Facts(**SEEN, after=NvidiaFs(5, 6)), "direct GDS for writes only"),
        (Facts(**SEEN, after=NvidiaFs(5, 5)), "unknown: nvidia-fs is loaded and counted none"),
        (Facts(**SEEN, after=NvidiaFs(None, None)), "unknown: nvidia-fs counts no transfers"),
        (Facts(**CUFILE), "unknown: nvidia-fs is not loaded"),
        (Facts(num_posix=2, num_cufile=0), "cuFile compat (POSIX bounce"),
        (
            Facts(num_posix=2, num_cufile=0, before=NvidiaFs(1, 1), after=NvidiaFs(9, 9)),
            "cuFile compat",
        ),
        (Facts(prefers_compat=True), "cuFile compat"),
        (Facts(prefers_compat=False), "unknown: nvidia-fs is not loaded"),
        (Facts(error="no such file"), "unknown: the probe failed (no such file)"),
    ],
)
def test_the_facts_become_one_sentence(facts, words):
    assert describe(facts).startswith(words)


def test_nothing_is_called_direct_without_a_counter_that_moved():
    counters = [None, NvidiaFs(None, None), NvidiaFs(3, 3), NvidiaFs(2, 2)]
    for before in counters:
        for after in counters:
            for counted in ((None, None), (0, 2), (2, 0)):
                for prefers in (None, True, False):
                    moved = bool(before and after and before.reads == 2 and after.reads == 3)
                    found = describe(Facts(None, prefers, *counted, before, after))
                    assert moved or not found.startswith("direct"), found


def test_facts_are_collected_from_kvikio_and_the_module(tmp_path):
    stats = tmp_path / "stats"
    stats.write_text(STATS)
    gds_lab.stub()
    transport = gds_lab.make_transport([], SLOT, probe_dir=str(tmp_path))

    def probe():
        choice._probe(transport, str(tmp_path))
        stats.write_text(STATS.replace("ok=11", "ok=15"))

    facts = evidence.collect(probe, str(stats))
    assert (facts.error, facts.before, facts.after) == (None, NvidiaFs(11, 7), NvidiaFs(15, 7))
    if facts.num_posix is not None:  # a kvikio that counts
        assert (facts.num_posix, facts.num_cufile) == (2, 0)
    assert os.listdir(tmp_path) == ["stats"]


def test_collecting_facts_never_raises(tmp_path, monkeypatch):
    real = builtins.__import__

    def no_kvikio(name, *args, **kwargs):
        if name.startswith("kvikio"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(builtins, "__import__", no_kvikio)
    facts = evidence.collect(fail, str(tmp_path))  # a directory in the file's place, too
    assert facts == Facts(error="ZeroDivisionError")
    assert describe(facts).startswith("unknown")


# --- the choice -------------------------------------------------------------------------------


def test_without_cuda_nothing_is_measured_and_the_line_says_why(place, monkeypatch):
    monkeypatch.setattr(measure, "measure", None)
    chosen = opened(place, kv())
    assert isinstance(chosen.transport, HostTransport)
    assert chosen.sentence.endswith(", not GDS: the KV is not on CUDA")
    assert opened(place, kv(), transport="host").sentence == chosen.transport.description
    with pytest.raises(ConfigError, match=r"option 'transport'.*the KV is not on CUDA; expected"):
        opened(place, kv(), transport="gds")
    assert left_behind(place) == []


def gds_device(tensors):
    return gds_lab.StubDevice(tensors)


def missing_kvikio(device, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "kvikio" else real(name)
    )


def broken_kvikio(device, monkeypatch):
    def refuse(*args, **kwargs):
        raise ImportError("libcufile.so.0: cannot open shared object file")

    monkeypatch.setattr(choice, "GdsTransport", refuse)


def failing_probe(device, monkeypatch):
    gds_lab.stub().fail_copies(1)


def wrong_bytes(device, monkeypatch):
    digests = iter([b"one", b"other"])
    device.row_digests = lambda *args: next(digests)


def no_registration(device, monkeypatch):
    def refuse(nbytes):
        raise RuntimeError("cuMemAlloc_v2 answers CUDA error 2")

    device.new_buffer = refuse


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (missing_kvikio, "kvikio is not installed"),
        (broken_kvikio, "libcufile.so.0"),
        (failing_probe, "a probe through cuFile failed"),
        (wrong_bytes, "other bytes were read than written"),
        (no_registration, "CUDA error 2"),
    ],
)
def test_gds_that_does_not_work_is_host_with_the_reason_or_refused(
    place, monkeypatch, break_it, words
):
    tensors = kv()
    for transport in ("auto", "gds"):
        device = gds_device(tensors)
        with monkeypatch.context() as patch:
            break_it(device, patch)
            if transport == "auto":
                chosen = opened(place, tensors, device=device)
                assert isinstance(chosen.transport, HostTransport)
                assert f"not GDS: {words}" in chosen.sentence or words in chosen.sentence
            else:
                with pytest.raises(ConfigError, match=words):
                    opened(place, tensors, device=device, transport="gds")
        assert left_behind(place) == []


def test_where_the_gpu_cannot_check_the_host_does_or_gds_is_refused(place):
    tensors = kv()
    device = gds_device(tensors)
    device.kernels_missing = "no Triton"
    chosen = opened(place, tensors, device=device, transport="gds")
    assert "rows checked on the host (no Triton)" in chosen.sentence
    with pytest.raises(ConfigError, match=r"cannot be checked on the GPU \(no Triton\)"):
        opened(place, tensors, device=device, transport="gds", gds_check="refuse")
    assert "not GDS" in opened(place, tensors, device=device, gds_check="refuse").sentence


def test_a_probe_that_hangs_is_host_and_the_start_goes_on(place, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(choice, "_PROBE_S", 0.2)
    monkeypatch.setattr(choice, "_probe", lambda *args: go_on.wait(20))
    tensors = kv()
    chosen = opened(place, tensors, device=gds_device(tensors))
    assert chosen.sentence.endswith("not GDS: a probe through cuFile did not end within 0.2 s")
    go_on.set()


@pytest.mark.parametrize(
    ("gds", "load", "store"),
    [
        (Rates(store=9e9, load=9e9), "gds", "gds"),
        (Rates(store=1e9, load=9e9), "gds", "host"),
        (Rates(store=9e9, load=1e9), "host", "gds"),
        (Rates(store=5.2e9, load=5.2e9), "host", "host"),  # not clearly faster
    ],
)
def test_each_direction_takes_the_faster(place, monkeypatch, gds, load, store):
    def rates(transport, *args, **kwargs):
        return Rates(5e9, 5e9) if isinstance(transport, HostTransport) else gds

    monkeypatch.setattr(measure, "measure", rates)
    tensors = kv()
    chosen = opened(place, tensors, device=gds_device(tensors))
    one = chosen.transport
    both = (one.load, one.store) if isinstance(one, SplitTransport) else (one, one)
    kinds = ["host" if isinstance(t, HostTransport) else "gds" for t in both]
    assert kinds == [load, store]
    assert f"load 5.00 host, {gds.load / 1e9:.2f} GDS" in chosen.sentence
    assert ("load: " in chosen.sentence) == (load != store)


def test_both_are_measured_once_with_real_files_and_leave_none(place, monkeypatch):
    monkeypatch.setattr(measure, "_PHASE_S", 0.02)
    tensors = kv()
    before = [tensor.clone() for tensor in tensors]
    chosen = opened(place, tensors, device=gds_device(tensors))
    assert "(measured in GB/s" in chosen.sentence
    assert left_behind(place) == []
    assert all(map(torch.equal, tensors, before)), "the pages hold what they held"
    assert SlotPool(chosen.transport, 1).take() is not None

    def again(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "measure", again)
    recalled = opened(place, tensors, device=gds_device(tensors))
    assert "(measured earlier in GB/s" in recalled.sentence
    assert type(recalled.transport) is type(chosen.transport)
    with pytest.raises(AssertionError, match="measured again"):
        opened(place, tensors, device=gds_device(tensors), num_threads=3)


def test_a_measurement_that_hangs_is_host_and_leaves_no_file_when_it_ends(place, monkeypatch):
    go_on = threading.Event()
    real = measure._Worker._store_one

    def hang(worker):
        go_on.wait(20)
        real(worker)

    monkeypatch.setattr(measure._Worker, "_store_one", hang)
    monkeypatch.setattr(choice, "_MEASURE_S", 0.3)
    tensors = kv()
    chosen = opened(place, tensors, device=gds_device(tensors))
    assert isinstance(chosen.transport, HostTransport)
    assert "did not end within 0.3 s" in chosen.sentence
    go_on.set()
    end = time.monotonic() + 20
    while [t for t in threading.enumerate() if t.name == "fskv-start-up"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert left_behind(place) == []


def test_other_bytes_than_were_written_count_for_nothing(place):
    transport = HostTransport([], SLOT, probe_dir=str(place), direct_io="off")
    real = transport.write_part

    def damage(path, slot, nbytes):
        slot.array[nbytes - 1] ^= 1
        real(path, slot, nbytes)

    transport.write_part = damage
    with pytest.raises(ValueError, match="other bytes were read"):
        measure.measure(
            transport,
            measure.sample_spans([], 0),
            str(place),
            num_threads=1,
            end_at=time.monotonic() + 60,
            guard=Guard(),
        )
    assert not [name for name in os.listdir(place) if name.endswith(".part")]


def test_sample_spans_are_whole_pages_side_by_side():
    wide = torch.zeros((3, 200), dtype=torch.int8)[:, :100]
    spans = measure.sample_spans([wide, torch.zeros((2, 50), dtype=torch.int8)], 1000)
    assert spans.tolist() == [
        [0, 0, 0, 100], [1, 0, 100, 50], [0, 200, 150, 100], [1, 50, 250, 50], [0, 400, 300, 100],
    ]  # fmt: skip
    assert measure.sample_spans([wide], 250)[:, 3].sum() == 200
    assert measure.sample_spans([], 250).shape == (0, 4)


# --- the note ---------------------------------------------------------------------------------

KEY = {"root": "/mnt/kv", "mount": "server:/kv nfs 0:42"}
RATES = {"host": Rates(1.0, 2.0), "gds": Rates(3.0, 4.0)}


def test_a_note_is_found_again_for_a_week_under_its_key_only(place):
    now = 1e9
    measure.remember(KEY, RATES, now)
    assert measure.recall(KEY, now + 6 * 86400) == RATES
    assert measure.recall(KEY, now + 8 * 86400) is None
    assert measure.recall(KEY, now - 1) is None, "written in the future: the clock was set"
    assert measure.recall({**KEY, "mount": "server:/kv nfs 0:43"}, now) is None


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "1e999", '{"version": 1}', "[" * 100_000, "\x00"),
        json.dumps({"version": 1, "key": KEY, "measured_at": 1e9, "rates": {}}),
        json.dumps({"version": 1, "key": KEY, "measured_at": 1e9, "rates": []}),
        json.dumps(
            {
                "version": 1,
                "key": KEY,
                "measured_at": 1e9,
                "rates": {n: {"store": float("nan"), "load": 1} for n in RATES},
            }
        ),
    ],
)
def test_a_note_that_is_none_is_measured_again_and_replaced(place, content):
    path = measure._note_path(KEY)
    os.makedirs(os.path.dirname(path))
    with open(path, "w") as file:
        file.write(content)
    assert measure.recall(KEY, 1e9) is None
    measure.remember(KEY, RATES, 1e9)
    assert measure.recall(KEY, 1e9) == RATES
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_cache_directory_that_cannot_be_written_is_no_trouble(place, monkeypatch):
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    measure.remember(KEY, RATES, 1e9)
    assert measure.recall(KEY, 1e9) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(place))
    assert measure._note_path(KEY).startswith(f"{place}/.cache/fskv/")


MOUNTS = """22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 0:35 / /mnt/kv rw,relatime - nfs4 server:/export rw,vers=4.2
41 22 0:36 / /mnt/kv\\040two rw shared:7 master:2 - xfs /dev/sdb rw
42 22 0:37 / /mnt/kv rw - tmpfs tmpfs rw
short line
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/x", "/dev/nvme0n1p2 ext4 259:2"),
        ("/mnt/kv/root", "tmpfs tmpfs 0:37"),  # mounted over the other
        ("/mnt/kv two/root", "/dev/sdb xfs 0:36"),
        ("/mnt/kvx", "/dev/nvme0n1p2 ext4 259:2"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_latest(tmp_path, path, mount):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert measure.mount_of(path, str(tmp_path / "mountinfo")) == mount
    assert measure.mount_of(path, str(tmp_path / "none")) == "unknown"
    assert measure.mount_of("/") != "unknown"


def test_a_split_transport_moves_each_direction_through_its_own(tmp_path, make_world):
    """Whole jobs; with loads and stores told apart by who opened the files."""
    from test_jobs import Bench

    made = []

    def make(*args, **options):
        options["native"] = False
        made.extend(HostTransport(*args, **options) for _ in range(2))
        return SplitTransport(*made)

    world = make_world(make_transport=make, faults=False)
    bench = Bench(world)
    load, store = made
    load.write_part = store.open = None  # whoever comes by the wrong one finds no way
    job, contents = bench.store([1, 2])
    bench.finish(job)
    bench.wait_until_idle()
    again = bench.load([1, 2], place=4)
    assert not bench.finish(again)[0].failed
    assert [world.pages(bench.blocks(4 + i)) for i in range(2)] == list(contents.values())
    assert "load: " in world.transport.description
    world.transport.close()
    bench.runner._pool.close()


@pytest.mark.parametrize("late", ["host", "gds"])
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "negative_control"])
def test_a_measurement_that_was_given_up_never_writes_a_page(place, monkeypatch, late, guarded):
    """Its threads live on; by the time their reads return, the engine uses the pages."""
    from fskv.transports.gds import _GdsChunk
    from fskv.transports.host import _HostChunk

    if not guarded:
        monkeypatch.setattr(Guard, "enter", lambda guard: True)
        monkeypatch.setattr(Guard, "leave", lambda guard: None)
    go_on, hung = threading.Event(), threading.Event()
    kind = {"host": _HostChunk, "gds": _GdsChunk}[late]
    real = kind.read_into

    def slow(file, *args):
        real(file, *args)
        if threading.current_thread().name != "fskv-start-up":
            hung.set()
            go_on.wait(20)

    monkeypatch.setattr(kind, "read_into", slow)
    with_deadline = choice.call_with_deadline

    def until_it_hangs(call, timeout_s, message):
        """Give the measurement up once a read hangs, however long that takes on a busy machine."""
        if timeout_s != choice._MEASURE_S:
            return with_deadline(call, timeout_s, message)

        def run():
            with contextlib.suppress(Exception):  # it was given up, and says so
                call()

        threading.Thread(target=run, name="fskv-start-up", daemon=True).start()
        assert hung.wait(60)
        raise RootError(message)

    monkeypatch.setattr(choice, "call_with_deadline", until_it_hangs)
    tensors = kv()
    chosen = opened(place, tensors, device=gds_device(tensors))
    assert isinstance(chosen.transport, HostTransport)
    for tensor in tensors:
        tensor[:] = 77
    go_on.set()
    end = time.monotonic() + 20
    while any(t.name == "fskv-start-up" for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert all(bool((tensor == 77).all()) for tensor in tensors) is guarded


def test_a_split_slot_that_cannot_be_completed_leaves_nothing_behind():
    class Half:
        native, slot_nbytes, description = None, 4096, ""

        def __init__(self, works):
            self.works, self.num_slots = works, 0

        def new_slot(self, index):
            if not self.works:
                raise MemoryError("pinned")
            self.num_slots += 1
            return object()

        def drop_slot(self, slot):
            self.num_slots -= 1

    load, store = Half(works=True), Half(works=False)
    pool = SlotPool(SplitTransport(load, store), 4)
    assert [pool.take() for _ in range(20)] == [None] * 20
    assert load.num_slots == pool.num_used == pool.num_made == 0
    store.works = True
    assert pool.take() is not None
