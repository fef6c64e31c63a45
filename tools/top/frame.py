"""Draws a `Frame` with rich: first who works, how full, what hits and what is off; then the rest."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .. import survey
from ..endpoint import Endpoint
from ..terminal import duration, iec, plain, show
from .watch import Frame

_STYLES = {survey.ALIVE: "green", survey.SILENT: "yellow", survey.GONE: "red", "bad": "red"}
_BESIDE = 130  # columns from which one panel is beside another


def draw(
    frame: Frame, width: int, *, rows: int | None = None, first: bool = True, rest: bool = True
) -> Group:
    """Return one screen or both, `width` columns wide, with `rows` rows in a table at most."""
    seen, parts = frame.survey, [_head(frame), *_complaints(frame, rows)]
    if first and seen is not None:
        pair = [one for one in (_bounds(seen, width, rows), _engines(seen, width, rows)) if one]
        if width >= _BESIDE and len(pair) == 2:
            beside = Table.grid(expand=True)
            beside.add_column(ratio=2)
            beside.add_column(ratio=3)
            beside.add_row(*pair)
            pair = [beside]
        parts += pair
        if not seen.engines:
            parts.append(Text(" no engine has a heartbeat here", style="dim"))
            rest = True
    if first and frame.endpoints:
        parts.append(_hits(frame.endpoints, width, rows))
    if rest and seen is not None:
        parts.append(_namespaces(seen, width, rows))
    if rest and any(one.total for one in frame.endpoints):
        parts.append(_reasons(frame.endpoints, rows))
    return Group(*parts)


def rate(value: float | None) -> str:
    """Write bytes a second; a dash where nobody knows yet."""
    if value is None:
        return "-"
    return "0" if abs(value) < 0.5 else f"{iec(value)}/s"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Write a short time: `1.2 ms`, `340 ms`, `2.5 s`."""
    if value is None or value >= 0.9995:
        return "-" if value is None else f"{value:.1f} s"
    return f"{value * 1e3:.{1 if value < 0.0995 else 0}f} ms"


# --- the parts --------------------------------------------------------------------------


def _head(frame: Frame) -> RenderableType:
    """Return the root and the time, its size and what moves."""
    grid, seen = Table.grid(expand=True, padding=(0, 1)), frame.survey
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    title = Text.assemble((" fskv top  ", "bold cyan"), (show(frame.root), "bold"))
    grid.add_row(title, f"{(seen.at or '')[11:19]} UTC" if seen else "")
    if seen is not None:
        size = Text(" ", no_wrap=True, overflow="ellipsis")
        if seen.nbytes is not None:
            size.append(f"{iec(seen.nbytes)} in {seen.files:,} files", style="bold")
        for word, value in (("grows", seen.growth), ("pruned", seen.pruned)):
            size.append(f"   {word} {rate(value)}" if value else "")
        size.append(f"   {iec(seen.free_nbytes)} of {iec(seen.total_nbytes)} free", style="dim")
        who = {"walk": "counted by top", None: "not counted yet"}.get(seen.counted_by)
        grid.add_row(size, Text(who or f"counted {(seen.counted_at or '')[11:19]}", style="dim"))
    return grid


def _complaints(frame: Frame, rows: int | None) -> list[RenderableType]:
    """Say in a line each what is not as it should be; on a live screen no line is broken."""
    seen, found = frame.survey, []
    if frame.no_answer_s:
        old = f"; what is shown is {duration(frame.age_s)} old" if seen else ""
        found.append(("bad", f"no answer from the root for {duration(frame.no_answer_s)}{old}"))
    elif seen is None and not frame.problem:
        found.append(("dim", "looking ..."))
    if frame.problem and not (seen and frame.problem == seen.problem):
        found.append(("bad", frame.problem))
    found += survey.amiss(seen) if seen else []
    return [
        Text(
            f" ! {show(words)}",
            _STYLES.get(level, "yellow"),
            no_wrap=rows is not None,
            overflow="fold" if rows is None else "ellipsis",
        )
        for level, words in found
    ]


def _bounds(seen: survey.Survey, width: int, rows: int | None) -> RenderableType | None:
    bar = ["|"] if width >= 70 else []
    table = _table("+bound", ">used", ">of", ">full", *bar)
    for scope in seen.bounds[-rows:] if rows else seen.bounds:
        full = scope.used / scope.limit if scope.limit > 0 else 1.0
        # Nearly full is how a root is meant to be; over the bound is not.
        style = "bold red" if full > 1 else "cyan"
        name = {"root": "root", "free": "disk"}.get(scope.kind, f"tenant {scope.name}")
        drawn = ProgressBar(1.0, full, width=16, complete_style=style, finished_style=style)
        cells = iec(scope.used), iec(scope.limit), Text(share(full), style)
        table.add_row(plain(name), *cells, *[drawn for _ in bar])
    return _panel("How full", table) if seen.bounds else None


