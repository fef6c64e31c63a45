"""Print fskv's dashboard for Grafana as JSON.

    python deploy/grafana/dashboard.py > fskv.json

It needs nothing but Python. docs/metrics.md says what each number means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Lines = Sequence[tuple[str, str]]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
LABELS = "job, instance, engine, model_name, connector"
ENGINE = "instance, engine, connector"
REASON = "connector, reason"
BOUND = "root, kind, name"
HITS = "Chunks found, of those looked for"

# --- queries ----------------------------------------------------------------------------


def engines(metric: str, prefix: str = "fskv_") -> str:
    """Return the series of the chosen engines."""
    return f'vllm:{prefix}{metric}{{instance=~"$instance"}}'


def change(metric: str, function: str = "rate", prefix: str = "fskv_") -> str:
    return f"{function}({engines(f'{metric}_total', prefix)}[$__rate_interval])"


def rate(metric: str, by: str = ENGINE, function: str = "rate") -> str:
    return f"sum by ({by}) ({change(metric, function)})"


def hit_ratio(by: str) -> str:
    hits, misses = rate("lookup_hits", by), rate("lookup_misses", by)
    return f"{hits} / ({hits} + {misses})"


def quantiles(metric: str, *percents: int) -> Lines:
    buckets = f"sum by (le, connector) (rate({engines(metric, '')}[$__rate_interval]))"
    return [
        (f"p{percent} {{{{connector}}}}", f"histogram_quantile({percent / 100}, {buckets})")
        for percent in percents
    ]


def by_root(function: str, query: str, by: str = "root") -> str:
    """Return series of engines with their roots, by an engine's own word."""
    root = f'on ({LABELS}) group_left (root) vllm:fskv_root_info{{root=~"$root"}}'
    return f"{function} by ({by}) ({query} * {root})"


def bound(metric: str) -> str:
    return by_root("min", f"({engines(metric)} < +Inf)", "root, bound")


def joined(query: str) -> str:
    """Return series of a watcher with their root."""
    return f'{query} * on (job, instance) group_left (root) fskv_root_info{{root=~"$root"}}'


def watched(function: str, query: str, by: str = "root") -> str:
    return f"{function} by ({by}) ({joined(query)})"


# --- panels -----------------------------------------------------------------------------


def panel(kind: str, title: str, about: str, lines: Lines, fields: Json, options: Json) -> Json:
    """Return a panel with these lines: a legend and a query each."""
    is_graph = kind == "timeseries"
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query,
            "legendFormat": legend,
            "range": is_graph,
            "instant": not is_graph,
        }
        for number, (legend, query) in enumerate(lines)
    ]
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": fields, "overrides": []},
        "targets": targets,
        "options": options,
    }


