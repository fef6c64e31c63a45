"""`fskv ls`: namespaces, or the chunk files of some of them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from ..exits import UsageError, outcome
from ..options import JsonOption, NamespaceArgument, QuietOption, RootOption
from ..root_view import ChunkFile, Namespace, RootView, Unlistable, chunk_files, num_chunks
from ..terminal import (
    age_option,
    columns,
    emit,
    iec,
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
        "arch": "GPU or CPU architecture",
        "model": "the model's name, as the directory has it",
        "digest": "16 hex digits of the identity's digest",
        "tenant": "text or null",
        "path": "its directory",
        "chunks": "chunks; the files of all ranks of a group are one",
        "files": "chunk files",
        "nbytes": "bytes on disk of chunk files and parts",
        "last_used": "time of the last use of any chunk, or null; at least that (see --fresh)",
        "unlistable": "directories of chunks that could not be listed",
        "problem": "what is wrong with its namespace.json, or null",
    },
    "chunk": {
        "id": "DIGEST/NAME.gGROUP[.rRANK]",
        "namespace": "ARCH/MODEL@DIGEST",
        "path": "the chunk file",
        "nbytes": "bytes on disk",
        "last_used": "time",
    },
    "summary": {
        "namespaces": "number of namespaces that were looked at",
        "chunks": "their chunks; null with --chunks",
        "files": "their chunk files; with --chunks those listed",
        "nbytes": "bytes on disk of these files",
        "problems": "namespaces with a problem",
        "unlistable": "directories that could not be listed",
    },
}


class Sort(StrEnum):
    NAME = "name"
    SIZE = "size"
    USED = "used"


@dataclass(slots=True)
class _Row:
    namespace: Namespace
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    last_used_ns: int | None = None
    unlistable: int = 0

    @property
    def problem(self) -> str | None:
        return self.namespace.problem


def command(
    root: RootOption,
    namespace: NamespaceArgument = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="List chunk files.")] = False,
    sort: Annotated[
        Sort | None,
        typer.Option(help="Largest or least recently used first. Default: as they come."),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="Reverse --sort.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="List no more than this.")] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only what was not used for so long, such as 12h or 30d."),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Look at every file, not only at directories that changed."),
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """List namespaces with their chunks, size and last use; with --chunks the chunk files.

    Namespaces are counted from their snapshot and from the directories that changed since; a file in one that
    did not change may have been used since. --chunks looks at every file. Exit code 1 if a namespace's
    identity is damaged, 3 if something could not be listed.
    """
    view = RootView.open(root)
    spaces = view.matching(namespace)
    unused_s = age_option("--older-than", older_than) if older_than is not None else None
    if unused_s is not None:
        fresh = True
    if chunks:
        _list_chunks(spaces, sort, reverse, limit, unused_s, quiet=quiet, as_json=as_json)
    else:
        _list_namespaces(spaces, sort, reverse, limit, unused_s, fresh, quiet, as_json)


# --- namespaces -------------------------------------------------------------------------


def _list_namespaces(
    spaces: list[Namespace],
    sort: Sort | None,
    reverse: bool,
    limit: int | None,
    unused_s: float | None,
    fresh: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    rows = [_count(one, fresh=fresh) for one in spaces]
    num_spaces, num_problems = len(rows), sum(row.problem is not None for row in rows)
    unlistable = sum(row.unlistable for row in rows)
    if unused_s is not None:
        before_ns = time.time_ns() - int(unused_s * 1e9)
        rows = [row for row in rows if (row.last_used_ns or 0) <= before_ns]
    if sort is not None:
        rows.sort(key=lambda row: row.namespace.id)
        if sort is Sort.SIZE:
            rows.sort(key=lambda row: -row.nbytes)
        elif sort is Sort.USED:
            rows.sort(key=lambda row: row.last_used_ns or 0)
    rows = (rows[::-1] if reverse else rows)[:limit]
    if quiet:
        _say_problems([row.namespace for row in rows])
        for row in rows:
            print(show(row.namespace.id))
    elif as_json:
        for row in rows:
            _emit_namespace(row)
        emit(
            "summary",
            namespaces=num_spaces,
            chunks=sum(row.chunks for row in rows),
            files=sum(row.files for row in rows),
            nbytes=sum(row.nbytes for row in rows),
            problems=num_problems,
            unlistable=unlistable,
        )
    elif rows:
        _print_namespaces(rows)
    else:
        say("no namespace" if not num_spaces else "no namespace that fits")
    raise typer.Exit(outcome(problems=num_problems, partial=unlistable))


def _count(one: Namespace, *, fresh: bool) -> _Row:
    row = _Row(one)
    try:
        catalogue, failed = one.catalogue(fresh=fresh)
    except OSError as error:
        say(f"{show(one.path)}: cannot be listed: {error.strerror}")
        row.unlistable = 1
        return row
    for shard in failed:
        say(str(Unlistable.of(one, shard)))
    row.unlistable = len(failed)
    row.files, row.nbytes = catalogue.num_files, catalogue.nbytes
    for _, records in catalogue.shards():
        row.chunks += num_chunks(records)
        row.last_used_ns = max(row.last_used_ns or 0, int(records["mtime_ns"].max()))
    return row


def _emit_namespace(row: _Row) -> None:
    one = row.namespace
    emit(
        "namespace",
        namespace=one.id,
        arch=one.arch,
        model=one.model,
        digest=one.digest16,
        tenant=one.tenant,
        path=one.path,
        chunks=row.chunks,
        files=row.files,
        nbytes=row.nbytes,
        last_used=rfc3339(row.last_used_ns),
        unlistable=row.unlistable,
        problem=row.problem,
    )


def _print_namespaces(rows: list[_Row]) -> None:
    tenants = any(row.namespace.tenant for row in rows)
    columns = ["ARCH", "MODEL@DIGEST", *["TENANT"] * tenants, "CHUNKS", "SIZE", "LAST USED"]
    table = new_table(*columns, right=("CHUNKS", "SIZE"))
    for row in rows:
        one = row.namespace
        cells = [show(one.arch), show(one.name)]
        if tenants:
            cells.append(show(one.tenant or "-"))
        cells += [f"{row.chunks:,}", iec(row.nbytes), last_use(row.last_used_ns)]
        table.add_row(*map(plain, cells))
    if len(rows) > 1:
        total = [many(len(rows), "namespace"), "", *[""] * tenants]
        total += [f"{sum(r.chunks for r in rows):,}", iec(sum(r.nbytes for r in rows)), ""]
        table.add_section()
        table.add_row(*map(plain, total))
    print_table(table)
    for row in rows:
        if row.problem is not None:
            say(f"{show(row.namespace.id)}: {row.problem}")


# --- chunks -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Listing:
    """A pass over chunk files that counts what it yields."""

    files: int = 0
    nbytes: int = 0
    unlistable: int = 0

    def of(self, spaces: list[Namespace], before_ns: int | None) -> Iterator[ChunkFile]:
        for one in spaces:
            for shard in one.listed(self):
                for file in chunk_files(one, shard.records):
                    if before_ns is None or file.mtime_ns <= before_ns:
                        yield file


def _list_chunks(
    spaces: list[Namespace],
    sort: Sort | None,
    reverse: bool,
    limit: int | None,
    unused_s: float | None,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    if quiet and as_json:
        raise UsageError("--quiet, --json: found both, expected one of them")
    before_ns = None if unused_s is None else time.time_ns() - int(unused_s * 1e9)
    listing = _Listing()
    found: Iterable[ChunkFile] = listing.of(spaces, before_ns)
    if sort is not None:
        found = _sorted(found, sort, reverse, limit)
    if not quiet and not as_json:
        line = _LINE if columns() >= 80 else _LINES
        print(line.format("ID", "SIZE", "LAST USED"))
    now_ns = time.time_ns()
    for file in itertools.islice(found, limit):
        listing.files += 1
        listing.nbytes += file.nbytes
        if quiet:
            print(show(file.id))
        elif as_json:
            emit(
                "chunk",
                id=file.id,
                namespace=file.namespace.id,
                path=file.path,
                nbytes=file.nbytes,
                last_used=rfc3339(file.mtime_ns),
            )
        else:
            print(line.format(show(file.id), iec(file.nbytes), last_use(file.mtime_ns, now_ns)))
    problems = _say_problems(spaces)
    if as_json:
        emit(
            "summary",
            namespaces=len(spaces),
            chunks=None,
            files=listing.files,
            nbytes=listing.nbytes,
            problems=problems,
            unlistable=listing.unlistable,
        )
    elif not quiet:
        say(f"{many(listing.files, 'file')}, {iec(listing.nbytes)} on disk")
    raise typer.Exit(outcome(problems=problems, partial=listing.unlistable))


def _say_problems(spaces: list[Namespace]) -> int:
    """Say what is wrong with namespaces where no table does; returns how many there are."""
    bad = [one for one in spaces if one.problem is not None]
    for one in bad:
        say(f"{show(one.id)}: {one.problem}")
    return len(bad)


_LINE = "{:<56} {:>9}  {}"  # no table: it would have to be held until its widths are known
_LINES = "{}\n{:>11}  {}"


def _sorted(
    files: Iterable[ChunkFile], sort: Sort, reverse: bool, limit: int | None
) -> Iterable[ChunkFile]:
    """Sort; with a limit no more than that is held at any time."""

    def key(file: ChunkFile) -> tuple[float, str]:
        first = {Sort.NAME: 0, Sort.SIZE: -file.nbytes, Sort.USED: file.mtime_ns}[sort]
        return first, file.id

    if limit is None:
        return sorted(files, key=key, reverse=reverse)
    return (heapq.nlargest if reverse else heapq.nsmallest)(limit, files, key)
