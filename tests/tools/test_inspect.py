"""`fskv inspect`: what it shows is what is in the file, and no file makes it fail, hang or grow."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_lab import Lab, check_lines, fskv, key_of, run, spoil


def inspect(*words, **options):
    return run("inspect", "--json", *words, **options)


def of(done, kind):
    return [line for line in done.lines if line["type"] == kind]


def test_it_shows_what_is_in_the_file_at_the_offsets_that_it_names(lab):
    where = lab.namespace(pages=(70000, 5000))
    path = lab.chunk(where, 7)
    with open(path, "rb") as file:
        content = file.read()
    done = inspect(path)
    assert done.exit_code == 0
    (facts,) = of(done, "file")
    header = facts["header"]
    assert (header["key"], header["group"], header["rank"]) == (key_of(7).hex(), 0, 0)
    assert header["namespace"] == where.identity.digest.hex()
    assert facts["nbytes"] == len(content) == header["header_nbytes"] + header["payload_nbytes"]
    rows, spans = of(done, "row"), of(done, "span")
    assert b"".join(content[r["offset"] :][: r["nbytes"]] for r in rows) == content[4096:]
    for row in rows:
        data = content[row["offset"] : row["offset"] + row["nbytes"]]
        assert row["expected"] == row["found"] == xxhash.xxh3_64_hexdigest(data)
        assert row["status"] == "ok"
    assert len(spans) == facts["spans"] == 8
    at = 4096
    for span in spans:  # without holes, in order
        assert span["offset"] == at
        first, last = (at - 4096) // 65536, (at + span["nbytes"] - 1 - 4096) // 65536
        assert (span["first_row"], span["last_row"]) == (first, last)
        assert span["layer"] == f"layers.{span['page']}"
        at += span["nbytes"]
    assert header["padding_nbytes"] == len(content) - at
    check_lines("inspect", done.lines)


def test_a_bad_row_is_named_with_both_digests_and_the_others_are_good(lab):
    path = lab.chunk(lab.namespace(pages=(70000, 5000)), 7)
    with open(path, "r+b") as file:
        file.seek(4096 + 2 * 65536 + 9)
        file.write(b"!!")
    done = inspect(path)
    assert done.exit_code == 1
    assert [row["status"] for row in of(done, "row")] == ["ok", "ok", "bad", "ok", "ok"]
    (facts,) = of(done, "file")
    assert (facts["finding"], facts["bad_rows"]) == ("corrupt", 1)
    assert "row 2" in facts["reason"]
    text = run("inspect", path)
    assert "CORRUPT" in text.stdout
    assert text.stdout.count(" bad ") == 1


def test_a_short_file_has_the_rows_that_are_there_judged(lab):
    path = lab.chunk(lab.namespace(pages=(70000, 5000)), 7)
    os.truncate(path, 4096 + 2 * 65536 + 100)
    done = inspect(path)
    assert [row["status"] for row in of(done, "row")] == ["ok", "ok", *["missing"] * 3]
    assert done.exit_code == 1
    os.truncate(path, 1000)
    done = inspect(path)
    assert of(done, "row") == []
    assert of(done, "file")[0]["header"] is None


def test_what_does_not_agree_is_said(lab):
    where = lab.namespace()
    other = lab.namespace(model_name="org/other")
    path = lab.chunk(where, 1)
    shutil.copyfile(lab.chunk(other, 2), path)
    (facts,) = of(inspect(path), "file")
    assert facts["finding"] == "stale"
    assert facts["reason"].endswith("not of its own name")
    assert "STALE: holds the key of" in run("inspect", path).stdout


def test_a_key_means_the_files_of_all_ranks_and_ids_are_understood(lab):
    where = lab.namespace()
    paths = {lab.chunk(where, 3, rank=0), lab.chunk(where, 3, rank=1)}
    done = inspect(key_of(3).hex(), root=lab.path)
    assert {line["path"] for line in of(done, "file")} == paths
    assert done.summary == {"type": "summary", "files": 2, "bad": 0}
    one = inspect(of(done, "file")[1]["id"], root=lab.path)
    assert one.summary["files"] == 1
    assert inspect(key_of(4).hex(), root=lab.path).exit_code == 2
    assert inspect(key_of(3).hex()).exit_code == 2
    assert "--root" in inspect("5dbe").stderr


def test_a_file_outside_of_any_root_is_judged_by_itself(lab, tmp_path):
    path = lab.chunk(lab.namespace(), 1)
    copy = tmp_path / "copy"
    shutil.copyfile(path, copy)
    done = inspect(copy)
    assert done.exit_code == 0
    (facts,) = of(done, "file")
    assert facts["id"] == facts["path"] == str(copy)
    wrong = tmp_path / ("0" * 32 + ".g0.kv")  # a name that says something
    shutil.copyfile(path, wrong)
    assert of(inspect(wrong), "file")[0]["finding"] == "stale"
    assert inspect(tmp_path / "nothing").exit_code == 2


KINDS = {
    "fifo": "a FIFO",
    "device": "a device",
    "directory": "a directory",
    "link": "a symbolic link",
    "socket": "a socket",
    "loop": "a symbolic link",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_named_and_never_followed_nor_waited_for(lab, tmp_path, kind):
    path = tmp_path / "strange"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = "/dev/tty"
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(lab.chunk(lab.namespace(), 1))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "socket":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.close()
    done = fskv("inspect", path, timeout_s=60)
    assert done.exit_code == 1
    assert f"NO CHUNK FILE: {KINDS[kind]}, no regular file" in done.stdout


def test_strange_entries_of_a_root_and_strange_arguments(lab, tmp_path, monkeypatch):
    where = lab.namespace()
    for path in spoil(lab, where):
        done = run("inspect", path)
        assert done.exit_code in (1, 2, 3)
        assert all(c.isprintable() or c == "\n" for c in done.stdout + done.stderr)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")  # there, or ../../etc may be a file of the machine
    for text in ("", "a\0b", "x" * 5000, "\x1b[31m", "../../etc"):
        assert inspect(text).exit_code == 2


def test_a_header_that_claims_the_largest_numbers_is_answered_in_bounded_memory(lab, tmp_path):
    """2 million pages in a header of 16 MiB, a payload of terabytes that is not there, and a sparse one."""
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.write(struct.pack("<8sIIIIQ", b"\x89FSKV\r\n\x1a", 1, 16 << 20, (16 << 20) - 32, 0, 0))
        file.truncate(1 << 40)
    code = (
        "import resource, sys; from fskv_tools.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        f"sys.argv = ['fskv', 'inspect', '--json', {str(path)!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print(open('/proc/self/status').read(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    # Of this program alone: `ru_maxrss` is the largest child's, and begins with what its parent had.
    (peak_kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", done.stderr, re.MULTILINE)
    assert int(peak_kib) < 1 << 18


# --- fuzz -------------------------------------------------------------------------------


def good_file():
    with tempfile.TemporaryDirectory() as directory:
        lab = Lab(directory)
        path = lab.chunk(lab.namespace(), 1)
        with open(path, "rb") as file:
            return file.read()


GOOD = good_file()


def with_checksum(content):
    """Make a header's own checksum right, so that what is behind it is reached."""
    content = bytearray(content)
    nbytes = min(int.from_bytes(content[12:16], "little"), len(content))
    if len(content) >= 32:
        content[24:32] = bytes(8)
        struct.pack_into("<Q", content, 24, xxhash.xxh3_64_intdigest(bytes(content[:nbytes])))
    return bytes(content)


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 420), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
)


