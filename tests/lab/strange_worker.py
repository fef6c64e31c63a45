"""A worker of vLLM on a CPU, for the option `worker_cls`: the last rank has KV that fskv does not know."""

from __future__ import annotations

from typing import Any

from lab_engine import without_impl
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.worker.cpu_worker import CPUWorker


class StrangeWorker(CPUWorker):
    """See the module docstring."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        if get_tensor_model_parallel_rank() == get_tensor_model_parallel_world_size() - 1:
            without_impl()
