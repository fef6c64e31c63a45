"""An endpoint with every metric of fskv and no engine behind it: counters grow with each scrape.

For tests of expressions: what two children of FskvMultiConnector, an engine with one connector, or a watcher
would publish, each with labels of its own.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping

from fskv_tools import exporter

from fskv.observe import metrics

OWN_VALUES = {
    "bound": ("root", "free"),
    "kind": ("root", "tenant"),
    "name": ("", "acme"),
    "tenant": ("acme",),
    "version": ("0.1.0",),
}


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{inner}}} {value}\n"


def _published(
    metric: metrics.Metric, labels: Mapping[str, str], root: str, scrape: int
) -> Iterator[str]:
    """Yield the lines of one metric of an engine or child, whose root this is."""
    values = {
        **OWN_VALUES,
        "root": (root,),
        "namespace": (f"{root[1:]}@{'0' * 16}",),
        "reason": metric.values or ("other",),
    }
    name = f"vllm:{metric.name}"
    for number, value in enumerate(values[metric.label] if metric.label else ("",)):
        own = {**labels, **({metric.label: value} if metric.label else {})}
        if metric.kind == "histogram":
            for edge in (*metric.buckets, "+Inf"):
                yield _line(f"{name}_bucket", {**own, "le": str(edge)}, scrape)
            yield _line(f"{name}_sum", own, scrape)
            yield _line(f"{name}_count", own, scrape)
        elif metric.kind == "counter":
            yield _line(f"{name}_total", own, scrape * (number + 1))
        else:
            yield _line(name, own, 1)


def engine(
    roots: Mapping[str, str | None], has_none: str | None = None, has_all: str | None = None
) -> Callable[[int], str]:
    """Return what an engine publishes with these roots, each with the name of its child, or None.

    Of the root `has_none` every lookup is a miss, of `has_all` a hit.
    """
    never = {(has_none, metrics.LOOKUP_HITS), (has_all, metrics.LOOKUP_MISSES)}

    def exposition(scrape: int) -> str:
        lines: list[str] = []
        base = {"engine": "0", "model_name": "m"}
        for number, (root, child) in enumerate(roots.items(), 1):
            labels = {**base, **({} if child is None else {"connector": child})}
            for metric in metrics.ALL_METRICS:
                moved = 0 if (root, metric) in never else scrape * number
                lines += _published(metric, labels, root, moved)
            for end, le in (("bucket", "1.0"), ("bucket", "+Inf"), ("sum", None), ("count", None)):
                name = f"vllm:kv_offload_lookup_async_delay_seconds_{end}"
                lines.append(_line(name, {**labels, **({"le": le} if le else {})}, scrape))
            if child is not None:
                lines += [
                    _line(f"vllm:{m.name}_total", labels, scrape) for m in metrics.MULTI_METRICS
                ]
        for word in ("hits", "queries"):
            lines.append(_line(f"vllm:external_prefix_cache_{word}_total", base, scrape))
        return "".join(lines)

    return exposition


def watcher(root: str) -> Callable[[int], str]:
    """Return what `fskv prune --watch` of a root publishes."""

    def exposition(scrape: int) -> str:
        lines = []
        values = {**OWN_VALUES, "root": (root,), "namespace": (f"{root[1:]}@{'0' * 16}",)}
        for metric in exporter.METRICS:
            counter = metric.kind == "counter"
            sets = (dict(zip(metric.labels, row, strict=True)) for row in itertools.product(
                *(values[label] for label in metric.labels)))  # fmt: skip
            name = metric.name + "_total" * counter
            lines += [_line(name, labels, scrape if counter else 1) for labels in sets]
        return "".join(lines)

    return exposition


@contextlib.contextmanager
def served(exposition: Callable[[int], str]) -> Iterator[int]:
    """Serve it on a port of this machine, which is yielded."""
    scrapes = itertools.count(1)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = exposition(next(scrapes)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
