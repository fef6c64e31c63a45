"""The page that `fskv report` writes: HTML without a script, complete in itself, from a `Survey`.

Every text that comes from a disk or an endpoint passes `text`, which shows what cannot be printed and escapes
the rest; tags are only in this package's sources. Each plot has its numbers beside it as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fskv import __version__
from fskv.bounds.limits import scopes
from fskv.observe import metrics

from .. import endpoint
from ..terminal import ago, duration, iec, many, rfc3339
from ..top.frame import seconds, share
from .health import engines_section, health_section, status
from .markup import figure, name_of, note, section, table, text
from .plots import Tick, area, bar, columns, escape
from .style import POLICY, SHEET
from .survey import AGE_BINS, DAY, HOUR, MINUTE, REUSE_BINS, NamespaceSurvey, Part, Survey

MAX_ROWS = 5000  # of a table; what is left out is said
_MAX_BARS = 10
_POINTS = 240
_UNUSED_S = 30 * DAY
_SCALE_S = 10 * MINUTE  # ages below it are on a linear axis, above it on a logarithmic one
_CELL = 0.018  # of the axis: a character of a label where the page is as narrow as a telephone's
_MARKS = (
    (10 * MINUTE, "10 m"),
    (HOUR, "1 h"),
    (6 * HOUR, "6 h"),
    (DAY, "1 d"),
    (7 * DAY, "7 d"),
    (30 * DAY, "30 d"),
    (180 * DAY, "180 d"),
    (730 * DAY, "2 y"),
)


def page(survey: Survey, answers: Sequence[tuple[str, endpoint.Sample | str]] | None = None) -> str:
    """Return the whole page. `answers`: of each endpoint its sample, or why there is none."""
    title = f"fskv report: {survey.path}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f"<title>{text(title)}</title><style>{SHEET}</style></head>\n<body>\n"
        f"<header><h1>{text(survey.path)}</h1>"
        f'<p class="soft">fskv cache root on {text(_utc(survey.at_ns))}</p></header>\n<main>\n'
        + "\n".join(
            [
                _tiles(survey),
                _bounds(survey),
                _over_time(survey),
                f'<div class="pair">{_ages(survey)}{_reuse(survey)}</div>',
                _hits(answers),
                _breakdowns(survey),
                health_section(survey),
                engines_section(survey),
                _namespaces(survey),
            ]
        )
        + f"\n</main>\n<footer><p>Written by fskv {text(__version__)} in one walk over the root. Sizes are "
        "bytes on disk. <em>Last use</em> is a file's mtime; engines refresh it at most every ten minutes. "
        "Times are in UTC.</p></footer>\n</body></html>\n"
    )


def _utc(ns: int | None) -> str:
    return "-" if ns is None else (rfc3339(ns) or "?")[:19].replace("T", " ") + " UTC"


# --- sections ---------------------------------------------------------------------------


def _tiles(survey: Survey) -> str:
    space = survey.after.space
    unused = survey.ages.between(_UNUSED_S, float("inf"))
    engines = [status(beat, survey) for beat in survey.after.heartbeats]
    alive = sum(status == "alive" for status, _ in engines)
    tiles = [
        ("Size", iec(survey.nbytes), f"{survey.nbytes:,} bytes"),
        ("Chunks", f"{survey.chunks:,}", f"in {survey.files:,} files"),
        ("Namespaces", f"{len(survey.namespaces):,}", many(len(survey.by(_model)), "model")),
        ("Free", iec(space.free_nbytes), f"of {iec(space.total_nbytes)}"),
        ("Unused for 30 days", iec(unused.nbytes), _of(unused.nbytes, survey.nbytes)),
        ("Engines", f"{alive:,} alive", f"of {len(engines):,} with a heartbeat"),
    ]
    body = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{body}</dl>'


def _of(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} % of the size" if whole else "nothing is there"


def _bounds(survey: Survey) -> str:
    look = survey.after
    counted = {one.namespace.id: (one.nbytes, one.files) for one in survey.namespaces}
    usage = replace(look.usage, namespaces=counted, others=(0, 0))
    rows = []
    for scope in scopes(usage, look.space):
        name = {"root": "the root", "free": "the file system"}.get(
            scope.kind, f"{scope.kind} {scope.name}"
        )
        full = scope.used / scope.limit if scope.limit > 0 else 1.0
        cells = [text(name), bar(full, over=full > 1), share(full), iec(scope.used)]
        rows.append([*cells, iec(scope.limit)])
    if not rows:
        return section(
            "bounds",
            "Bounds",
            note(
                "Nobody can tell."
                if survey.after.unread
                else "No living engine declares one (max_bytes, keep_free)."
            ),
        )
    heads = ["of", "|full", ".full", ".used", ".limit"]
    words = note("Of the engines that live now. Nearly full is how a bounded root is meant to be.")
    return section("bounds", "Bounds", words, table("Bounds", heads, rows))


def _ticks(oldest: str, marks: Sequence[tuple[float, str]]) -> list[Tick]:
    """Label both ends of the axis, and between them what touches no other label."""
    found, end = [Tick(0, oldest), Tick(1, "now")], len(oldest) * _CELL
    for at, label in sorted(marks):
        half = (len(label) + 1) / 2 * _CELL
        if end <= at - half and at + half <= 1 - len("now") * _CELL:
            found.insert(-1, Tick(at, label))
            end = at + half
    return found


def _over_time(survey: Survey) -> str:
    ages, name = survey.ages, "What is there, by the time of its last use"
    if not survey.files:
        return section("time", name, note("There is no chunk file."))
    oldest_s = ages.oldest_s

    def place_of(age_s: float) -> float:
        """Put ages on a logarithmic axis: a root's last hours say as much as its last months."""
        return 1 - math.log1p(age_s / _SCALE_S) / math.log1p(oldest_s / _SCALE_S)

    curve = ages.curve(
        [
            _SCALE_S * math.expm1(at / _POINTS * math.log1p(oldest_s / _SCALE_S))
            for at in range(_POINTS, -1, -1)
        ]
    )
    points = [(place_of(age), float(nbytes)) for age, nbytes in curve]
    ticks = _ticks(duration(oldest_s), [(place_of(age), label) for age, label in _MARKS])
    total = curve[-1][1]
    plot = area(
        "curve",
        name,
        f"A curve that rises from nothing {duration(oldest_s)} ago to {iec(total)} now.",
        points,
        ticks,
        iec,
        base=1024.0,
    )
    told = [oldest_s, *[age for age, _ in reversed(_MARKS) if age < 0.75 * oldest_s], 0.0]
    rows = [
        [f"{duration(age)} ago" if age else "now", f"{nbytes:,}", iec(nbytes)]
        for age, nbytes in ages.curve(told)
    ]
    words = note(
        "Bytes whose last use was so long ago or longer: so much would go if all were removed that was not "
        "used since. It is not the size that the root had then: a file keeps its last use alone, and of "
        "pruned files nothing is left. The time axis is logarithmic."
    )
    heads = ["unused since", ".bytes", ".size"]
    return section("time", name, words, figure(plot, name, heads, rows))


