"""What would a lossless codec save on the KV of a root, and what would it cost?

Reads chunk files that engines with real weights have written: random weights say nothing. For each namespace
and KV group, a sample of files is compressed and decompressed in frames of a row (64 KiB) and of a whole
chunk, one thread, the codecs in turns; every byte is compared. Rates are GB of KV a CPU second, medians of
rounds. `entropy` is the ratio if signs and mantissas stay as they are and each exponent takes its entropy.
`XXH3-64` is what checking the same bytes costs today.

Codecs of packages that are not installed are left out, and said so: blosc2, zipnn (bfloat16 and float32),
zstandard.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from fskv_tools.exits import NotARoot, UsageError
from fskv_tools.replay.trace import TraceError, lru_hits, read_trace
from fskv_tools.root_view import Namespace, RootView, chunk_files

from benchmarks.options import positive
from benchmarks.report import command, judged, publish, say
from benchmarks.rig import BenchmarkError
from fskv.errors import FskvError
from fskv.format.chunk_file import ROW_NBYTES, parse_header

_MIB = 1 << 20
_BLOCKS, _RATIOS = [5_000, 10_000, 30_000, 60_000], (1.0, 1.18, 1.46)  # fp8 and bfloat16
# Bytes of a value, and where its exponent is in it: the first bit and the number of bits.
_EXPONENTS = {
    "bfloat16": (2, 7, 8),
    "float16": (2, 10, 5),
    "float32": (4, 23, 8),
    "fp8": (1, 3, 4),
    "fp8_e4m3": (1, 3, 4),
    "fp8_e5m2": (1, 2, 5),
}


class Codec(NamedTuple):
    """`encode` takes bytes; `decode` takes what it made, and how many bytes that was of."""

    encode: Callable[[bytes], bytes]
    decode: Callable[[bytes, int], bytes]


class Sample(NamedTuple):
    """Payloads of some files of one group."""

    namespace: str
    dtype: str
    group_idx: int
    payloads: list[bytes]


# --- codecs -----------------------------------------------------------------------------------


def _zstd(package: Any, _dtype: str) -> Codec:
    encoder, decoder = package.ZstdCompressor(level=1), package.ZstdDecompressor()
    return Codec(encoder.compress, decoder.decompress)


def _split_zstd(package: Any, dtype: str) -> Codec:
    """Bytes of one significance together, each plane by zstd, as it is where that saves nothing."""
    width = _EXPONENTS[dtype][0]
    encoder, decoder = package.ZstdCompressor(level=1), package.ZstdDecompressor()

    def encode(data: bytes) -> bytes:
        planes = np.frombuffer(data, np.uint8).reshape(-1, width).T
        parts = []
        for plane in planes:
            plain = plane.tobytes()
            packed = encoder.compress(plain)
            part = packed if len(packed) < len(plain) else plain
            parts.append(len(part).to_bytes(4, "little") + part)
        return b"".join(parts)

    def decode(data: bytes, nbytes: int) -> bytes:
        result = np.empty((nbytes // width, width), np.uint8)
        at = 0
        for plane in range(width):
            length = int.from_bytes(data[at : at + 4], "little")
            part = data[at + 4 : at + 4 + length]
            plain = part if length == nbytes // width else decoder.decompress(part)
            result[:, plane] = np.frombuffer(plain, np.uint8)
            at += 4 + length
        return result.tobytes()

    return Codec(encode, decode)


def _blosc2(package: Any, dtype: str, *, codec: str) -> Codec:
    encode = functools.partial(
        package.compress2,
        typesize=_EXPONENTS[dtype][0],
        codec=getattr(package.Codec, codec),
        clevel=1,
        filters=[package.Filter.SHUFFLE],
        nthreads=1,
    )
    return Codec(encode, lambda data, _: package.decompress2(data, nthreads=1))


def _zipnn(package: Any, dtype: str) -> Codec | None:
    if dtype not in ("bfloat16", "float32"):
        return None
    codec = package.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    return Codec(
        lambda data: bytes(codec.compress(bytearray(data))),
        lambda data, _: bytes(codec.decompress(data)),
    )


_MAKERS: dict[str, tuple[str, Callable[[Any, str], Codec | None]]] = {
    "zstd 1": ("zstandard", _zstd),
    "bytes split, zstd 1": ("zstandard", _split_zstd),
    "blosc2 shuffle, zstd 1": ("blosc2", functools.partial(_blosc2, codec="ZSTD")),
    "blosc2 shuffle, lz4": ("blosc2", functools.partial(_blosc2, codec="LZ4")),
    "zipnn": ("zipnn", _zipnn),
}


def codecs(dtype: str, modules: dict[str, Any]) -> dict[str, Codec]:
    """Return the codecs for values of a type."""
    made = {
        name: make(modules[package], dtype)
        for name, (package, make) in _MAKERS.items()
        if package in modules
    }
    return {name: codec for name, codec in made.items() if codec is not None}


def installed() -> dict[str, Any]:
    """Return the packages that are here; says which are not."""
    found = {}
    for package in dict.fromkeys(package for package, _ in _MAKERS.values()):
        try:
            found[package] = importlib.import_module(package)
        except ImportError as error:
            say(f"benchmarks.codec: {package} is left out: {error}")
    return found


# --- samples ----------------------------------------------------------------------------------


def samples(root: str, nbytes: int) -> Iterator[Sample]:
    """Read about `nbytes` of files of each group of a root's namespaces, drawn at random."""
    try:
        view = RootView.open(root)
    except (NotARoot, UsageError) as error:
        raise BenchmarkError(str(error)) from None
    for namespace in view.namespaces():
        identity = namespace.identity
        if identity is None:
            say(f"benchmarks.codec: {namespace.id} is left out: {namespace.problem}")
            continue
        if identity.kv_cache_dtype not in _EXPONENTS:
            say(f"benchmarks.codec: {namespace.id} is left out: {identity.kv_cache_dtype}")
            continue
        for group_idx, payloads in sorted(_payloads(namespace, nbytes).items()):
            yield Sample(namespace.id, identity.kv_cache_dtype, group_idx, payloads)


