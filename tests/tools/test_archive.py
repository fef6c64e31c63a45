"""An archive brings the same files to another root, and nothing else: whatever is done to the stream.

Archives are made and taken apart here with the standard library's tarfile, files are compared byte by byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from shlex import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_lab import Lab, check_lines, everything_below, fskv, key_of, run, spoil
from world import follow_links, make_identity, read_by_hand, wait_for

from fskv import namespace
from fskv.root.root import Root
from fskv.sizes import Share

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")

from fskv_tools.archive import layout, receive, tar
from fskv_tools.archive.layout import TRAILER
from fskv_tools.archive.receive import Receiver
from fskv_tools.transfer import allowance
from fskv_tools.transfer.destination import Destination, Options
from fskv_tools.transfer.tally import Fate, Tally


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "kv")


def empty_root(path):
    os.makedirs(path)
    Root.open(str(path), create=True)
    return str(path)


def chunk_files(root):
    """Return every file below namespaces' directories of chunks: relative name -> (content, mtime)."""
    found = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = os.path.join(base, name)
            relative = os.path.relpath(path, root)
            if "/chunks/" in relative:
                with open(path, "rb") as file:
                    found[relative] = (file.read(), os.stat(path).st_mtime_ns)
    return found


def content_of(path):
    with open(path, "rb") as file:
        return file.read()


def exported(lab, *options, code=0):
    path = f"{lab.path}.{len(os.listdir(os.path.dirname(lab.path)))}.tar"
    done = run("export", "-o", path, *options, root=lab.path)
    assert done.exit_code == code, done.stderr
    return content_of(path)


def members(archive):
    """Take an archive apart: [(TarInfo, content)]."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return [
            (info, opened.extractfile(info).read() if info.isfile() else b"") for info in opened
        ]


def packed(entries):
    """Put an archive together from [(TarInfo, content)], as it is told to."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as opened:
        for info, content in entries:
            opened.addfile(info, io.BytesIO(content) if info.isfile() else None)
    return out.getvalue()


