"""`fskv rm`: remove namespaces or chunks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from fskv.root.remove import PART, Fate, Outcome, Tally, always

from ..exits import Exit, UsageError
from ..interrupt import stopped_by_signals
from ..neighbours import News, clock_ns, namespaces_in_use, wall_clock_ns
from ..options import DryRunOption, JsonOption, RootOption, YesOption, complete_namespace
from ..removal import CHUNK, DIRECTORY, remove_files, remove_namespace
from ..root_view import Ambiguous, ChunkFile, Namespace, RootView
from ..terminal import confirm, emit, iec, many, say, show, tell, tell_failure, walk_progress

LINES = {
    "plan": {
        "target": "ARCH/MODEL@DIGEST, or DIGEST/NAME of a chunk",
        "what": "`namespace` or `chunk`",
        "files": "chunk files that would go",
        "nbytes": "bytes on disk of these, with parts",
        "in_use": "whether a living engine writes to its namespace",
    },
    "foreign": {"path": "what stays in a namespace: fskv did not make it, or it came meanwhile"},
    "failure": {"path": "what could not be removed", "reason": "why"},
    "summary": {
        "dry_run": "whether nothing was to be removed",
        "planned_files": "chunk files that were to go",
        "planned_nbytes": "bytes on disk of these, with parts",
        "removed_files": "chunk files that went",
        "removed_nbytes": "bytes on disk that went",
        "foreign": "what stays in these namespaces",
        "unremovable": "what could not be removed",
        "unlistable": "directories that could not be listed",
        "interrupted": "whether a signal ended it",
    },
}


@dataclass(slots=True)
class _Target:
    namespace: Namespace
    chunk: list[ChunkFile] | None = None  # its files; None: the whole namespace
    files: int = 0
    nbytes: int = 0
    unlistable: int = 0

    @property
    def kind(self) -> str:
        return "namespace" if self.chunk is None else "chunk"

    @property
    def id(self) -> str:
        if self.chunk is None:
            return self.namespace.id
        return f"{self.namespace.digest16}/{self.chunk[0].name[:32]}"

    def remove(self, news: News, stop: threading.Event) -> Iterator[Outcome]:
        one, files = self.namespace, self.chunk
        try:
            if files is None:
                yield from remove_namespace(one, news, stop.is_set)
            else:
                names, where = [file.name for file in files], files[0].directory
                yield from remove_files(one, where, names, always(CHUNK), news, stop.is_set)
        except OSError as error:  # the root is away
            yield Outcome(one.root, Fate.FAILED, error=error)


def command(
    root: RootOption,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMESPACE|MODEL|KEY",
            autocompletion=complete_namespace,
            help="Namespaces, all those of a model, or chunks as `ls --chunks` names them.",
            show_default=False,
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT",
            help="All namespaces of this tenant, by its exact name; may be repeated.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also a namespace to which a living engine writes."),
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all files of chunks, or whole namespaces with all that fskv made in them.

    It lists what would go, and asks. What fskv did not make stays, and so do the directories that hold it;
    then the namespace's identity stays, too. Engines are told what went and miss it from then on.

    A namespace to which a living engine writes is refused. With --force it goes: the engine misses all of it
    from then on, and its next store makes the namespace again; a store that is under way fails. Chunks may
    always be removed.

    Exit code 3 if something could not be removed or foreign entries keep a namespace.
    """
    view = RootView.open(root)
    words = [one.id for one in view.of_tenants(tenant)] if tenant else []
    words += targets or []
    if not words:
        raise UsageError("found nothing to remove, expected namespaces, chunks or --tenant")
    found = _resolve(view, words)
    in_use = namespaces_in_use(view.path, wall_clock_ns() if dry_run else clock_ns(view.path))
    _measure(found)
    for target in found:
        is_busy = target.namespace.id in in_use
        sizes = {"files": target.files, "nbytes": target.nbytes}
        text = f"{target.kind} {target.id}: {many(target.files, 'file')}, {iec(target.nbytes)}"
        text += "  (a living engine writes to it)" * is_busy
        facts = {"target": target.id, "what": target.kind, **sizes, "in_use": is_busy}
        tell("plan", text, as_json=as_json, **facts)
    busy = [t.id for t in found if t.chunk is None and t.id in in_use]
    refusal = f"{', '.join(busy)}: a living engine writes to it; stop it first, or give --force"
    refusal *= bool(busy) and not force
    files, nbytes = sum(t.files for t in found), sum(t.nbytes for t in found)
    removed, interrupted = Tally(), False
    what = f"{many(files, 'file')} ({iec(nbytes)}) of {many(len(found), 'target')}"
    if dry_run:
        say(f"would remove {what}; nothing was removed")
        if refusal:
            say(f"without --dry-run it is refused: {refusal}")
    elif refusal:
        raise UsageError(show(refusal))
    elif not confirm(f"Remove {what}?", yes=yes):
        say("nothing was done")
    else:
        with stopped_by_signals() as stop:
            removed = _remove(view, found, stop, as_json=as_json)
            interrupted = stop.is_set()
        say(f"removed {many(removed.count[CHUNK], 'file')}, {iec(_nbytes(removed))}")
    foreign, failed = removed.count[Fate.FOREIGN], removed.count[Fate.FAILED]
    unlistable = sum(t.unlistable for t in found)
    if as_json:
        emit(
            "summary",
            dry_run=dry_run,
            planned_files=files,
            planned_nbytes=nbytes,
            removed_files=removed.count[CHUNK],
            removed_nbytes=_nbytes(removed),
            foreign=foreign,
            unremovable=failed,
            unlistable=unlistable,
            interrupted=interrupted,
        )
    if interrupted:
        raise KeyboardInterrupt
    if foreign or failed or unlistable:
        raise typer.Exit(Exit.PARTIAL)


