"""What the fuzz puts in the place of files: contents and kinds of files, made from a seed.

`Content` makes bytes, from nothing or out of what is right: trees of JSON or msgpack in which one thing after
the other is replaced. `KINDS` are ways to put something under a path.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import xxhash

NUM_SHARDS = 4096  # docs/format.md
_RECORD_NBYTES = 40
_MAX_PLACES = 50_000  # of a tree: it gets no larger
_NUMBERS = (
    *(0, -1, 1, 255, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1),
    *(1 << 63, (1 << 64) - 1, 1 << 64, 1 << 200, -(1 << 63), -(1 << 70), 10**4000),
    *(0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
)
_TEXTS = (
    *("", "x", "\0", "\n", "../..", "/etc/passwd", "\ud800", "\u202e", "é" * 300, "x" * 70_000),
    *("true", "null", "NaN", "1e999", "\x1b[2J"),
)


class Content:
    """Bytes for a file, by the generator that it was made with."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def value(self, depth: int = 0) -> Any:
        """Return something of any type."""
        rng = self._rng
        pick = rng.random()
        if pick < 0.45:
            return rng.choice(_NUMBERS)
        if pick < 0.65:
            return rng.choice(_TEXTS)
        if pick < 0.8 or depth > 2:
            return rng.choice((None, True, False, [], {}))
        if pick < 0.9:
            return [self.value(depth + 1) for _ in range(rng.randrange(4))]
        return {rng.choice(_TEXTS): self.value(depth + 1) for _ in range(rng.randrange(4))}

    def changed(self, tree: Any) -> Any:
        """Return a copy of a tree in which one to four things are others."""
        tree = copy.deepcopy(tree)
        for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
            tree = self._change(tree)
        return tree

    def _change(self, tree: Any) -> Any:
        rng = self._rng
        places: list[tuple[Any, Any]] = []

        def walk(node: Any) -> None:
            for key in list(node.keys() if isinstance(node, dict) else range(len(node))):
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    walk(node[key])

        if isinstance(tree, dict | list):
            walk(tree)
        if not places or rng.random() < 0.03:
            return self.value()
        node, key = rng.choice(places)
        pick = rng.random()
        if pick < 0.12:
            del node[key]
        elif pick < 0.2 and isinstance(node, dict):
            node[rng.choice(_TEXTS)] = self.value()
        elif pick < 0.3 and isinstance(node, dict):  # names, thousands of them
            count = rng.choice((10, 1000, 20_000))
            number = rng.choice((0, 1, (1 << 62) - 1, "t", None))
            # Of their own each: one list in all places would be a tree that grows in all of them.
            made = {f"a/m-{n}@{n:016x}": number or [(1 << 62) - 1, 1] for n in range(count)}
            node[key] = made if len(places) < _MAX_PLACES else {}
        elif pick < 0.35:
            deep: Any = []
            for _ in range(200):
                deep = [deep]
            node[key] = deep
        else:
            node[key] = self.value()
        return tree

    def json(self, tree: Any) -> bytes:
        """Return JSON of a tree, changed, mostly."""
        made = tree if self._rng.random() < 0.1 else self.changed(tree)
        # Digits of a number that are too many.
        with contextlib.suppress(ValueError, RecursionError):
            return self._torn(json.dumps(made).encode())
        return b"9" * 5000

    def noise(self) -> bytes:
        """Return bytes of no format."""
        rng = self._rng
        return rng.choice(
            (
                lambda: b"",
                lambda: rng.randbytes(rng.choice((1, 100, 5000, 300_000))),
                lambda: b"[" * 200_000,
                lambda: b'{"a":' * 100_000,
                lambda: b"9" * 100_000,
                lambda: bytes(rng.choice((1, 4096, 3_000_000))),
                lambda: b"\xff\xfe" + "{}".encode("utf-16-le"),
                lambda: b'{"name":1,"name":2}',
                lambda: b"\x81" * 60_000,
                lambda: b"\xc6\xff\xff\xff\xff",
            )
        )()

    def _torn(self, content: bytes) -> bytes:
        rng = self._rng
        pick = rng.random()
        if pick < 0.8 or not content:
            return content
        if pick < 0.87:
            return content[: rng.randrange(len(content))]
        if pick < 0.92:
            return content + content
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 1, 20))):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        return bytes(flipped)

    def snapshot(self) -> bytes:
        """Return a snapshot by docs/format.md, often with a right digest and odd records."""
        rng = self._rng
        count = rng.choice((0, 1, 50, 2000))
        shards = sorted(rng.randrange(NUM_SHARDS) for _ in range(count))
        counts = np.bincount(shards, minlength=NUM_SHARDS).astype("<u4")
        records = bytearray(rng.randbytes(_RECORD_NBYTES * count))
        for at, shard in enumerate(shards):
            if rng.random() < 0.5:  # at its place
                begin = at * _RECORD_NBYTES
                records[begin : begin + 2] = (shard << 4 | rng.randrange(16)).to_bytes(2, "big")
                records[begin + 32 : begin + 40] = rng.choice((0, 4096, 1 << 63)).to_bytes(
                    8, "little"
                )
        mtimes = np.array(
            [rng.choice((0, -2, -9, (1 << 63) - 1, 5)) for _ in range(NUM_SHARDS)], "<i8"
        )
        taken = rng.choice((0, 1, 10**18, (1 << 63) - 1))
        hasher = xxhash.xxh3_64(taken.to_bytes(8, "little"))
        for part in (mtimes.tobytes(), counts.tobytes(), bytes(records)):
            hasher.update(part)
        tree = {
            "snapshot": 1,
            "taken_at_ns": taken,
            "dir_mtimes": mtimes.tobytes(),
            "counts": counts.tobytes(),
            "digest": hasher.digest(),
        }
        if rng.random() < 0.4:
            name = rng.choice(list(tree))
            tree[name] = rng.choice((None, -1, b"", b"x" * 7, [], 1 << 63, "x", tree["digest"]))
        with contextlib.suppress(OverflowError, ValueError):
            packed = msgpack.packb(tree)
            head = bytes([packed[0] + 1]) + packed[1:] + msgpack.packb("records")
            nbytes = rng.choice((len(records), len(records), len(records), 0xFFFFFFFF, 0))
            return self._torn(head + b"\xc6" + nbytes.to_bytes(4, "big") + bytes(records))
        return b"\x86"


