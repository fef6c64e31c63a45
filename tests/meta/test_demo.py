"""What `make demo` shows of itself; that it holds is tests/engines' business."""

from __future__ import annotations

from types import SimpleNamespace

from demo import run


def test_a_phase_that_takes_long_is_said_every_fifteen_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = run.Lines(1)
    lines.phase("computes")
    said = []
    for _ in range(60):
        lines.waiting()
        said.append(capsys.readouterr().err)
        now[0] += 1
    assert [(at, text.strip()) for at, text in enumerate(said) if text] == [
        (at, f"... computes, {at} s") for at in (15, 30, 45)
    ]
    lines.phase("loads")
    lines.waiting()
    assert capsys.readouterr().err == "", "a new phase begins anew"
