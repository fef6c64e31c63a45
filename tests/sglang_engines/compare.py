"""SGLang's file backend and fskv on the same prompts: time to first token, bytes, files.

    FSKV_SGLANG_MODEL=DIR python tests/sglang_engines/compare.py DIRECTORY [ROUNDS]

In the environment of `make test-sglang`. One engine at a time: two on few cores are slow in turns, and not
alike. In each round an engine of each kind is started on an empty root, in an order that turns round. It
computes two prompts; then each is asked twice with nothing in memory, so that all of it comes from storage,
and after each of these once more, when it finds all of it on the device.
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


_TIMES = 2  # that a prompt is loaded by an engine
_HOWS = ("computed", "from storage", "from the device's memory")


def main(directory: str, rounds: int) -> None:
    names = ("file", "fskv")
    found: dict[tuple[str, str], list[dict]] = {(n, how): [] for n in names for how in _HOWS}
    sizes = {}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            root = pathlib.Path(directory) / f"{name}-{number}"
            root.mkdir(parents=True)
            with _engine(name, root) as engine:
                for prompt in PROMPTS:
                    found[name, "computed"].append(engine.generate(prompt, tokens=1))
                for prompt in PROMPTS * _TIMES:
                    engine(flush=True)
                    found[name, "from storage"].append(engine.generate(prompt, tokens=1))
                    found[name, _HOWS[2]].append(engine.generate(prompt, tokens=1))
                engine(flush=True)
            pages = [p for p in root.rglob("*") if p.suffix in (".bin", ".kv")]
            sizes[name] = len(pages), sum(path.stat().st_size for path in pages) / 2**20
    for (name, how), answers in found.items():
        seconds = [said["first_s"] for said in answers]
        tokens = sorted({(said["storage"], said["prompt_tokens"]) for said in answers})
        print(
            f"{name}: {how}: first token {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} requests), "
            f"(tokens from storage, of the prompt) {tokens}"
        )
    for name, (number, mib) in sizes.items():
        print(f"{name}: {number} files of pages, {mib:.1f} MiB")
    texts = [[said["text"] for said in found[name, "from storage"]] for name in names]
    print(f"same first tokens: {texts[0] == texts[1]}")


def _engine(name: str, root: pathlib.Path) -> lab.Engine:
    log = root.with_suffix(".log")
    if name == "fskv":
        return lab.Engine(log, **lab.storage(root))
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(root)}
    return lab.Engine(log, env=environment, hicache_storage_backend="file")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