def _payloads(namespace: Namespace, nbytes: int) -> dict[int, list[bytes]]:
    files = [file for shard in namespace.shards() for file in chunk_files(namespace, shard.records)]
    random.Random(1).shuffle(files)  # noqa: S311
    groups = {group.group_idx for group in namespace.identity.groups} if namespace.identity else ()
    found: dict[int, list[bytes]] = {group_idx: [] for group_idx in groups}
    for file in files:
        try:
            with open(file.path, "rb") as stream:
                content = stream.read()
            header = parse_header(content)
        except (OSError, FskvError):
            continue
        of_group = found.setdefault(header.group_idx, [])
        if sum(map(len, of_group)) < nbytes:
            of_group.append(content[header.header_nbytes :])
    return {group_idx: payloads for group_idx, payloads in found.items() if payloads}


def entropy_ratio(payloads: list[bytes], dtype: str) -> float:
    """Return the ratio at which exponents have their entropy and all other bits are stored as they are."""
    width, first_bit, num_bits = _EXPONENTS[dtype]
    values = np.frombuffer(b"".join(payloads), f"<u{width}")
    counts = np.bincount((values >> first_bit) & ((1 << num_bits) - 1))
    shares = counts[counts > 0] / len(values)
    entropy = float(-(shares * np.log2(shares)).sum())
    return 8 * width / (8 * width - num_bits + entropy)


# --- measuring --------------------------------------------------------------------------------


def _turn(name: str, codec: Codec, frames: list[bytes]) -> tuple[int, float, float]:
    """Return the bytes that would be stored, and the CPU seconds of encoding and of decoding."""
    start = time.process_time()
    packed = [codec.encode(frame) for frame in frames]
    encoded = time.process_time()
    plain = [codec.decode(one, len(frame)) for one, frame in zip(packed, frames, strict=True)]
    decoded = time.process_time()
    if plain != frames:
        raise BenchmarkError(f"{name}: other bytes came out than went in")
    stored = sum(min(len(one), len(frame)) for one, frame in zip(packed, frames, strict=True))
    return stored, encoded - start, decoded - encoded


def _check_s(frames: list[bytes]) -> float:
    start = time.process_time()
    for frame in frames:
        xxhash.xxh3_64_digest(frame)
    return time.process_time() - start