def _engines(seen: survey.Survey, width: int, rows: int | None) -> RenderableType | None:
    model = ["+model"] if width >= 70 else []
    table = _table("process", *model, ">written", ">rate", "status")
    # Who is in trouble comes first: the last rows may not fit.
    order = (survey.SILENT, survey.GONE, survey.ALIVE, survey.UNKNOWN)
    ordered = sorted(seen.engines, key=lambda one: (order.index(one.status), -(one.rate or 0)))
    for one in ordered[:rows]:
        status = f"silent {duration(one.silent_s)}" if one.status == survey.SILENT else one.status
        status += f", disk full {one.disk_full:,}x" if one.disk_full else ""
        name = one.host if one.pid is None else f"{one.host}:{one.pid}"
        # A watcher (`fskv prune --watch`) writes nothing.
        served = (one.namespace or "watcher").rpartition("/")[2].rpartition("@")[0] or "watcher"
        told = Text(status, _STYLES.get(one.status, "dim"))
        cells = iec(one.written), rate(one.rate), told
        table.add_row(plain(name), *[plain(served) for _ in model], *cells)
    _more(table, len(ordered), rows)
    keeper, who = seen.keeper, ""
    if keeper is not None:
        who = f"kept by {keeper['host']}:{keeper['pid']}, {keeper['status']}"
    return _panel("Who works", table, who) if seen.engines else None


def _hits(endpoints: Sequence[Endpoint], width: int, rows: int | None) -> Panel:
    """Return the table of hits: of requests now and since the start, and of tokens."""
    names = ["+engine", *(["+model"] if width >= _BESIDE else [])]
    titles = [">now", ">all", *([">tokens"] if width >= 70 else [])]
    titles += [">loaded", ">a load", ">stored", ">first token"] if width >= 110 else []
    table = _table(*names, *titles, ">failed", "+status")
    for one in endpoints[:rows]:
        now, total, values = one.recent or one.total, one.total, {}
        if now is not None and total is not None:
            values = {
                ">now": share(now.hit_ratio),
                ">all": share(total.hit_ratio),
                ">tokens": share(total.token_hit_ratio),
                ">loaded": rate(now.rate(now.loaded_nbytes)),
                ">a load": seconds(now.load_s),
                ">stored": rate(now.rate(now.stored_nbytes)),
                ">first token": seconds(now.first_token_s),
            }
        failed = sum(total.load_failures.values()) if total else 0
        named = [plain(one.place), *(plain(", ".join(one.models)) for _ in names[1:])]
        status = Text(show(one.status), "green" if one.status == "ok" else "red")
        lost = Text(f"{failed:,}" if total else "-", "yellow" if failed else "")
        table.add_row(*named, *(values.get(title, "-") for title in titles), lost, status)
    table.columns[-1].no_wrap = False  # why there are no numbers is not cut
    _more(table, len(endpoints), rows)
    return _panel("What hits", table, "share of requests, and of tokens since the start")


def _namespaces(seen: survey.Survey, width: int, rows: int | None) -> Panel:
    tenant = ["tenant"] if width >= 100 else []
    table = _table("+namespace", *tenant, ">size", ">files", ">grows")
    table.columns[0].no_wrap = False
    for one in seen.namespaces[:rows]:
        size = "not counted" if one.nbytes is None else iec(one.nbytes)
        files = "-" if one.files is None else f"{one.files:,}"
        owner = [plain(one.tenant or "") for _ in tenant]
        table.add_row(plain(one.namespace), *owner, size, files, rate(one.growth))
    _more(table, len(seen.namespaces), rows)
    return _panel("Namespaces", table if seen.namespaces else Text("none seen", "dim"))


def _reasons(endpoints: Sequence[Endpoint], rows: int | None) -> Panel:
    """Return why loads failed, chunks were missed or were not stored, since the start."""
    table = _table("+engine", "failed loads", "missed", "not stored")
    for one in endpoints[:rows]:
        if (total := one.total) is not None:
            found = (total.load_failures, total.missed, total.stores_skipped)
            told = [", ".join(f"{why} {num:,}" for why, num in each.items()) for each in found]
            table.add_row(*map(plain, (one.place, *(words or "-" for words in told))))
    return _panel("Chunks and why", table)


def _table(*titles: str) -> Table:
    """Return an empty table. `>` before a title: numbers; `+`: takes what room there is."""
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(
            title.lstrip(">+|"),
            justify="right" if title[:1] == ">" else "left",
            ratio=1 if title[:1] == "+" else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _more(table: Table, num: int, rows: int | None) -> None:
    if rows is not None and num > rows:
        table.add_row(Text(f"and {num - rows:,} more", "dim"))


def _panel(title: str, body: RenderableType, told: str = "") -> Panel:
    return Panel(
        body,
        title=Text(f" {title} ", "bold not dim"),
        title_align="left",
        subtitle=Text(f" {show(told)} ", "dim") if told else None,
        subtitle_align="right",
        border_style="dim",
    )
