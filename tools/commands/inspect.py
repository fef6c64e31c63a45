"""`fskv inspect`: the header, rows and spans of a chunk file, judged."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fskv import namespace
from fskv.errors import ChunkError
from fskv.format.chunk_file import ChunkHeader

from ..check import anatomy
from ..check.anatomy import Body, Place, Row, Span
from ..check.expect import layout_of
from ..check.judge import Finding, Reader, Verdict, finding_of
from ..exits import UsageError, outcome
from ..options import JsonOption, root_option
from ..root_view import RootView
from ..terminal import emit, iec, last_use, rfc3339, say, show

LINES = {
    "file": {
        "id": "DIGEST/NAME.gGROUP[.rRANK], or the path of a file outside of a namespace",
        "path": "the file",
        "finding": "ok, corrupt, stale, unreadable or vanished (see `verify`)",
        "reason": "in words; empty for ok",
        "nbytes": "length, or null",
        "nbytes_on_disk": "bytes on disk, or null",
        "last_used": "mtime, or null",
        "namespace": "directory of its namespace, or null",
        "problem": "damage of its namespace.json, or null",
        "header": "object (docs/format.md), or null where it fails its checks",
        "rows": "",
        "bad_rows": "damaged or missing rows",
        "spans": "blocks x pages",
    },
    "row": {
        "row": "",
        "offset": "in the file",
        "nbytes": "length",
        "status": "ok, bad, missing or encrypted",
        "expected": "XXH3-64 or tag in the header, hex",
        "found": "XXH3-64 of the bytes, hex, or null",
    },
    "span": {
        "block": "number in the chunk",
        "page": "number in the block",
        "offset": "in the file",
        "nbytes": "length",
        "first_row": "row of its first byte",
        "last_row": "row of its last byte",
        "stored": "false before `first_block`",
        "layer": "name, or null",
    },
    "summary": {"files": "chunk files", "bad": "files that are not ok"},
}
_SHOWN = 24  # rows and spans that a person is shown without --all
_MAX_SPAN_LINES = 100_000  # in JSON without --all: a header can claim 2^31 blocks


def command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY|PATH",
            help="A chunk as in `ls --chunks`, the engine's key in hex, or a file.",
        ),
    ],
    root: Annotated[str | None, root_option("The cache root; not needed for a path.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every row and span.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show header, identity, spans and rows of a chunk file, and judge it; for a key, all files of its chunk.

    A file outside of a root is judged by itself.
    """
    paths = _paths(what, root)
    reader, bad, tell = Reader(), [], _emit if as_json else _print
    for number, path in enumerate(paths):
        if number and not as_json:
            print()
        where = anatomy.place(path)
        try:
            with reader.open(where.path, None) as file:
                body = anatomy.examine(file, where)
                tell(where, body, everything)
        except ChunkError as error:
            body = Body(None, Verdict(*finding_of(error)), None)
            tell(where, body, everything)
        if body.verdict.finding is not Finding.OK:
            bad.append(body.verdict.finding)
    if as_json:
        emit("summary", files=len(paths), bad=len(bad))
    problems = set(bad) & {Finding.CORRUPT, Finding.STALE, Finding.CHANGING}
    raise typer.Exit(outcome(problems=problems, partial=bad))


def _paths(what: str, root: str | None) -> list[str]:
    if not what or "\0" in what:
        raise UsageError(f"{show(what)!r}: found no name, expected a chunk or a path")
    if os.path.lexists(what):
        return [what]
    is_path = what.startswith(("/", "./", "../")) or f"/{namespace.CHUNK_DIR}/" in what
    if is_path or not root:
        hint = "" if is_path else " here; a chunk's name or key needs --root"
        raise UsageError(f"{show(what)}: no such file{hint}")
    return [file.path for file in RootView.open(root).chunk(what)]


def _facts(where: Place, body: Body, bad_rows: int | None) -> dict[str, Any]:
    verdict, info, header, space = body.verdict, body.info, body.header, where.namespace
    return {
        "id": where.id,
        "path": where.path,
        "finding": verdict.finding.value,
        "reason": verdict.reason,
        "nbytes": info.st_size if info else None,
        "nbytes_on_disk": info.st_blocks * 512 if info else None,
        "last_used": rfc3339(info.st_mtime_ns) if info else None,
        "namespace": space.path if space else None,
        "problem": space.problem if space else None,
        "header": _header_facts(header, where) if header else None,
        "rows": header.num_rows if header else None,
        "bad_rows": bad_rows,
        "spans": anatomy.num_spans(header) if header else None,
    }


