"""The engine of the tests: demo/engine.py with further steps, and with changes that its request names.

python lab_engine.py request.json result.json

Further steps:
    {"prompt_token_ids": [...], "image": seed, "uuid": name, "label"}   the picture of this seed stands in the
                               place of the prompt's image token; `uuid` is what the client calls it
    {"together": [prompt, ...], "max_tokens": 16, "label"}   at the same time, which needs blocks of all
    {"embed": [...], "label"}                                a pooling model
    {"rpc": name, "kwargs": {...}, "raises": false}          collective_rpc
    {"version": name}                                        of the weights, as the client calls it
    {"add": {label: prompt}, "max_tokens": 16, "turns": n}   they run on during further steps; without `turns`
                               each gets its first token now
    {"abort": [label, ...]}
    {"preempt": true}                                        vLLM's own cache is reset under what runs
    {"finish": true}                                         their answers by label, when none runs any more
    {"damage": root, "part": 0.2, "seed": 1}                 a bit is flipped in this part of the chunk files
    {"read": path, "until": text}                            the file, as soon as it has this text
    {"facts": true}                                          what may leak

`changes` of the request are names and values of the functions in `CHANGES`. Most take a protection out, for a
negative control.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import sys
from collections.abc import Callable
from typing import Any

import places  # noqa: F401
import pytest
from world import wait_for

from demo import engine
from faults import files


class Child(engine.Child):
    def _start(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}  # so far, of what was added
        for name, value in self.request.get("changes", {}).items():
            CHANGES[name](value)
        super()._start()

    def _do(self, step: dict[str, Any]) -> dict[str, Any]:
        label = {"label": step.get("label")}
        if "rpc" in step:
            with pytest.raises(RuntimeError) if step.get("raises") else contextlib.nullcontext():
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
        for name in ("version", "add", "abort", "preempt", "finish", "damage", "read", "facts"):
            if name in step:
                return {"step": name, **(getattr(self, f"_{name}")(step) or {})}
        return super()._do(step)

    def _version(self, step: dict[str, Any]) -> None:
        self.llm.llm_engine.set_weight_version(step["version"])

    def _add(self, step: dict[str, Any]) -> None:
        for label, prompt in step["add"].items():
            sampling = self._sampling(step.get("max_tokens", 16))
            self.llm.llm_engine.add_request(label, {"prompt_token_ids": prompt}, sampling)
        for _ in range(step.get("turns", 0)):
            self._turn()
        while "turns" not in step and not step["add"].keys() <= self.answers.keys():
            self._turn()

    def _turn(self) -> None:
        for output in self.llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            answer = {"tokens": tokens, "num_cached_tokens": output.num_cached_tokens}
            self.answers[output.request_id] = answer

    def _abort(self, step: dict[str, Any]) -> None:
        self.llm.llm_engine.abort_request(step["abort"])
        for label in step["abort"]:
            self.answers.pop(label, None)

    def _preempt(self, step: dict[str, Any]) -> None:
        assert self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def _finish(self, step: dict[str, Any]) -> dict[str, Any]:
        while self.llm.llm_engine.has_unfinished_requests():
            self._turn()
        if self.flush:
            self._generate([1], 1)
        answers, self.answers = self.answers, {}
        return {"answers": answers}

    def _damage(self, step: dict[str, Any]) -> dict[str, Any]:
        paths = sorted(files.chunk_files(step["damage"]))
        chosen = random.Random(step["seed"]).sample(paths, int(step["part"] * len(paths)))
        for path in chosen:
            with contextlib.suppress(FileNotFoundError):
                files.flip_payload_bit(path)
        return {"count": len(chosen)}

    def _read(self, step: dict[str, Any]) -> dict[str, Any]:
        wait_for(lambda: step["until"] in pathlib.Path(step["read"]).read_text())
        return {"text": pathlib.Path(step["read"]).read_text()}

    def _facts(self, step: dict[str, Any]) -> dict[str, Any]:
        status = pathlib.Path("/proc/self/status").read_text()
        return {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "rss_kib": int(status.partition("VmRSS:")[2].split()[0]),
        }

    def _answer(self, prompts: list[dict[str, Any]], max_tokens: int, **more: Any) -> list[Any]:
        return self.llm.generate(prompts, self._sampling(max_tokens, **more), use_tqdm=False)

    def _sampling(self, max_tokens: int, **more: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0, **more
        )


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


def one_epoch(_: Any) -> None:
    """The identity does not tell the weights of one update from those of another."""
    from fskv.namespace import Identity

    check = Identity.__post_init__

    def without_epoch(self: Any) -> None:
        check(self)
        object.__setattr__(self, "epoch", None)

    Identity.__post_init__ = without_epoch


def always_pure(_: Any) -> None:
    """VLLM's own cache counts as one that has no KV of other weights."""
    from fskv.engines.vllm.weights import Purity

    Purity._is_pure = property(lambda self: True, lambda self, value: None)


def constants(values: dict[str, float]) -> None:
    """Fskv's constants are others."""
    from quick_constants import set_constants

    set_constants(**values)


def quick_keys(_: Any) -> None:
    """A key file is read again at each step."""
    from fskv.data_path import worker_keys

    assert worker_keys._LOOK_S
    worker_keys._LOOK_S = 0.0


_ALL = (arch, kernels, replace_after_load, without_impl, new_kind, never_rests, quick_keys)
_ALL += (early_events, untold, patient, cpu_pool, cpu_gaps, one_epoch, always_pure, constants)
CHANGES: dict[str, Callable[[Any], None]] = {change.__name__: change for change in _ALL}


if __name__ == "__main__":
    engine.Child = Child
    sys.exit(engine.main(sys.argv[1:]))
