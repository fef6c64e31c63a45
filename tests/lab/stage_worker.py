"""A worker of vLLM 0.32 on a CPU that can be a later pipeline stage: only a profile run makes its buffers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """For the option `worker_cls`."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
