"""Programs in sessions of their own, and engines among them that answer each line of JSON with another one.

Both sides: `AskedEngine` starts the program and asks; the program is `answer_lines`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import urllib.request

START_S, STEP_S = 400, 240


class Program:
    """A program in a session of its own; killed with all its children at the end of the block."""

    def __init__(self, log: pathlib.Path, command, env, **pipes):
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | env,
                stderr=output,
                start_new_session=True,
                **{name: output if pipe is None else pipe for name, pipe in pipes.items()},
            )

    def __enter__(self):
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_):
        self.kill()

    def log(self):
        return self._log.read_text(errors="replace")

    def tail(self):
        return self.log()[-3000:]

    def wait_for_answer(self, url):
        end = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, f"it ended: {self.tail()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60):
                return
            assert time.monotonic() < end, self.tail()
            time.sleep(0.2)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class AskedEngine(Program):
    """An engine of `program`, which is asked over its pipes."""

    def __init__(self, log: pathlib.Path, program: pathlib.Path, arguments, env):
        command = [sys.executable, str(program), json.dumps(arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(log, command, env, **pipes)

    def wait_ready(self):
        assert self._read(START_S).get("ready"), self.tail()

    def __call__(self, **step):
        self.process.stdin.write((json.dumps(step) + "\n").encode())
        self.process.stdin.flush()
        said = self._read(STEP_S)
        assert "error" not in said, (said, self.tail())
        return said

    def generate(self, text, **step):
        return self(generate=text, **step)

    def _read(self, allowed_s):
        ready, _, _ = select.select([self.process.stdout], [], [], allowed_s)
        assert ready, f"no answer in {allowed_s} s: {self.tail()}"
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.tail()}"
        return json.loads(line)

    def close(self):
        """End it as a user does; returns its exit code."""
        self.process.stdin.close()
        return self.process.wait(120)


def answer_lines(make, answer):
    """Make an engine of the first argument, and answer until stdin ends; return the engine.

    `make` imports it: an import prints to 1 as well.
    """
    answers = os.fdopen(os.dup(1), "w")  # engines and their children print to 1
    os.dup2(2, 1)
    engine = make(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            said = answer(engine, json.loads(line))
        except Exception as error:
            said = {"error": repr(error)}
        print(json.dumps(said), file=answers, flush=True)
    return engine