def _ages(survey: Survey) -> str:
    name, ages = "Age", survey.ages
    parts, low_s = [], 0.0
    for _, high_s in AGE_BINS:
        parts.append(ages.between(low_s, high_s))
        low_s = high_s
    labels = [label for label, _ in AGE_BINS]
    plot = columns(
        "ages",
        "Bytes by the time since their last use",
        "; ".join(
            f"{label}: {iec(part.nbytes)}" for label, part in zip(labels, parts, strict=True)
        ),
        [part.nbytes for part in parts],
        [label.removeprefix("< ") if at else label for at, label in enumerate(labels)],
        [
            f"{label}: {iec(p.nbytes)}, {p.files:,} files"
            for label, p in zip(labels, parts, strict=True)
        ],
        iec,
        base=1024.0,
    )
    rows = [
        [text(label), f"{p.files:,}", f"{p.nbytes:,}", iec(p.nbytes)]
        for label, p in zip(labels, parts, strict=True)
    ]
    if ages.undated.files:
        rows.append(["no date", f"{ages.undated.files:,}", f"{ages.undated.nbytes:,}", ""])
    words = note("Bytes by the time since their last use. Each column ends at its label.")
    heads = ["last use", ".files", ".bytes", ".size"]
    return section(
        "age", name, words, figure(plot, "Bytes by the time since their last use", heads, rows)
    )


def _reuse(survey: Survey) -> str:
    name, reuse = "Reuse", survey.reuse
    counted = sum(reuse.bins)
    if not counted:
        return section("reuse", name, note("No header could be read: there is nothing to show."))
    labels = [label for label, _ in REUSE_BINS]
    shares = [100 * count / counted for count in reuse.bins]
    said = [
        f"{label}: {count:,} files, {value:.1f} %"
        for label, count, value in zip(labels, reuse.bins, shares, strict=True)
    ]
    plot = columns(
        "reuses",
        "Files by the time from their storing to their last use",
        "; ".join(said),
        shares,
        [label.removeprefix("< ") if at else label for at, label in enumerate(labels)],
        said,
        lambda value: f"{value:g} %",
    )
    rows = [
        [text(label), f"{count:,}", f"{value:.1f} %"]
        for label, count, value in zip(labels, reuse.bins, shares, strict=True)
    ]
    sample = (
        f"all {survey.files:,} files"
        if reuse.read >= survey.files
        else f"{reuse.read:,} of {survey.files:,} files, chosen at random"
    )
    words = note(
        f"Time from a chunk's storing (its header) to its last use: {sample}"
        f"{', until the time was up' if reuse.unfinished else ''}. The first column was not used again, "
        "or only within ten minutes, which an mtime does not show."
    )
    heads = ["used for", ".files", ".share"]
    return section("reuse", name, words, figure(plot, "Files by time to last use", heads, rows))


