"""How fast is `fskv verify --read-data`, next to a plain parallel read of the same files?

Both in turns in one run, with a cold page cache: dirty pages are written and cached ones dropped before
each turn, and both read with O_DIRECT where the file system has it. The plain read is given the list of
files, opens each, reads it in pieces of the same size into aligned memory with as many threads, and looks
at nothing. The command is a process of its own, as a user starts it; its rate is what it reports in its
summary, from the first directory to the last byte, listing included. `process` is the same with the start
of Python.

Exit code 1 when the command finds anything wrong with the good files, or reads fewer bytes than there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from fskv_tools.check.expect import expected_of

from benchmarks.options import parser, positive, settings
from benchmarks.report import command, publish, say, show, spread
from benchmarks.rig import BenchmarkError
from fskv.format.chunk_file import ChunkHeader, encode_header
from fskv.format.integrity import xxh3_rows
from fskv.namespace import GroupIdentity, Identity
from fskv.root.root import Root

_PIECE_NBYTES = 4 << 20  # as fskv_tools.check.judge has it
_BLOCKS = 16
_MIB = 1 << 20


def _identity(chunk_nbytes: int) -> Identity:
    return Identity(
        engine="benchmark",
        engine_version="1",
        arch="cpu-x86_64",
        model_name="verify",
        weights="none",
        model_config={},
        kv_cache_dtype="int8",
        model_dtype="int8",
        kv_cache_layout="none",
        attention_backend="none",
        tokens_per_hash=16,
        blocks_per_chunk=_BLOCKS,
        groups=(GroupIdentity(0, "full", None, 16, (chunk_nbytes // _BLOCKS,), ("layers.0",)),),
        hash_algorithm="none",
        hash_seed="0",
        topology={"tp": 1},
    )


def make_root(path: str, num_files: int, chunk_nbytes: int) -> list[str]:
    """Write good chunk files of random content; returns their paths."""
    os.mkdir(path)
    identity = _identity(chunk_nbytes)
    directory = Root.open(path, create=True).open_namespace(identity)
    layouts = expected_of(identity, identity.digest16).layouts
    layout = layouts[0] if layouts else None
    assert layout is not None
    paths = []
    for number in range(num_files):
        key = number.to_bytes(32, "big")
        content = os.urandom(layout.content_nbytes)
        payload = content + bytes(layout.payload_nbytes - len(content))
        header = ChunkHeader(
            key_hash=key,
            group_idx=0,
            rank=0,
            namespace_digest=directory.digest,
            layout_digest=layout.digest,
            num_blocks=layout.num_blocks,
            page_nbytes=layout.page_nbytes,
            first_block=0,
            payload_nbytes=layout.payload_nbytes,
            row_digests=xxh3_rows(memoryview(payload)),
            creator="fskv/benchmark",
            written_at_ms=1_700_000_000_000,
        )
        paths.append(directory.chunk_path(key, 0, None))
        os.makedirs(os.path.dirname(paths[-1]), exist_ok=True)
        with open(paths[-1], "wb") as file:
            file.write(encode_header(header, layout.header_nbytes) + payload)
    return paths


def drop_caches(paths: list[str]) -> None:
    """Write what is dirty and drop what is cached of these files; no other file's."""
    os.sync()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def plain_read(paths: list[str], threads: int, *, direct: bool) -> tuple[int, float]:
    """Read all files on threads and look at nothing; returns bytes and seconds."""
    left = iter(paths)
    lock = threading.Lock()
    total = 0
    errors: list[OSError] = []

    def work() -> None:
        nonlocal total
        memory = mmap.mmap(-1, _PIECE_NBYTES + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 << 20)
        view = memoryview(memory)[start : start + _PIECE_NBYTES]
        nbytes = 0
        try:
            while True:
                with lock:
                    path = next(left, None)
                if path is None:
                    break
                fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
                try:
                    at = 0
                    while got := os.preadv(fd, [view], at):
                        at += got
                    nbytes += at
                finally:
                    os.close(fd)
        except OSError as error:
            errors.append(error)
        with lock:
            total += nbytes

    before = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - before
    if errors:
        raise BenchmarkError(f"the plain read failed: {errors[0]}")
    return total, seconds


def verify(root: str, threads: int) -> tuple[dict[str, Any], float]:
    """Run the command as a process; returns its summary and the seconds it took."""
    words = [sys.executable, "-m", "fskv_tools", "verify", "--read-data", "--json"]
    before = time.perf_counter()
    done = subprocess.run(
        [*words, "--threads", str(threads), "--root", root],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - before
    lines = done.stdout.splitlines()
    if not lines:
        raise BenchmarkError(f"verify said nothing: {done.stderr.strip()[-300:]}")
    return json.loads(lines[-1]), seconds


def takes_direct(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def main() -> int:
    made = parser("verify", __doc__)
    made.set_defaults(dir=".", threads=8)
    made.add_argument("--files", type=positive, default=768, help="(768)")
    made.add_argument("--chunk-kib", type=positive, default=2048, help="(2048)")
    made.add_argument("--rounds", type=positive, default=7, help="(7)")
    options = made.parse_args()
    if options.chunk_kib * 1024 % _BLOCKS:
        raise BenchmarkError("--chunk-kib: expected a whole number of KiB")
    directory = tempfile.mkdtemp(prefix="fskv-verify-", dir=os.path.abspath(options.dir))
    try:
        root = os.path.join(directory, "root")
        say(f"writing {options.files} files of {options.chunk_kib} KiB")
        paths = make_root(root, options.files, options.chunk_kib * 1024)
        nbytes = sum(os.stat(path).st_size for path in paths)
        direct = takes_direct(paths[0])
        rates: dict[str, list[float]] = {"plain": [], "verify": [], "process": []}
        wrong = 0
        for number in range(options.rounds):
            # Who is first in a round changes: a disk may remember what the other has read.
            for turn in ("plain", "verify") if number % 2 else ("verify", "plain"):
                drop_caches(paths)
                if turn == "plain":
                    read, seconds = plain_read(paths, options.threads, direct=direct)
                    rates["plain"].append(read / seconds / _MIB)
                    continue
                summary, seconds = verify(root, options.threads)
                rates["verify"].append(summary["nbytes_read"] / summary["seconds"] / _MIB)
                rates["process"].append(summary["nbytes_read"] / seconds / _MIB)
                wrong += summary["bad"] + (summary["nbytes_read"] != nbytes)
            say(f"round {number + 1}: " + ", ".join(f"{n} {v[-1]:.0f}" for n, v in rates.items()))
        ratios = [mine / plain for mine, plain in zip(rates["verify"], rates["plain"], strict=True)]
        spreads = {name: spread(values, 1) for name, values in rates.items()}
        ratio = spread(ratios)
        title = f"{options.files} files, {nbytes / _MIB:.0f} MiB, {options.threads} threads"
        publish(
            "verify",
            {
                **settings(options),
                "nbytes": nbytes,
                "direct": direct,
                "mib_per_s": spreads,
                "ratio": ratio,
                "wrong": wrong,
            },
            (
                f"{title}, {'O_DIRECT' if direct else 'buffered'}",
                ("", "MiB/s: median [min - max]"),
                [
                    *((name, show(value, 0)) for name, value in spreads.items()),
                    ("verify / plain", show(ratio)),
                ],
            ),
            as_json=options.json,
        )
        return 1 if wrong else 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(command("benchmarks.verify", main))
