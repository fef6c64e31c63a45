"""Draws a `State` as lines of a terminal of any size. Pure: no clock, no disk, no terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from rich.text import Text

from fskv.observe import metrics

from .. import endpoint
from ..terminal import duration, iec, many, rfc3339, show
from . import state as states
from .grid import Column, Section, cut, stack, table
from .state import EndpointState, EngineState, NamespaceState, State

NO_LIMIT = 1 << 30  # of a height, where nobody reads a screen
_BAR_CELLS = 20
_STATUS_WIDTH = 12  # of an endpoint
_STYLES = {
    states.ALIVE: "green",
    states.SILENT: "yellow",
    states.GONE: "red",
    states.UNKNOWN: "dim",
}


def lines(state: State, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
    """Return at most `height` lines of at most `width` cells, the most important first."""
    drawn = _Frame(state, max(1, width), ascii_only=ascii_only)
    return [cut(line, drawn.width) for line in stack(drawn.head(), drawn.sections(), height)]


def rate(value: float | None, *, sign: bool = False) -> str:
    """Write bytes a second; a dash where nobody knows yet."""
    if value is None:
        return "-"
    if abs(value) < 0.5:
        return "0"
    return ("+" if sign and value > 0 else "") + iec(value) + "/s"


def share(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if value < 0.9995 else f"{100 * value:,.0f} %"


def seconds(value: float | None) -> str:
    """Write a short time: `1.2 ms`, `340 ms`, `2.5 s`."""
    if value is None:
        return "-"
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.1f} s"


def amounts(total: Mapping[str, float], recent: Mapping[str, float]) -> str:
    """Write counts by reason, and in brackets what came in the last interval."""
    return ", ".join(
        f"{show(label)} {int(count):,}"
        + (f" (+{int(recent[label]):,})" if recent.get(label) else "")
        for label, count in total.items()
    )


def place(url: str) -> str:
    return show(url.removeprefix("http://").removesuffix("/metrics"))


class _Frame:
    def __init__(self, state: State, width: int, *, ascii_only: bool) -> None:
        self.state = state
        self.width = width
        self._full, self._empty, self._dots = ("#", ".", "~") if ascii_only else ("█", "░", "…")

    # --- the head -----------------------------------------------------------------------

    def head(self) -> list[Text]:
        state = self.state
        clock = (rfc3339(state.at_ns) or "")[11:19] + " UTC"
        left = Text.assemble(("fskv top  ", "bold"), show(state.path))
        if cell_len(left.plain) + len(clock) + 2 <= self.width:
            left.append(" " * (self.width - cell_len(left.plain) - len(clock)) + clock, style="dim")
        lines = [left]
        if state.silent_s:
            told = f"no answer from the root for {duration(state.silent_s)}"
            if state.space is not None:
                told += f"; what is shown is {duration(state.age_s)} old"
            lines.append(Text(told, style="bold red"))
        if state.problem is not None:
            lines.append(Text(show(state.problem), style="bold red"))
        if state.space is None:
            if not state.silent_s and state.problem is None:
                lines.append(Text("looking ...", style="dim"))
            return lines
        return lines + self._totals() + self._complaints()

    def _totals(self) -> list[Text]:
        state, space = self.state, self.state.space
        assert space is not None
        known = f"{iec(space.free_nbytes)} of {iec(space.total_nbytes)}"
        pieces = [f"free {known if space.total_nbytes else 'unknown'}"]
        if state.nbytes is None:
            first = Text("not counted yet", style="dim")
        else:
            first = Text.assemble((iec(state.nbytes), "bold"), f" in {state.files:,} files")
            if state.growth is not None:
                pieces.append(f"growth {rate(state.growth, sign=True)}")
        if state.stored is not None and state.engines:
            pieces.append(f"stored {rate(state.stored)}")
        if state.pruned is not None:
            pieces.append(f"pruned {rate(state.pruned)}")
        for piece in pieces:
            if cell_len(first.plain) + 2 + len(piece) <= self.width:
                first.append(f"  {piece}")
        return [first, self._keeper()]

    def _keeper(self) -> Text:
        """Say who keeps the root in bounds, and whose numbers are shown."""
        state, lease = self.state, self.state.lease
        line = Text()
        if lease is None:
            known = state.problem is None
            line.append(
                "no engine holds the lease" if known else "nobody can tell who holds the lease"
            )
            line.stylize("dim")
        else:
            line.append(f"kept by {show(lease.host)}, process {lease.pid}, ")
            line.append_text(self._status(lease.status, lease.silent_s))
        if state.counted_by == "top":
            line.append("; counted by this command", style="dim")
        elif state.counted_at_ms is not None:
            when = rfc3339(state.counted_at_ms * 1_000_000)
            line.append(f"; counted at {(when or '?')[11:19]}", style="dim")
        return line

    def _complaints(self) -> list[Text]:
        usage, unlistable = self.state.usage, self.state.unlistable
        found = []
        if unlistable:
            found.append(
                f"directories that could not be listed: {unlistable:,}; sizes may be too small"
            )
        if usage is not None and usage.unremovable:
            found.append(f"{many(usage.unremovable, 'file')} cannot be removed")
        return [Text(line, style="yellow") for line in found]

    def _status(self, status: str, silent_s: float) -> Text:
        text = f"silent for {duration(silent_s)}" if status == states.SILENT else status
        return Text(text, style=_STYLES[status])

    # --- the sections -------------------------------------------------------------------

    def sections(self) -> list[Section]:
        state = self.state
        found = []
        if state.bounds:
            found.append(self._bounds())
        if state.space is not None:
            found.append(self._namespaces())
        if state.engines:
            found.append(self._engines())
        if state.endpoints:
            found.append(self._endpoints())
        return found

    def _bounds(self) -> Section:
        columns = (
            Column("BOUND", least=12),
            Column("USED", right=True),
            Column("LIMIT", right=True),
            Column("FULL", right=True),
            Column("", rank=1),
        )
        rows = []
        for scope in self.state.bounds:
            full = scope.used / scope.limit if scope.limit > 0 else 1.0
            # Nearly full is how a root is meant to be; over the bound is not.
            style = "yellow" if full > 1 else "cyan"
            name = {"root": "root", "free": "file system"}.get(
                scope.kind, f"{scope.kind} {show(scope.name or '')}"
            )
            rows.append(
                [
                    Text(name),
                    Text(iec(scope.used)),
                    Text(iec(scope.limit)),
                    Text(share(full), style=style if full > 1 else ""),
                    Text(self._bar(full), style=style),
                ]
            )
        return Section(*table(columns, rows, self.width, self._dots))

    def _bar(self, part: float) -> str:
        full = min(_BAR_CELLS, max(0, round(_BAR_CELLS * part)))
        return self._full * full + self._empty * (_BAR_CELLS - full)

    def _namespaces(self) -> Section:
        columns = (
            Column("NAMESPACE", least=32),
            Column("TENANT", rank=4, least=8),
            Column("SIZE", right=True),
            Column("FILES", rank=2, right=True),
            Column("GROWTH", rank=1, right=True),
            Column("STORED", rank=3, right=True),
            Column("PRUNED", rank=3, right=True),
        )
        shown = self.state.namespaces
        rows = [self._namespace(one) for one in shown]
        if not rows:
            word = "seen" if self.state.unlistable else "yet"
            return Section(Text(f"no namespace {word}", style="dim"), ())
        return Section(*table(columns, rows, self.width, self._dots), least=3)

    def _namespace(self, one: NamespaceState) -> list[Text]:
        pruned = "-" if one.pruned is None else f"{one.pruned:,.0f} /s" if one.pruned else "0"
        return [
            Text(show(one.id)),
            Text(show(one.tenant or "")),
            Text("not counted" if one.nbytes is None else iec(one.nbytes)),
            Text("-" if one.files is None else f"{one.files:,}"),
            Text(rate(one.growth, sign=True)),
            Text(rate(one.stored)),
            Text(pruned),
        ]

    def _engines(self) -> Section:
        columns = (
            Column("ENGINE", least=18),
            Column("NAMESPACE", rank=4, least=16),
            Column("WRITTEN", rank=1, right=True),
            Column("RATE", right=True),
            Column("DISK FULL", rank=2, right=True),
            Column("STATUS"),
        )
        # Who is in trouble comes first: the last rows may not fit.
        order = (states.SILENT, states.GONE, states.ALIVE, states.UNKNOWN)
        engines = sorted(
            self.state.engines, key=lambda one: (order.index(one.status), -(one.rate or 0))
        )
        return Section(*table(columns, [self._engine(e) for e in engines], self.width, self._dots))

    def _engine(self, one: EngineState) -> list[Text]:
        name = one.host if one.pid is None else f"{one.host}:{one.pid}"
        return [
            Text(show(name)),
            Text(show(one.namespace or "fskv prune --watch")),
            Text(iec(one.written)),
            Text(rate(one.rate)),
            Text(f"{one.full:,} times" if one.full else "", style="yellow"),
            self._status(one.status, one.silent_s),
        ]

    # --- endpoints ----------------------------------------------------------------------

    def _endpoints(self) -> Section:
        columns = (
            Column("METRICS", least=14),
            Column("HITS", rank=5, right=True),
            Column("ALL", right=True),
            Column("LOADED", rank=2, right=True),
            Column("A CHUNK", rank=2, right=True),
            Column("STORED", rank=2, right=True),
            Column("LOOKUP P50", rank=7, right=True),
            Column("P99", rank=6, right=True),
            Column("TTFT P50", rank=4, right=True),
            Column("P99", rank=3, right=True),
            Column("FAILED", right=True),
            Column("HUNG", rank=1, right=True),
            Column("STATUS", least=_STATUS_WIDTH),
        )
        rows = [self._endpoint(one) for one in self.state.endpoints]
        head, drawn = table(columns, rows, self.width, self._dots)
        with_reasons: list[Text] = []
        for line, one in zip(drawn, self.state.endpoints, strict=True):
            with_reasons += [line, *self._reasons(one)]
        return Section(head, tuple(with_reasons))

    def _endpoint(self, one: EndpointState) -> list[Text]:
        status, style = self._endpoint_status(one)
        if one.total is None or not one.is_up:
            # Why it is down is what counts then, and would be cut: it has a line of its own.
            status = status if len(status) <= _STATUS_WIDTH else "no metrics"
            return [Text(place(one.url)), *[Text("")] * 11, Text(status, style=style)]
        recent = one.recent or one.total
        failed = one.total.total(metrics.LOAD_FAILURES)
        hung = one.total.total(metrics.THREADS_HUNG)
        values = [
            Text("" if recent.token_hit_ratio is None else share(recent.token_hit_ratio)),
            Text(share(one.total.token_hit_ratio)),
            Text(rate(recent.rate(metrics.LOADED_BYTES))),
            Text("" if recent.load_s is None else seconds(recent.load_s)),
            Text(rate(recent.rate(metrics.STORED_BYTES))),
            *(
                Text(seconds(value)) if value is not None else Text("")
                for name in (endpoint.LOOKUP_DELAY, endpoint.FIRST_TOKEN)
                for value in (recent.quantile(name, 0.5), recent.quantile(name, 0.99))
            ),
            Text(f"{int(failed):,}", style="yellow" if failed else ""),
            Text(f"{int(hung):,}" if hung else "", style="red"),
        ]
        return [Text(place(one.url)), *values, Text(status, style=style)]

    def _endpoint_status(self, one: EndpointState) -> tuple[str, str]:
        if one.silent_s:
            return f"no answer for {duration(one.silent_s)}", "red"
        if one.problem is not None:
            first = one.problem[:1]
            first = first if one.problem[:2].isupper() else first.lower()  # HTTP stays as it is
            return show(first + one.problem[1:]), "red"
        if one.total is None:
            return "looking ...", "dim"
        if one.total.total(metrics.BREAKER_OPEN):
            return "breaker open", "red"
        if one.total.total(metrics.STORES_PAUSED):
            return "stores paused", "yellow"
        return "ok", "green"

    def _reasons(self, one: EndpointState) -> list[Text]:
        if one.total is None or not one.is_up:
            status, style = self._endpoint_status(one)
            return [Text(f"  {status}", style=style)] if len(status) > _STATUS_WIDTH else []
        lines = []
        for words, metric, style in (
            ("failed", metrics.LOAD_FAILURES, "yellow"),
            ("not stored", metrics.STORES_SKIPPED, "dim"),
            ("missed", metrics.LOOKUP_MISSES, "dim"),
        ):
            total = one.total.by_label(metric)
            recent = one.recent.by_label(metric) if one.recent else {}
            if total:
                lines.append(Text(f"  {words}: {amounts(total, recent)}", style=style))
        return lines
