"""What `vllm serve` starts, asked by an OpenAI client: many at once, streams that it leaves, a restart."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, Self

import engine_lab as lab
import pytest
from places import LAB
from prometheus_client.parser import text_string_to_metric_families
from world import free_port, wait_for

from fskv.bounds.shared_files import SharedFiles

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()
pytest.importorskip("uvicorn", reason="the server needs what .ci/setup installs: make test")
httpx = pytest.importorskip("httpx", reason="as uvicorn")
openai = pytest.importorskip("openai", reason="as uvicorn")

MODEL = lab.MODELS["llama"]
CHUNK, NUM_CLIENTS, PROMPT_TOKENS = 128, 16, 400
LONG_TOKENS = 60_000  # nobody waits for them, however slow the machine is
START_S = 180.0


class Server:
    """One `vllm serve` on a port of its own; killed at the end of the block if it still runs."""

    def __init__(self, directory: pathlib.Path, root: str) -> None:
        self.port = free_port()
        self.log = directory / f"serve-{self.port}.log"
        # The server closes a connection that nobody uses for 5 s, just when the next request is sent on it.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(trust_env=False, timeout=120, limits=limits)
        url = f"http://127.0.0.1:{self.port}"
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=self._http
        )
        arguments = {
            "model": lab.checkpoint(MODEL.name),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "block-size": CHUNK,
            "max-model-len": LONG_TOKENS + 1000,
            "hf-overrides": json.dumps({"max_position_embeddings": LONG_TOKENS + 1000}),
            "max-num-batched-tokens": 1024,
            "max-num-seqs": 8,
            "kv-cache-memory-bytes": lab.KV_NBYTES,
            "seed": 0,
            "kv-transfer-config": json.dumps(lab.connector(root, **lab.options_for(MODEL.name))),
        }
        self._process = lab.start_program(
            str(LAB / "serve.py"),
            *(f"--{name}={value}" for name, value in arguments.items()),
            "--skip-tokenizer-init",
            "--enforce-eager",
            log=self.log,
        )

    def __enter__(self) -> Self:
        wait_for(lambda: self.get("/health")[0] == 200 or self._process.poll() is not None, START_S)
        assert self._process.poll() is None, self.log.read_text()[-4000:]
        return self

    def __exit__(self, *_: object) -> None:
        lab.kill_program(self._process)
        self._http.close()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text; status 0 where nobody listens."""
        try:
            answer = self._http.get(f"http://127.0.0.1:{self.port}{path}")
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.text

    def _ask(self, prompt: list[int], max_tokens: int, salt: str | None = None, **how: Any) -> Any:
        return self._client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
            **how,
        )

    def complete_all(self, prompts: list[list[int]], salt: str | None = None) -> list[list[int]]:
        """Ask all at once; what has another salt shares nothing."""

        def ask(prompt: list[int]) -> list[int]:
            return self._ask(prompt, 8, salt).choices[0].token_ids

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(ask, prompts))

    def cancel_all(self, prompts: list[list[int]]) -> None:
        """Begin a long stream of each prompt and leave, half of them before their first token."""
        generated = self._vllm("generation_tokens_total")
        streams = [self._ask(prompt, LONG_TOKENS, stream=True) for prompt in prompts]
        for number, stream in enumerate(streams):
            if number % 2:
                assert next(iter(stream)).choices[0].finish_reason is None
            if (
                number == 1
            ):  # the control of what is below; told as of a step that may not be the last
                wait_for(lambda: self._vllm("kv_cache_usage_perc") > 0, 20)
            stream.close()
        self._ask([2], 1)  # what vLLM says of itself is as of its last step
        left = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: all(self._vllm(name) == 0 for name in left), 60)
        ours = ("pending_loads", "store_queue_chunks", "staging_slots_in_use")
        self.step_until(lambda: all(self.metric(name) == 0 for name in ours))
        generated = self._vllm("generation_tokens_total") - generated
        assert generated < LONG_TOKENS * len(prompts) / 2, "they ended by themselves"

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Wait with requests: an idle engine hears of no load and no store."""
        wait_for(lambda: self._ask([2], 1) and condition(), 60)

    def metric(self, name: str, **labels: str) -> float:
        return self._vllm(f"fskv_{name}", **labels)

    def _vllm(self, name: str, **labels: str) -> float:
        status, text = self.get("/metrics")
        assert status == 200
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        )

    def stop(self) -> tuple[int, float]:
        """End it as a service manager does; return exit code and seconds."""
        begun = time.monotonic()
        os.kill(self._process.pid, signal.SIGTERM)
        return self._process.wait(60), time.monotonic() - begun


def test_a_served_engine_stores_for_many_clients_and_loads_for_them_after_a_restart(root, tmp_path):
    prompts = [MODEL.tokens(f"client {n}", PROMPT_TOKENS) for n in range(NUM_CLIENTS)]
    left, late = (
        [MODEL.tokens(f"{of} {n}", PROMPT_TOKENS) for n in range(8)] for of in ("left", "late")
    )
    chunks = PROMPT_TOKENS // CHUNK * NUM_CLIENTS
    with Server(tmp_path, root) as server:
        cold = server.complete_all(prompts)
        assert len({tuple(tokens) for tokens in cold}) > NUM_CLIENTS // 2, "degenerate tokens"
        # Nobody asks any more, and what is left is stored all the same.
        wait_for(lambda: len(lab.chunks(root)) == chunks, 60)
        server.step_until(lambda: server.metric("stored_chunks_total") == chunks)
        assert server.metric("requests_total", result="miss") == NUM_CLIENTS
        assert server.metric("loaded_requests_total") == 0
        server.cancel_all(left)  # while they are computed and stored
        left_cold = server.complete_all(left)
        left_chunks = PROMPT_TOKENS // CHUNK * len(left)
        wait_for(lambda: len(lab.chunks(root)) == chunks + left_chunks, 60)
        server.complete_all(late)
        assert server.get("/health")[0] == 200
        # Later vLLM says so of itself now and then, when its engine goes before its own handler.
        assert " ERROR " not in server.log.read_text()
        code, seconds = server.stop()  # in the middle of the stores of these
        assert code == 0, server.log.read_text()[-4000:]
        assert seconds < 60
        # And it has ended: nobody waits for its lease, and doctor does not call it dead.
        shared = f"{root}/.fskv-maintenance"
        wait_for(lambda: not os.path.exists(f"{shared}/lease.json"), 20)
        assert SharedFiles(shared).heartbeats() == []
        said = server.log.read_text().splitlines()
        assert not [line for line in said if " ERROR " in line and "fskv: " in line]
    lab.assert_sound(root)
    with Server(tmp_path, root) as server:
        assert server.complete_all(prompts) == cold
        assert server.metric("loaded_requests_total") == NUM_CLIENTS
        assert server.metric("loaded_tokens_total") == chunks * CHUNK
        assert server.metric("load_failures_total") == 0
        assert server.metric("pending_loads") == 0
        server.cancel_all(left)  # while they are loaded
        assert server.metric("requests_total", result="hit") > NUM_CLIENTS
        assert server.complete_all(left) == left_cold
        assert server.complete_all(left, salt="computed anew") == left_cold
        assert server.stop()[0] == 0
