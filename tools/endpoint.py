"""What an engine publishes at /metrics: fetched within bounds, read into numbers, compared over time.

An endpoint is somebody else's process: it may be slow, endless, garbage, or start again with its counters at
zero. `fetch` stops at a deadline and at a length, and raises nothing but `NoMetrics`; `read` keeps only the
series that fskv shows. `between` says what happened from one look to the next; a counter that went back began
again from zero, as Prometheus has it.

`fetch` blocks, up to its deadline: it belongs on a thread of its own. Longer takes only the system's look for
the host's name, and a host of which several addresses do not answer.
"""

from __future__ import annotations

import http.client
import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fskv.observe import metrics

from .exits import UsageError
from .terminal import show

MAX_NBYTES = 8 << 20  # of one answer: vLLM's are some hundred kilobytes
_MAX_LINE = 4096
_MAX_URL = 2000
_MAX_MODELS = 8
_MAX_VALUE = 1e30  # of one series: what is added up of them stays finite
_OURS = re.compile(r"\w+:(?=fskv_)")  # an engine puts its name before ours
# vLLM 0.32's own.
HIT_TOKENS = "vllm:external_prefix_cache_hits"
QUERIED_TOKENS = "vllm:external_prefix_cache_queries"
LOOKUP_DELAY = "vllm:kv_offload_lookup_async_delay_seconds"
FIRST_TOKEN = "vllm:time_to_first_token_seconds"  # noqa: S105  no password
_WANTED = (HIT_TOKENS, QUERIED_TOKENS, LOOKUP_DELAY, FIRST_TOKEN)


class NoMetrics(Exception):  # noqa: N818  a state of the endpoint, said in a few words
    """The endpoint gave no numbers; the text says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an endpoint. Series of all engines and models behind it are summed."""

    at_s: float  # monotonic
    sums: Mapping[tuple[str, str], float]  # (name without _total, label value or "") -> value
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)  # cumulative, by le
    # Every series by itself: a counter that went back is only seen there.
    series: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    models: tuple[str, ...] = ()

    @property
    def has_fskv(self) -> bool:
        return any(name.startswith("fskv_") for name, _ in self.sums)

    @property
    def namespaces(self) -> list[str]:
        """The namespaces ARCH/MODEL@DIGEST of the engines behind it, as they say themselves."""
        return sorted(label for name, label in self.sums if name == metrics.NAMESPACE_INFO.name)

    def value(self, metric: metrics.Metric, label: str = "") -> float | None:
        return self.sums.get((metric.name, label))


@dataclass(frozen=True, slots=True)
class Change:
    """What two samples say about the time between them; or one alone about the time since its start."""

    seconds: float  # 0: since the start
    sums: Mapping[tuple[str, str], float]
    buckets: Mapping[str, Mapping[float, float]]

    def total(self, metric: metrics.Metric | str) -> float:
        name = metric if isinstance(metric, str) else metric.name
        return sum(amount for (found, _), amount in self.sums.items() if found == name)

    def by_label(self, metric: metrics.Metric) -> dict[str, float]:
        """Return the amounts by label value, the largest first; no zeros."""
        found = {
            label: amount
            for (name, label), amount in self.sums.items()
            if name == metric.name and amount > 0
        }
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def rate(self, metric: metrics.Metric) -> float | None:
        return self.total(metric) / self.seconds if self.seconds > 0 else None

    @property
    def token_hit_ratio(self) -> float | None:
        """Of the tokens that were not in the engine's own cache, as vLLM counts them.

        Chunks give no such ratio: of full attention a lookup ends at the first that is missing.
        """
        queried = self.total(QUERIED_TOKENS)
        return min(1.0, self.total(HIT_TOKENS) / queried) if queried > 0 else None

    @property
    def load_s(self) -> float | None:
        """Mean seconds of an I/O thread per chunk; None below one chunk."""
        chunks = self.total(metrics.LOADED_CHUNKS)
        return self.total(metrics.LOAD_SECONDS) / chunks if chunks >= 1 else None

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of a histogram, within its bucket by interpolation."""
        return quantile(self.buckets.get(name, {}), share)


def quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """As PromQL's histogram_quantile. Buckets that are not cumulative are made so."""
    edges = sorted(cumulative)
    if len(edges) < 2:
        return None
    counts, most = [], 0.0
    for edge in edges:
        most = max(most, cumulative[edge])
        counts.append(most)
    if most <= 0:
        return None
    rank = share * most
    lower_edge, lower = 0.0, 0.0
    for edge, count in zip(edges, counts, strict=True):
        if count >= rank and count > lower:
            if math.isinf(edge):
                return lower_edge  # all that is known: not less than this
            return lower_edge + (edge - lower_edge) * (rank - lower) / (count - lower)
        lower_edge, lower = edge, count
    return lower_edge


