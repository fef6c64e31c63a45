"""The engine of the tests: demo/engine.py with further steps, and with changes that its request names.

python lab_engine.py request.json result.json

Further steps:
    {"prompt_token_ids": [...], "image": seed, "uuid": name, "label"}   the picture of this seed stands in the
                               place of the prompt's image token; `uuid` is what the client calls it
    {"together": [prompt, ...], "max_tokens": 16, "label"}   at the same time, which needs blocks of all
    {"embed": [...], "label"}                                a pooling model
    {"rpc": name, "kwargs": {...}}                           collective_rpc

`changes` of the request are names and values of the functions in `CHANGES`. Most take a protection out, for a
negative control.
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
        for name, value in self.request.get("changes", {}).items():
            CHANGES[name](value)
        super()._start()

    def _do(self, step: dict[str, Any]) -> dict[str, Any]:
        label = {"label": step.get("label")}
        if "rpc" in step:
            self.llm.collective_rpc(step["rpc"], kwargs=step.get("kwargs", {}))
            return {"step": "rpc"}
        if "embed" in step:
            (output,) = self.llm.embed([{"prompt_token_ids": step["embed"]}], use_tqdm=False)
            return {"step": "embed", "values": output.outputs.embedding, **label}
        if "together" in step:
            prompts = [{"prompt_token_ids": prompt} for prompt in step["together"]]
            outputs = self._answer(prompts, step["max_tokens"])
            metrics = self.llm.get_metrics()
            return {
                "step": "together",
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "num_preemptions": sum(
                    m.value for m in metrics if m.name == "vllm:num_preemptions"
                ),
                **label,
            }
        if "image" in step:
            (output,) = self._answer([_prompt_with_image(step)], 12)
            tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
            if self.flush:
                self._generate([1], 1)
            return {"step": "generate", "tokens": tokens, "num_cached_tokens": cached, **label}
        return super()._do(step)

    def _answer(self, prompts: list[dict[str, Any]], max_tokens: int, **more: Any) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0, **more
        )
        return self.llm.generate(prompts, sampling, use_tqdm=False)


def _prompt_with_image(step: dict[str, Any]) -> dict[str, Any]:
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


def arch(name: str) -> None:
    """Fskv takes the GPU's architecture for this one."""
    from fskv.engines.vllm import identity

    identity.gpu_arch = lambda: name


def kernels(factor: float) -> None:
    """Attention mixes values that are so much larger, which stands for kernels of another architecture.

    It makes their KV tell: a model that loads the KV of another factor gives other tokens.
    """

    def scale(runner: Any) -> None:
        for name, parameter in runner.model.named_parameters():
            if "input_layernorm" in name:  # of linear layers there is a packed copy, which counts
                parameter.data.mul_(factor)

    _after_load(scale)


def replace_after_load(files: list[str]) -> None:
    """The first file is replaced by the second when vLLM has loaded the model, before fskv looks at it."""
    path, by = files

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


class _Bare:
    """A layer without an `impl`, as indexers of sparse attention have none."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        if name == "impl":
            raise AttributeError(f"'{type(self._layer).__name__}' object has no attribute 'impl'")
        return getattr(self._layer, name)


def without_impl(_: Any = None) -> None:
    """From now on layer 1 shows fskv no `impl`, in this process."""
    from fskv.engines.vllm.page_layout import _Pages

    inside = _Pages.inside

    def of_bare_layer(self: Any, name: str, layer: Any, *args: Any, **kwargs: Any) -> str:
        return inside(self, name, _Bare(layer) if ".1." in name else layer, *args, **kwargs)

    _Pages.inside = of_bare_layer


def new_kind(_: Any) -> None:
    """Every KV group is of a kind that fskv does not know."""
    from fskv.engines.vllm import identity

    def unknown(spec: Any) -> Any:
        raise identity._unknown(spec)

    identity._kind = unknown


def never_rests(_: Any) -> None:
    """Fskv does not rest where vLLM does not use KV again.

    vLLM 0.32 turns prefix caching off for MLA on CPUs; so the files of MLA are seen there all the same.
    """
    from fskv.engines.vllm.manager import FskvManager

    assert callable(FskvManager.turn_off)
    FskvManager.turn_off = lambda self, reason: None


def early_events(_: Any) -> None:
    """Fskv announces chunks as it takes them."""
    from fskv.engines.vllm.manager import FskvManager, to_chunk

    prepare_store = FskvManager.prepare_store

    def announce_at_once(self, keys, req_context):
        output = prepare_store(self, keys, req_context)
        for key in output.keys_to_store:
            self.events.stored(to_chunk(key))
        return output

    FskvManager.prepare_store = announce_at_once


def untold(_: Any) -> None:
    """Children do not hear which blocks a load of another one overwrites, as under vLLM's MultiConnector."""
    from fskv.engines.vllm import connector as one
    from fskv.engines.vllm_multi import connector as several

    for module in (one, several):
        assert callable(module.tell_allocated)
        module.tell_allocated = lambda scheduler, blocks: None


def patient(_: Any) -> None:
    """A child that has not answered is waited for, as under vLLM's MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from fskv.engines.vllm_multi.connector import FskvMultiConnector

    theirs = MultiConnector.get_num_new_matched_tokens
    FskvMultiConnector.get_num_new_matched_tokens = theirs


def cpu_pool(_: Any) -> None:
    """vLLM's own CPU pool needs no GPU."""
    import cpu_pool

    cpu_pool.replace_copies()


def cpu_gaps(_: Any) -> None:
    """What vLLM's CPU build lacks for drafts is there."""
    import cpu_gaps

    cpu_gaps.fill()


def constants(values: dict[str, float]) -> None:
    """Fskv's constants are others."""
    from quick_constants import set_constants

    set_constants(**values)


_ALL = (arch, kernels, replace_after_load, without_impl, new_kind, never_rests)
_ALL += (early_events, untold, patient, cpu_pool, cpu_gaps, constants)
CHANGES: dict[str, Callable[[Any], None]] = {change.__name__: change for change in _ALL}


if __name__ == "__main__":
    engine.Child = Child
    sys.exit(engine.main(sys.argv[1:]))
