"""What an engine publishes at /metrics: fetched within bounds, read into numbers, compared over time.

An endpoint is somebody else's process: it may be slow, endless, garbage, or start again with its counters
at zero. `fetch` stops at a deadline and at a length; `read` keeps only the series that fskv shows. A counter
that went back began again from zero, as Prometheus has it.
"""

from __future__ import annotations

import http.client
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from fskv.observe import metrics

from .exits import UsageError
from .terminal import show

MAX_NBYTES = 8 << 20  # of one answer: vLLM's are some hundred kilobytes
TIMEOUT_S = 5.0
_MAX_URL = 2000
_MAX_VALUE = 1e30  # of one series: what is added up of them stays finite
# fskv's own with an engine's name before them, and vLLM's that say what hits bring.
_TOKENS_HIT, _TOKENS_ASKED = "external_prefix_cache_hits", "external_prefix_cache_queries"
_FIRST_TOKEN, _CONFIG = "time_to_first_token_seconds", "cache_config_info"
_LINE = re.compile(
    rf"^(?:\w+:)?(?:fskv_|{_TOKENS_HIT}|{_TOKENS_ASKED}|{_FIRST_TOKEN}|{_CONFIG}).{{0,4000}}$",
    re.MULTILINE,
)
_LABELS = {metric.name: metric.label for metric in metrics.ALL_METRICS if metric.label}


class NoMetrics(Exception):  # noqa: N818  a state of the endpoint, said in a few words
    """The endpoint gave no numbers; the text says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an endpoint. Behind it may be several engines and models."""

    at_s: float  # monotonic
    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]  # by name and labels

    def labels(self, label: str, name: str | None = None) -> list[str]:
        """Return the values that a label has, of one metric or of all."""
        found = {dict(labels).get(label) for known, labels in self.series if name in (None, known)}
        return sorted(value for value in found if value)

    @property
    def models(self) -> list[str]:
        return self.labels("model_name")[:8]

    @property
    def namespaces(self) -> list[str]:
        """The namespaces ARCH/MODEL@DIGEST of the engines behind it, as they say themselves."""
        return self.labels("namespace", metrics.NAMESPACE_INFO.name)

    def gauge(self, metric: metrics.Metric) -> float:
        """Return the largest value of a gauge; 0 where it is not published."""
        return max((n for (name, _), n in self.series.items() if name == metric.name), default=0)

    @property
    def status(self) -> str:
        """Say in a word or two whether these engines load and store."""
        if not any(name.startswith("fskv_") for name, _ in self.series):
            return "no metrics of fskv"
        if "False" in self.labels("enable_prefix_caching", _CONFIG):
            return "off: prefix caching"
        for metric, words in (
            (metrics.OFF, "off"),
            (metrics.WEIGHTS_IN_DOUBT, "off: weights in doubt"),
            (metrics.BREAKER_OPEN, "breaker open"),
            (metrics.STORES_PAUSED, "stores paused"),
        ):
            if self.gauge(metric):
                return words
        hung = int(self.gauge(metrics.THREADS_HUNG))
        return f"{hung} threads hung" if hung else "ok"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What happened between two samples, or since an engine's start."""

    seconds: float | None  # None: since the start
    hits: int  # requests, each counted once
    misses: int
    hit_ratio: float | None  # of these requests
    token_hit_ratio: float | None  # of the tokens that the engine's own cache did not have
    loaded_nbytes: int
    stored_nbytes: int
    load_s: float | None  # mean of a request
    first_token_s: float | None  # mean
    missed: dict[str, int]  # chunks by reason, as the next two
    load_failures: dict[str, int]
    stores_skipped: dict[str, int]

    def rate(self, nbytes: int) -> float | None:
        return nbytes / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What an endpoint says; there is no traffic while it gives no numbers, and `status` says why."""

    url: str
    status: str
    models: list[str] = field(default_factory=list)
    namespaces: list[str] = field(default_factory=list)
    recent: Traffic | None = None  # of the last interval
    total: Traffic | None = None  # since the engine's start

    @property
    def place(self) -> str:
        return show(self.url.removeprefix("http://").removesuffix("/metrics"))


class Scraper:
    """Asks one endpoint again and again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: Sample | None = None

    def look(self) -> Endpoint:
        """Ask once. Raises NoMetrics."""
        before, now = self._before, read(fetch(self._url), time.monotonic())
        self._before = now
        recent = traffic(now, before) if before else None
        return Endpoint(self._url, now.status, now.models, now.namespaces, recent, traffic(now))


