"""SGLang's file backend and fskv on the same prompts, in turns: time to first token, bytes, files.

    FSKV_SGLANG_MODEL=DIR python tests/sglang_engines/compare.py DIRECTORY [ROUNDS]

In the environment of `make test-sglang`. Two engines run side by side and are asked in turns, so that what
else the machine does hurts both. Each request finds nothing in memory, so that all of it comes from
storage; then it is asked again and finds all of it on the device.
"""

from __future__ import annotations

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

import sglang_lab as lab
from places import REPOSITORY

TEXT = (REPOSITORY / "LICENSE").read_text()
PROMPTS = [TEXT[at : at + 5500] for at in (0, 5500)]


def main(directory: str, rounds: int) -> None:
    base = pathlib.Path(directory)
    roots = {name: base / name for name in ("file", "fskv")}
    for root in roots.values():
        root.mkdir(parents=True)
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(roots["file"])}
    with (
        lab.Engine(base / "fskv.log", **lab.storage(roots["fskv"])) as fskv,
        lab.Engine(base / "file.log", env=environment, hicache_storage_backend="file") as file,
    ):
        engines = {"file": file, "fskv": fskv}
        computed: dict[str, list[dict]] = {name: [] for name in engines}
        for prompt in PROMPTS:
            for name, engine in engines.items():
                computed[name].append(engine.generate(prompt, tokens=1))
        loaded: dict[str, list[dict]] = {name: [] for name in engines}
        at_hand: dict[str, list[dict]] = {name: [] for name in engines}
        for number in range(rounds):
            for name in sorted(engines, reverse=bool(number % 2)):
                for prompt in PROMPTS:
                    engines[name](flush=True)
                    loaded[name].append(engines[name].generate(prompt, tokens=1))
                    at_hand[name].append(engines[name].generate(prompt, tokens=1))
        for name, root in roots.items():
            engines[name](flush=True)
            found = [p for p in root.rglob("*") if p.suffix in (".bin", ".kv")]
            seconds = [said["first_s"] for said in loaded[name]]
            times = f"{min(seconds):.2f} to {max(seconds):.2f} s, {len(seconds)} requests"
            first = statistics.median(said["first_s"] for said in computed[name])
            tokens = sorted({(s["storage"], s["prompt_tokens"]) for s in loaded[name]})
            size = sum(path.stat().st_size for path in found) / 2**20
            print(f"{name}: first token computed {first:.2f} s")
            print(f"{name}: from storage {statistics.median(seconds):.2f} s ({times})")
            in_memory = [said["first_s"] for said in at_hand[name]]
            print(f"{name}: from the device's memory {statistics.median(in_memory):.2f} s")
            longer = [s - m for s, m in zip(seconds, in_memory, strict=True)]
            print(f"{name}: storage takes {statistics.median(longer):.2f} s longer")
            print(f"{name}: (tokens from storage, of the prompt) {tokens}")
            print(f"{name}: {len(found)} files of pages, {size:.1f} MiB")
        same = [a["text"] == b["text"] for a, b in zip(*loaded.values(), strict=True)]
        print(f"same first token: {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
