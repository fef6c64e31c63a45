"""`fskv report`: its options; the work is done in `tools.report`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .. import endpoint
from ..exits import UsageError, outcome
from ..options import JsonOption, MetricsOption, RootOption
from ..root_view import RootView
from ..terminal import emit, iec, many, progress, rfc3339, say

LINES = {
    "namespace": {
        "namespace": "ARCH/MODEL@DIGEST",
        "tenant": "text or null",
        "chunks": "chunks; the files of all ranks of a group are one",
        "files": "chunk files",
        "nbytes": "bytes on disk of chunk files",
        "oldest_use": "time of the last use of what was not used for longest, or null",
        "last_used": "time of the last use of any chunk, or null",
        "kinds": "kind of KV group to bytes on disk",
        "unlistable": "directories of chunks that could not be listed",
        "problem": "what is wrong with its namespace.json, or null",
    },
    "summary": {
        "root": "its directory",
        "at": "time",
        "html": "the page that was written, or null",
        "namespaces": "number of namespaces",
        "chunks": "their chunks",
        "files": "their chunk files",
        "nbytes": "bytes on disk of these",
        "free_nbytes": "free on the file system, for this user",
        "by_age": "list of `below_s` (null: no limit), `files`, `nbytes`: by the time since the last use",
        "reuse": "list of `below_s`, `files`: of the sample, by the time from storing to last use",
        "sampled": "files whose header was read and is good",
        "damaged": "of the sample: files whose header is damaged or of another chunk",
        "undated": "files without a usable time of last use",
        "parts": "unfinished files",
        "old_parts": "of these an hour old and more",
        "foreign": "entries that are not fskv's",
        "problems": "namespaces with a problem",
        "unlistable": "directories that could not be listed",
    },
}
_TIMEOUT_S = 5.0


def command(
    root: RootOption,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The page to write.", show_default=False),
    ] = None,
    metrics: MetricsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a root: what is there, how old, how often used, how healthy.

    The page needs nothing else, neither a script nor the network, and is light or dark as the reader's
    system is. Every chunk file is looked at, and the headers of 2000 of them, chosen at random, are read;
    memory does not grow with files. The file is replaced as a whole; what is no plain file is not
    overwritten. With --json the same numbers are printed. Engines on other machines are given some seconds
    to show that they are alive. Exit code 1 if an identity or a header of the sample is damaged, 3 if
    something could not be listed.
    """
    from ..report import file
    from ..report.page import page
    from ..report.survey import Survey, survey

    if html is None and not as_json:
        raise UsageError("report: nothing to do; give --html FILE, or --json, or both")
    urls = endpoint.addresses(metrics)
    view = RootView.open(root)
    path = None if html is None else file.check(html, view.path)
    with progress() as drawn:
        task = drawn.add_task("namespaces", total=None)
        found: Survey = survey(
            view, told=lambda done, total: drawn.update(task, completed=done, total=total)
        )
    if path is not None:
        answers = _answers(urls) if metrics is not None else None
        nbytes = file.write(path, page(found, answers))
        say(f"{html}: {iec(nbytes)}, about {many(found.files, 'file')} of {iec(found.nbytes)}")
    if as_json:
        _emit(found, path)
    problems = found.problems or found.reuse.damaged or found.reuse.misplaced
    unseen = found.health.unlistable or found.after.unread is not None
    raise typer.Exit(outcome(problems=problems, partial=unseen))


def _answers(urls: list[str]) -> list[tuple[str, endpoint.Sample | str]]:
    """Ask all endpoints at once; one that gives no numbers costs a sentence."""
    from ..top.watch import watch_endpoint, words

    watches = [(url, watch_endpoint(url, 3600.0, _TIMEOUT_S)) for url in urls]
    for _, watch in watches:
        watch.start()
    deadline = time.monotonic() + 2 * _TIMEOUT_S
    found: list[tuple[str, endpoint.Sample | str]] = []
    for url, watch in watches:
        watch.wait(max(0.0, deadline - time.monotonic()))
        watch.stop()
        problem = "no answer" if watch.problem is None else words(watch.problem)
        found.append((url, problem if watch.answer is None else watch.answer))
    return found


def _emit(found: object, path: str | None) -> None:
    from ..report.survey import AGE_BINS, REUSE_BINS, Survey

    assert isinstance(found, Survey)
    for one in found.namespaces:
        emit(
            "namespace",
            namespace=one.namespace.id,
            tenant=one.namespace.tenant,
            chunks=one.chunks,
            files=one.files,
            nbytes=one.nbytes,
            oldest_use=rfc3339(one.oldest_ns),
            last_used=rfc3339(one.last_used_ns),
            kinds={kind: part.nbytes for kind, part in one.kinds.items()},
            unlistable=one.unlistable,
            problem=one.namespace.problem,
        )
    by_age, low_s = [], 0.0
    for _, high_s in AGE_BINS:
        part = found.ages.between(low_s, high_s)
        by_age.append({"below_s": _limit(high_s), "files": part.files, "nbytes": part.nbytes})
        low_s = high_s
    reuse, health = found.reuse, found.health
    emit(
        "summary",
        root=found.path,
        at=rfc3339(found.at_ns),
        html=path,
        namespaces=len(found.namespaces),
        chunks=found.chunks,
        files=found.files,
        nbytes=found.nbytes,
        free_nbytes=found.after.space.free_nbytes,
        by_age=by_age,
        reuse=[
            {"below_s": _limit(high_s), "files": count}
            for (_, high_s), count in zip(REUSE_BINS, reuse.bins, strict=True)
        ],
        sampled=reuse.read,
        damaged=reuse.damaged + reuse.misplaced,
        undated=found.ages.undated.files,
        parts=health.parts.files,
        old_parts=health.old_parts.files,
        foreign=health.foreign,
        problems=len(found.problems),
        unlistable=health.unlistable,
    )


def _limit(seconds: float) -> int | None:
    return None if seconds == float("inf") else int(seconds)
