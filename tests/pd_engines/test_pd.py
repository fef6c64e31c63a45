"""Prefill and decode in engines of their own, with NixlConnector beside fskv.

Both engines run on this machine, over UCX on the loopback device, and share a root.
"""

from __future__ import annotations

import os
import pathlib
import shutil

import engine_lab as lab
import pytest
from places import REPOSITORY
from world import free_port, wait_for

NIXL = os.environ.get("FSKV_NIXL")
pytestmark = [
    pytest.mark.pd,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not NIXL, reason="no nixl: make test-pd"),
]
lab.needs_vllm()

PROGRAM = str(pathlib.Path(__file__).parent / "engine.py")
LLAMA = lab.MODELS["llama"]


def transfer(role: str, root: str, model: lab.Model, lease_s: int) -> dict:
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        # How long blocks wait for who was to pull them.
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }
    stores = {} if role == "kv_producer" else {"store": False}
    beside = lab.connector(root, **lab.options_for(model.name), **stores)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [nixl, beside]},
    }


def environment(model: lab.Model) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([NIXL or "", str(REPOSITORY)]),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        **model.env,
    }


class Nodes:
    """What two engines need to find each other: a root, and files that say how far they are."""

    def __init__(self, directory: pathlib.Path, model: lab.Model = LLAMA):
        self.directory, self.model = directory, model
        self.root = self.at("root")
        os.mkdir(self.root)
        self.main = model.main_prompt()

    def at(self, name: str) -> str:
        return str(self.directory / name)

    def start(
        self, role: str, steps: list[dict], *, lease_s: int = 300, engine: dict | None = None
    ) -> lab.Engine:
        """Start a "kv_producer" or a "kv_consumer"."""
        described = lab.request(
            self.model,
            steps,
            transfer=transfer(role, self.root, self.model, lease_s),
            engine=engine,
            env=environment(self.model),
        )
        return lab.start_engine(described, program=PROGRAM, fresh=True)

    def prefill(self, prompt: list[int] | None = None, name: str = "main") -> list[dict]:
        """Compute a prompt, and tell the other node when all of it is stored."""
        return [
            {"prefill": prompt or self.main, "params": self.at(f"{name}.stored")},
            *lab.SETTLE,
            *lab.SETTLE,
            {"rename": [self.at(f"{name}.stored"), self.at(f"{name}.params")]},
        ]

    def decode(self, prompt: list[int] | None = None, name: str = "main") -> list[dict]:
        return [
            {"wait_for_file": self.at(f"{name}.params"), "timeout_s": 200},
            {"decode": prompt or self.main, "params": self.at(f"{name}.params"), "label": name},
            {"metrics": True},
        ]

    def pulled_then_loaded(self) -> list[dict]:
        loaded = [lab.RESET, lab.generate(self.main, "loaded"), lab.METRICS]
        return [*self.decode(), *loaded, {"touch_file": self.at("done")}]

    def reference(self) -> list[int]:
        return lab.main_tokens(self.model.name)


def ended(engine: lab.Engine) -> dict:
    return lab.good(engine.wait())


def pulled(step: dict) -> float:
    """Return the bytes that an engine has pulled, of a metrics step."""
    return sum(
        m.get("sum", 0) for m in step["metrics"] if m["name"] == "vllm:nixl_bytes_transferred"
    )


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_what_one_node_prefills_the_other_pulls_or_loads_with_one_engines_tokens(name, tmp_path):
    nodes = Nodes(tmp_path, lab.MODELS[name])
    prefill = nodes.start(
        "kv_producer", [*nodes.prefill(), {"serve_until": nodes.at("done")}, {"metrics": True}]
    )
    decode = nodes.start("kv_consumer", nodes.pulled_then_loaded())
    result = ended(decode)
    done, (first, second) = lab.generates(result), lab.metrics(result)
    assert done["main"]["tokens"] == done["loaded"]["tokens"] == nodes.reference()
    assert pulled(first) > 0
    assert lab.counter(first, "loaded_chunks") == 0
    assert pulled(second) == pulled(first)
    assert lab.counter(second, "loaded_chunks") > 0
    assert done["loaded"]["num_cached_tokens"] >= 1280
    assert lab.counter(second, "stored_chunks") == 0
    (served,) = lab.metrics(ended(prefill))
    assert lab.counter(served, "stored_chunks") == len(lab.chunks(nodes.root)) > 0
    lab.assert_sound(nodes.root)


