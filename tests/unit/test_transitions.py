"""One line for each change of state, whatever is in its values, and never a flood."""

from __future__ import annotations

import json
import logging
import shlex
import threading

from world import Clock

from fskv.data_path.breaker import Breaker
from fskv.observe import state_log
from fskv.observe.state_log import MAX_LINES, MAX_SENTENCES, WINDOW_S, Once, StateLog
from fskv.types import Status


def _lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_whatever_a_value_holds_it_is_one_line_that_can_be_read_back(caplog):
    caplog.set_level(logging.INFO)
    nasty = ["two\nlines", 'a "quote"', "event=other", "\x1b[31mred", "ü" * 10, "", "x" * 5000]
    log = StateLog()
    for number, text in enumerate(nasty):
        log.say(f"event_{number}", value=text)
    for line, text in zip(_lines(caplog), nasty, strict=True):
        assert line.isprintable()
        assert line.isascii()
        assert len(line) < 2600
        value = line.split(" value=", 1)[1]
        read = json.loads(value) if value.startswith('"') else value
        assert read == text if len(text) < 400 else text.startswith(read[:-1])
    assert shlex.split(_lines(caplog)[2])[2] == "value=event=other", "quoted: no second event"


def test_a_sentence_is_said_again_later_and_new_ones_not_without_end(caplog, monkeypatch):
    """A sentence may hold a client's words, so that each is a new one."""
    once = Once()
    for number in range(3 * MAX_SENTENCES):
        once.say(f"flood {number}")
        once.say("flood 0")
    *lines, last = (f"fskv: flood {number}" for number in range(MAX_SENTENCES))
    assert _lines(caplog) == [*lines, f"{last} (no more of these for 600 s)"]
    monkeypatch.setattr(state_log, "WINDOW_S", 0.0)
    once.say("flood 0")
    assert _lines(caplog)[-1] == "fskv: flood 0"


def test_a_state_that_flaps_is_said_a_few_times_and_how_often_it_was_not(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = StateLog(clock=clock)
    for _ in range(10_000):
        log.say("breaker_open")
        log.say("breaker_closed")
        clock.advance(WINDOW_S / 20_000)
    lines = _lines(caplog)
    assert len(lines) == 2 * MAX_LINES
    assert sum("quiet_for_s=" in line for line in lines) == 2
    log.say("stores_paused")
    assert len(_lines(caplog)) == 2 * MAX_LINES + 1, "another event is not kept back"
    clock.advance(WINDOW_S)
    log.say("breaker_open")
    assert f"not_logged={10_000 - MAX_LINES}" in _lines(caplog)[-1]


def test_negative_control_without_the_bound_it_is_a_flood(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("fskv.observe.state_log.MAX_LINES", 10**9)
    log = StateLog()
    for _ in range(1000):
        log.say("breaker_open")
    assert len(_lines(caplog)) == 1000


def test_a_breaker_says_when_it_opens_and_when_it_closes_and_nothing_between(caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    breaker = Breaker(failures=3, clock=clock, log=StateLog(clock=clock, root=None, of="rank 0"))
    for _ in range(10):
        breaker.record(Status.TIMED_OUT)
    clock.advance(12.5)
    breaker.record(Status.OK)
    breaker.record(Status.OK)
    breaker.trip()
    breaker.trip()
    assert _lines(caplog) == [
        'fskv: event=breaker_open of="rank 0" reason="3 failures in a row, the last: timed_out"',
        'fskv: event=breaker_closed of="rank 0" after_s=12.5',
        'fskv: event=breaker_open of="rank 0" reason="a worker\'s own breaker is open"',
    ]
    assert caplog.records[0].levelno == logging.WARNING
    assert breaker.num_openings == 2


def test_a_log_that_blocks_keeps_nobody_else_from_the_breaker():
    """The line is written when the breaker's lock is free again."""
    blocked, go = threading.Event(), threading.Event()

    class Blocking:
        def say(self, *_, **__):
            blocked.set()
            assert go.wait(30)

    breaker = Breaker(failures=1, log=Blocking())
    thread = threading.Thread(target=breaker.record, args=(Status.IO_ERROR,), daemon=True)
    thread.start()
    assert blocked.wait(30)
    assert breaker.open
    assert not breaker.allows(), "and this took the lock"
    go.set()
    thread.join(30)
    assert not thread.is_alive()
