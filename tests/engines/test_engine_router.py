"""A router that is not ours: ai-dynamo's indexer hears two live engines on one root.

It is asked over HTTP, as a router asks: how many tokens of a prompt does each engine have, on which medium?
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import engine_lab as lab
import pytest
import tool_lab
from world import free_port, wait_for

DYNAMO = os.environ.get("FSKV_DYNAMO")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not DYNAMO, reason="no ai-dynamo-runtime: make test-router"),
]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
BLOCK_TOKENS, CHUNK_TOKENS = 128, 256
WHOLE = MODEL.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS
MAIN, OTHER = MODEL.main_prompt(), MODEL.tokens("other", MODEL.prompt_tokens)
NEWS_S = 60


class Indexer:
    """A process of ai-dynamo's standalone indexer; `stop` it."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        with (directory / "indexer.log").open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--threads", "1"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": DYNAMO or ""},
            )
        wait_for(self._answers, NEWS_S)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the indexer ended"
        try:
            self._ask("/workers")
        except OSError:
            return False
        return True

    def _ask(self, path: str, body: dict | None = None) -> object:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def hear(self, node: Node, *, replay: bool = True) -> None:
        about = {"instance_id": node.number, "model_name": "m", "block_size": BLOCK_TOKENS}
        about["endpoint"] = f"tcp://127.0.0.1:{node.port}"
        if replay:
            about["replay_endpoint"] = f"tcp://127.0.0.1:{node.replay_port}"
        assert self._ask("/register", about) == {"status": "ok"}

    def tokens(self, node: Node, prompt: list[int], medium: str = "disk") -> int:
        """Return how many tokens of the prompt the engine has on a medium, or on a faster one."""
        answer = self._ask("/query", {"model_name": "m", "token_ids": prompt})
        return answer["instances"].get(str(node.number), {}).get(medium, 0)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Node:
    """An engine that publishes its KV events, and whose steps wait for the test."""

    def __init__(self, number: int, directory: pathlib.Path, root: str) -> None:
        self.number, self.root = number, root
        self.directory = directory / f"node{number}"
        self.directory.mkdir()
        self.port, self.replay_port = free_port(), free_port()
        self.talk = lab.Conversation(self.directory)
        self.pauses: list[int] = []

    def say(self, *steps: dict) -> None:
        """Add steps, which run when `go` was called once more."""
        self.pauses.append(self.talk.pause())
        self.talk.say(*steps)

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        options = {"hybrid_chunk_size": CHUNK_TOKENS, "keep_free": 0}
        transfer = lab.connector(self.root, self_describing_kv_events=True, **options)
        engine = {"kv_events_config": events}
        request = lab.request(MODEL, self.talk.steps, transfer=transfer, engine=engine)
        self.engine = lab.start_engine(request, self.directory / "engine")

    def wait_started(self) -> None:
        first = self.directory / f"{self.pauses[0]}.reached"
        wait_for(lambda: first.exists() or not self.engine.running, lab.ENGINE_TIMEOUT_S)
        assert self.engine.running

    def go(self) -> None:
        self.talk.resume(self.engine, self.pauses.pop(0), lambda: None)


def test_a_foreign_indexer_sees_what_is_on_the_disk_and_what_is_pruned_and_catches_up(
    root, tmp_path
):
    one, two = nodes = [Node(number, tmp_path, root) for number in (1, 2)]
    reset = lab.RESET
    # An engine says what was pruned while it steps.
    idle = [step for n in range(8) for step in ({"sleep": 0.5}, lab.generate([7 + n], "idle"))]
    one.say(lab.generate(MAIN, "main"))
    one.say(reset, lab.generate([5], "any"))
    one.say(lab.generate(OTHER, "other"), *lab.SETTLE, reset, lab.generate([6], "any"))
    one.say(*idle)
    one.say(lab.generate(MODEL.tokens("third", 300), "third"))
    one.say()
    two.say(lab.generate(MAIN, "main"), reset, lab.generate([5], "any"))
    two.say(*idle)
    two.say(lab.generate(OTHER, "other"), reset, lab.generate([6], "any"))
    two.say()
    indexers = [Indexer(tmp_path)]

    def has(node: Node, prompt: list[int], tokens: int, indexer: int = -1) -> None:
        end = time.monotonic() + NEWS_S
        while (found := indexers[indexer].tokens(node, prompt)) != tokens:
            assert time.monotonic() < end, f"{found} tokens, expected {tokens}"
            time.sleep(0.1)

    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_started()
            indexers[0].hear(node)
        one.go()
        # In its own cache there may be a block more than in whole chunks.
        wait_for(lambda: indexers[0].tokens(one, MAIN) >= WHOLE, NEWS_S)
        assert indexers[0].tokens(two, MAIN) == 0, "another engine's word"
        one.go()  # vLLM says that all blocks are cleared
        has(one, MAIN, WHOLE)
        assert indexers[0].tokens(one, MAIN, "gpu") == 0
        two.go()  # loads it
        has(two, MAIN, WHOLE)
        assert indexers[0].tokens(two, MAIN, "gpu") == 0
        one.go()
        has(one, OTHER, WHOLE)
        assert indexers[0].tokens(two, OTHER) == 0

        nbytes = sum(os.path.getsize(path) for path in lab.chunks(root)) // 2
        pruned = tool_lab.fskv("prune", "--max-size", nbytes, "--yes", root=root)
        assert pruned.exit_code == 0, pruned.stderr
        for node in nodes:
            node.go()
            has(node, MAIN, 0)
        has(one, OTHER, WHOLE)

        indexers.pop().stop()
        # The second one of these is the control: it has nobody to ask.
        indexers += [Indexer(tmp_path), Indexer(tmp_path)]
        for node in nodes:
            indexers[0].hear(node)
            indexers[1].hear(node, replay=False)
        assert indexers[0].tokens(one, OTHER) == 0, "it has forgotten"
        one.go()  # whatever it says next shows that something was missed
        two.go()
        has(one, OTHER, WHOLE, 0)
        for indexer in range(2):
            has(two, OTHER, WHOLE, indexer)
        assert indexers[0].tokens(one, MAIN) == indexers[0].tokens(two, MAIN) == 0
        assert indexers[1].tokens(one, OTHER) == 0, "without a replay it would not know"
        for node in nodes:
            node.go()
            result = lab.good(node.engine.wait())
        assert lab.generates(result)["main"]["num_cached_tokens"] == WHOLE
    finally:
        for indexer in indexers:
            indexer.stop()
