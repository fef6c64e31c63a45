"""Draws a `Frame` with rich: faults, room, engines, hits and content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .. import survey
from ..endpoint import Endpoint
from ..terminal import ago, duration, iec, many, plain, rfc3339, share, show
from .watch import Frame

_STYLES = {survey.ALIVE: "green", survey.SILENT: "yellow", survey.GONE: "red", "bad": "red"}
_WIDE = 130  # columns


def draw(frame: Frame, width: int, rows: int | None = None, *, whole: bool = True) -> Group:
    """Return the screen, `width` columns wide, with `rows` rows in a table at most.

    Without `whole` namespaces are left out.
    """
    seen, parts = frame.survey, [_head(frame), *_complaints(frame, rows)]
    if seen is not None:
        panels = (_bounds(seen, width, rows), _engines(seen, width, rows))
        parts += [one for one in panels if one]
        if not seen.engines:
            parts.append(Text(" no engine has a heartbeat here", style="dim"))
    if frame.endpoints:
        parts.append(_hits(frame.endpoints, width, rows))
    if seen is not None and whole:
        parts.append(_namespaces(seen, width, rows))
    elif seen is not None:
        parts.append(Text(" no room for namespaces: `fskv ls` lists them", style="dim"))
    return Group(*parts)


def rate(value: float | None) -> str:
    """Write bytes a second; a dash if they are unknown."""
    if value is None:
        return "-"
    return "0" if abs(value) < 0.5 else f"{iec(value)}/s"


# --- the parts --------------------------------------------------------------------------


def _head(frame: Frame) -> RenderableType:
    """Return the root and the time, its size and its rates."""
    grid, seen = Table.grid(expand=True, padding=(0, 1)), frame.survey
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    title = Text.assemble((" fskv top  ", "bold cyan"), (show(frame.root), "bold"))
    grid.add_row(title, f"{(rfc3339(seen.at_ns) or '')[11:19]} UTC" if seen else "")
    if seen is not None:
        size = Text.assemble(
            " ", (iec(seen.usage.nbytes), "bold"), no_wrap=True, overflow="ellipsis"
        )
        free, total = iec(seen.space.free_nbytes), iec(seen.space.total_nbytes)
        size.append(f"   {free} of {total} free", style="dim")
        for word, value in (("grows", seen.growth), ("pruned", seen.pruned)):
            size.append(f"   {word} {rate(value)}" if value else "")
        # Engines add up bytes all the time, and count files once in a while.
        counted = f"{many(seen.usage.num_files, 'file')} counted {ago(seen.counted_ns, seen.at_ns)}"
        grid.add_row(size, Text(counted, style="dim"))
    return grid


def _complaints(frame: Frame, rows: int | None) -> list[RenderableType]:
    """Write each condition in a line; on a live screen no line is broken."""
    found: list[tuple[str, str]] = []
    if frame.no_answer_s:
        found.append(("bad", f"no answer from the root for {duration(frame.no_answer_s)}"))
    elif frame.problem:
        found.append(("bad", frame.problem))
    elif frame.survey is None:
        found.append(("dim", "looking ..."))
    found += survey.warnings(frame.survey) if frame.survey else []
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
    bar = [""] if width >= 70 else []
    table = _table("+bound", ">used", ">of", ">full", *bar)
    for scope in _shown(table, seen.bounds[::-1], rows):
        full = scope.used / scope.limit if scope.limit > 0 else 1.0
        # Nearly full is how a root is meant to be; over the bound is not.
        style = "bold red" if full > 1 else "cyan"
        name = {"root": "root", "free": "disk"}.get(scope.kind, f"tenant {scope.name}")
        drawn = ProgressBar(1.0, full, width=16, complete_style=style, finished_style=style)
        cells = iec(scope.used), iec(scope.limit), Text(share(full), style)
        table.add_row(plain(name), *cells, *[drawn for _ in bar])
    usage, body = seen.usage, Group(table)
    if usage.first_hits or usage.second_hits:
        mode = "all new chunks" if usage.first_sight else "chunks seen twice"
        hits = usage.first_hits // 1000, usage.second_hits // 1000
        told = "stores {}: hits {:,} at first sight, {:,} at second".format(mode, *hits)
        body.renderables.append(Text(told, "dim"))
    return _panel("How full", body) if seen.bounds else None


def _engines(seen: survey.Survey, width: int, rows: int | None) -> RenderableType | None:
    model = ["+model"] if width >= 70 else []
    table = _table("process", *model, ">written", ">rate", "status")
    # Engines in trouble come first: the last rows may not fit.
    order = (survey.SILENT, survey.GONE, survey.ALIVE)
    ordered = sorted(seen.engines, key=lambda one: (order.index(one.status), -(one.rate or 0)))
    for one in _shown(table, ordered, rows):
        status = one.status + (f", disk full {one.disk_full:,}x" if one.disk_full else "")
        name = one.host if one.pid is None else f"{one.host}:{one.pid}"
        # A watcher (`fskv prune --watch`) writes nothing.
        served = (one.namespace or "watcher").rpartition("/")[2].rpartition("@")[0] or "watcher"
        cells = iec(one.written), rate(one.rate), Text(status, _STYLES[one.status])
        table.add_row(plain(name), *[plain(served) for _ in model], *cells)
    kept = "kept by {}, {}".format(*seen.keeper) if seen.keeper else ""
    return _panel("Who works", table, kept) if seen.engines else None


def _hits(endpoints: Sequence[Endpoint], width: int, rows: int | None) -> Panel:
    """Return the table of hits: of requests now and since the start, and of tokens."""
    num = 2 if width < 70 else 3 if width < 110 else 5
    titles = (">now", ">all", ">tokens", ">loaded", ">stored")[:num]
    table = _table("+engine", *titles, "failed loads", "+status")
    for one in _shown(table, endpoints, rows):
        now, total, cells, failed = one.recent or one.total, one.total, ["-"] * 5, ""
        if now is not None and total is not None:
            ratios = (now.hit_ratio, total.hit_ratio, total.token_hit_ratio)
            cells = [*map(share, ratios), rate(now.loaded), rate(now.stored)]
            failed = ", ".join(f"{why} {count:,}" for why, count in total.load_failures.items())
        named = ", ".join([one.place, *(one.models if width >= _WIDE else [])])
        status = Text(show(one.status), "green" if one.status == "ok" else "red")
        lost = Text(show(failed or "-"), "yellow" if failed else "")
        table.add_row(plain(named), *cells[:num], lost, status)
    table.columns[-1].no_wrap = False  # why there are no numbers is not cut
    return _panel("What hits", table, "share of requests, and of tokens since the start")


def _namespaces(seen: survey.Survey, width: int, rows: int | None) -> Panel:
    tenant = ["tenant"] if width >= 100 else []
    table = _table("+namespace", *tenant, ">size", ">files")
    table.columns[0].no_wrap = False
    for name, size in _shown(table, list(seen.namespaces.items()), rows):
        cells = ("not counted", "-") if size is None else (iec(size[0]), f"{size[1]:,}")
        owner = [plain(seen.usage.tenants.get(name, "")) for _ in tenant]
        table.add_row(plain(name), *owner, *cells)
    return _panel("Namespaces", table if seen.namespaces else Text("none seen", "dim"))


def _table(*titles: str) -> Table:
    """Return an empty table. A title with `>` aligns numbers right; one with `+` takes the free width."""
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(
            title.lstrip(">+"),
            justify="right" if title[:1] == ">" else "left",
            ratio=1 if title[:1] == "+" else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _shown(table: Table, items: Sequence[Any], rows: int | None) -> Sequence[Any]:
    """Return the visible part of `items`; the table's caption gives the number of the others."""
    if rows is None or len(items) <= rows:
        return items
    table.caption, table.caption_justify = f"and {len(items) - rows + 1:,} more", "left"
    return items[: rows - 1]


def _panel(title: str, body: RenderableType, told: str = "") -> Panel:
    return Panel(
        body,
        title=Text(f" {title} ", "bold not dim"),
        title_align="left",
        subtitle=Text(f" {show(told)} ", "dim") if told else None,
        subtitle_align="right",
        border_style="dim",
    )