def _resolve(view: RootView, words: list[str]) -> list[_Target]:
    found = {target.id: target for word in words for target in _meant(view, word)}
    whole = {target.id for target in found.values() if target.chunk is None}
    return [t for t in found.values() if t.chunk is None or t.namespace.id not in whole]


def _meant(view: RootView, word: str) -> list[_Target]:
    """Return what a word means; refuse it where it may be a namespace and a chunk."""
    if not word:
        raise UsageError("found an empty name, expected a namespace or a chunk")
    spaces: list[Namespace] = []
    files: list[ChunkFile] = []
    try:
        spaces = view.of_one_model(word)
    except Ambiguous:
        raise
    except UsageError:
        pass  # it may be a chunk
    try:
        files = view.chunk(word, "namespace or chunk")
    except UsageError as error:
        if isinstance(error, Ambiguous) or not spaces:
            raise
    if spaces and files:
        raise UsageError(
            f"{show(word)}: may be the namespace {show(spaces[0].id)} or the chunk {files[0].id}"
        )
    return [_Target(one) for one in spaces] or [_Target(files[0].namespace, files)]


def _measure(targets: list[_Target]) -> None:
    with walk_progress("looking", len(targets)) as seen:
        for number, target in enumerate(targets):
            if target.chunk is not None:
                target.files = len(target.chunk)
                target.nbytes = sum(file.nbytes for file in target.chunk)
                continue
            for shard in target.namespace.listed(target):
                target.files += len(shard.records)
                target.nbytes += int(shard.records["nbytes"].sum())
                target.nbytes += sum(part.nbytes for part in shard.parts)
                seen(number, shard.idx)


def _nbytes(tally: Tally) -> int:
    return tally.nbytes[CHUNK] + tally.nbytes[PART]


def _remove(
    view: RootView, targets: list[_Target], stop: threading.Event, *, as_json: bool
) -> Tally:
    news, tally = News(view.path), Tally()
    with walk_progress("removing", len(targets)) as seen:
        for number, target in enumerate(targets):
            for found in target.remove(news, stop):
                tally.add(found)
                if found.what == DIRECTORY:
                    seen(number, int(found.name, 16))
                elif found.fate is Fate.FAILED:
                    tell_failure(found.path, found.reason, as_json=as_json)
                elif found.fate is Fate.FOREIGN:
                    text = f"stays   {found.path}"
                    tell("foreign", text, as_json=as_json, path=found.path)
            if stop.is_set():
                break
    return tally
