"""`fskv ls`: namespaces, or the chunk files of some of them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from ..exits import UsageError, outcome
from ..options import JsonOption, NamespaceArgument, QuietOption, RootOption
from ..root_view import (
    ChunkFile,
    Namespace,
    RootView,
    Sums,
    by_line,
    chunk_files,
    num_chunks,
)
from ..terminal import (
    columns,
    emit,
    iec,
    is_narrow,
    last_use,
    many,
    new_table,
    plain,
    print_table,
    rfc3339,
    say,
    show,
)

LINES = {
    "namespace": {
        "namespace": "ARCH/MODEL@DIGEST",
        "arch": "architecture of the GPU or CPU",
        "model": "its name in the directory",
        "digest": "16 hex digits",
        "tenant": "text or null",
        "epoch": "as in its namespace.json, or null",
        "path": "its directory",
        "chunks": "chunks; the files of all ranks are one",
        "files": "chunk files",
        "nbytes": "bytes on disk, with parts",
        "last_used": "newest last use (mtime), or null; perhaps later without --fresh",
        "unlistable": "directories of chunks that could not be listed",
        "problem": "damage of its namespace.json, or null",
    },
    "chunk": {
        "id": "DIGEST/NAME.gGROUP[.rRANK]",
        "namespace": "ARCH/MODEL@DIGEST",
        "path": "the chunk file",
        "nbytes": "bytes on disk",
        "last_used": "mtime, or null",
    },
    "summary": {
        "namespaces": "number of namespaces",
        "chunks": "null with --chunks",
        "files": "chunk files",
        "nbytes": "bytes on disk",
        "problems": "namespaces with a damaged namespace.json",
        "unlistable": "directories that could not be listed",
    },
}


class Sort(StrEnum):
    SIZE = "size"
    USED = "used"


_Listed = TypeVar("_Listed", Sums, ChunkFile)


class Form(StrEnum):
    """The options that say how a listing is printed."""

    TABLE = ""
    JSON = "--json"
    IDS = "--quiet"
    PATHS = "--path"


def command(
    root: RootOption,
    namespace: NamespaceArgument = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="List chunk files.")] = False,
    sort: Annotated[
        Sort | None,
        typer.Option(
            help="`size`: largest first. `used`: least recently used first. Default: unsorted."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="List no more than this.")] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Look at every file."),
    ] = False,
    quiet: QuietOption = False,
    path: Annotated[bool, typer.Option("--path", help="Print paths only, one per line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List namespaces with their chunks, size and last use; with --chunks the chunk files.

    Counts come from a namespace's snapshot and from directories that changed since, so a last use may be
    older than the true one. --fresh and --chunks look at every file. `--path NAMESPACE` prints a namespace's
    directory.
    """
    wanted = {Form.JSON: as_json, Form.IDS: quiet, Form.PATHS: path}
    forms = [form for form in wanted if wanted[form]]
    if len(forms) > 1:
        raise UsageError(f"{', '.join(forms)}: found {len(forms)}, expected one of them")
    form = forms[0] if forms else Form.TABLE
    spaces = RootView.open(root).matching(namespace)
    total = _Total()
    if chunks:
        _show_chunks(total, _picked(total.chunk_files(spaces), sort, limit), form)
    elif form in (Form.IDS, Form.PATHS) and sort is None:
        _show_names(_picked(map(Sums, spaces), sort, limit), form)
    else:
        counted = total.counted(spaces, fresh=fresh)
        rows = by_line(counted) if form is Form.TABLE else counted
        _show_namespaces(total, _picked(rows, sort, limit), form)
    problems = 0
    for one in spaces:
        if one.problem is not None:
            problems += 1
            say(f"{show(one.id)}: {one.problem}")
    if form is Form.JSON:
        emit(
            "summary",
            namespaces=len(spaces),
            chunks=None if chunks else total.chunks,
            files=total.files,
            nbytes=total.nbytes,
            problems=problems,
            unlistable=total.unlistable,
        )
    elif form is Form.TABLE and chunks:
        say(f"{many(total.files, 'file')}, {iec(total.nbytes)} on disk")
    raise typer.Exit(outcome(problems=problems, partial=total.unlistable))