def plain(name, content=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


class Free:
    """Stands for the allowance of a transfer: there is always room, no process is started."""

    pruned = 0
    exhausted = None

    def __init__(self, *_):
        pass

    def take(self, nbytes):
        pass

    def settle(self, taken, written):
        pass

    def close(self):
        pass


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr("fskv_tools.transfer.destination.Allowance", Free)


def received(archive, root):
    """Import bytes in this process, without an allowance; returns the receiver's view of it."""
    tally = Tally()
    with Destination(Root.open(root, create=False), Options(0, num_threads=2)) as destination:
        receiver = Receiver(destination, tally)
        with contextlib.redirect_stderr(io.StringIO()):
            receiver.receive(io.BytesIO(archive).read, 2)
    return receiver, tally


def all_good(root):
    """Every file of the root passes the checks of a reader that shares no code with the import."""
    for relative, (content, _) in chunk_files(root).items():
        assert not relative.endswith(".part"), relative
        path = os.path.join(root, relative)
        told = read_by_hand(path)
        name = os.path.basename(path)
        assert namespace.chunk_name(told.meta["key"]) == name[:32]
        assert f".g{told.meta['group']}" in name
        space = relative.split("/chunks/")[0]
        assert told.meta["namespace"].hex()[:16] == space[-16:]
        assert len(content) == told.header_nbytes + told.meta["payload"]
    return True


# --- there and back ---------------------------------------------------------------------


@pytest.mark.parametrize("zstd", [False, True])
def test_what_was_exported_arrives_byte_for_byte_with_its_times(lab, tmp_path, zstd):
    if zstd:
        pytest.importorskip("zstandard")
    one = lab.namespace()
    other = lab.namespace(model_name="org/other", tenant="acme")
    for number in range(25):
        lab.chunk(one, number, age_s=3600.5 * number)
    lab.chunks(other, range(5), rank=0)
    lab.chunks(other, range(5), rank=1)
    archive = exported(lab, *["--zstd"] * zstd)
    (tmp_path / "a").write_bytes(archive)
    target = empty_root(tmp_path / "to")
    done = run("import", tmp_path / "a", "--json", root=target)
    assert done.exit_code == 0, done.stderr
    assert done.summary["stored"] == 35
    assert done.summary["archive"] is None
    check_lines("import", done.lines)
    assert chunk_files(target) == chunk_files(lab.path)
    for where in (one, other):
        assert content_of(f"{target}/{where.id}/namespace.json") == content_of(
            f"{lab.path}/{where.id}/namespace.json"
        )
    again = run("import", tmp_path / "a", "--json", root=target)
    assert (again.summary["stored"], again.summary["there"]) == (0, 35)
    assert run("ls", "--json", root=target).summary["files"] == 35


def test_a_pipe_carries_it_and_any_tar_can_list_it(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(10))
    target = tmp_path / "to"
    target.mkdir()
    me = f"{quote(sys.executable)} -m fskv_tools"
    command = f"{me} export --root kv | tee a | {me} import - --create --root to"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert chunk_files(target) == chunk_files(lab.path)
    listed = subprocess.run(["tar", "tf", tmp_path / "a"], capture_output=True, text=True)
    assert listed.returncode == 0
    assert listed.stderr == ""
    names = listed.stdout.splitlines()
    assert names[0] == f"{where.id}/namespace.json"
    assert names[-1] == TRAILER
    assert sorted(names[1:-1]) == sorted(chunk_files(lab.path))


def test_what_another_tar_has_packed_again_arrives_too(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(5))
    (tmp_path / "a").write_bytes(exported(lab))
    subprocess.run(
        "mkdir u && tar xf a -C u && tar cf b --format=gnu -C u .", shell=True, cwd=tmp_path
    )
    names = subprocess.run(
        "cd u && find * -type f | sort", shell=True, cwd=tmp_path, capture_output=True
    )
    (tmp_path / "names").write_bytes(
        b"\n".join(sorted(names.stdout.split(), key=lambda n: (b"namespace.json" not in n, n)))
    )
    subprocess.run("tar cf b --format=gnu -C u -T names", shell=True, cwd=tmp_path, check=True)
    done = run("import", tmp_path / "b", root=empty_root(tmp_path / "to"))
    assert done.exit_code == 1  # times to the second: not what was written, and it says so
    assert "5 files stored" in done.stderr
    assert {n: c for n, (c, _) in chunk_files(tmp_path / "to").items()} == {
        n: c for n, (c, _) in chunk_files(lab.path).items()
    }


def test_only_what_was_chosen_goes_in(lab):
    where, other = lab.namespace(), lab.namespace(model_name="org/other")
    for number in range(10):
        lab.chunk(where, number, age_s=86400 * number + 60)
    lab.chunks(other, range(3))

    def files(*options):
        return sum(info.name.endswith(".kv") for info, _ in members(exported(lab, *options)))

    assert files() == 13
    assert files("other") == 3
    assert files("--newer-than", "5d", "org--model") == 5
    assert files("--older-than", "5d") == 5
    assert files("--newer-than", "6d", "--older-than", "3d") == 3
    assert files("--chunk", key_of(3).hex(), where.id) == 1
    assert files("--group", "0") == 13
    assert files("--group", "1") == 0
    assert run("export", "--chunk", "ffffffff", root=lab.path).exit_code == 2
    nothing = run("export", "--newer-than", "1d", "--older-than", "2d", root=lab.path)
    assert nothing.exit_code == 2


def test_a_file_that_fails_a_check_never_goes_in(lab, tmp_path):
    where = lab.namespace()
    paths = lab.chunks(where, range(8))
    spoil(lab, where)
    for path, at in zip(paths[:3], (9, 3000, -1), strict=True):
        damage(path, at)
    os.truncate(paths[3], os.path.getsize(paths[3]) - 4096)
    os.replace(paths[4], paths[5])  # a good file under another's name
    output = tmp_path / "a.tar"
    done = run("export", "-o", output, "--json", root=lab.path)
    assert done.exit_code == 1
    check_lines("export", [dict(line) for line in done.lines])
    assert done.summary["bad"] == 5
    names = [info.name for info, _ in members(output.read_bytes())]
    assert {n for n in names if n.endswith(".kv")} == {
        os.path.relpath(path, lab.path) for path in paths[6:]
    }
    assert {line["name"] for line in done.lines[:-1]} == {
        os.path.relpath(path, lab.path) for path in (*paths[:4], paths[5])
    }


def damage(path, at):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_an_output_never_replaces_a_file_and_is_whole_or_not_there(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(3))
    kept = tmp_path / "precious"
    kept.write_text("mine")
    assert run("export", "-o", kept, root=lab.path).exit_code == 2
    assert kept.read_text() == "mine"
    inside = run("export", "-o", f"{lab.path}/a.tar", root=lab.path)
    assert inside.exit_code == 2
    assert not os.path.exists(f"{lab.path}/a.tar")
    assert run("export", "-o", tmp_path / "no" / "a", root=lab.path).exit_code == 3
    assert run("export", "--json", root=lab.path).exit_code == 2
    assert sorted(os.listdir(tmp_path)) == ["kv", "precious"]


@pytest.mark.skipif(shutil.which("script") is None, reason="needs script, of util-linux")
def test_an_archive_is_not_written_to_a_terminal(lab):
    lab.chunks(lab.namespace(), range(2))
    command = f"{quote(sys.executable)} -m fskv_tools export --root {quote(lab.path)}"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "terminal" in done.stdout
    assert "\x89FSKV" not in done.stdout


# --- what may be done to the stream -----------------------------------------------------


def broken(archive, rng):
    """Break an archive in some way; returns what was done and the result."""
    way = rng.choice(("flip", "flip", "cut", "double", "swap", "drop", "insert", "zero"))
    raw = bytearray(archive)
    at = rng.randrange(len(raw))
    entries = members(archive)
    if way == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del raw[at:]
    elif way == "insert":
        raw[at:at] = rng.randbytes(rng.choice((1, 512, 4096)))
    elif way == "zero":
        raw[at : at + 512] = bytes(len(raw[at : at + 512]))
    elif way == "double":
        entries.insert(rng.randrange(len(entries)), rng.choice(entries[1:-1]))
    elif way == "drop":
        del entries[rng.randrange(len(entries))]
    elif way == "swap":  # the contents of two members
        a, b = rng.sample(range(1, len(entries) - 1), 2)
        (info_a, content_a), (info_b, content_b) = entries[a], entries[b]
        entries[a], entries[b] = (info_a, content_b), (info_b, content_a)
    return way, packed(entries) if way in ("double", "drop", "swap") else bytes(raw)


def test_nothing_bad_is_published_whatever_happens_to_the_stream(lab, tmp_path, free):
    where = lab.namespace(pages=(700, 100))
    lab.chunks(where, range(6))
    archive = exported(lab)
    original = {name: content for name, (content, _) in chunk_files(lab.path).items()}
    rng = random.Random(5)
    noticed = 0
    for attempt in range(200):
        way, changed = broken(archive, rng)
        root = empty_root(tmp_path / f"to{attempt}")
        receiver, tally = received(changed, root)
        found = chunk_files(root)
        assert all(original[name] == content for name, (content, _) in found.items()), way
        wrong = receiver.problem or tally.files[Fate.BAD] or tally.other
        if len(found) < len(original):
            assert wrong, way
        noticed += bool(wrong)
    assert noticed > 150  # the rest hit padding, or modes and owners that nobody believes


def test_negative_control_without_the_checks_a_bad_file_is_published(
    lab, tmp_path, free, monkeypatch
):
    where = lab.namespace(pages=(700, 100))
    lab.chunks(where, range(6))
    archive = bytearray(exported(lab))
    content = members(bytes(archive))[1][1]
    at = bytes(archive).index(content) + len(content) - 2000
    archive[at] ^= 1
    _, tally = received(bytes(archive), empty_root(tmp_path / "checked"))
    assert tally.files[Fate.BAD] == 1
    assert all_good(tmp_path / "checked")
    monkeypatch.setattr(receive, "check_rows", lambda header, payload: None)
    received(bytes(archive), empty_root(tmp_path / "unchecked"))
    with pytest.raises(AssertionError):
        all_good(tmp_path / "unchecked")


def hostile(archive, tmp_path):
    """Members that nobody should believe, each with what makes it so."""
    (manifest, told), (first, content), *_ = members(archive)
    space = manifest.name.rpartition("/")[0]
    outside = f"{tmp_path}/outside"
    shard = first.name.rpartition("/")[0]
    other = first.name[:-8] + "0.g0.kv" if first.name[-8] != "0" else first.name[:-8] + "1.g0.kv"
    link = {"type": tarfile.SYMTYPE, "linkname": outside}
    yield "traversal", [plain(f"../{first.name}", content), plain("../../x.kv", content)]
    yield "inner traversal", [plain(f"{space}/chunks/../../../x/{first.name[-42:]}", content)]
    yield "absolute", [plain(f"{outside}/x.kv", content), plain(f"/{first.name}", content)]
    yield "a link, then through it", [plain(shard, **link), plain(first.name, content)]
    yield "links for chunks", [plain(f"{space}/chunks", **link), plain(space, **link)]
    yield "a hard link", [plain(first.name, type=tarfile.LNKTYPE, linkname="/etc/passwd")]
    yield "devices", [plain(first.name, type=tarfile.CHRTYPE, devmajor=1, devminor=3)]
    yield "a fifo", [plain(first.name, type=tarfile.FIFOTYPE)]
    yield "a directory", [plain(first.name, type=tarfile.DIRTYPE), plain(first.name, content)]
    yield "the name of another key", [plain(other, content)]
    yield "another group", [plain(first.name.replace(".g0", ".g1"), content)]
    yield "a rank", [plain(first.name.replace(".kv", ".r1.kv"), content)]
    yield "a part", [plain(f"{shard}/host-1-00000000-1.part", content)]
    yield "files of the root", [plain("fskv.json", b'{"format": 2}'), plain("CACHEDIR.TAG", b"x")]
    yield "maintenance", [plain(".fskv-maintenance/lease.json", b"{}")]
    yield "a snapshot", [plain(f"{space}/snapshot.msgpack", b"\x80")]
    yield "another namespace", [plain(first.name.replace(space[-16:], "0" * 16), content)]
    lies = json.dumps({**json.loads(told), "model_name": "org/evil"}).encode()
    yield "a manifest that lies", [plain(manifest.name, lies)]
    yield "a manifest of nothing", [plain(manifest.name, b"[" * 100_000)]
    yield "a manifest without end", [plain(manifest.name, b" " * (17 << 20))]
    yield (
        "sparse",
        [
            plain(
                first.name,
                content,
                pax_headers={"GNU.sparse.major": "1", "GNU.sparse.realsize": "9" * 12},
            )
        ],
    )
    yield "bytes for a name", [plain(os.fsdecode(b"\xff\xfe/\x1b[31m"), content)]
    yield "a long name", [plain("a" * 50_000, content)]


def test_hostile_members_are_left_out_and_nothing_is_written_elsewhere(lab, tmp_path, free):
    where = lab.namespace()
    lab.chunks(where, range(3))
    archive = exported(lab)
    original = chunk_files(lab.path)
    (tmp_path / "outside").mkdir()
    before = None
    for attempt, (what, entries) in enumerate(hostile(archive, tmp_path)):
        room = tmp_path / f"room{attempt}"
        room.mkdir()
        root = empty_root(room / "to")
        good = members(archive)
        # In front of, between and behind what is good.
        stream = packed([*entries, good[0], *entries, *good[1:3], *entries, good[3], good[-1]])
        receiver, tally = received(stream, root)
        assert receiver.problem or tally.other or tally.files[Fate.BAD], what
        found = chunk_files(root)
        assert set(found) <= set(original), what
        assert all(found[name][0] == original[name][0] for name in found), what
        assert os.listdir(room) == ["to"], what
        assert os.listdir(tmp_path / "outside") == [], what
        names = everything_below(root)
        assert not [n for n in names if os.path.islink(os.path.join(root, n))], what
        allowed = {"fskv.json", "CACHEDIR.TAG", where.id.partition("/")[0]}
        assert {n for n in names if "/" not in n} <= allowed, what
        with open(f"{root}/fskv.json") as file:
            assert json.load(file) == {"format": 1}
        if before is None:
            before = names
    assert all_good(root)


def raw_member(name, size, kind=b"0"):
    """Make a header block by hand: the length is a claim."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.type = kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("what", "stream"),
    [
        ("an extended header of 8 GiB", raw_member("x", (8 << 30) - 1, b"x") + bytes(1 << 20)),
        ("a long name of 8 GiB", raw_member("x", (8 << 30) - 1, b"L") + bytes(1 << 20)),
        ("a file of 2^80 bytes", raw_member("x", 1 << 80) + bytes(1 << 20)),
        ("negative", bytearray(raw_member("x", -5, b"0"))),
        ("no tar", random.Random(1).randbytes(1 << 20)),
        ("text", b"hello\n" * 1000),
        ("nothing", b""),
        ("zeros", bytes(1 << 20)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lengths_that_are_only_claimed_cost_no_memory(tmp_path, free, what, stream):
    import tracemalloc

    root = empty_root(tmp_path / "to")
    tracemalloc.start()
    try:
        receiver, _ = received(bytes(stream), root)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert receiver.problem
    assert peak < 16 << 20
    assert chunk_files(root) == {}


def test_a_claimed_chunk_of_a_gigabyte_costs_no_memory(lab, tmp_path, free):
    import tracemalloc

    lab.chunks(lab.namespace(), range(1))
    manifest, first, _ = members(exported(lab))
    name = raw_member(first[0].name, 1 << 30)
    stream = tar.member_header(manifest[0].name, len(manifest[1]), 0) + manifest[1]
    stream += tar.padding(len(manifest[1])) + name + first[1]
    tracemalloc.start()
    try:
        receiver, tally = received(stream, empty_root(tmp_path / "to"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tally.files[Fate.BAD] == 1
    assert receiver.problem
    assert peak < 16 << 20


def test_a_compressed_bomb_costs_no_memory_and_ends(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    bomb = tmp_path / "bomb"
    with open(bomb, "wb") as file, zstandard.ZstdCompressor(level=19).stream_writer(file) as out:
        for number in range(400):
            out.write(raw_member(f"f{number}", 1 << 20) + bytes(1 << 20))
    assert bomb.stat().st_size < 1 << 20
    root = empty_root(tmp_path / "to")
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        f"sys.argv = ['fskv', 'import', {str(bomb)!r}, '--root', {root!r}];"
        "runpy.run_module('fskv_tools', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    # Between two files 64 MiB of what is not ours are passed over, and 1000 such members.
    many = b"".join(raw_member(f"f{number}", 0) for number in range(2000))
    (tmp_path / "many").write_bytes(many)
    done = run("import", tmp_path / "many", root=root)
    assert "too much in it is not fskv's" in done.stderr
    assert len(done.stderr.splitlines()) < 30


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
@pytest.mark.parametrize("counted", [True, False])
def test_headers_without_a_member_come_to_an_end(kind, counted, monkeypatch):
    """Negative control: with no bound on what comes between files, it goes on as long as the stream does."""
    block, blocks = raw_member("x", 0, kind)[: tar.BLOCK], 400_000
    if not counted:
        monkeypatch.setattr(tar, "_MAX_STRANGE_NBYTES", 1 << 60)
    read = 0

    def stream(nbytes):
        nonlocal read
        read += 1
        return block if read <= blocks else b""

    if counted:
        with pytest.raises(layout.ArchiveError, match="too much"):
            list(tar.TarReader(stream))
        assert read < blocks
    else:
        assert list(tar.TarReader(stream)) == []
        assert read > blocks


def test_a_million_tiny_members_end_early_with_a_few_lines(tmp_path, free):
    root = empty_root(tmp_path / "to")
    one = raw_member("x", 0)
    reads = 0

    def read(nbytes):
        nonlocal reads
        reads += 1
        return one if reads < 1_000_000 else b""

    tally = Tally()
    with Destination(Root.open(root, create=False), Options(0)) as destination:
        receiver = Receiver(destination, tally)
        receiver.receive(read, 1)
    assert receiver.problem == "too much in it is not fskv's"
    assert reads < 2000


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_reader_of_tar_ends_with_members_or_an_error_and_nothing_else(data):
    whole = tar.member_header("a/b@0/namespace.json", 600, 5) + bytes(1024)
    blocks = [
        whole,
        raw_member("x", 512, b"L") + bytes(512),
        raw_member("x", 512, b"x") + b"30 mtime=1.5\n".ljust(512, b"\0"),
        raw_member("y", 100) + bytes(512),
        bytes(512),
    ]
    pieces = data.draw(st.lists(st.sampled_from(blocks) | st.binary(max_size=600), max_size=6))
    stream = bytearray(b"".join(pieces))
    for at in data.draw(st.lists(st.integers(0, max(0, len(stream) - 1)), max_size=4)):
        if stream:
            stream[at] ^= data.draw(st.integers(1, 255))
    # A header whose checksum is right again: what is behind it is tried.
    if data.draw(st.booleans()):
        for at in range(0, len(stream) - 511, 512):
            block = stream[at : at + 512]
            block[148:156] = b" " * 8
            stream[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    reader = tar.TarReader(io.BytesIO(bytes(stream)).read)
    with contextlib.suppress(layout.ArchiveError):
        for member in reader:
            assert 0 <= member.nbytes <= 1 << 30
            assert isinstance(member.name, str)
            if data.draw(st.booleans()):
                member.read(min(member.nbytes, 100))
    assert reader.nbytes <= len(stream)


# --- the root it goes to ----------------------------------------------------------------


def test_bad_files_that_are_there_are_replaced_and_strangers_moved_aside(lab, tmp_path, free):
    where = lab.namespace()
    paths = lab.chunks(where, range(6))
    archive = exported(lab)
    root = empty_root(tmp_path / "to")
    received(archive, root)
    there = [os.path.join(root, os.path.relpath(path, lab.path)) for path in paths]
    os.truncate(there[0], 4096)
    damage(there[1], 100)
    os.unlink(there[2])
    os.symlink("/etc/passwd", there[2])
    os.unlink(there[3])
    os.mkdir(there[3])
    (tmp_path / "elsewhere").mkdir()
    os.rename(os.path.dirname(there[4]), f"{tmp_path}/aside")
    os.symlink(tmp_path / "elsewhere", os.path.dirname(there[4]))
    receiver, tally = received(archive, root)
    assert receiver.problem is None
    assert tally.files == {Fate.STORED: 4, Fate.THERE: 1, Fate.FAILED: 1}
    # A link in the place of a directory is not followed.
    assert os.listdir(tmp_path / "elsewhere") == []
    assert os.path.islink(os.path.dirname(there[4]))
    for path, original in zip(there[:4], paths[:4], strict=True):
        assert content_of(path) == content_of(original)
        assert not os.path.islink(path)
    assert [n for n in os.listdir(os.path.dirname(there[3])) if ".foreign-" in n]


def test_another_identity_in_its_place_is_refused_and_stays(lab, tmp_path, free):
    where = lab.namespace()
    lab.chunks(where, range(3))
    archive = exported(lab)
    target = Lab(tmp_path / "to")
    target.namespace()
    manifest = f"{target.path}/{where.id}/namespace.json"
    other = json.dumps(make_identity(model_name="org/other").to_manifest())
    with open(manifest, "w") as file:
        file.write(other)
    _, tally = received(archive, target.path)
    assert tally.files == {Fate.FAILED: 3}
    assert content_of(manifest) == other.encode()
    assert chunk_files(target.path) == {}


@pytest.mark.parametrize("level", ["arch", "namespace", "tmp", "chunks", "shard"])
@pytest.mark.parametrize("protected", [True, False])
def test_nothing_is_made_behind_a_link(lab, tmp_path, free, monkeypatch, level, protected):
    """Negative control: where links are followed, things are made behind the link."""
    where = lab.namespace()
    lab.chunks(where, range(3))
    archive = exported(lab)
    root, outside = empty_root(tmp_path / "to"), tmp_path / "outside"
    outside.mkdir()
    arch = where.id.split("/")[0]
    links = {"arch": [arch], "namespace": [where.id], "chunks": [f"{where.id}/chunks"]}
    links["tmp"] = [f"{where.id}/tmp"]
    for link in links.get(level) or [f"{where.id}/chunks/{idx:03x}" for idx in range(4096)]:
        os.makedirs(os.path.dirname(f"{root}/{link}"), exist_ok=True)
        os.symlink(outside, f"{root}/{link}")
    if not protected:
        follow_links(monkeypatch)
    before_ns = os.stat(outside).st_mtime_ns  # parts and probes do not stay
    _, tally = received(archive, root)
    assert tally.files[Fate.FAILED if protected else Fate.STORED] == 3
    assert (os.stat(outside).st_mtime_ns == before_ns) is protected


@pytest.mark.parametrize("declared", [False, True])
def test_what_is_to_stay_free_costs_nobody_a_chunk(lab, tmp_path, monkeypatch, declared):
    """Negative control: as a limit in the heartbeat it holds for the whole root, which is pruned for it."""
    lab.chunks(lab.namespace(), range(3))
    archive = exported(lab)
    target = Lab(tmp_path / "to")
    theirs = target.chunks(target.namespace(tenant="theirs"), range(50), age_s=86400)
    if declared:
        real = allowance.Limits
        monkeypatch.setattr(allowance, "Limits", lambda **_: real(keep_free=Share(99.9)))
    tally = Tally()
    options = Options(Share(99.9), patience_s=5.0 if declared else 1.0)
    with Destination(Root.open(target.path, create=False), options) as to:
        Receiver(to, tally).receive(io.BytesIO(archive).read, 2)
    assert "--keep-free" in to.exhausted
    assert tally.files[Fate.STORED] == 0
    assert all(os.path.exists(path) for path in theirs) is not declared


def test_times_of_the_future_become_now(lab, tmp_path, free):
    where = lab.namespace()
    path = lab.chunk(where, 1)
    os.utime(path, (1e10, 1e10))
    root = empty_root(tmp_path / "to")
    received(exported(lab), root)
    ((_, mtime_ns),) = chunk_files(root).values()
    assert mtime_ns <= time.time_ns() + 60 * 10**9


def test_a_dry_run_checks_everything_and_writes_nothing(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(4))
    (tmp_path / "a").write_bytes(exported(lab))
    root = empty_root(tmp_path / "to")
    before = everything_below(root)
    done = run("import", tmp_path / "a", "--dry-run", "--json", root=root)
    assert (done.exit_code, done.summary["stored"], done.summary["dry_run"]) == (0, 4, True)
    assert everything_below(root) == before
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-15000])
    assert run("import", tmp_path / "a", "--dry-run", root=root).exit_code == 1


@pytest.mark.parametrize("kind", ["missing", "empty", "foreign"])
def test_what_is_no_root_takes_nothing(lab, tmp_path, kind):
    lab.chunks(lab.namespace(), range(2))
    (tmp_path / "a").write_bytes(exported(lab))
    target = tmp_path / "to"
    if kind != "missing":
        target.mkdir()
    if kind == "foreign":
        (target / "photo").write_bytes(b"")
    before = everything_below(target)
    done = run("import", tmp_path / "a", *["--create"] * (kind == "foreign"), root=target)
    assert done.exit_code == 10
    assert everything_below(target) == before
    assert run("import", tmp_path / "none", root=lab.path).exit_code == 1


def test_the_bounds_of_a_living_engine_hold(lab, tmp_path, monkeypatch):
    """What is imported goes at most 2 % beyond it, the oldest going first."""
    from fskv.bounds.client import Capacity
    from fskv.bounds.limits import Limits

    where = lab.namespace()
    for number in range(300):
        lab.chunk(where, number, age_s=1000 + number)
    archive = exported(lab)
    root = empty_root(tmp_path / "to")
    bound = 4 << 20  # of about 11 MiB
    engine = Capacity(root, where.id, None, Limits(max_nbytes=bound))
    engine.start()
    engine.wait_for_first_word()
    maintenance = f"/proc/{engine.pid}"
    largest = 0
    over = threading.Event()

    def watch():
        nonlocal largest
        while not over.wait(0.01):
            largest = max(largest, on_disk(root))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    monkeypatch.setattr(allowance, "PATIENCE_S", 30.0)
    tally = Tally()
    stop = threading.Event()
    polls = threading.Thread(
        target=lambda: [engine.poll() for _ in iter(lambda: stop.wait(0.1), True)]
    )
    polls.start()
    try:
        with Destination(Root.open(root, create=False), Options(Share(0.0), num_threads=2)) as to:
            receiver = Receiver(to, tally)
            receiver.receive(io.BytesIO(archive).read, 2)
    finally:
        stop.set()
        polls.join(20)
        engine.close()
        wait_for(lambda: not os.path.exists(maintenance), 60)  # it ends its prune first
        over.set()
        watcher.join(20)
    assert tally.files[Fate.STORED] + tally.files[Fate.NO_ROOM] <= 300
    assert 0 < largest <= bound + bound // 50
    assert tally.files[Fate.STORED] * 36864 > bound // 2
    assert all_good(root)
    # Negative control: without the allowance it would have been exceeded.
    monkeypatch.setattr("fskv_tools.transfer.destination.Allowance", Free)
    without = empty_root(tmp_path / "without")
    received(archive, without)
    assert on_disk(without) > bound


def on_disk(root):
    total = 0
    for base, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                if "/chunks/" in f"{base}/":
                    total += os.stat(os.path.join(base, name)).st_blocks * 512
    return total


def test_a_full_disk_ends_it_without_a_part_and_says_how_to_go_on(lab, tmp_path, monkeypatch):
    import errno

    where = lab.namespace()
    lab.chunks(where, range(20))
    (tmp_path / "a").write_bytes(exported(lab))
    root = empty_root(tmp_path / "to")
    real, calls = os.writev, []

    def writev(fd, pieces):
        calls.append(fd)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, pieces)

    monkeypatch.setattr(os, "writev", writev)
    done = run("import", tmp_path / "a", "--keep-free", "0", "--threads", "1", "--json", root=root)
    assert done.exit_code == 3, done.stderr
    assert "run the same command again" in done.stderr
    assert done.summary["stored"] == 5
    assert done.summary["no_room"] >= 1
    assert all_good(root)
    monkeypatch.undo()
    again = run("import", tmp_path / "a", "--keep-free", "0", "--json", root=root)
    assert (again.exit_code, again.summary["there"], again.summary["stored"]) == (0, 5, 15)


def start_import(archive, root, **options):
    """Start an import that gets its archive bit by bit; returns the process."""
    words = [sys.executable, "-m", "fskv_tools", "import", "-", "--keep-free", "0", "--root", root]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )
    process.stdin.write(archive[: len(archive) * 2 // 3])
    process.stdin.flush()
    wait_for(lambda: sum(name.endswith(".kv") for name in everything_below(root)) >= 50, 60)
    return process


def test_killed_in_the_middle_it_is_completed_by_the_next_one(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(150))
    archive = exported(lab)
    root = empty_root(tmp_path / "to")
    process = start_import(archive, root)
    process.kill()
    process.communicate(timeout=60)
    some = {name for name in chunk_files(root) if name.endswith(".kv")}
    assert 50 <= len(some) < 150
    (tmp_path / "a").write_bytes(archive)
    done = run("import", tmp_path / "a", "--json", root=root)
    assert done.exit_code == 0, done.stderr
    assert done.summary["stored"] + done.summary["there"] == 150
    found = {n: c for n, c in chunk_files(root).items() if n.endswith(".kv")}
    assert found == chunk_files(lab.path)


def test_interrupted_it_leaves_no_part(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(150))
    root = empty_root(tmp_path / "to")
    process = start_import(exported(lab), root)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert all_good(root)


def test_an_import_and_a_prune_and_a_writer_at_the_same_time(lab, tmp_path):
    where = lab.namespace()
    lab.chunks(where, range(200))
    archive = exported(lab)
    target = Lab(tmp_path / "to")
    there = target.namespace()
    stop = threading.Event()

    def disturb():
        rng = random.Random(3)
        while not stop.is_set():
            for base, folders, names in os.walk(f"{target.path}/{where.id}/chunks", topdown=False):
                for name in names:
                    if name.endswith(".kv") and rng.random() < 0.1:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(os.path.join(base, name))
                for name in folders:
                    with contextlib.suppress(OSError):
                        os.rmdir(os.path.join(base, name))
            with contextlib.suppress(FileNotFoundError):
                target.chunk(there, rng.randrange(200))

    thread = threading.Thread(target=disturb)
    thread.start()
    (tmp_path / "a").write_bytes(archive)
    try:
        done = fskv("import", tmp_path / "a", "--keep-free", "0", "--json", root=target.path)
    finally:
        stop.set()
        thread.join(30)
    assert done.exit_code == 0, done.stderr
    assert done.summary["stored"] + done.summary["there"] == 200
    assert all_good(target.path)


def test_without_the_package_zstd_is_one_sentence(lab, tmp_path, monkeypatch):
    lab.chunks(lab.namespace(), range(1))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    done = run("export", "--zstd", "-o", tmp_path / "a", root=lab.path)
    assert done.exit_code == 2
    assert "zstandard" in done.stderr
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    assert run("import", tmp_path / "b", root=lab.path).exit_code == 2
