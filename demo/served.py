"""A served model with real weights reads a long text: an answer computed, and after a restart one from files.

What the README's first command starts, asked as a user asks it: an OpenAI client and the chat template, over
HTTP on 127.0.0.1. SmolLM2-135M-Instruct reads this repository's LICENSE and answers a question about it. The
server is ended with SIGTERM and started again on the same root, and the same question is asked.

Called by `run.py` on its main thread. Whatever ends that, no server is left.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from demo.engine import RunningEngine, launch
from demo.progress import Lines, StoryError, follow, living
from demo.story import connector, duration

NAME = "SmolLM2-135M-Instruct"
TEXT = pathlib.Path(__file__).resolve().parents[1] / "LICENSE"
QUESTION = "What is the name of this license?"
MAX_TOKENS = 48
API_SERVER = "vllm.entrypoints.openai.api_server"
# `python -m` that, which gets SIGTERM (15) also when the demo is killed (1 is PR_SET_PDEATHSIG).
CHILD = (
    "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 15); "
    f"runpy.run_module({API_SERVER!r}, run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int  # of them, not computed
    first_s: float  # from the question to the first word

    def said(self) -> str:
        return (
            f"{self.text}\n    ({self.cached_tokens} of {self.prompt_tokens} tokens from files, "
            f"first word after {duration(self.first_s)})"
        )


def tell(checkpoint: str, root: str, directory: pathlib.Path, lines: Lines) -> list[str]:
    """Ask two servers, one after the other; return a line for everything that was not as it must be."""
    problems = []
    try:
        cold = _ask_a_server(checkpoint, root, directory / "first", lines)
        if cold.cached_tokens:
            problems.append("the first answer was not computed: it came from files")
        lines.done(f"{QUESTION} Computed", cold.said(), problems)
        warm = _ask_a_server(checkpoint, root, directory / "second", lines)
        if not warm.cached_tokens:
            problems.append("after the restart nothing was loaded")
        if warm.text != cold.text:
            problems.append("after the restart the answer had other words")
        lines.done("after a restart", warm.said(), problems)
    except StoryError as error:
        problems.append(str(error))
        lines.done("served", "failed", problems)
    return problems


def _ask_a_server(checkpoint: str, root: str, directory: pathlib.Path, lines: Lines) -> Answer:
    """Start a server on a free port, ask one question, end the server, and return the answer."""
    name = f"the {directory.name} server"
    lines.phase(f"{name} starts and is asked about {TEXT.name}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-c", CHILD),
        f"--model={checkpoint}",
        f"--served-model-name={NAME}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        "--max-model-len=4096",
        "--gpu-memory-utilization=0.3",
        "--shutdown-timeout=10",
        f"--kv-transfer-config={json.dumps(connector(root))}",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]
    url, env = f"http://127.0.0.1:{port}", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = RunningEngine(
        {"env": env}, str(directory), lambda _, around, log: launch(command, around, log)
    )
    with living(server, name, lines):
        follow(server.pid, lambda: _answers(server, url), lines)
        with ThreadPoolExecutor(1, "client") as thread:
            asking = thread.submit(_asked, url)
            try:
                follow(server.pid, asking.done, lines)
            except BaseException:
                server.kill()  # or this would wait for the answer
                raise
        answer = asking.result()
        with suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGTERM)  # as a service manager does
        follow(server.pid, lambda: not server.running, lines)
        if code := server.wait(0)["exit_code"]:
            raise StoryError(f"after SIGTERM its exit code was {code}")
    return answer


def _answers(server: RunningEngine, url: str) -> bool:
    if not server.running:
        raise StoryError(server.wait(0)["error"])
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", trust_env=False).is_success
    return False


def _asked(url: str) -> Answer:
    """Ask about the text; the first request of a process pays for what it does only once."""
    import openai

    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=None,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False, timeout=None),
    )
    try:
        with client:
            _chat(client, "Hello!", 2)
            return _chat(client, f"{TEXT.read_text()}\n\n{QUESTION}", MAX_TOKENS)
    except (openai.OpenAIError, httpx.TransportError) as error:
        raise StoryError(f"{type(error).__name__}: {error}") from error


def _chat(client: Any, text: str, max_tokens: int) -> Answer:
    words, first_s, usage = [], None, None
    begun = time.monotonic()
    with client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
        stop=["\n\n"],  # one paragraph: so small a model has little to add
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for event in stream:
            usage = event.usage or usage
            said = "".join(choice.delta.content or "" for choice in event.choices)
            if said and first_s is None:
                first_s = time.monotonic() - begun
            words.append(said)
    if first_s is None or usage is None:
        raise StoryError("it answered nothing")
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else None
    return Answer("".join(words).strip(), usage.prompt_tokens, cached or 0, first_s)
