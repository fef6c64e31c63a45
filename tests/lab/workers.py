"""Workers of vLLM 0.32 on a CPU, for the option `worker_cls`."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """It can be a later pipeline stage: only a profile run makes its buffers."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )


class StrangeWorker(CPUWorker):
    """The last rank has KV that fskv does not know."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        from lab_engine import without_impl

        super().load_model(*arguments, **options)
        if get_tensor_model_parallel_rank() == get_tensor_model_parallel_world_size() - 1:
            without_impl()