def since_start(sample: Sample) -> Change:
    return Change(0.0, sample.sums, sample.buckets)


def between(before: Sample, now: Sample) -> Change:
    """Return what was added; gauges are as they are now."""
    sums: dict[tuple[str, str], float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for key, value in now.series.items():
        name, label, le = key[0], key[1], key[2]
        old = before.series.get(key, 0.0)
        gain = value - old if value >= old else value
        if le:
            table = buckets.setdefault(name, {})
            edge = float(le)
            table[edge] = table.get(edge, 0.0) + gain
        else:
            sums[name, label] = sums.get((name, label), 0.0) + gain
    # A gauge has no past.
    sums = {key: amount for key, amount in sums.items() if key[0] not in _GAUGES}
    sums |= {key: value for key, value in now.sums.items() if key[0] in _GAUGES}
    return Change(max(0.0, now.at_s - before.at_s), sums, buckets)


_LABELS = {metric.name: metric.label for metric in metrics.ALL_METRICS if metric.label}
_GAUGES = {metric.name for metric in metrics.ALL_METRICS if metric.kind == "gauge"}
# What is the root's, or 0 or 1, is the same for all engines behind an endpoint: the largest is shown.
_SHARED = _GAUGES - {
    *(metrics.SLOTS_IN_USE.name, metrics.THREADS_HUNG.name, metrics.STORE_QUEUE.name),
    *(metrics.KNOWN_CHUNKS.name, metrics.QUARANTINED_CHUNKS.name, metrics.PENDING_LOADS.name),
}


# --- fetching ---------------------------------------------------------------------------


def address(text: str, option: str = "--metrics") -> str:
    """Return the URL that a person means: `host:8000` is `http://host:8000/metrics`. Raises UsageError."""
    url = text.strip()
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or " " in url or len(url) > _MAX_URL:
        raise UsageError(f"{option}: found {show(text)!r}, expected http://HOST:PORT")
    if "@" in parts.netloc:
        raise UsageError(f"{option}: a URL with a user name or a password is not taken")
    return url if parts.path not in ("", "/") or parts.query else url.rstrip("/") + "/metrics"


def addresses(text: str | None) -> list[str]:
    """Return the URLs of a comma-separated list, each once. Raises UsageError."""
    words = [word for word in (text or "").split(",") if word.strip()]
    if text is not None and not words:
        raise UsageError("--metrics: found nothing, expected http://HOST:PORT/metrics")
    return list(dict.fromkeys(map(address, words)))


def fetch(url: str, timeout_s: float, body: bytes | None = None) -> str:
    """Return what `url` answers, to a POST of `body` if there is one. Raises NoMetrics.

    No redirect is followed and no proxy is asked.
    """
    cut = threading.Event()
    try:
        with ExitStack() as stack:
            connection = _connect(url, timeout_s, cut, stack)
            return _answer(connection, url, timeout_s, cut, body)
    except TimeoutError:
        raise NoMetrics(f"no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if cut.is_set():
            raise NoMetrics(f"not all of its answer within {timeout_s:g} s") from None
        raise NoMetrics(_words(error)) from None


def _connect(
    url: str, timeout_s: float, cut: threading.Event, stack: ExitStack
) -> http.client.HTTPConnection:
    """Connect; after `timeout_s` in all the connection is cut, whatever is being waited for.

    The socket's own timeout is one for each piece: a server that drips would never meet it.
    """
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    end = time.monotonic() + timeout_s
    sock = socket.create_connection((host, parts.port or (443 if secure else 80)), timeout_s)
    stack.callback(sock.close)
    handle = stack.enter_context(sock.dup())  # TLS takes the other one over

    def shut() -> None:
        cut.set()
        with suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, end - time.monotonic()), shut)
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    if secure:
        import ssl

        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        stack.callback(sock.close)
    connection = http.client.HTTPConnection(host, parts.port)
    connection.sock = sock
    return connection