def try_all(content):
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        for words in (("--json",), ()):
            done = run("inspect", file.name, *words)  # raises what is no exit
            assert done.exit_code in (0, 1, 2)
            assert len(done.stdout) < 5_000_000
            assert all(c.isprintable() or c == "\n" for c in done.stdout)
        return run("inspect", "--json", file.name).lines[0]["finding"]


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_fuzz_a_map_behind_a_good_prefix(meta, header_nbytes, meta_nbytes):
    for lengths in ((4096, len(meta)), (header_nbytes, meta_nbytes)):
        start = struct.pack("<8sIIIIQ", GOOD[:8], 1, *lengths, 0, 0)
        assert try_all(with_checksum((start + meta).ljust(8192, b"\0"))) in ("corrupt", "stale")


@given(MUTATIONS, st.booleans(), st.integers(0, len(GOOD)))
@settings(max_examples=40, deadline=None)
def test_fuzz_a_mutated_header_whose_checksum_is_right(mutations, truncated, nbytes):
    content = bytearray(GOOD)
    for at, data in mutations:
        content[at : at + len(data)] = data
    made = with_checksum(content)
    try_all(made[:nbytes] if truncated else made)


def test_negative_control_the_unchanged_file_is_good():
    assert try_all(with_checksum(GOOD)) == "ok"
    assert try_all(GOOD[:-1]) == "corrupt"
