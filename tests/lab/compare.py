"""Another store of KV and fskv on the same prompts: time to first token, bytes, files.

    FSKV_LMCACHE_MODEL=DIR python tests/lab/compare.py lmcache DIRECTORY [ROUNDS]   beside its fs_native
    FSKV_SGLANG_MODEL=DIR python tests/lab/compare.py sglang DIRECTORY [ROUNDS]     beside its file backend

In the environment of `make test-lmcache` or `make test-sglang`. One engine at a time: two on few cores are
slow in turns, and not alike. In each round one of each kind is started on an empty root, in an order that
turns round. It computes two prompts; then each is asked twice with nothing in memory, so that all of it comes
from files, and after each of these once more, when it finds all of it in memory.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import sys

from places import REPOSITORY

TEXT = (REPOSITORY / "LICENSE").read_text()
PROMPTS = [TEXT[at : at + 5500] for at in (0, 5500)]
_TIMES = 2  # that a prompt is loaded by an engine
_HOWS = ("computed", "from files", "from memory")


@contextlib.contextmanager
def lmcache(name, root):
    """Start an engine with LMCache; yield how to ask it, and how to leave nothing in memory."""
    import lmcache_lab as lab

    own = {"type": "fs_native", "base_path": str(root)}
    adapter = lab.plugin(root) if name == "fskv" else own
    logs = root.with_suffix(".logs")
    logs.mkdir()
    with lab.pair(logs, adapter) as (server, engine):

        def ask(prompt):
            said = engine.generate(prompt, tokens=1)
            lab.wait_idle(server)
            return said

        yield ask, lambda: lab.forget(server)


@contextlib.contextmanager
def sglang(name, root):
    """Start an engine of SGLang; see `lmcache`."""
    import sglang_lab as lab

    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(root)}
    own = {"env": environment, "hicache_storage_backend": "file"}
    arguments = lab.storage(root) if name == "fskv" else own
    with lab.Engine(root.with_suffix(".log"), **arguments) as engine:
        yield lambda prompt: engine.generate(prompt, tokens=1), lambda: engine(flush=True)
        engine(flush=True)


def main(kind, directory, rounds=3):
    names = ("other", "fskv")
    found = {(name, how): [] for name in names for how in _HOWS}
    sizes = {}
    for number in range(int(rounds)):
        for name in names if number % 2 else reversed(names):
            root = pathlib.Path(directory) / f"{name}-{number}"
            root.mkdir(parents=True)
            with {"lmcache": lmcache, "sglang": sglang}[kind](name, root) as (ask, forget):
                for prompt in PROMPTS:
                    found[name, "computed"].append(ask(prompt))
                for prompt in PROMPTS * _TIMES:
                    forget()
                    for how in ("from files", "from memory"):
                        found[name, how].append(ask(prompt))
            files = [p for p in root.rglob("*") if p.suffix in (".bin", ".data", ".kv")]
            sizes[name] = len(files), sum(path.stat().st_size for path in files) / 2**20
    for (name, how), answers in found.items():
        seconds = [said["first_s"] for said in answers]
        loaded = sorted({(said["loaded"], said["prompt_tokens"]) for said in answers})
        print(
            f"{name}: {how}: first token {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} requests), "
            f"(tokens from files, of the prompt) {loaded}"
        )
    for name, (number, mib) in sizes.items():
        print(f"{name}: {number} files, {mib:.1f} MiB")
    texts = [[said["text"] for said in found[name, "from files"]] for name in names]
    print(f"same first tokens: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
