"""LMCache's fs_native and fskv on the same prompts: time to first token, bytes, files.

    FSKV_LMCACHE_MODEL=DIR python tests/lmcache_engines/compare.py DIRECTORY [ROUNDS]

In the environment of `make test-lmcache`. One server with its engine at a time: two on few cores are slow in
turns, and not alike. In each round one of each kind is started on an empty root, in an order that turns
round. It computes two prompts; then each is asked twice with nothing in memory, so that all of it comes from
files, and after each of these once more, when it finds all of it in the server's memory.
"""

from __future__ import annotations

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

import lmcache_lab as lab
from places import REPOSITORY

TEXT = (REPOSITORY / "LICENSE").read_text()
PROMPTS = [TEXT[at : at + 5500] for at in (0, 5500)]


_TIMES = 2  # that a prompt is loaded by an engine


def main(directory: str, rounds: int) -> None:
    names = ("fs_native", "fskv")
    found: dict[tuple[str, str], list[dict]] = {}
    sizes = {}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            root = pathlib.Path(directory) / f"{name}-{number}"
            root.mkdir(parents=True)
            own = {"type": "fs_native", "base_path": str(root)}
            adapter = own if name == "fs_native" else lab.plugin(root)
            with (
                lab.Server(root.with_suffix(".server"), adapter) as server,
                lab.Engine(root.with_suffix(".engine"), server.port) as engine,
            ):
                for how in ("computed", *["from files", "from memory"] * _TIMES):
                    for prompt in PROMPTS:
                        if how == "from files":
                            lab.forget(server)
                        said = engine.generate(prompt, tokens=1)
                        found.setdefault((name, how), []).append(said)
                        lab.wait_idle(server)
            files = [path for path in root.rglob("*") if path.suffix in (".data", ".kv")]
            sizes[name] = len(files), sum(path.stat().st_size for path in files) / 2**20
    for (name, how), answers in found.items():
        seconds = [said["first_s"] for said in answers]
        loaded = sorted({(said["loaded"], said["prompt_tokens"]) for said in answers})
        print(
            f"{name}: {how}: first token {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} requests), "
            f"(tokens from LMCache, of the prompt) {loaded}"
        )
    for name, (number, mib) in sizes.items():
        print(f"{name}: {number} files, {mib:.1f} MiB")
    ids = [[said["ids"] for said in found[name, "from files"]] for name in names]
    print(f"same first tokens: {ids[0] == ids[1]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
