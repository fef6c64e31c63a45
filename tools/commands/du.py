"""`fskv du`: what takes how much room."""

from __future__ import annotations

import shlex
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from fskv.root.filesystem import Space

from ..exits import outcome
from ..neighbours import wall_clock_ns
from ..options import JsonOption, NamespaceArgument, RootOption
from ..root_view import RootView
from ..terminal import (
    age_option,
    ago,
    emit,
    fill,
    iec,
    is_wide,
    many,
    new_table,
    plain,
    print_table,
    rfc3339,
    say,
    show,
    walk_progress,
)
from ..usage import Bounds, NamespaceUsage, RootUsage, Sums, age_text, bounds_of

_COUNTS = {
    "files": "chunk files",
    "nbytes": "their lengths; null where no good header says it",
    "nbytes_on_disk": "what they take on disk",
    "unused": "list of objects with `age` (such as 7d), `files` and `nbytes_on_disk` not used for so long",
}
LINES = {
    "use": {
        "by": "`namespace`, `arch`, `tenant` or `group`",
        "arch": "with `arch` and `namespace`, else null",
        "namespace": "ARCH/MODEL@DIGEST, with `namespace`, else null",
        "tenant": "with `tenant` and `namespace`; null also for none",
        "group": "with `group`: the kind of KV group, such as `full`; `unknown` without a good identity",
        **_COUNTS,
    },
    "garbage": {
        "namespace": "ARCH/MODEL@DIGEST",
        "orphaned_parts": "parts whose writer is gone, or older than an hour",
        "orphaned_nbytes": "bytes on disk of these",
        "parts_in_progress": "parts that are being written",
        "in_progress_nbytes": "bytes on disk of these",
        "foreign": "entries among the chunks that fskv did not make",
        "problem": "what is wrong with its namespace.json, or null: no engine uses its files then",
        "unlistable": "directories that could not be listed",
    },
    "filesystem": {
        "nbytes": "its size",
        "free_nbytes": "free for this user",
        "inodes": "its inodes; 0 where it has no such number, or none that can be true",
        "free_inodes": "free ones",
    },
    "bound": {
        "scope": "`root`, `tenant` or `free` (what of the file system may be in use)",
        "name": "of the tenant, or null",
        "limit": "bytes; the smallest of all that living engines and watchers were given",
        "used": "bytes in use, as the engines know it",
    },
    "target": {
        "option": "an option of `fskv prune`",
        "files": "files that it would remove, by what is known now",
        "nbytes_on_disk": "bytes that it would free",
    },
    "summary": {
        **_COUNTS,
        "namespaces": "number of namespaces",
        "problems": "namespaces with a damaged identity",
        "foreign": "foreign entries among the chunks",
        "unlistable": "directories that could not be listed",
        "heartbeats": "engines and watchers that live",
        "counted_at": "when they last walked all of it, or null",
    },
}


class By(StrEnum):
    NAMESPACE = "namespace"
    ARCH = "arch"
    TENANT = "tenant"
    GROUP = "group"


def _key(by: By, usage: NamespaceUsage, group: int) -> tuple[str, ...]:
    one = usage.namespace
    if by is By.NAMESPACE:
        return one.arch, one.name, one.tenant or ""
    if by is By.ARCH:
        return (one.arch,)
    return (one.tenant or "",) if by is By.TENANT else (usage.kind(group),)


_COLUMNS = {
    By.NAMESPACE: ("ARCH", "MODEL@DIGEST", "TENANT"),
    By.ARCH: ("ARCH",),
    By.TENANT: ("TENANT",),
    By.GROUP: ("KV GROUP",),
}


