"""Starts real SGLang engines for tests and measurements, with what a CPU needs."""

from __future__ import annotations

import json
import os
import pathlib

from asked_engine import AskedEngine
from places import LAB, REPOSITORY

HERE = REPOSITORY / "tests" / "sglang_engines"
PAGE_SIZE = 64
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


class Engine(AskedEngine):
    """One engine; killed with all its children at the end of the block."""

    def __init__(self, log: pathlib.Path, *, env=None, **arguments):
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
        around = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "OMP_NUM_THREADS": "2",
            **(env or {}),
        }
        super().__init__(log, HERE / "engine.py", plain | arguments, around)

    def again(self, text):
        """Generate with nothing in memory: what is used comes from storage."""
        self(flush=True)
        return self.generate(text)
