"""`fskv inspect`: what a chunk file says of itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from fskv import chunk_file
from fskv.errors import ChunkError

from ..exits import Exit, UsageError


def command(
    path: Annotated[str, typer.Argument(help="A chunk file (*.kv).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a chunk file's header and check its length and every row. Exit code 1 if anything is wrong."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    problem: str | None = None
    facts: dict[str, object] = {"path": path, "nbytes": len(content)}
    try:
        header = chunk_file.parse_header(content)
        facts |= {
            "key_hash": header.key_hash.hex(),
            "group": header.group_idx,
            "rank": header.rank,
            "namespace": header.namespace_digest.hex(),
            "layout": header.layout_digest.hex(),
            "blocks": header.num_blocks,
            "first_block": header.first_block,
            "page_nbytes": list(header.page_nbytes),
            "header_nbytes": header.header_nbytes,
            "payload_nbytes": header.payload_nbytes,
            "rows": header.num_rows,
            "creator": header.creator,
            "written_at": _rfc3339(header.written_at_ms),
        }
        expected = header.header_nbytes + header.payload_nbytes
        if len(content) != expected:
            problem = f"{len(content)} bytes, header says {expected}"
        else:
            payload = memoryview(content)[header.header_nbytes :]
            chunk_file.check_rows(payload, 0, header.row_digests)
    except ChunkError as error:
        problem = str(error)
    facts["problem"] = problem
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:15} {'none' if value is None else value}")
    raise typer.Exit(Exit.PROBLEMS if problem else Exit.OK)


def _rfc3339(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
