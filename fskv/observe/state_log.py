"""One line in the log for each change of state: `event=NAME key=value ...`. docs/metrics.md lists them.

For people who search logs and programs that parse them: names are stable, and values with special characters
are quoted as JSON. The lines of one event in a window are bounded. The first line after the window says how
many were left out.

Any thread may call; no lock is held while a line is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from fskv.errors import FskvError

logger = logging.getLogger(__name__)

MAX_LINES = 6  # of one event
WINDOW_S = 600.0
MAX_SENTENCES = 16  # of one `Once` in a window
_MAX_VALUE = 400
_MAX_ERROR = 200  # characters
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+-]+")


class StateLog:
    """Logs each change of state as one line. `fields` come with every line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, **fields: object) -> None:
        self._clock = clock
        self._fields = fields
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}  # event -> begin of its window, times in it

    def say(self, event: str, level: int = logging.INFO, **fields: object) -> None:
        """Log that the state has changed, unless this event was logged too often lately."""
        now = self._clock()
        left_out = 0
        with self._lock:
            began, times = self._seen.get(event, (now, 0))
            if now - began > WINDOW_S:
                left_out = max(0, times - MAX_LINES)
                began, times = now, 0
            self._seen[event] = (began, times + 1)
        if times >= MAX_LINES:
            return
        fields = {**self._fields, **fields}
        if left_out:
            fields["not_logged"] = left_out
        words = [f"{name}={_value(value)}" for name, value in fields.items() if value is not None]
        if times == MAX_LINES - 1:
            words.append(f"quiet_for_s={WINDOW_S - (now - began):.0f}")
        logger.log(level, "fskv: event=%s %s", event, " ".join(words))


class Once:
    """Sentences for people, each of them logged once in a window.

    Some hold a client's words, so that each is a new one: there are no more than MAX_SENTENCES in a window.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}  # when

    def say(self, sentence: str, level: int = logging.ERROR) -> None:
        now = time.monotonic()
        with self._lock:
            self._said = {said: at for said, at in self._said.items() if now - at < WINDOW_S}
            if sentence in self._said or len(self._said) >= MAX_SENTENCES:
                return
            self._said[sentence] = now
            if len(self._said) == MAX_SENTENCES:
                sentence += f" (no more of these for {WINDOW_S:.0f} s)"
        logger.log(level, "fskv: %s", sentence)


@contextlib.contextmanager
def refusals_said() -> Iterator[None]:
    """Log an FskvError of the block in one sentence, which an engine's traceback would bury."""
    try:
        yield
    except FskvError as error:
        logger.error("fskv: %s", error)
        raise


def _value(value: object) -> str:
    text = str(value)
    if len(text) > _MAX_VALUE:
        text = text[: _MAX_VALUE - 1] + "~"
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def described(error: BaseException) -> str:
    """Return an error as one line: its own words if it names a file, else with its class and place in the
    code.
    """
    if isinstance(error, OSError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{ascii(error)[:_MAX_ERROR]}{where}"