# --- ways to put something under a path ------------------------------------------------------


def remove(path: str) -> None:
    """Remove whatever is there."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def is_file(path: str) -> bool:
    """Return whether a regular file is there: no link, and nothing for which open() waits."""
    return os.path.isfile(path) and not os.path.islink(path)


def published(path: str, content: bytes, rng: random.Random) -> None:
    part = f"{path}.{rng.randrange(1 << 30)}"
    with open(part, "wb") as file:
        file.write(content)
    if os.path.isdir(path) and not os.path.islink(path):
        remove(path)
    os.rename(part, path)


def in_place(path: str, content: bytes, rng: random.Random) -> None:
    if not is_file(path):
        remove(path)
    with open(path, "wb") as file:
        half = len(content) // 2
        file.write(content[:half])
        file.flush()
        file.write(content[half:])


def _unreadable(path: str, content: bytes, rng: random.Random) -> None:
    published(path, content, rng)
    os.chmod(path, 0)


def _sparse(path: str, content: bytes, rng: random.Random) -> None:
    published(path, content, rng)
    for nbytes in ((1 << 63) - 4096, 1 << 43, 1 << 33):
        with contextlib.suppress(OSError):
            os.truncate(path, nbytes)
            return


def link(path: str, outside: str, rng: random.Random) -> None:
    """Put a symbolic link there, to a directory outside of the root, a file in it, itself and such."""
    remove(path)
    os.symlink(rng.choice((outside, f"{outside}/file", "/dev/zero", "nowhere", path)), path)


def _fifo(path: str, content: bytes, rng: random.Random) -> None:
    remove(path)
    os.mkfifo(path)


def _socket(path: str, content: bytes, rng: random.Random) -> None:
    remove(path)
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


def _directory(path: str, content: bytes, rng: random.Random) -> None:
    remove(path)
    os.mkdir(path)
    if rng.random() < 0.5:
        with open(f"{path}/inside.json", "wb") as file:
            file.write(content)


def _gone(path: str, content: bytes, rng: random.Random) -> None:
    remove(path)


KINDS: dict[str, Callable[[str, bytes, random.Random], None]] = {
    "published": published,
    "in place": in_place,
    "unreadable": _unreadable,
    "sparse": _sparse,
    "fifo": _fifo,
    "socket": _socket,
    "directory": _directory,
    "gone": _gone,
}
WEIGHTS = (10, 6, 1, 1, 1, 1, 1, 1)
