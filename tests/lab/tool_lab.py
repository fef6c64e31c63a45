"""Roots for the tests of the command line, written without an engine, and runs of the real `fskv`.

`Lab` writes chunk files through `fskv.format.chunk_file`, without torch; `spoil` puts everything into a root
that does not belong there. `run` calls the command in this process, `fskv` as a process of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
from world import make_identity

from fskv import namespace
from fskv.format.chunk_file import ChunkHeader, FileLayout, encode_header
from fskv.format.integrity import xxh3_rows
from fskv.namespace import GroupIdentity
from fskv.root.root import Root

PAGES = (3000, 5000)  # of one block


class Lab:
    """A root with namespaces of small chunk files."""

    def __init__(self, path):
        self.path = str(path)
        os.makedirs(self.path, exist_ok=True)
        self.root = Root.open(self.path, create=True)

    def namespace(self, pages=PAGES, **changes):
        """Make a namespace of one full-attention group (unless `groups` says otherwise)."""
        groups = (GroupIdentity(0, "full", None, 16, tuple(pages), ("layers.0", "layers.1")),)
        return self.namespace_of(make_identity(**{"groups": groups, **changes}))

    def namespace_of(self, identity):
        return SimpleNamespace(
            identity=identity,
            id=namespace.directory(identity),
            directory=self.root.open_namespace(identity),
        )

    def chunk(
        self, where, number, *, group=0, rank=None, age_s=0.0, seed=None, key=None, **changes
    ):
        """Write one good chunk file; returns its path. Its key is `key_of(number)` where none is given.

        `changes`: what its header says instead of the truth.
        """
        key = key_of(number) if key is None else key
        layout = layout_of(where.identity, group)
        content = np.random.default_rng(number if seed is None else seed).bytes(
            layout.content_nbytes
        )
        payload = content + bytes(layout.payload_nbytes - len(content))
        header = ChunkHeader(
            key_hash=key,
            group_idx=group,
            rank=rank or 0,
            namespace_digest=where.identity.digest,
            layout_digest=layout.digest,
            num_blocks=layout.num_blocks,
            page_nbytes=layout.page_nbytes,
            first_block=0,
            payload_nbytes=layout.payload_nbytes,
            row_digests=xxh3_rows(memoryview(payload)),
            creator="fskv/test",
            written_at_ms=1_700_000_000_000,
        )
        header = dataclasses.replace(header, **changes)
        path = where.directory.chunk_path(key, group, rank)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(encode_header(header, layout.header_nbytes) + payload)
        if age_s:
            then_ns = os.stat(path).st_mtime_ns - int(age_s * 1e9)
            os.utime(path, ns=(then_ns, then_ns))
        return path

    def chunks(self, where, numbers, **options):
        return [self.chunk(where, number, **options) for number in numbers]


def key_of(number):
    return number.to_bytes(32, "big")


def layout_of(identity, group_idx):
    group = next(g for g in identity.groups if g.group_idx == group_idx)
    facts = {
        "group": group_idx,
        "kind": group.kind,
        "tokens_per_block": group.tokens_per_block,
        "blocks": identity.blocks_per_chunk,
        "pages": list(group.page_nbytes),
        "layers": list(group.layer_names),
    }
    digest = hashlib.sha256(namespace.canonical_json(facts)).digest()[:16]
    return FileLayout(identity.blocks_per_chunk, group.page_nbytes, digest)


def spoil(lab, where):
    """Put in all that a hostile or careless neighbour may; returns the paths that must stay as they are."""
    chunks = f"{where.directory.path}/chunks"
    shard = f"{chunks}/abc"
    os.makedirs(shard, exist_ok=True)
    outside = f"{lab.path}-outside"
    os.makedirs(outside, exist_ok=True)
    put = []

    def file(path, content=b"not ours"):
        with open(path, "wb") as opened:
            opened.write(content)
        put.append(path)

    def link(target, path):
        os.symlink(target, path)
        put.append(path)

    file(f"{outside}/precious")
    file(f"{lab.path}/README.txt")
    file(f"{shard}/notes.txt")
    file(f"{shard}/{'x' * 240}.kv")
    file(os.fsencode(f"{shard}/new\nline\x1b[31mred\u202e") + b"\xff\xfe")
    file(f"{shard}/" + "a" * 32 + ".g0.kv")  # in another's directory
    file(f"{shard}/" + "abc" + "0" * 29 + ".g00.kv")  # leading zero
    file(f"{chunks}/stray")
    link("/", f"{shard}/abc" + "1" * 29 + ".g0.kv")
    link(shard, f"{shard}/loop")
    link(outside, f"{chunks}/0ff")  # a directory of chunks that is a link
    link(outside, f"{lab.path}/linked")
    os.mkfifo(f"{shard}/abc" + "2" * 29 + ".g0.kv")
    put.append(f"{shard}/abc" + "2" * 29 + ".g0.kv")
    os.mkdir(f"{shard}/abc" + "3" * 29 + ".g0.kv")
    put.append(f"{shard}/abc" + "3" * 29 + ".g0.kv")
    os.makedirs(f"{lab.path}/strange/place@0123")
    put.append(f"{lab.path}/strange/place@0123")
    return put


def run(*arguments, root=None, stdin=None, env=None):
    """Call `fskv` in this process; returns exit_code, stdout, stderr and `lines`, parsed where it is JSON."""
    from fskv_tools import cli
    from typer.testing import CliRunner

    words = [str(word) for word in arguments]
    if root is not None:
        words += ["--root", str(root)]
    done = CliRunner().invoke(cli.app, words, input=stdin, env={"FSKV_ROOT": None, **(env or {})})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return _result(done.exit_code, done.stdout, done.stderr)


def fskv(*arguments, root=None, timeout_s=120, env=None):
    """Run `fskv` as a process of its own."""
    words = [sys.executable, "-m", "fskv_tools", *map(str, arguments)]
    if root is not None:
        words += ["--root", str(root)]
    around = {**os.environ, **(env or {})}
    if not env or "FSKV_ROOT" not in env:
        around.pop("FSKV_ROOT", None)
    done = subprocess.run(words, capture_output=True, timeout=timeout_s, env=around)
    out, err = (text.decode(errors="backslashreplace") for text in (done.stdout, done.stderr))
    assert "Traceback" not in err, err
    return _result(done.returncode, out, err)


def _result(code, out, err):
    lines = []
    if out.startswith("{"):
        lines = [json.loads(line) for line in out.splitlines()]
    return SimpleNamespace(
        exit_code=code, stdout=out, stderr=err, lines=lines, summary=lines[-1] if lines else None
    )


def lines_of(name):
    """Return what a command's module says of its JSON lines."""
    from fskv_tools import cli

    entry = next(entry for entry in cli.COMMANDS if entry.name == name)
    return getattr(importlib.import_module(entry.module), "LINES", {})


def check_lines(name, lines):
    """Every line has exactly the documented fields, and the last one is the summary."""
    documented = lines_of(name)
    for line in lines:
        kind = line.pop("type")
        assert line.keys() == documented[kind].keys(), (kind, line.keys() ^ documented[kind].keys())
    assert kind == "summary"


def everything_below(path):
    return {
        os.path.relpath(os.path.join(base, name), path)
        for base, folders, names in os.walk(path)
        for name in [*folders, *names]
    }
