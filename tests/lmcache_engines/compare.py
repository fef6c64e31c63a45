"""LMCache's fs_native and fskv on the same prompts, in turns: time to first token, bytes, files.

    FSKV_LMCACHE_MODEL=DIR python tests/lmcache_engines/compare.py DIRECTORY [ROUNDS]

In the environment of `make test-lmcache`. Two servers with an engine each run side by side and are asked in
turns, so that what else the machine does hurts both. Each request finds nothing in memory, so that all of it
comes from files; then it is asked again and finds all of it in the server's memory.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

import lmcache_lab as lab
from places import REPOSITORY

TEXT = (REPOSITORY / "LICENSE").read_text()
PROMPTS = [TEXT[at : at + 5500] for at in (0, 5500)]


def main(directory: str, rounds: int) -> None:
    base = pathlib.Path(directory)
    roots = {name: base / name for name in ("fs_native", "fskv")}
    for root in roots.values():
        root.mkdir(parents=True)
    adapters = {
        "fs_native": {"type": "fs_native", "base_path": str(roots["fs_native"])},
        "fskv": lab.plugin(roots["fskv"]),
    }
    with contextlib.ExitStack() as stack:
        pairs = {}
        for name, adapter in adapters.items():
            server = stack.enter_context(lab.Server(base / f"{name}.server", adapter))
            engine = stack.enter_context(lab.Engine(base / f"{name}.engine", server.port))
            pairs[name] = server, engine
        found: dict[tuple[str, str], list[dict]] = {}
        for how in ("computed", *["from files", "from memory"] * rounds):
            for name, (server, engine) in pairs.items():
                for prompt in PROMPTS:
                    if how == "from files":
                        lab.forget(server)
                    found.setdefault((name, how), []).append(engine.generate(prompt, tokens=1))
                    lab.wait_idle(server)
        for (name, how), answers in found.items():
            seconds = [said["first_s"] for said in answers]
            loaded = sorted({(said["loaded"], said["prompt_tokens"]) for said in answers})
            print(
                f"{name}: {how}: first token {statistics.median(seconds):.2f} s "
                f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} requests), "
                f"(tokens from LMCache, of the prompt) {loaded}"
            )
        for name, root in roots.items():
            files = [path for path in root.rglob("*") if path.suffix in (".data", ".kv")]
            size = sum(path.stat().st_size for path in files) / 2**20
            print(f"{name}: {len(files)} files, {size:.1f} MiB")
        last = [[said["ids"] for said in found[name, "from files"]] for name in pairs]
        print(f"same first token: {last[0] == last[1]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
