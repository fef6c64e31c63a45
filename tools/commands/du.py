"""`fskv du`: disk usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial

import typer

from ..exits import outcome
from ..options import JsonOption, NamespaceArgument, RootOption
from ..root_view import Namespace, RootView, lines
from ..terminal import (
    ago,
    columns,
    emit,
    fill,
    iec,
    many,
    new_table,
    plain,
    print_table,
    rfc3339,
    say,
    show,
    walk_progress,
)
from ..usage import Count, Key, NamespaceUsage, RootUsage

_COUNTS = {
    "files": "chunk files",
    "nbytes_on_disk": "their bytes on disk",
    "unused": "for each `age` (such as 7d) `files` and `nbytes_on_disk` unused for so long",
}
LINES = {
    "use": {
        "by": "`namespace`, `tenant` or `group`",
        "namespace": "ARCH/MODEL@DIGEST if `by` is `namespace`, else null",
        "epoch": "of the namespace, as in its namespace.json, or null",
        "tenant": "unless `by` is `group`; null for none",
        "group": "kind of KV group if `by` is `group`; `unknown` without a good identity",
        **_COUNTS,
    },
    "garbage": {
        "namespace": "ARCH/MODEL@DIGEST",
        "orphaned_parts": "parts of dead writers, or older than an hour",
        "orphaned_nbytes": "their bytes on disk",
        "parts_in_progress": "",
        "in_progress_nbytes": "their bytes on disk",
        "foreign": "entries among the chunks that fskv did not make",
        "problem": "damage of its namespace.json, or null",
        "unlistable": "directories that could not be listed",
    },
    "filesystem": {
        "nbytes": "its size",
        "free_nbytes": "free bytes for this user",
        "inodes": "0: unknown",
        "free_inodes": "",
    },
    "bound": {
        "scope": "`root`, `tenant` or `free` (of the file system)",
        "name": "the tenant, or null",
        "limit": "bytes; the smallest of living engines and watchers",
        "used": "bytes, by the engines' count",
    },
    "summary": {
        **_COUNTS,
        "namespaces": "number of namespaces",
        "problems": "namespaces with a damaged namespace.json",
        "foreign": "entries among the chunks that fskv did not make",
        "unlistable": "directories that could not be listed",
        "heartbeats": "living engines and watchers",
        "counted_at": "time of their last walk, or null",
    },
}


_AGES = ("1d", "7d", "30d")


class By(StrEnum):
    """What a table is by."""

    NAMESPACE = "namespace"
    TENANT = "tenant"
    GROUP = "group"


def _key(by: By, usage: NamespaceUsage, group: int) -> Key:
    one = usage.namespace
    return {By.NAMESPACE: one, By.TENANT: one.tenant, By.GROUP: usage.kind(group)}[by]


def command(
    root: RootOption,
    namespace: NamespaceArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Show disk usage by namespace, tenant and kind of KV group.

    It looks at every file. It also shows garbage (`fskv prune` removes it), free space, and the bounds of
    living engines. `fskv prune --dry-run` says what a prune would free.
    """
    view = RootView.open(root)
    spaces = view.matching(namespace)
    usage = RootUsage(view.path, spaces, _AGES)
    with walk_progress("looking", len(spaces)) as seen:
        usage.count(seen)
    tables = {one: usage.sums(partial(_key, one)) for one in By}
    if as_json:
        _emit(usage, tables)
    else:
        _print(usage, tables)
    raise typer.Exit(outcome(problems=usage.num_problems, partial=usage.unlistable))


# --- for people -------------------------------------------------------------------------


def _print(usage: RootUsage, tables: dict[By, dict[Key, Count]]) -> None:
    for by, rows in tables.items():
        if len(rows) > (by is By.TENANT):
            _print_table(by, rows, usage)
    for one in usage.namespaces:
        _print_garbage(one)
    space = usage.bounds.space
    free = "does not say how much is free"
    if space.total_nbytes:
        share = space.free_nbytes / space.total_nbytes
        free = f"{iec(space.free_nbytes)} of {iec(space.total_nbytes)} free ({share:.0%})"
    inodes = f", {space.free_inodes:,} inodes free" if space.total_inodes else ""
    _line("file system", f"{free}{inodes}")
    for scope in usage.bounds.scopes:
        name = f" of {scope.name}" if scope.name else ""
        used = f"{iec(scope.used)} of {iec(scope.limit)} in use"
        _line("bound", f"{scope.kind}{name}: {used}")
    if beats := usage.bounds.heartbeats:
        engines = sum(beat.namespace is not None for beat in beats)
        living = f"{many(engines, 'engine')}, {many(len(beats) - engines, 'watcher')}"
        _line("alive", f"{living}, last counted {ago(usage.bounds.counted_at_ns)}")


