"""The thread that opens namespaces of new weights: one at a time, and never in the engine's way."""

from __future__ import annotations

import os
import threading
import time

import pytest
from world import wait_for

from fskv.offload import opener as module
from fskv.offload.opener import Opener


def calls_until(opener, epoch):
    """Return how often a caller that does nothing else asks until the epoch is open."""
    calls = 1
    while opener.take(epoch) is None:
        calls += 1
    return calls


@pytest.mark.parametrize("yields", [True, False], ids=["", "negative_control"])
def test_a_caller_that_never_pauses_leaves_the_interpreter_to_the_thread(
    tmp_path, monkeypatch, yields
):
    if not yields:
        monkeypatch.setattr(module, "_YIELDS", 0)

    def many_disk_calls(epoch):
        for _ in range(100):  # each gives the interpreter away
            os.stat(tmp_path)
        return epoch

    calls = [calls_until(Opener(many_disk_calls), 1) for _ in range(10)]
    # On a busy machine the thread may be done before its caller runs again.
    assert (max(calls) < 60) is yields, calls


def test_a_mount_that_hangs_keeps_one_thread_and_holds_up_no_caller_for_long():
    answers, opened = threading.Event(), []

    def hangs(epoch):
        opened.append(epoch)
        answers.wait()
        return f"namespace {epoch}"

    opener, before = Opener(hangs), threading.active_count()
    for epoch in range(1, 200):
        assert opener.take(epoch) is None
    assert threading.active_count() == before + 1
    assert opener._yields == 0
    answers.set()
    while (found := opener.take(199)) is None:
        time.sleep(0.002)
    assert (found, opened) == ("namespace 199", [1, 199]), "the first was of no use any more"


def test_what_cannot_be_opened_is_told_once_and_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(module, "_AGAIN_S", 0)
    tries = []

    def fails(epoch):
        tries.append(epoch)
        raise OSError("read-only")

    opener = Opener(fails)
    wait_for(lambda: opener.take(1) is None and len(tries) > 3)
    assert caplog.text.count("cannot be opened: read-only") == 1