def traffic(now: Sample, before: Sample | None = None) -> Traffic:
    """Return what was added since `before`, or since the start."""
    gains: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (name, labels), value in now.series.items():
        old = before.series.get((name, labels), 0.0) if before else 0.0
        label = dict(labels).get(_LABELS.get(name) or "", "")
        gains[name][label] += value - old if value >= old else value

    def total(name: str) -> float:
        return sum(gains[name].values())

    def mean(name: str) -> float | None:
        count = total(f"{name}_count")
        return total(f"{name}_sum") / count if count >= 1 else None

    def reasons(metric: metrics.Metric) -> dict[str, int]:
        found = sorted(gains[metric.name].items(), key=lambda item: (-item[1], item[0]))
        return {label: int(amount) for label, amount in found if amount >= 1}

    requests, asked = gains[metrics.REQUESTS.name], total(_TOKENS_ASKED)
    hits, misses = requests["hit"], requests["miss"]
    return Traffic(
        seconds=round(now.at_s - before.at_s, 3) if before else None,
        hits=int(hits),
        misses=int(misses),
        hit_ratio=hits / (hits + misses) if hits + misses >= 1 else None,
        # vLLM counts the two at different moments.
        token_hit_ratio=min(1.0, total(_TOKENS_HIT) / asked) if asked >= 1 else None,
        loaded_nbytes=int(total(metrics.LOADED_BYTES.name)),
        stored_nbytes=int(total(metrics.STORED_BYTES.name)),
        load_s=mean(metrics.LOAD_LATENCY.name),
        first_token_s=mean(_FIRST_TOKEN),
        missed=reasons(metrics.LOOKUP_MISSES),
        load_failures=reasons(metrics.LOAD_FAILURES),
        stores_skipped=reasons(metrics.STORES_SKIPPED),
    )


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


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow nothing: a redirect is an answer like any other that is no metrics."""


def fetch(url: str, timeout_s: float = TIMEOUT_S, body: bytes | None = None) -> str:
    """Return what `url` answers, to a POST of `body` if there is one. Raises NoMetrics.

    No redirect is followed and no proxy is asked. A server that drips its headers may take longer.
    """
    headers = {} if body is None else {"Content-Type": "application/json"}
    end_s, content = time.monotonic() + timeout_s, b""
    try:
        opener = build_opener(ProxyHandler({}), _NoRedirect)
        with opener.open(Request(url, body, headers), timeout=timeout_s) as answer:  # noqa: S310  address
            while more := answer.read1(1 << 18):
                content += more
                if len(content) > MAX_NBYTES:
                    raise NoMetrics(f"more than {MAX_NBYTES >> 20} MiB of answer")
                if time.monotonic() > end_s:
                    raise TimeoutError
    except HTTPError as error:
        error.close()
        raise NoMetrics(f"HTTP {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        raise NoMetrics(f"no answer within {timeout_s:g} s" if late else _words(reason)) from None
    return content.decode("utf-8", "replace")


def _words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return show(str(text))[:120]


def read(text: str, at_s: float) -> Sample:
    """Read an answer in Prometheus' text format. Raises NoMetrics where it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    # What is not shown is left out before it is parsed: a thousandth of the work for garbage.
    lines = "\n".join(match[0] for match in _LINE.finditer(text)) + "\n"
    if not lines.strip() and "# TYPE " not in text:
        raise NoMetrics("its answer is no metrics")
    try:
        series = {
            (
                re.sub(r"^\w+:", "", one.name).removesuffix("_total"),
                frozenset(one.labels.items()),
            ): one.value
            for family in text_string_to_metric_families(lines)
            for one in family.samples
            if 0 <= one.value <= _MAX_VALUE  # nor is it NaN
        }
    except Exception as error:  # the parser raises whatever a line makes of it
        raise NoMetrics(f"its answer cannot be read: {_words(error)}") from None
    return Sample(at_s, series)