@dataclass(frozen=True)
class Graph:
    """A graph of the dashboard; `least` and `most` bound its axis."""

    title: str
    unit: str
    about: str = ""
    least: int | None = None
    most: int | None = None

    def of(self, *lines: tuple[str, str]) -> Json:
        bounds = {"min": self.least, "max": self.most}
        fields = {
            "unit": self.unit,
            **{name: bound for name, bound in bounds.items() if bound is not None},
            "custom": {
                "drawStyle": "line",
                "fillOpacity": 10,
                "lineWidth": 1,
                "showPoints": "never",
                "spanNulls": True,
            },
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        return panel("timeseries", self.title, self.about, lines, fields, options)


def number(
    title: str, about: str, query: str, colors: Json, unit: str = "short", legend: str = ""
) -> Json:
    """Return one number; each of its colours holds from a value up, None is the least."""
    steps = [{"color": color, "value": value} for color, value in colors.items()]
    bounds = {"min": 0, "max": 1} if unit == "percentunit" else {}
    fields = {"unit": unit, **bounds, "thresholds": {"mode": "absolute", "steps": steps}}
    options: Json = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if colors is FULL:
        options |= {"showThresholdLabels": False, "showThresholdMarkers": True}
    else:
        options |= {"colorMode": "background", "graphMode": "none", "textMode": "auto"}
    kind = "gauge" if colors is FULL else "stat"
    return panel(kind, title, about, [(legend, query)], fields, options)


PLAIN = {"text": None}
BAD = {"green": None, "red": 1}
GOOD = {"red": None, "green": 1}
FULL = {"green": None, "orange": 0.999}  # on a gauge
ENGINES_OR_CHILDREN = "(or children of FskvMultiConnector)."
AT_A_GLANCE = [
    number(
        HITS,
        "Of full attention a lookup ends at its first missing chunk: a prompt of which nothing is "
        "stored counts as one. Compare it with itself; the next number is what requests got. "
        "Of FskvMultiConnector each child is asked for all: see each by itself.",
        hit_ratio("connector"),
        PLAIN,
        "percentunit",
        "{{connector}}",
    ),
    number(
        "Prompt tokens from files",
        "Of the tokens that were not in the engine's own cache. With FskvMultiConnector: from any "
        "of its children.",
        f"sum({change('external_prefix_cache_hits', prefix='')}) / "
        f"sum({change('external_prefix_cache_queries', prefix='')})",
        PLAIN,
        "percentunit",
    ),
    number(
        "Breakers open",
        f"Engines that leave their root alone {ENGINES_OR_CHILDREN}",
        f"sum({engines('breaker_open')})",
        BAD,
    ),
    number(
        "Stores paused",
        f"Engines that found the disk full {ENGINES_OR_CHILDREN}",
        f"sum({engines('stores_paused')})",
        BAD,
    ),
    number(
        "Corrupt chunks",
        "In the time shown. None of them was served.",
        'sum(increase(vllm:fskv_load_failures_total{instance=~"$instance", reason="corrupt"}'
        "[$__range]))",
        BAD,
    ),
    number(
        "Maintained",
        "0: an engine has no maintenance process, and stores nothing.",
        f"min({engines('maintenance_up')})",
        GOOD,
    ),
    number(
        "Fullest bound",
        "Pruning begins at 99.5 % and ends at 98 %.",
        f"max(1 - {engines('bound_left_bytes')} / {engines('bound_bytes')})",
        FULL,
        "percentunit",
    ),
]
NAMESPACE = f"on ({LABELS}) group_left (namespace) vllm:fskv_namespace_info"
ALL_INODES = joined("fskv_root_total_inodes")
CHILD = "{{instance}} {{connector}}"
ROOT = "{{root}}"
ROWS: dict[str, list[Json]] = {
    "At a glance": AT_A_GLANCE,
    "Hits, by engine": [
        Graph(HITS, "percentunit", least=0, most=1).of((CHILD, hit_ratio(ENGINE))),
        Graph("Misses by reason", "cps").of(
            ("{{connector}} {{reason}}", rate("lookup_misses", REASON))
        ),
        Graph(
            "Wait for a lookup", "s", "Requests whose chunks were not known to be there or not."
        ).of(*quantiles("kv_offload_lookup_async_delay_seconds_bucket", 50, 99)),
    ],
    "Loads, by engine": [
        Graph("Bytes loaded", "Bps").of((CHILD, rate("loaded_bytes"))),
        Graph("Load latency of requests", "s").of(
            *quantiles("fskv_load_latency_seconds_bucket", 50, 95, 99)
        ),
        Graph("Load failures by reason", "cps", "Each costs a recompute.").of(
            ("{{connector}} {{reason}}", rate("load_failures", REASON))
        ),
        Graph(
            "Bytes per second of one I/O thread", "Bps", "Falls: the storage has become slower."
        ).of(
            (f"load {CHILD}", f"{rate('loaded_bytes')} / {rate('load_seconds')}"),
            (f"store {CHILD}", f"{rate('stored_bytes')} / {rate('store_seconds')}"),
        ),
    ],
    "Stores, by engine": [
        Graph("Bytes stored", "Bps").of((CHILD, rate("stored_bytes"))),
        Graph("Chunks not stored, by reason", "cps").of(
            ("{{connector}} {{reason}}", rate("stores_skipped", REASON))
        ),
        Graph("Chunks loaded and stored", "cps").of(
            (f"loaded {CHILD}", rate("loaded_chunks")),
            (f"stored {CHILD}", rate("stored_chunks")),
        ),
    ],
    "Load or recompute, by engine": [
        Graph(
            "Loaded, declined and cut hits",
            "short",
            "What was found and not loaded, because a load before it was slower than a recompute "
            "(load_budget).",
        ).of(
            (f"{CHILD} tokens declined/s", rate("declined_tokens")),
            (f"{CHILD} loads cut", rate("cut_loads", function="increase")),
            (f"{CHILD} tokens loaded/s", rate("loaded_tokens")),
            (f"{CHILD} requests loaded/s", rate("loaded_requests")),
            ("requests/s, {{result}} {{connector}}", rate("requests", "connector, result")),
            (f"{CHILD} loads under way", f"sum by ({ENGINE}) ({engines('pending_loads')})"),
        ),
        Graph(
            "Seconds saved",
            "s",
            "How long computing what was loaded would have taken, less the loads.",
        ).of((f"{CHILD} saved", rate("saved_seconds"))),
        Graph("Rate of prefill", "short", "What the time of a recompute is taken from.").of(
            (f"{CHILD} tokens/s", engines("prefill_rate")),
        ),
    ],
    "Admission": [
        Graph("New chunks", "ops", "Chunks that were stored, or seen once and not stored.").of(
            (f"admitted {CHILD}", rate("admitted_chunks")),
            (f"not admitted {CHILD}", rate("not_admitted_chunks")),
        ),
        Graph("Writes that were spared", "Bps").of(
            (f"{CHILD} spared", rate("not_admitted_bytes")),
        ),
        Graph("Stores at first sight", "short", "0: at second sight.", least=0).of(
            (f"{CHILD} at first sight", engines("stores_at_first_sight")),
        ),
    ],
    "State of engines": [
        Graph("Breaker, pauses, doubt, off", "short", least=0).of(
            (f"breaker open {CHILD}", engines("breaker_open")),
            (f"stores paused {CHILD}", engines("stores_paused")),
            (f"weights in doubt {CHILD}", engines("weights_in_doubt")),
            (f"updates of weights {CHILD}", engines("weight_epoch")),
            (f"breaker opened {CHILD}", change("breaker_openings", "increase")),
            (f"off {CHILD}", engines("off")),
            (f"written, never read {CHILD}", engines("written_unread")),
        ),
        Graph("Threads and slots", "short", least=0).of(
            (f"threads hung {CHILD}", engines("io_threads_hung")),
            (f"slots {CHILD}", engines("staging_slots_in_use")),
            (f"chunks to store {CHILD}", engines("store_queue_chunks")),
        ),
        Graph("Chunks in memory of the scheduler", "short", least=0).of(
            (f"known {CHILD}", engines("known_chunks")),
            (f"quarantined {CHILD}", engines("quarantined_chunks")),
        ),
        Graph("Maintenance", "short", least=0).of(
            (f"up {CHILD}", engines("maintenance_up")),
            (f"lease {CHILD}", engines("lease_held")),
            (f"restarts {CHILD}", change("maintenance_restarts", "increase")),
        ),
    ],
    "By root, as engines see it": [
        Graph(
            "Used, and its bounds",
            "bytes",
            "`free` is what may be in use on the file system, others included.",
        ).of(
            (f"used {ROOT}", by_root("max", engines("root_bytes"))),
            (f"bound {{{{bound}}}} {ROOT}", bound("bound_bytes")),
        ),
        Graph("Left of the bounds", "bytes", least=0).of(
            (f"{{{{bound}}}} {ROOT}", bound("bound_left_bytes")),
            (f"free on disk {ROOT}", by_root("min", engines("root_free_bytes"))),
        ),
        Graph("Used by namespace", "bytes").of(
            ("{{namespace}}", f"max by (namespace) ({engines('namespace_bytes')} * {NAMESPACE})"),
            ("files of the largest root", f"max({engines('root_files')})"),
        ),
        Graph("Loaded and stored by root", "Bps").of(
            (f"loaded {ROOT}", by_root("sum", change("loaded_bytes"))),
            (f"stored {ROOT}", by_root("sum", change("stored_bytes"))),
        ),
        Graph(
            "Pruned, by the holder of the lease",
            "Bps",
            "Falls below zero for a moment when another process takes the lease and counts from "
            "zero.",
        ).of((ROOT, by_root("max", f"deriv({engines('pruned_bytes')}[5m])"))),
        Graph("Files: pruned, stuck, left behind", "short").of(
            (f"pruned {ROOT}", by_root("max", engines("pruned_files"))),
            (f"unremovable {ROOT}", by_root("max", engines("unremovable_files"))),
            (f"orphans removed {ROOT}", by_root("max", engines("orphans_removed"))),
            (
                f"seconds since the count {ROOT}",
                by_root("min", f"(time() - {engines('counted_at_seconds')})"),
            ),
        ),
    ],
    "Roots, as fskv prune --watch sees them": [
        Graph("Namespaces", "bytes").of(
            (
                "{{namespace}}",
                watched("max", "fskv_root_namespace_bytes", "root, namespace, tenant"),
            ),
        ),
        Graph("Tenants", "bytes").of(
            (f"{{{{tenant}}}} {ROOT}", watched("max", "fskv_root_tenant_bytes", "root, tenant"))
        ),
        Graph("Bounds: what is left", "bytes").of(
            ("{{kind}} {{name}}", watched("min", "fskv_root_headroom_bytes", BOUND)),
            ("limit {{kind}} {{name}}", watched("min", "fskv_root_limit_bytes", BOUND)),
        ),
        Graph("Pruned", "Bps").of(
            (ROOT, watched("max", "rate(fskv_root_pruned_bytes_total[$__rate_interval])"))
        ),
        Graph("File system", "bytes").of(
            (f"size {ROOT}", watched("max", "fskv_root_total_bytes")),
            (f"free {ROOT}", watched("min", "fskv_root_free_bytes")),
        ),
        Graph("Files", "short").of(
            (
                f"chunk files {ROOT}",
                watched(
                    "sum", "max by (job, instance, namespace, tenant) (fskv_root_namespace_files)"
                ),
            ),
            (f"pruned {ROOT}", watched("max", "fskv_root_pruned_files_total")),
            (f"unremovable {ROOT}", watched("max", "fskv_root_unremovable_files")),
            (f"orphans removed {ROOT}", watched("max", "fskv_root_orphans_removed_total")),
        ),
        Graph("Ages", "s").of(
            (f"since the count {ROOT}", watched("min", "fskv_root_count_age_seconds")),
            (f"since the root answered {ROOT}", watched("max", "fskv_root_last_step_age_seconds")),
        ),
        Graph("Writers, lease, inodes", "short").of(
            (f"engines and watchers {ROOT}", watched("max", "fskv_root_heartbeats")),
            (f"lease held by a watcher {ROOT}", watched("max", "fskv_root_lease_held")),
            (
                f"inodes free {ROOT}",
                f"min by (root) ({joined('fskv_root_free_inodes')} / ({ALL_INODES} > 0))",
            ),
        ),
    ],
    "Children of FskvMultiConnector": [
        Graph(
            "Requests loaded, by child", "cps", "Where hits come from. Empty with one connector."
        ).of((CHILD, rate("multi_loads"))),
        Graph(
            "Failed and given up, by child",
            "cps",
            "Failed loads were tried at another child, then recomputed. Given up: a request went "
            "on without this child's answer.",
        ).of(
            (f"failed {CHILD}", rate("multi_failed_loads")),
            (f"given up {CHILD}", rate("multi_given_up")),
        ),
    ],
}


# --- the dashboard ----------------------------------------------------------------------

WIDTHS = {2: [12, 12], 3: [8] * 3, 4: [6] * 4, 6: [8] * 6, 7: [4, 4, 3, 3, 3, 3, 4], 8: [6] * 8}


def placed() -> Iterator[Json]:
    """Yield rows and their panels from left to right, as many beside each other as fit."""
    y = 0
    for title, panels in ROWS.items():
        at = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": at}
        x, y = 0, y + 1
        height = 5 if panels is AT_A_GLANCE else 8
        for one, width in zip(panels, WIDTHS[len(panels)], strict=True):
            if x == 24:
                x, y = 0, y + height
            yield {**one, "gridPos": {"h": height, "w": width, "x": x, "y": y}}
            x += width
        y += height


def variable(name: str, label: str, query: str) -> Json:
    """Return a choice of several label values, all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> Json:
    """Return the dashboard as Grafana imports it; Grafana fills in its defaults."""
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
    roots = '{__name__=~"vllm:fskv_root_info|fskv_root_info"}'
    return {
        "title": "fskv",
        "uid": "fskv-overview",
        "tags": ["fskv", "vllm"],
        "description": "KV cache in files: docs/metrics.md says what each number means.",
        "schemaVersion": 39,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {**datasource, "query": "prometheus"},
                variable("instance", "Engine", "label_values(vllm:fskv_root_info, instance)"),
                variable("root", "Root", f"label_values({roots}, root)"),
            ]
        },
        "panels": [{"id": number, **one} for number, one in enumerate(placed(), 1)],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