def _hits(answers: Sequence[tuple[str, endpoint.Sample | str]] | None) -> str:
    name = "Hits"
    if answers is None:
        return section(
            "hits",
            name,
            note(
                "Left out: hit ratios are in the engines' metrics and not in the root. "
                "Give --metrics URL[,URL] to have them here."
            ),
        )
    rows = []
    for url, answer in answers:
        if isinstance(answer, str):
            rows.append([_place(url), text(answer[:1].lower() + answer[1:]), "", *["-"] * 5])
            continue
        change = endpoint.since_start(answer)
        ratio = change.token_hit_ratio
        failed = change.by_label(metrics.LOAD_FAILURES)
        rows.append(
            [
                _place(url)
                + f'<br><span class="soft">{text(", ".join(answer.models) or "no model named")}</span>',
                text(", ".join(answer.namespaces) or "it names none"),
                bar(ratio or 0.0),
                share(ratio),
                f"{int(change.total(endpoint.QUERIED_TOKENS)):,}",
                f"{int(change.total(metrics.LOOKUP_HITS)):,}",
                text(seconds(change.load_s)),
                text(", ".join(f"{k} {int(v):,}" for k, v in failed.items()) or "0"),
            ]
        )
    heads = [
        "engine",
        "namespace",
        "|hits",
        ".hits",
        ".of tokens",
        ".chunks found",
        ".load",
        "failed",
    ]
    words = note(
        "Since each engine's start: tokens found of those that its own cache did not have; chunks found; an "
        "I/O thread's mean time for a chunk; loads that failed and were recomputed."
    )
    return section("hits", name, words, table("Hits by engine and namespace", heads, rows))


def _place(url: str) -> str:
    return text(url.removeprefix("http://").removesuffix("/metrics")).replace(":", ":<wbr>")


def _breakdowns(survey: Survey) -> str:
    tables = [
        _breakdown("By model", survey.by(_model)),
        _breakdown("By architecture", survey.by(lambda one: one.namespace.arch)),
        _breakdown("By kind of KV group", survey.by_kind()),
        _breakdown("By tenant", survey.by(lambda one: one.namespace.tenant or "no tenant")),
    ]
    return section("where", "Where the bytes are", f'<div class="pair">{"".join(tables)}</div>')


def _model(one: NamespaceSurvey) -> str:
    identity = one.namespace.identity
    return identity.model_name if identity else one.namespace.model


def _breakdown(caption: str, parts: dict[str, Part]) -> str:
    total = sum(part.nbytes for part in parts.values())
    ordered = sorted(parts.items(), key=lambda item: (-item[1].nbytes, item[0]))
    shown = ordered if len(ordered) <= _MAX_BARS else ordered[: _MAX_BARS - 1]
    rest = Part()
    for _, part in ordered[len(shown) :]:
        rest.add(part.files, part.nbytes)
    rows = [
        [
            name_of(name),
            bar(part.nbytes / total if total else 0.0),
            iec(part.nbytes),
            f"{part.files:,}",
        ]
        for name, part in [
            *shown,
            *([(f"{len(ordered) - len(shown):,} others", rest)] if rest.files else []),
        ]
    ]
    return table(caption, ["name", "|share", ".size", "-files"], rows, shown=True)


def _namespaces(survey: Survey) -> str:
    ordered = sorted(survey.namespaces, key=lambda one: (-one.nbytes, one.namespace.id))
    if not ordered:
        return section("namespaces", "Namespaces", note("There is none yet."))
    total = sum(one.nbytes for one in ordered) or 1
    rows = [
        [
            f"<code>{name_of(one.namespace.id)}</code>",
            bar(one.nbytes / total),
            iec(one.nbytes),
            f"{one.chunks:,}",
            f"{one.files:,}",
            text(one.namespace.tenant or "-"),
            text(ago(one.oldest_ns, survey.at_ns)),
            text(ago(one.last_used_ns, survey.at_ns)),
            f'<span class="state bad">{text(one.namespace.problem)}</span>'
            if one.namespace.problem
            else '<span class="state good">good</span>',
        ]
        for one in ordered[:MAX_ROWS]
    ]
    heads = [
        "namespace",
        "|share",
        ".size",
        ".chunks",
        ".files",
        "tenant",
        ".oldest use",
        ".last use",
    ]
    left = len(ordered) - len(rows)
    more = note(f"{left:,} smaller ones are not shown.") if left else ""
    return section(
        "namespaces", "Namespaces", table("Namespaces", [*heads, "identity"], rows), more
    )