def _answer(
    connection: http.client.HTTPConnection,
    url: str,
    timeout_s: float,
    cut: threading.Event,
    body: bytes | None,
) -> str:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if body is None:
        connection.request("GET", target, headers={"Accept": "text/plain; version=0.0.4"})
    else:
        connection.request("POST", target, body, {"Content-Type": "application/json"})
    content = bytearray()
    with connection.getresponse() as answer:
        if not 200 <= answer.status < 300:
            raise NoMetrics(f"HTTP {answer.status}")
        while more := answer.read1(65536):
            content += more
            if len(content) > MAX_NBYTES:
                raise NoMetrics(f"more than {MAX_NBYTES >> 20} MiB of answer")
    if cut.is_set():
        raise NoMetrics(f"not all of its answer within {timeout_s:g} s")
    return content.decode("utf-8", "replace")


def _words(reason: object) -> str:
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return show(str(text))[:120]


# --- reading ----------------------------------------------------------------------------


def read(text: str, at_s: float) -> Sample:
    """Read an answer in Prometheus' text format. Raises NoMetrics where it is none."""
    lines = "\n".join(_wanted_lines(text))
    series: dict[tuple[str, ...], float] = {}
    models: dict[str, None] = {}
    if not lines and "# TYPE " not in text:
        raise NoMetrics("its answer is no metrics")
    try:
        for name, labels, value in _samples(lines + "\n"):
            key = _key(name, labels)
            if key is None or not 0 <= value <= _MAX_VALUE:  # nor is it NaN
                continue
            series[key] = value
            if (model := labels.get("model_name")) and len(models) < _MAX_MODELS:
                models[model] = None
    except Exception as error:  # the parser raises whatever a line makes of it
        raise NoMetrics(f"its answer cannot be read: {_words(error)}") from None
    return _summed(at_s, series, tuple(models))


def _wanted_lines(text: str) -> Iterator[str]:
    """Leave out what fskv does not show, before it is parsed: a thousandth of the work for garbage."""
    for line in text.split("\n"):
        name = line.removeprefix("# TYPE ")
        if (_OURS.match(name) or name.startswith(_WANTED)) and len(line) <= _MAX_LINE:
            yield line


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield _OURS.sub("", sample.name), sample.labels, sample.value


def _key(name: str, labels: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return (name, label value, le, and what tells series of one name apart); None for what is not shown."""
    others = tuple(f"{k}={labels[k]}" for k in sorted(labels) if k != "le")
    if name.endswith("_bucket"):
        try:
            edge = float(labels.get("le", ""))
        except ValueError:
            return None
        if edge != math.inf and not abs(edge) <= _MAX_VALUE:  # nor is it NaN
            return None
        return name.removesuffix("_bucket"), "", repr(edge), *others
    if name.endswith(("_created", "_sum", "_count")):
        return None
    name = name.removesuffix("_total")
    label = _LABELS.get(name)
    return name, labels.get(label, "") if label else "", "", *others


def _summed(
    at_s: float, series: Mapping[tuple[str, ...], float], models: tuple[str, ...]
) -> Sample:
    sums: dict[tuple[str, str], float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for (name, label, le, *_), value in series.items():
        if le:
            table = buckets.setdefault(name, {})
            table[float(le)] = table.get(float(le), 0.0) + value
        elif name in _SHARED:
            sums[name, label] = max(sums.get((name, label), 0.0), value)
        else:
            sums[name, label] = sums.get((name, label), 0.0) + value
    return Sample(at_s, sums, buckets, series, models)
