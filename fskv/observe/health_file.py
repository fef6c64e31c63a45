"""The health file: the state of the cache, its conditions and its beginning, for probes and people.

One daemon thread writes it: after a change, at most once a second, and every EVERY_S seconds. An old file
therefore belongs to an engine that is gone. Nobody waits for that thread, so a hung directory hangs it alone.
`look` runs on it and must only read attributes that other threads assign.

The file is small (texts are cut) and replaced by rename: no reader sees half of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fskv.errors import ConfigError
from fskv.observe.state_log import StateLog
from fskv.root.files import publishing

EVERY_S = 10.0
LOOK_S = 1.0
_END_S = 1.0
_MAX_TEXT = 300
_MODE = 0o644  # a probe runs as somebody else
# Conditions with which nothing is loaded and nothing is stored.
_OFF = frozenset({"weights_in_doubt", "prefix_caching_off", "kv_unknown"})
STARTING, ENDED = "starting", "ended"
_MAX_NBYTES = 1 << 16


def check_directory(path: str | None) -> None:
    """Raise ConfigError unless the directory of a health file exists."""
    directory = os.path.dirname(path or "/")
    if "{rank}" not in directory and not os.path.isdir(directory):
        raise ConfigError(
            f"option 'health_file': found {path!r}, expected a file in a directory that is there: "
            f"{directory} is none"
        )


class HealthFile:
    """The health file and its thread. `look` returns the unhealthy conditions: name -> sentence."""

    def __init__(
        self,
        path: str,
        look: Callable[[], Mapping[str, str]],
        facts: Mapping[str, object],
        *,
        every_s: float = EVERY_S,
        look_s: float = LOOK_S,
    ) -> None:
        """`facts` go into the health file unchanged."""
        self._path = path
        self._look = look
        self._facts = dict(facts)
        self._every_s = every_s
        self._look_s = look_s
        self._log = StateLog(file=path)
        self._stop = threading.Event()
        # The thread's own from here on.
        self._since: dict[str, float] = {}
        self._written: tuple[str, tuple[str, ...]] | None = None
        self._written_at = float("-inf")
        self._failing = False
        self._state_since = time.time()
        self._thread = threading.Thread(target=self._run, name="fskv-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Have the thread write that the engine has ended; wait for that a moment at most."""
        self._stop.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn(ended=False)
            self._stop.wait(self._look_s)
        self._turn(ended=True)

    def _turn(self, *, ended: bool) -> None:
        try:
            unhealthy = dict(self._look())
        except Exception as error:  # a bug in here must not look like a sick cache
            unhealthy = {"unknown": f"its state cannot be read: {error!r}"}
        now = time.time()
        self._since = {name: self._since.get(name, now) for name in unhealthy}
        state = ENDED if ended else _state(unhealthy)
        if self._written is None or self._written[0] != state:
            self._state_since = now
        why = tuple(
            f"{text[:_MAX_TEXT]} (since {_rfc3339(self._since[name])})"
            for name, text in sorted(unhealthy.items())
        )
        due = time.monotonic() - self._written_at >= self._every_s
        if (state, why) == self._written and not due:
            return
        content = {
            "state": state,
            "since": _rfc3339(self._state_since),
            "why": list(why),
            "conditions": sorted(unhealthy),
            "at": _rfc3339(now),
            "at_s": round(now, 3),
            "every_s": self._every_s,
            "pid": os.getpid(),
            **self._facts,
        }
        try:
            replace_file(self._path, content)
        except OSError as error:
            if not self._failing:
                self._log.say("health_file_failed", logging.WARNING, reason=str(error))
            self._failing = True
            return
        if self._failing:
            self._log.say("health_file_written")
        self._failing = False
        self._written, self._written_at = (state, why), time.monotonic()


def _state(unhealthy: Mapping[str, str]) -> str:
    if STARTING in unhealthy:
        return "starting"
    if _OFF & unhealthy.keys():
        return "stopped"
    return "degraded" if unhealthy else "ok"


def replace_file(path: str, content: Mapping[str, Any]) -> None:
    """Write JSON beside `path` and rename it there. Raises OSError."""
    part = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)
    with publishing(path, _MODE, part=part, umask=True) as file:
        file.write(f"{json.dumps(content, indent=1)}\n".encode())


def end_health_file(path: str, pid: int) -> None:
    """Write that the engine of that process has ended, unless it did so itself or another one has the file.

    Raises OSError, ValueError.
    """
    with open(path, "rb") as file:
        content = json.loads(file.read(_MAX_NBYTES))
    if content["pid"] != pid or content["state"] == ENDED:
        return
    now = time.time()
    at = {"at": _rfc3339(now), "at_s": round(now, 3)}
    replace_file(path, {**content, "state": ENDED, "since": _rfc3339(now), **at})


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
