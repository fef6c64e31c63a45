"""Child process of test_engine_identity: demo/engine.py with images, and with things done around the load.

python identity_engine.py request.json result.json

A generate step may have `image`: the seed of a picture that stands in the place of the prompt's image token,
and `uuid`: what the client calls it. Further steps: {"together": [such steps; a later one is run first]},
{"embed": [...], "label"} (a pooling model), {"rpc": name, "kwargs": {...}} (collective_rpc).
Of the request, `replace_after_load`: [file, by file] replaces a file when vLLM has loaded the model and fskv
has not looked at it yet. `sees_nothing`: Llama 4 is asked about text alone, with nothing that sees images.
`arch`: what fskv takes the GPU's architecture for; `kernels`: a factor, by which the values that attention
mixes differ from those of a factor of 1. It stands for kernels of another architecture, and makes their KV
tell: a model that loads the KV of another factor gives other tokens.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import places  # noqa: F401

from demo import engine


class Child(engine.Child):
    def _start(self) -> None:
        if replaced := self.request.get("replace_after_load"):
            _replace_after_load(*replaced)
        if self.request.get("sees_nothing"):
            _without_images()
        if "kernels" in self.request:
            _compute_with(self.request["kernels"])
        if "arch" in self.request:
            _call_it(self.request["arch"])
        super()._start()

    def _do(self, step: dict[str, Any]) -> dict[str, Any]:
        if "rpc" in step:
            self.llm.collective_rpc(step["rpc"], kwargs=step.get("kwargs", {}))
            return {"step": "rpc"}
        if "embed" in step:
            (output,) = self.llm.embed([{"prompt_token_ids": step["embed"]}], use_tqdm=False)
            return {"step": "embed", "label": step["label"], "values": output.outputs.embedding}
        if "together" in step:
            priorities = [-i for i in range(len(step["together"]))]
            self._see(step["together"], priority=priorities)
            return {"step": "together"}
        if "image" not in step:
            return super()._do(step)
        return {"step": "generate", "label": step["label"], **self._see([step])}

    def _see(self, steps: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        prompts = [_prompt(step) for step in steps]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False, **how)
        tokens, cached = list(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens
        if self.flush:
            self._generate([1], 1)
        return {"tokens": tokens, "num_cached_tokens": cached}


def _prompt(step: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(step["image"]).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    prompt: dict[str, Any] = {
        "prompt_token_ids": step["prompt_token_ids"],
        "multi_modal_data": {"image": Image.fromarray(pixels)},
    }
    if "uuid" in step:
        prompt["multi_modal_uuids"] = {"image": [step["uuid"]]}
    return prompt


def _without_images() -> None:
    from vllm.model_executor.models.mllama4 import Mllama4ProcessingInfo

    Mllama4ProcessingInfo.get_mm_max_tokens_per_item = lambda self, *args, **kwargs: {"image": 16}


def _call_it(arch: str) -> None:
    from fskv.engines.vllm import identity

    identity.gpu_arch = lambda: arch


def _compute_with(factor: float) -> None:
    def scale(runner: Any) -> None:
        for name, parameter in runner.model.named_parameters():
            if "input_layernorm" in name:  # of linear layers there is a packed copy, which counts
                parameter.data.mul_(factor)

    _after_load(scale)


def _replace_after_load(path: str, by: str) -> None:
    def replace(runner: Any) -> None:
        shutil.copyfile(by, f"{path}.new")
        os.replace(f"{path}.new", path)

    _after_load(replace)


def _after_load(do: Callable[[Any], None]) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_and_do(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        do(self)
        return result

    CPUModelRunner.load_model = load_and_do


if __name__ == "__main__":
    engine.Child = Child
    sys.exit(engine.main(sys.argv[1:]))