def command(
    root: RootOption,
    namespace: NamespaceArgument = None,
    by: Annotated[
        list[By] | None, typer.Option(help="Only this table; may be repeated. Default: all.")
    ] = None,
    unused_for: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AGE",
            help="Show what was not used for so long; may be repeated. Default: 1d, 7d, 30d.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what takes how much room, by namespace, architecture, tenant and kind of KV group.

    Also garbage, the file system's free space, the bounds of the engines that live, and what pruning would
    free. Every file is looked at, so that last uses are those of now. SIZE is the length of the files, ON
    DISK what they take; a narrow terminal shows fewer columns. `fskv prune` lists foreign entries and
    removes garbage.

    Exit code 1 if a namespace's identity is damaged, 3 if something could not be listed.
    """
    view = RootView.open(root)
    spaces = view.matching(namespace)
    ages_s = sorted(age_option("--unused-for", text) for text in unused_for or ("1d", "7d", "30d"))
    now_ns = wall_clock_ns()
    usage = RootUsage(view.path, spaces, ages_s, now_ns)
    with walk_progress("looking", len(spaces)) as seen:
        usage.count(seen)
    bounds = bounds_of(view.path, now_ns)
    space = Space.of(view.path)
    ages = [age_text(age_s) for age_s in ages_s]
    total = usage.sums(lambda *_: ()).get((), Sums(unused=[(0, 0)] * len(ages)))
    tables = {one: usage.sums(partial(_key, one)) for one in by or By}
    print_all = _emit if as_json else partial(_print, root)
    print_all(usage, tables, total, ages, bounds, space)
    problems = sum(one.namespace.problem is not None for one in usage.namespaces)
    unlistable = any(one.unlistable for one in usage.namespaces)
    raise typer.Exit(outcome(problems=problems, partial=unlistable))


# --- for people -------------------------------------------------------------------------


def _print(
    root: str,
    usage: RootUsage,
    tables: dict[By, dict[tuple[str, ...], Sums]],
    total: Sums,
    ages: list[str],
    bounds: Bounds,
    space: Space,
) -> None:
    for by, rows in tables.items():
        if len(rows) > (by not in (By.NAMESPACE, By.GROUP)) or len(tables) == 1:
            _print_table(by, rows, total, ages)
    for one in usage.namespaces:
        _print_garbage(one)
    free = f"{iec(space.free_nbytes)} of {iec(space.total_nbytes)} free"
    if space.total_nbytes:
        free += f" ({space.free_nbytes / space.total_nbytes:.0%})"
    else:
        free = "does not say how much is free"
    inodes = f", {space.free_inodes:,} inodes free" if space.total_inodes else ""
    _line("file system", f"{free}{inodes}")
    for scope in bounds.scopes:
        name = f" of {scope.name}" if scope.name else ""
        _line(
            "bound",
            f"{scope.kind}{name}: {iec(scope.used)} of {iec(scope.limit)} in use",
        )
    if bounds.heartbeats:
        _line("engines", f"{len(bounds.heartbeats):,}, last counted {ago(bounds.counted_at_ns)}")
    prune = f"fskv prune --root {shlex.quote(root)}"
    for target in usage.targets(bounds.scopes):
        files = many(target.num_files, "file")
        _line("would free", f"{iec(target.nbytes)} in {files}: {prune} {target.option}")


def _line(name: str, text: str) -> None:
    print(f"{name:<13}{fill(text, 13).lstrip()}")


def _print_table(by: By, rows: dict[tuple[str, ...], Sums], total: Sums, ages: list[str]) -> None:
    columns, shown = _COLUMNS[by], list(range(len(_COLUMNS[by])))
    numbers = ["FILES", "SIZE", "ON DISK", *(f"UNUSED {age}" for age in ages)]
    kept = list(range(len(numbers)))
    if by is By.NAMESPACE and not any(key[2] for key in rows):
        shown.remove(2)
    if not is_wide():
        kept = sorted({0, 2, len(numbers) - 1})
        if by is By.NAMESPACE and len({key[0] for key in rows}) == 1:
            shown.remove(0)
    right = [numbers[at] for at in kept]
    table = new_table(*(columns[at] for at in shown), *right, right=right)
    for key, sums in rows.items():
        cells = _cells(sums)
        names = [show(key[at]) or "-" for at in shown]
        table.add_row(*map(plain, [*names, *(cells[at] for at in kept)]))
    if len(rows) > 1 and by is By.NAMESPACE:
        table.add_section()
        cells = _cells(total)
        names = [many(len(rows), "namespace"), *[""] * (len(shown) - 1)]
        table.add_row(*map(plain, [*names, *(cells[at] for at in kept)]))
    print_table(table)


def _cells(sums: Sums) -> list[str]:
    length = "?" if sums.length is None else iec(sums.length)
    unused = [iec(nbytes) for _, nbytes in sums.unused]
    return [f"{sums.num_files:,}", length, iec(sums.nbytes), *unused]


def _print_garbage(one: NamespaceUsage) -> None:
    parts = one.parts
    facts = []
    if parts.orphaned:
        facts.append(f"{many(parts.orphaned, 'orphaned part')} ({iec(parts.orphaned_nbytes)})")
    if parts.in_progress:
        facts.append(f"{parts.in_progress:,} being written ({iec(parts.in_progress_nbytes)})")
    if one.num_foreign:
        facts.append(f"{one.num_foreign:,} foreign entries")
    if facts:
        _line("garbage", f"{one.namespace.id}: {', '.join(facts)}")
    if one.namespace.problem is not None:
        say(f"{show(one.namespace.id)}: {one.namespace.problem}; no engine uses its files")


# --- for programs -----------------------------------------------------------------------


def _counts(sums: Sums, ages: list[str]) -> dict[str, object]:
    unused = [
        {"age": age, "files": files, "nbytes_on_disk": nbytes}
        for age, (files, nbytes) in zip(ages, sums.unused, strict=True)
    ]
    return {
        "files": sums.num_files,
        "nbytes": sums.length,
        "nbytes_on_disk": sums.nbytes,
        "unused": unused,
    }


def _emit(
    usage: RootUsage,
    tables: dict[By, dict[tuple[str, ...], Sums]],
    total: Sums,
    ages: list[str],
    bounds: Bounds,
    space: Space,
) -> None:
    for by, rows in tables.items():
        for key, sums in rows.items():
            emit(
                "use",
                by=by.value,
                arch=key[0] if by in (By.ARCH, By.NAMESPACE) else None,
                namespace=f"{key[0]}/{key[1]}" if by is By.NAMESPACE else None,
                tenant=key[-1] or None if by in (By.TENANT, By.NAMESPACE) else None,
                group=key[0] if by is By.GROUP else None,
                **_counts(sums, ages),
            )
    for one in usage.namespaces:
        emit(
            "garbage",
            namespace=one.namespace.id,
            orphaned_parts=one.parts.orphaned,
            orphaned_nbytes=one.parts.orphaned_nbytes,
            parts_in_progress=one.parts.in_progress,
            in_progress_nbytes=one.parts.in_progress_nbytes,
            foreign=one.num_foreign,
            problem=one.namespace.problem,
            unlistable=one.unlistable,
        )
    emit(
        "filesystem",
        nbytes=space.total_nbytes,
        free_nbytes=space.free_nbytes,
        inodes=space.total_inodes,
        free_inodes=space.free_inodes,
    )
    for scope in bounds.scopes:
        emit(
            "bound",
            scope=scope.kind,
            name=scope.name,
            limit=scope.limit,
            used=scope.used,
        )
    for target in usage.targets(bounds.scopes):
        emit("target", option=target.option, files=target.num_files, nbytes_on_disk=target.nbytes)
    emit(
        "summary",
        **_counts(total, ages),
        namespaces=len(usage.namespaces),
        problems=sum(one.namespace.problem is not None for one in usage.namespaces),
        foreign=sum(one.num_foreign for one in usage.namespaces),
        unlistable=sum(one.unlistable for one in usage.namespaces),
        heartbeats=len(bounds.heartbeats),
        counted_at=rfc3339(bounds.counted_at_ns),
    )
