"""The HTTP server of the watcher's metrics. Whoever can reach its port costs it a few threads and no more.

The library's own has a thread for each connection, for as long as the other side likes, and a traceback on
stderr for each that is reset. Here MAX_CONNECTIONS are open at most: the oldest is closed for the newest,
since a scrape takes milliseconds; and one that says nothing for IDLE_S is closed as well.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import OrderedDict
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CONNECTIONS = 16
IDLE_S = 10.0


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        self._open: OrderedDict[int, socket.socket] = OrderedDict()  # guarded by _lock
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                _, oldest = self._open.popitem(last=False)
                with contextlib.suppress(OSError):  # its thread wakes up, and closes it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Say nothing: the other side went away, or is no scraper."""


def start(registry: CollectorRegistry, address: str, port: int) -> int:
    """Serve a registry on daemon threads; returns the port. Raises OSError, or OverflowError for no port."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    server = _Server((str(found[0][4][0]), port), found[0][0])
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="fskv-metrics", daemon=True).start()
    return int(server.server_address[1])
