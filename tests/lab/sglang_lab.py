"""Starts real SGLang engines for tests and measurements, with what a CPU needs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys

from places import LAB, REPOSITORY

HERE = REPOSITORY / "tests" / "sglang_engines"
PAGE_SIZE = 64
START_S = 400
STEP_S = 240
# Of Llama type, with weights that answer: `make test-sglang` downloads them.
MODEL = os.environ.get("FSKV_SGLANG_MODEL", "")


def storage(root, **options):
    """The arguments that put fskv behind the host cache."""
    names = {"backend_name": "fskv", "module_path": "fskv.engines.sglang"}
    config = {**names, "class_name": "FskvStorage", "interface_v1": 1, "root": str(root), **options}
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(config),
    }


class Engine:
    """One engine; killed with all its children at the end of the block."""

    def __init__(self, log: pathlib.Path, *, env=None, **arguments):
        self._log = log
        plain = {
            "model_path": MODEL,
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.3,
            "max_total_tokens": 8192,
            # In bfloat16 a hit in SGLang's own cache changes the text, on CPUs that compute with it (AMX).
            "dtype": "float32",
            "skip_server_warmup": True,
            "page_size": PAGE_SIZE,
            "enable_hierarchical_cache": True,
            "hicache_ratio": 1.5,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            # A request waits for what is in storage, so that what is loaded does not depend on the machine.
            "hicache_storage_prefetch_policy": "wait_complete",
            "log_level": "info",
        }
        path = [str(HERE / "shims"), str(REPOSITORY), os.environ.get("PYTHONPATH", ""), str(LAB)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), json.dumps(plain | arguments)],
                env={
                    **os.environ,
                    "SGLANG_USE_CPU_ENGINE": "1",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                    "OMP_NUM_THREADS": "2",
                    **(env or {}),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def __enter__(self):
        try:
            assert self._read(START_S).get("ready"), self.tail()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_):
        self.kill()

    def __call__(self, **step):
        self._process.stdin.write(json.dumps(step) + "\n")
        self._process.stdin.flush()
        said = self._read(STEP_S)
        assert "error" not in said, (said, self.tail())
        return said

    def generate(self, text, **step):
        return self(generate=text, **step)

    def again(self, text):
        """Generate with nothing in memory: what is used comes from storage."""
        self(flush=True)
        return self.generate(text)

    def log(self):
        return self._log.read_text(errors="replace")

    def tail(self):
        return self.log()[-3000:]

    def close(self):
        """End it as a user does; returns its exit code."""
        self._process.stdin.close()
        return self._process.wait(120)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def _read(self, allowed_s):
        ready, _, _ = select.select([self._process.stdout], [], [], allowed_s)
        assert ready, f"no answer in {allowed_s} s: {self.tail()}"
        line = self._process.stdout.readline()
        assert line, f"it ended: {self.tail()}"
        return json.loads(line)