def _picked(found: Iterable[_Listed], sort: Sort | None, limit: int | None) -> Iterable[_Listed]:
    """Sort and limit; with a limit no more than that is held at any time."""

    def key(one: _Listed) -> tuple[int, str]:
        return -one.nbytes if sort is Sort.SIZE else one.mtime_ns, one.id

    if sort is None:
        return itertools.islice(found, limit)
    return sorted(found, key=key) if limit is None else heapq.nsmallest(limit, found, key)


@dataclass(slots=True)
class _Total:
    """Walks namespaces, and counts the listed ones."""

    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    unlistable: int = 0

    def chunk_files(self, spaces: list[Namespace]) -> Iterator[ChunkFile]:
        for one in spaces:
            for shard in one.listed(self):
                yield from chunk_files(one, shard.records)

    def counted(self, spaces: list[Namespace], *, fresh: bool) -> Iterator[Sums]:
        for one in spaces:
            catalogue, failed = one.catalogue(fresh=fresh)
            for each in failed:
                say(str(each))
            self.unlistable += len(failed)
            row = Sums(one, catalogue.num_files, catalogue.nbytes, None, len(failed))
            for _, records in catalogue.shards():
                row.chunks += num_chunks(records)
                row.last_used_ns = max(row.mtime_ns, int(records["mtime_ns"].max()))
            yield row


def _show_names(found: Iterable[Sums | ChunkFile], form: Form) -> None:
    for one in found:
        print(show(one.id if form is Form.IDS else one.path))


def _show_namespaces(total: _Total, found: Iterable[Sums], form: Form) -> None:
    rows = list(found)
    total.chunks = sum(row.chunks for row in rows)
    total.files = sum(row.files for row in rows)
    total.nbytes = sum(row.nbytes for row in rows)
    if form is Form.JSON:
        for row in rows:
            emit(
                "namespace",
                namespace=row.id,
                arch=row.namespace.arch,
                model=row.namespace.model,
                digest=row.namespace.digest16,
                tenant=row.namespace.tenant,
                epoch=row.namespace.epoch,
                path=row.path,
                chunks=row.chunks,
                files=row.files,
                nbytes=row.nbytes,
                last_used=rfc3339(row.last_used_ns),
                unlistable=row.unlistable,
                problem=row.namespace.problem,
            )
    elif form is not Form.TABLE:
        _show_names(rows, form)
    elif rows:
        _print_namespaces(rows, total)
    else:
        say("found no namespace")


def _print_namespaces(rows: list[Sums], total: _Total) -> None:
    narrow = is_narrow()  # a tenant stands below its namespace then
    tenants = not narrow and any(row.namespace.tenant for row in rows)
    columns = ["ARCH", "MODEL@DIGEST", *["TENANT"] * tenants, ">CHUNKS", ">SIZE", "LAST USED"]
    table = new_table(*columns)
    for row in rows:
        one = row.namespace
        cells = [one.arch, row.name.removeprefix(f"{one.arch}/"), *[one.tenant or "-"] * tenants]
        cells += [f"{row.chunks:,}", iec(row.nbytes), last_use(row.last_used_ns)]
        shown = list(map(plain, cells))
        if narrow and one.tenant:
            shown[1].append(f"\ntenant {show(one.tenant)}")
        table.add_row(*shown)
    if len(rows) > 1:
        table.add_section()
        damaged = sum(row.namespace.problem is not None for row in rows)
        name = many(sum(row.number for row in rows), "namespace")
        name += f", {damaged:,} damaged" * bool(damaged)
        cells = ["", name, *[""] * tenants]
        table.add_row(*map(plain, [*cells, f"{total.chunks:,}", iec(total.nbytes), ""]))
    print_table(table)


def _show_chunks(total: _Total, found: Iterable[ChunkFile], form: Form) -> None:
    if form in (Form.IDS, Form.PATHS):
        _show_names(found, form)
        return
    # No table: it would have to be held until its widths are known.
    line = "{:<56} {:>9}  {}" if columns() >= 80 else "{}\n{:>11}  {}"
    if form is Form.TABLE:
        print(line.format("ID", "SIZE", "LAST USED"))
    now_ns = time.time_ns()
    for file in found:
        total.files += 1
        total.nbytes += file.nbytes
        if form is Form.TABLE:
            print(line.format(show(file.id), iec(file.nbytes), last_use(file.mtime_ns, now_ns)))
        else:
            emit(
                "chunk",
                id=file.id,
                namespace=file.namespace.id,
                path=file.path,
                nbytes=file.nbytes,
                last_used=rfc3339(file.mtime_ns),
            )