def test_a_pull_that_comes_too_late_is_not_checked_by_vllm_and_stays_out_of_the_root(tmp_path):
    """The negative control of all pulls, and why a node that pulls does not store.

    The lease has ended, and the prefill node has used its blocks for other prompts: other tokens.
    """
    nodes = Nodes(tmp_path)
    filling = [LLAMA.tokens(f"filling {number}", 1900) for number in range(2)]
    prefill = nodes.start(
        "kv_producer",
        [
            {"prefill": nodes.main, "params": nodes.at("main.stored")},
            *lab.SETTLE,
            {"sleep": 3},
            *(lab.generate(prompt, "filling") for prompt in filling),
            *lab.SETTLE,
            {"rename": [nodes.at("main.stored"), nodes.at("main.params")]},
            {"serve_until": nodes.at("done")},
        ],
        lease_s=2,
        engine={"num_gpu_blocks_override": 20, "max_model_len": 2048},
    )
    decode = nodes.start("kv_consumer", nodes.pulled_then_loaded())
    result = ended(decode)
    ended(prefill)
    done, (first, second) = lab.generates(result), lab.metrics(result)
    assert pulled(first) > 0
    assert done["main"]["tokens"] != nodes.reference()
    assert lab.counter(second, "loaded_chunks") == 15
    assert done["loaded"]["tokens"] == nodes.reference()


@pytest.mark.parametrize("there", ["stored", "nowhere"])
@pytest.mark.parametrize("met", ["strangers", "connected"])
def test_a_prefill_node_that_dies_before_the_pull_costs_a_load_or_a_recompute(met, there, tmp_path):
    """Where the two have met before, a transfer fails; otherwise the first handshake does."""
    nodes = Nodes(tmp_path)
    other = LLAMA.tokens("another", 400)
    before = nodes.prefill(other, "other") if met == "connected" else []
    prefill = nodes.start(
        "kv_producer",
        [*before, *nodes.prefill(name="dying"), {"serve_until": nodes.at("never")}],
    )
    decode = nodes.start(
        "kv_consumer",
        [
            *(nodes.decode(other, "other") if before else []),
            {"touch_file": nodes.at("ready")},
            *nodes.decode(),
            lab.generate(LLAMA.tokens("third", 300), "third"),
        ],
    )
    ready, dying = (pathlib.Path(nodes.at(name)) for name in ("ready", "dying.params"))
    wait_for(lambda: (ready.exists() and dying.exists()) or not decode.running, 200)
    prefill.kill()
    stored = len(lab.chunks(nodes.root))
    if there == "nowhere":
        lab.remove(nodes.root)
    shutil.copyfile(dying, nodes.at("main.params"))
    result = ended(decode)
    done, counts = lab.generates(result), lab.metrics(result)[-1]
    assert stored >= 15
    assert done["main"]["tokens"] == nodes.reference()
    assert done["main"]["finish_reason"] == "length"
    assert (pulled(counts) > 0) == (met == "connected")
    loaded = lab.counter(counts, "loaded_chunks")
    assert loaded == (15 if there == "stored" else 0)
    assert len(done["third"]["tokens"]) == lab.MAX_TOKENS


def test_a_decode_node_that_dies_costs_the_prefill_node_nothing_and_another_one_loads(tmp_path):
    """Its blocks wait for a pull that never comes, until the lease ends; there are few of them."""
    nodes = Nodes(tmp_path)
    filling = [LLAMA.tokens(f"filling {number}", 1900) for number in range(2)]
    prefill = nodes.start(
        "kv_producer",
        [
            *nodes.prefill(),
            {"serve_until": nodes.at("killed")},
            *(lab.generate(prompt, f"filling {n}") for n, prompt in enumerate(filling)),
            {"touch_file": nodes.at("filled")},
            {"serve_until": nodes.at("done")},
        ],
        lease_s=6,
        engine={"num_gpu_blocks_override": 20, "max_model_len": 2048},
    )
    decode = nodes.start(
        "kv_consumer", [{"wait_for_file": nodes.at("main.params"), "timeout_s": 200}, {"sleep": 99}]
    )
    params, filled = (pathlib.Path(nodes.at(name)) for name in ("main.params", "filled"))
    wait_for(lambda: params.exists() or not prefill.running, 200)
    decode.kill()
    pathlib.Path(nodes.at("killed")).touch()
    again = nodes.start(
        "kv_consumer",
        [
            {"wait_for_file": str(filled), "timeout_s": 200},
            lab.generate(nodes.main, "main"),
            {"metrics": True},
            {"touch_file": nodes.at("done")},
        ],
    )
    result = ended(again)
    for label, step in lab.generates(ended(prefill)).items():
        assert label == "settle" or len(step["tokens"]) == lab.MAX_TOKENS, label
    assert lab.generates(result)["main"]["tokens"] == nodes.reference()
    assert lab.counter(lab.metrics(result)[0], "loaded_chunks") == 15
