"""An engine's /metrics: fetched within bounds, read into numbers, compared over time.

An endpoint is somebody else's process: it may be slow, endless, garbage, or start again with its counters
at zero. `fetch` stops at a deadline and at a length; `read` keeps only the series that fskv shows.
"""

from __future__ import annotations

import http.client
import re
import time
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
_MAX_VALUE = 1e30  # of one series: what is added up of them stays finite
# fskv's own with an engine's name before them, and vLLM's that say what hits bring.
_TOKENS_HIT, _TOKENS_ASKED = "external_prefix_cache_hits", "external_prefix_cache_queries"
_CONFIG = "cache_config_info"
_LINE = re.compile(
    rf"^(?:\w+:)?(?:fskv_|{_TOKENS_HIT}|{_TOKENS_ASKED}|{_CONFIG}).{{0,4000}}$", re.MULTILINE
)
_STATES = {
    metrics.OFF.name: "off",
    metrics.WEIGHTS_IN_DOUBT.name: "off: weights in doubt",
    metrics.BREAKER_OPEN.name: "breaker open",
    metrics.STORES_PAUSED.name: "stores paused",
    metrics.THREADS_HUNG.name: "threads hung",
}


class NoMetrics(Exception):  # noqa: N818  a state of the endpoint, said in a few words
    """The endpoint gave no numbers; the text says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an endpoint. Behind it may be several engines and models."""

    at_s: float  # monotonic
    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]  # by name and labels

    def labels(self, label: str) -> list[str]:
        """Return the values that a label has."""
        found = {dict(labels).get(label) for _, labels in self.series}
        return sorted(value for value in found if value)

    @property
    def is_caching_off(self) -> bool:
        return "False" in self.labels("enable_prefix_caching")

    @property
    def status(self) -> str:
        """Say in a word or two whether these engines load and store."""
        if not any(name.startswith("fskv_") for name, _ in self.series):
            return "no metrics of fskv"
        if self.is_caching_off:
            return "off: prefix caching"
        wrong = {name for (name, _), value in self.series.items() if value}
        return next((words for name, words in _STATES.items() if name in wrong), "ok")

    def gains(self, before: Sample | None, name: str, label: str | None = None) -> dict[str, float]:
        """Return the increase of a counter by a label's values; one that went back began again at zero."""
        found: dict[str, float] = {}
        for (known, labels), value in self.series.items():
            if known == name:
                old = before.series.get((known, labels), 0.0) if before else 0.0
                key = dict(labels).get(label or "", "")
                found[key] = found.get(key, 0.0) + (value - old if value >= old else value)
        return found


@dataclass(frozen=True, slots=True)
class Traffic:
    """The differences between two samples, or since an engine's start."""

    hit_ratio: float | None  # of requests, each counted once
    token_hit_ratio: float | None  # of the tokens that the engine's own cache did not have
    loaded: float | None  # bytes a second, as the next; None: since the start
    stored: float | None
    load_failures: dict[str, int]  # chunks by reason


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The state of an endpoint; without numbers there is no traffic, and `status` has the reason."""

    url: str
    status: str
    models: list[str] = field(default_factory=list)
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

    def look(self, *_: object) -> Endpoint:
        """Ask once. Raises NoMetrics."""
        before, now = self._before, read(fetch(self._url), time.monotonic())
        self._before = now
        models = now.labels("model_name")[:8]
        recent = traffic(now, before) if before else None
        return Endpoint(self._url, now.status, models, recent, traffic(now))


def traffic(now: Sample, before: Sample | None = None) -> Traffic:
    """Return the increase since `before`, or since the start."""

    def total(name: str) -> float:
        return sum(now.gains(before, name).values())

    def rate(name: str) -> float | None:
        return total(name) / (now.at_s - before.at_s) if before else None

    requests = now.gains(before, metrics.REQUESTS.name, metrics.REQUESTS.label)
    hits, asked = requests.get("hit", 0.0), total(_TOKENS_ASKED)
    looked_up = hits + requests.get("miss", 0.0)
    failures = now.gains(before, metrics.LOAD_FAILURES.name, metrics.LOAD_FAILURES.label)
    return Traffic(
        hit_ratio=hits / looked_up if looked_up >= 1 else None,
        # vLLM counts the two at different moments.
        token_hit_ratio=min(1.0, total(_TOKENS_HIT) / asked) if asked >= 1 else None,
        loaded=rate(metrics.LOADED_BYTES.name),
        stored=rate(metrics.STORED_BYTES.name),
        load_failures={reason: int(n) for reason, n in sorted(failures.items()) if n >= 1},
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
    if not fits or not url.isascii() or not url.isprintable() or " " in url:
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
    """Return the answer of `url`, to a POST of `body` if there is one. Raises NoMetrics.

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
        raise NoMetrics(f"no answer within {timeout_s:g} s" if late else words_of(reason)) from None
    return content.decode("utf-8", "replace")


def words_of(error: Exception) -> str:
    """Return an exception in a few printable words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return show(str(text))[:120]


def read(text: str, at_s: float) -> Sample:
    """Read an answer in Prometheus' text format. Raises NoMetrics where it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    # Lines that are not shown are left out before the parser: a thousandth of the work for garbage.
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
        raise NoMetrics(f"its answer cannot be read: {words_of(error)}") from None
    return Sample(at_s, series)
