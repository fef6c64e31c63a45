"""Starts a real LMCache server and real vLLM engines for tests and measurements, with what a CPU needs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request

from asked_engine import AskedEngine, Program
from places import LAB, REPOSITORY
from world import free_port, wait_for

HERE = REPOSITORY / "tests" / "lmcache_engines"
CHUNK_TOKENS = 128
BLOCK_TOKENS = 128  # what vLLM takes on CPUs by itself
# Of Llama type, with weights that answer: `make test-lmcache` downloads them.
MODEL = os.environ.get("FSKV_LMCACHE_MODEL", "")
FACTS = {
    "engine": "vllm 0.32.0",
    "arch": "cpu-x86_64",
    "attention_backend": "CPU_ATTN",
    "settings": {},
    "media": "none",
    "server": [0, 1],
}


def isa(block_tokens, dtype):
    """How vLLM's attention packs pages on this x86-64, for the tests' model (cpu_attn._get_attn_isa)."""
    import torch

    if block_tokens % 32:
        return "vec16"
    return "amx" if dtype == "bfloat16" and torch.cpu._is_amx_tile_supported() else "vec"


def plugin(
    root, *, block_tokens=BLOCK_TOKENS, dtype="float32", module="fskv.engines.lmcache", **options
):
    """What stands behind --l2-adapter for fskv, for an engine with such blocks and such a dtype."""
    pages = {"block_size": block_tokens, "isa": isa(block_tokens, dtype)}
    models = {MODEL: FACTS | pages}
    params = {"root": str(root), "weights_fixed": True, "models": models, **options}
    names = {"module_path": module, "class_name": "FskvAdapter"}
    return {"type": "plugin", **names, "adapter_params": params}


def environment():
    """What all programs here are started with, beside this one's environment."""
    path = [str(REPOSITORY), os.environ.get("PYTHONPATH", ""), str(LAB)]
    return {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def connector(port):
    """What an engine is told of a server."""
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Server(Program):
    """`lmcache server` with one L2 adapter behind it."""

    def __init__(self, log, adapter, *, env=None, options=()):
        self.port, self.http = free_port(), free_port()
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(self.port)),
            *("--http-port", str(self.http), "--prometheus-port", str(free_port())),
            *("--supported-transfer-mode", "auto", "--chunk-size", str(CHUNK_TOKENS)),
            *("--l1-size-gb", "1", "--eviction-policy", "LRU"),
            *("--l2-adapter", json.dumps(adapter), *options),
        ]
        env = environment() | (env or {})
        super().__init__(log, command, env, stdin=subprocess.DEVNULL, stdout=None)

    def wait_ready(self):
        self.wait_for_answer(f"http://127.0.0.1:{self.http}/healthcheck")

    def ask(self, path, method="GET", body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}",
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def metrics(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/metrics", timeout=60) as said:
            return said.read().decode()

    def storage(self):
        return self.ask("/status")["storage_manager"]

    def objects(self):
        """Return how many objects are in its memory."""
        return self.storage()["l1_manager"]["total_object_count"]

    def idle(self):
        """Say whether nothing waits to be stored or is being stored."""
        store = self.storage()["store_controller"]
        return not store["pending_keys_count"] and not store["in_flight_task_count"]

    def close(self):
        """End it as a user does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


_ENGINE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}


class Engine(AskedEngine):
    """One vLLM engine with LMCache's connector."""

    def __init__(self, log, port, *, env=None, **arguments):
        plain = {
            "model": MODEL,
            # In bfloat16 a hit in vLLM's own cache may change the text, on CPUs that compute with it (AMX).
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "max_model_len": 4096,
            # An idle engine in process takes no step, so blocks that were stored stay in use and its own
            # prefix cache cannot be reset. What LMCache has is loaded without one, too.
            "enable_prefix_caching": False,
            "max_num_seqs": 2,
            "seed": 0,
            "disable_log_stats": False,
            "kv_transfer_config": connector(port) if port else None,
        }
        own = environment() | _ENGINE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | (env or {})
        super().__init__(log, HERE / "engine.py", plain | arguments, own)


@contextlib.contextmanager
def pair(directory, adapter, *, env=None, **arguments):
    """Start a server with an adapter behind it, in this environment, and an engine of these arguments."""
    with (
        Server(directory / "server", adapter, env=env) as server,
        Engine(directory / "engine", server.port, **arguments) as engine,
    ):
        yield server, engine


class Served(Program):
    """What `vllm serve` runs, with any connector or none."""

    def __init__(self, log, transfer, **arguments):
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, str(HERE / "served.py"), "--model", MODEL, "--enforce-eager"]
        command += ["--port", self.url.rpartition(":")[2], "--seed", "0"]
        command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        if transfer:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        # Of demo/: vLLM's tiers where no GPU is.
        path = os.pathsep.join([environment()["PYTHONPATH"], str(REPOSITORY / "demo")])
        env = environment() | _ENGINE | {"PYTHONPATH": path}
        super().__init__(log, command, env, stdin=subprocess.DEVNULL, stdout=None)

    def wait_ready(self):
        self.wait_for_answer(f"{self.url}/health")

    def metric(self, name):
        """Return the sum of a counter of the engine."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as said:
            lines = said.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def wait_idle(server):
    """Wait until the server has stored what it was given."""
    wait_for(server.idle, 120)


def forget(server):
    """Leave nothing in the server's memory: what is used then comes from files."""

    def forgotten():
        server.ask("/cache/clear", "POST", {})  # of what is being stored it clears nothing
        return server.objects() == 0

    wait_for(forgotten, 120)