def measure_sample(sample: Sample, modules: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each codec and size of a frame. Raises BenchmarkError where a byte differs."""
    rows = []
    nbytes = sum(map(len, sample.payloads))
    facts = {
        "namespace": sample.namespace,
        "dtype": sample.dtype,
        "group": sample.group_idx,
        "nbytes": nbytes,
        "entropy": round(entropy_ratio(sample.payloads, sample.dtype), 3),
    }
    for frame_nbytes in (ROW_NBYTES, max(map(len, sample.payloads))):
        frames = [
            payload[at : at + frame_nbytes]
            for payload in sample.payloads
            for at in range(0, len(payload), frame_nbytes)
        ]
        found = codecs(sample.dtype, modules)
        turns: dict[str, list[tuple[int, float, float]]] = {name: [] for name in found}
        checks = []
        for round_ in range(rounds):
            names = list(found)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                turns[name].append(_turn(name, found[name], frames))
            checks.append(_check_s(frames))
        for name, of in turns.items():
            stored, encode_s, decode_s = (
                statistics.median(column) for column in zip(*of, strict=True)
            )
            rows.append(
                {
                    **facts,
                    "codec": name,
                    "frame_nbytes": frame_nbytes,
                    "ratio": round(nbytes / stored, 3),
                    "encode": round(nbytes / encode_s / 1e9, 2),
                    "decode": round(nbytes / decode_s / 1e9, 2),
                    "check": round(nbytes / statistics.median(checks) / 1e9, 1),
                }
            )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    modules = installed()
    if not modules:
        raise BenchmarkError("no codec is installed: pip install blosc2 zstandard zipnn")
    rows = []
    for sample in samples(options.root, options.mib * _MIB):
        rows += measure_sample(sample, modules, options.rounds)
    if not rows:
        raise BenchmarkError(f"{options.root}: no chunk file that could be read")
    return {"rows": rows, "rounds": options.rounds}


def hit_ratios(path: str, blocks: list[int], ratios: Sequence[float]) -> list[dict[str, float]]:
    """Return what an exact LRU hits of a trace (see `fskv replay`) in so many blocks, and in more of them."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        raise BenchmarkError(str(error)) from None
    total = max(1, trace.num_blocks)
    return [
        {"blocks": number}
        | {
            f"{ratio:g}": sum(lru_hits(trace.requests, int(number * ratio))) / total
            for ratio in ratios
        }
        for number in blocks
    ]


def report_hits(rows: list[dict[str, float]], options: argparse.Namespace) -> None:
    names = [name for name in rows[0] if name != "blocks"]
    shown = [[f"{row['blocks']:,.0f}", *(f"{row[name]:.1%}" for name in names)] for row in rows]
    columns = ["blocks", *(f"{name} times" for name in names)]
    title = "Hit ratio of an exact LRU, with so many times the blocks"
    publish("codec", {"rows": rows}, (title, columns, shown), as_json=options.json)


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    shown = [
        [
            f"{row['namespace'].rpartition('/')[2]} {row['group']}",
            row["dtype"],
            row["codec"],
            f"{row['frame_nbytes'] >> 10} KiB",
            f"{row['ratio']:.3f}",
            f"{row['entropy']:.3f}",
            f"{row['encode']:.2f}",
            f"{row['decode']:.2f}",
            f"{row['check']:.0f}",
        ]
        for row in facts["rows"]
    ]
    columns = [
        "group of",
        "values",
        "codec",
        "frame",
        "ratio",
        "entropy",
        "encode",
        "decode",
        "XXH3-64",
    ]
    title = f"Rates: GB of KV a CPU second, medians of {facts['rounds']} rounds"
    publish("codec", facts, (title, columns, shown), as_json=options.json)


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="benchmarks.codec",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("root", help="a root with chunks of models with real weights, or a trace")
    made.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of the table"
    )
    made.add_argument("--mib", type=positive, default=24, help="of each group (24)")
    made.add_argument("--rounds", type=positive, default=5, help="(5)")
    made.add_argument(
        "--trace",
        action="store_true",
        help="instead: what more room would hit of a trace of requests",
    )
    options = made.parse_args(arguments)
    if options.trace:
        return command("benchmarks.codec", lambda: _hits(options))
    return judged("codec", options, measure, report)


def _hits(options: argparse.Namespace) -> int:
    report_hits(hit_ratios(options.root, _BLOCKS, _RATIOS), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