def _line(name: str, text: str) -> None:
    print(f"{name:<13}{fill(text, 13).lstrip()}")


def _print_table(by: By, rows: dict[Key, Count], usage: RootUsage) -> None:
    named = [(str(key or "-"), count) for key, count in rows.items()]
    if by is By.NAMESPACE:
        folded = lines(key for key in rows if isinstance(key, Namespace)).items()
        named = [(name, Count.of(rows[one] for one in spaces)) for name, spaces in folded]
        if len(rows) > 1:
            damaged = f", {usage.num_problems:,} damaged" * bool(usage.num_problems)
            named.append((many(len(rows), "namespace") + damaged, usage.total))
    numbers = [">FILES", ">ON DISK", *(f">UNUSED {age}" for age in usage.ages)]
    if columns() < 80:  # the columns would leave no room for the names
        for name, count in named:
            print(fill(name))
            files, on_disk, *unused = _cells(count)
            print(fill(f"{files} files, {on_disk} on disk", 2))
            each = map(" ".join, zip(usage.ages, unused, strict=True))
            print(fill(f"unused: {', '.join(each)}", 2))
        return
    table = new_table(by.value.upper(), *numbers)
    for name, count in named:
        if count is usage.total:
            table.add_section()
        table.add_row(*map(plain, [name, *_cells(count)]))
    print_table(table)


def _cells(count: Count) -> list[str]:
    unused = [iec(nbytes) for _, nbytes in count.unused]
    return [f"{count.num_files:,}", iec(count.nbytes), *unused]


def _print_garbage(one: NamespaceUsage) -> None:
    parts = one.parts
    facts = []
    if parts.orphaned_parts:
        facts.append(
            f"{many(parts.orphaned_parts, 'orphaned part')} ({iec(parts.orphaned_nbytes)})"
        )
    if parts.parts_in_progress:
        facts.append(f"{parts.parts_in_progress:,} being written ({iec(parts.in_progress_nbytes)})")
    if one.num_foreign:
        facts.append(f"{one.num_foreign:,} foreign entries")
    if facts:
        _line("garbage", f"{one.namespace.id}: {', '.join(facts)}")
    if one.namespace.problem is not None:
        say(f"{show(one.namespace.id)}: {one.namespace.problem}; no engine uses its files")


# --- for programs -----------------------------------------------------------------------


def _counts(count: Count, ages: Sequence[str]) -> dict[str, object]:
    unused = [
        {"age": age, "files": files, "nbytes_on_disk": nbytes}
        for age, (files, nbytes) in zip(ages, count.unused, strict=True)
    ]
    return {"files": count.num_files, "nbytes_on_disk": count.nbytes, "unused": unused}


def _emit(usage: RootUsage, tables: dict[By, dict[Key, Count]]) -> None:
    for by, rows in tables.items():
        for key, count in rows.items():
            where = key if isinstance(key, Namespace) else None
            names = {"namespace": where and where.id, "epoch": where and where.epoch}
            names |= {"tenant": key if by is By.TENANT else where and where.tenant}
            names |= {"group": key if by is By.GROUP else None}
            emit("use", by=by.value, **names, **_counts(count, usage.ages))
    for one in usage.namespaces:
        emit(
            "garbage",
            namespace=one.namespace.id,
            **asdict(one.parts),
            foreign=one.num_foreign,
            problem=one.namespace.problem,
            unlistable=one.unlistable,
        )
    space = usage.bounds.space
    emit(
        "filesystem",
        nbytes=space.total_nbytes,
        free_nbytes=space.free_nbytes,
        inodes=space.total_inodes,
        free_inodes=space.free_inodes,
    )
    for scope in usage.bounds.scopes:
        emit("bound", scope=scope.kind, name=scope.name, limit=scope.limit, used=scope.used)
    emit(
        "summary",
        **_counts(usage.total, usage.ages),
        namespaces=len(usage.namespaces),
        problems=usage.num_problems,
        foreign=usage.num_foreign,
        unlistable=usage.unlistable,
        heartbeats=len(usage.bounds.heartbeats),
        counted_at=rfc3339(usage.bounds.counted_at_ns),
    )
