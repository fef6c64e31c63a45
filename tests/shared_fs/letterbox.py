"""Requests and replies as files in a directory, between the tests and a program on a node.

The program itself is, by `python -m shared_fs.letterbox DIRECTORY`, the first process of a User-Mode-Linux
node: it runs the shell commands that arrive.

A directory is what both sides of a User-Mode-Linux node share whatever happens to the node's network. A
request is `<n>.request`, its reply `<n>.reply`; both are JSON and appear whole, by a rename. The server finds
requests by listing: a listing is never answered from a cache of names.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

_POLL_S = 0.01


class NoReply(Exception):  # noqa: N818
    """The other side has not answered in time; it may still do so."""


class Letterbox:
    """The side that asks."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._numbers = itertools.count()
        os.makedirs(directory, exist_ok=True)

    def post(self, **request) -> str:
        """Send a request and return its ticket."""
        ticket = f"{next(self._numbers):06d}"
        _publish(f"{self.directory}/{ticket}.request", request)
        return ticket

    def wait(self, ticket: str, timeout_s: float) -> dict:
        """Return the reply to a request; raises NoReply after `timeout_s`."""
        path = f"{self.directory}/{ticket}.reply"
        end = time.monotonic() + timeout_s
        while not os.path.exists(path):
            if time.monotonic() > end:
                raise NoReply(f"request {ticket}: no reply within {timeout_s:g} s")
            time.sleep(_POLL_S)
        with open(path, encoding="ascii") as file:
            reply = json.load(file)
        if "error" in reply:
            raise AssertionError(f"the other side raised:\n{reply['error']}")
        return reply

    def ask(self, timeout_s: float, **request) -> dict:
        return self.wait(self.post(**request), timeout_s)


def serve(directory: str, answer: Callable[[dict], dict], *, parallel: bool) -> None:
    """Answer requests for ever: one after the other, or each on a thread of its own."""
    while True:
        for name in sorted(os.listdir(directory)):
            ticket, kind = os.path.splitext(name)
            if kind != ".request":
                continue
            with open(f"{directory}/{name}", encoding="ascii") as file:
                request = json.load(file)
            os.unlink(f"{directory}/{name}")
            arguments = (f"{directory}/{ticket}.reply", answer, request)
            if parallel:
                threading.Thread(target=_reply, args=arguments, daemon=True).start()
            else:
                _reply(*arguments)
        time.sleep(_POLL_S)


def _reply(path: str, answer: Callable[[dict], dict], request: dict) -> None:
    try:
        reply = answer(request)
    except Exception:
        reply = {"error": traceback.format_exc()}
    _publish(path, reply)


def _publish(path: str, content: dict) -> None:
    with open(f"{path}.new", "w", encoding="ascii") as file:
        json.dump(content, file)
    os.rename(f"{path}.new", path)


def _run(request: dict) -> dict:
    """Run a command to its end, on a thread of its own: one that hangs must not block the next."""
    done = subprocess.run(
        ["/bin/bash", "-c", request["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        check=False,
    )
    return {"code": done.returncode, "output": done.stdout.decode(errors="replace")}


if __name__ == "__main__":
    serve(sys.argv[1], _run, parallel=True)
