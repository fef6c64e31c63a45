"""A fake engine that publishes metrics: real prometheus_client text, and all that may go wrong instead."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fskv.observe import metrics

LABELS = {"engine": "0", "model_name": "org/model"}


class Engine:
    """Counts like an engine; `restart` begins again at zero."""

    def __init__(self):
        self.restart()

    def restart(self):
        self.registry = CollectorRegistry()
        self._made = {}

    def _get(self, kind, name, labels, **options):
        if name not in self._made:
            names = [*LABELS, *labels]
            self._made[name] = kind(name, "of a test", names, registry=self.registry, **options)
        return self._made[name].labels(**LABELS, **labels)

    def add(self, metric, amount=1, label=None):
        name = metric if isinstance(metric, str) else f"vllm:{metric.name}"
        self._get(Counter, name, {metric.label: label} if label else {}).inc(amount)

    def set(self, metric, value, label=None):
        self._get(Gauge, f"vllm:{metric.name}", {metric.label: label} if label else {}).set(value)

    def observe(self, name, *values):
        one = self._get(Histogram, name, {}, buckets=(0.001, 0.01, 0.1, 1))
        for value in values:
            one.observe(value)

    def traffic(self):
        """Half a second of a healthy engine: 75 % of 40 chunks, 80 % of 5 requests, 60 % of the tokens."""
        self.add(metrics.REQUESTS, 4, "hit")
        self.add(metrics.REQUESTS, 1, "miss")
        self.add(metrics.LOOKUP_HITS, 30)
        self.add(metrics.LOOKUP_MISSES, 10, "absent")
        self.add(metrics.LOADED_BYTES, 30 << 20)
        self.add(metrics.LOADED_CHUNKS, 30)
        self.add(metrics.LOAD_SECONDS, 0.06)
        self.add(metrics.STORED_BYTES, 10 << 20)
        self.add("vllm:external_prefix_cache_hits", 600)
        self.add("vllm:external_prefix_cache_queries", 1000)
        self.observe("vllm:time_to_first_token_seconds", 0.1, 0.5)
        self.set(metrics.BREAKER_OPEN, 0)
        self.set(metrics.THREADS_HUNG, 0)

    @property
    def text(self):
        return generate_latest(self.registry)


@contextlib.contextmanager
def server(engine, mode="good", port=0):
    """Serve an engine's metrics; `.mode` of what is yielded may be changed at any time."""
    stop = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                self._answer(made.mode)

        def _answer(self, mode):
            if mode == "silent":
                stop.wait(60)
                return
            if mode == "error":
                self.send_error(503)
                return
            if mode == "redirect":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.end_headers()
                return
            if mode == "not http":
                self.wfile.write(b"\xff\x00\r\n" * 2000)
                return
            self.send_response(200)
            if mode == "dripping headers":
                self.flush_headers()
                while not stop.wait(0.05):
                    self.wfile.write(b"X")
            self.end_headers()
            if mode == "good":
                self.wfile.write(engine.text)
            elif mode == "garbage":
                self.wfile.write(bytes(range(256)) * 300)
            elif mode == "half":
                self.wfile.write(
                    b'vllm:fskv_lookup_hits_total{engine="0 5\nvllm:fskv_x{{{ NaN\n' * 50
                )
            elif mode == "html":
                self.wfile.write(b"<html><script>alert(1)</script></html>")
            elif mode == "empty":
                pass
            elif mode == "dripping":
                while not stop.wait(0.05):
                    self.wfile.write(b"#\n")
            elif mode == "endless":
                while not stop.is_set():
                    self.wfile.write(b"vllm:fskv_lookup_hits_total 5\n" * 4000)

        def log_message(self, *_):
            pass

    class Made(http.server.ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_):
            pass

    made = Made(("127.0.0.1", port), Handler)
    made.mode = mode
    made.url = f"http://127.0.0.1:{made.server_port}/metrics"
    thread = threading.Thread(
        target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        made.shutdown()
        made.server_close()
        thread.join(10)
        time.sleep(0)
