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
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from demo.engine import ENV_DEFAULTS
from demo.story import LOG_LINES, POLL_S, Display, StoryError, duration

NAME = "SmolLM2-135M-Instruct"
TEXT = pathlib.Path(__file__).resolve().parents[1] / "LICENSE"
QUESTION = "What is the name of this license?"
LONGEST_S = 300.0  # a start or an answer
STOP_S = 60.0
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
    last_s: float

    def page(self, title: str) -> Iterator[str]:
        first, *more = self.text.splitlines() or [""]
        yield f"  {title + ':':17} {first}"
        yield from (f"{'':20}{line}" for line in more)
        source = f"{self.cached_tokens} tokens from files" if self.cached_tokens else "no files"
        yield (
            f"{'':20}(first word after {duration(self.first_s)}, last after "
            f"{duration(self.last_s)}; {source})"
        )


@dataclass(slots=True)
class Row:
    """What the served model did; None: not reached. Becomes JSON as it is."""

    model: str = NAME
    text: str = TEXT.name
    text_bytes: int = TEXT.stat().st_size
    question: str = QUESTION
    computed: Answer | None = None
    from_files: Answer | None = None  # of the second server
    process_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def page(self) -> Iterator[str]:
        """Yield what a person reads of it."""
        if self.computed is None:
            return
        read = f"has read {self.text} ({self.computed.prompt_tokens} tokens)"
        yield f"{self.model}, served by vLLM, {read}"
        yield f"  question:         {self.question}"
        yield from self.computed.page("computed")
        if self.from_files is not None:
            yield from self.from_files.page("after a restart")


def tell(
    checkpoint: str,
    root: str,
    directory: pathlib.Path,
    display: Display,
    connector: Mapping[str, Any],
    env: Mapping[str, str],
) -> Row:
    """Ask two servers, one after the other, and return what they said; raises for nothing that they do."""
    row = Row()
    directory.mkdir(parents=True)

    def ask(name: str) -> Answer:
        begun, log = time.monotonic(), directory / f"{name}.log"
        display.phase(f"a server starts and is asked about {TEXT.name}: {name}")
        try:
            with serving(_arguments(checkpoint, {"root": root, **connector}), env, log) as server:
                server.begin(display)
                answer = server.ask(QUESTION, display)
                server.end(display)
        except StoryError as error:
            display.log(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise StoryError(f"the {name} server: {error}; log: {log}") from None
        row.process_s[name] = round(time.monotonic() - begun, 2)
        return answer

    try:
        row.computed = cold = ask("first")
        if cold.cached_tokens:
            row.problems.append("the first answer was not computed: it came from files")
        display.done(
            "served", f"first word after {duration(cold.first_s)}", [], row.process_s["first"]
        )
        row.from_files = warm = ask("second")
        if not warm.cached_tokens:
            row.problems.append("after the restart nothing was loaded")
        if warm.text != cold.text:
            row.problems.append("after the restart the answer had other words")
        detail = (
            f"first word after {duration(warm.first_s)}, {warm.cached_tokens} tokens from files, "
            f"{'the same words' if warm.text == cold.text else 'OTHER WORDS'}"
        )
        display.done("served after a restart", detail, row.problems, row.process_s["second"])
    except StoryError as error:
        row.problems.append(str(error))
        display.done("served", "failed", row.problems, None)
    return row


# --- a server --------------------------------------------------------------------------------


class Server:
    """One that was started; what goes wrong is a StoryError."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self._url = f"http://127.0.0.1:{port}"

    def begin(self, display: Display) -> None:
        """Wait until it answers."""
        end = time.monotonic() + LONGEST_S
        while not self._is_up():
            display.waiting()
            if self._process.poll() is not None:
                raise StoryError(f"it ended with exit code {self._process.returncode}")
            if time.monotonic() > end:
                raise StoryError(f"it did not answer in {LONGEST_S:g} s")
            time.sleep(POLL_S)

    def _is_up(self) -> bool:
        import httpx

        with suppress(httpx.TransportError):
            return httpx.get(f"{self._url}/health", trust_env=False).is_success
        return False

    def ask(self, question: str, display: Display) -> Answer:
        import httpx
        import openai

        with ThreadPoolExecutor(1, "client") as thread:
            try:
                asking = thread.submit(_asked, self._url, question)
                while not asking.done():
                    wait([asking], POLL_S)  # in slices: a signal is handled between two of them
                    display.waiting()
                return asking.result()
            except (openai.OpenAIError, httpx.TransportError) as error:
                raise StoryError(f"{type(error).__name__}: {error}") from error
            except BaseException:
                self.kill()  # or this would wait for the answer
                raise

    def end(self, display: Display) -> None:
        """End it as a service manager does."""
        self._process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_S
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S)
            display.waiting()
        if self._process.poll() != 0:
            raise StoryError(f"after SIGTERM its exit code was {self._process.poll()}")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def serving(
    arguments: list[str], env: Mapping[str, str], log_path: pathlib.Path
) -> Iterator[Server]:
    """Start a server on a free port; in the end it is killed with all of its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*arguments, f"--port={port}"]
    around = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    around |= {**ENV_DEFAULTS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **env}
    with log_path.open("wb") as log:
        log.write(f"$ python -m {API_SERVER} {shlex.join(arguments)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=around,
            start_new_session=True,
        )
    server = Server(process, port)
    try:
        yield server
    finally:
        server.kill()


def _arguments(checkpoint: str, options: Mapping[str, Any]) -> list[str]:
    transfer = {
        "kv_connector": "FskvConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }
    values = {
        "model": checkpoint,
        "served-model-name": NAME,
        "host": "127.0.0.1",
        "dtype": "float32",
        "max-model-len": 4096,
        "gpu-memory-utilization": 0.3,
        "shutdown-timeout": 10,
        "kv-transfer-config": json.dumps(transfer),
    }
    flags = ("--enforce-eager", "--enable-prompt-tokens-details")
    return [*(f"--{name}={value}" for name, value in values.items()), *flags]


def _asked(url: str, question: str) -> Answer:
    """Ask about the text; the first request of a process pays for what it does only once."""
    import openai

    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=LONGEST_S,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
    with client:
        _chat(client, "Hello!", 2)
        return _chat(client, f"{TEXT.read_text()}\n\n{question}", MAX_TOKENS)


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
    last_s = time.monotonic() - begun
    return Answer("".join(words).strip(), usage.prompt_tokens, cached or 0, first_s, last_s)