def _header_facts(header: ChunkHeader, where: Place) -> dict[str, Any]:
    group = where.group(header.group_idx)
    return {
        "key": header.key_hash.hex(),
        "name": namespace.chunk_name(header.key_hash),
        "group": header.group_idx,
        "kind": group.kind if group else None,
        "rank": header.rank,
        "namespace": header.namespace_digest.hex(),
        "layout": header.layout_digest.hex(),
        "blocks": header.num_blocks,
        "first_block": header.first_block,
        "page_nbytes": list(header.page_nbytes),
        "header_nbytes": header.header_nbytes,
        "payload_nbytes": header.payload_nbytes,
        "padding_nbytes": header.payload_nbytes - layout_of(header).content_nbytes,
        "checksum": header.checksum,
        "creator": header.creator,
        "written_at": rfc3339(header.written_at_ms * 1_000_000),
    }


# --- for programs -----------------------------------------------------------------------


def _emit(where: Place, body: Body, everything: bool) -> None:
    file, header = body.file, body.header
    if file is None or header is None:
        emit("file", **_facts(where, body, None))
        return
    # Counted before they are printed: the line about the file comes first.
    num_bad = sum(row.status not in ("ok", "encrypted") for row in anatomy.rows(file, header))
    emit("file", **_facts(where, body, num_bad))
    for row in anatomy.rows(file, header):
        emit("row", **asdict(row))
    made = anatomy.spans(header, where.layers(header.group_idx))
    for span in made if everything else itertools.islice(made, _MAX_SPAN_LINES):
        emit("span", **asdict(span))


# --- for people -------------------------------------------------------------------------


def _line(name: str, text: object) -> None:
    print(f"{name:14} {show(str(text))}")


def _print(where: Place, body: Body, everything: bool) -> None:
    verdict, info, header = body.verdict, body.info, body.header
    _line("file", where.path)
    shouted = "ok" if verdict.finding is Finding.OK else verdict.finding.value.upper()
    if verdict.finding is Finding.STALE and info is None:
        shouted = "NO CHUNK FILE"
    _line("verdict", f"{shouted}: {verdict.reason}" if verdict.reason else shouted)
    if where.namespace and where.namespace.problem:
        say(f"{where.namespace.path}: {where.namespace.problem}")
    if info is not None:
        _line("length", f"{info.st_size} bytes, {iec(info.st_blocks * 512)} on disk")
        _line("last used", f"{rfc3339(info.st_mtime_ns)}, {last_use(info.st_mtime_ns)}")
    if body.file is None or header is None:
        return
    for name, fact in _header_facts(header, where).items():
        if name != "page_nbytes":  # they are in the table of spans
            _line(name.replace("_", " "), str(fact))
    print()
    _print_spans(where, header, everything)
    print()
    _print_rows(anatomy.rows(body.file, header), everything)


def _print_spans(where: Place, header: ChunkHeader, everything: bool) -> None:
    total = anatomy.num_spans(header)
    made: Iterable[Span] = anatomy.spans(header, where.layers(header.group_idx))
    print(f"{'BLOCK':>6} {'PAGE':>5} {'OFFSET':>12} {'NBYTES':>10} {'ROWS':>9}  LAYER")
    for span in made if everything else itertools.islice(made, _SHOWN):
        rows = f"{span.first_row}"
        rows += f"-{span.last_row}" if span.last_row > span.first_row else ""
        layer = show(span.layer) if span.layer else "-"
        layer += "" if span.stored else "  (not stored)"
        print(f"{span.block:6} {span.page:5} {span.offset:12} {span.nbytes:10} {rows:>9}  {layer}")
    if total > _SHOWN and not everything:
        print(f"... and {total - _SHOWN:,} more; --all shows them")


def _print_rows(rows: Iterable[Row], everything: bool) -> None:
    counts = {"ok": 0, "encrypted": 0, "bad": 0, "missing": 0}
    print(f"{'ROW':>6} {'OFFSET':>12} {'NBYTES':>10}  {'STATUS':7}  {'EXPECTED':16}  FOUND")
    hidden = 0
    for row in rows:
        counts[row.status] += 1
        # Those that are bad are what somebody looks for; the first of each kind are shown.
        if not everything and counts[row.status] > _SHOWN:
            hidden += 1
            continue
        print(
            f"{row.row:6} {row.offset:12} {row.nbytes:10}  {row.status:7}  {row.expected}  "
            f"{row.found or '-'}"
        )
    if hidden:
        print(f"... and {hidden:,} more; --all shows them")
    print(
        ", ".join(
            f"{number:,} {status}" for status, number in counts.items() if number or status == "ok"
        )
    )
