"""What is pruned of prefixes that real engines used: their ends, so that what stays can be hit."""

from __future__ import annotations

import json
import os
import shutil

import engine_lab as lab
import pytest
from tool_lab import run as fskv

from fskv.format.chunk_file import MAX_HEADER_NBYTES, header_length, parse_header

pytestmark = [pytest.mark.engine]
lab.needs_vllm()
pytest.importorskip("fskv_tools.explain")

MODEL = lab.MODELS["llama"]
CHUNK = 128
SYSTEM = MODEL.tokens("system", 1024)
CHATS = [SYSTEM + MODEL.tokens(f"chat-{n}", 700) for n in range(4)]
OTHERS = [MODEL.tokens(f"other-{n}", 1500) for n in range(3)]
LONG = MODEL.tokens("long", 5900)
# The system prompt never leaves the engine's own cache, and others are computed between its uses.
PROMPTS = [CHATS[0], OTHERS[0], CHATS[1], LONG, OTHERS[1], CHATS[2], CHATS[3], OTHERS[2]]
ENGINE = {"max_model_len": 8192, "max_num_batched_tokens": 256}  # prompts are computed in chunks


def test_of_each_prefix_that_an_engine_used_the_head_is_pruned_last(root, tmp_path):
    transfer = lab.connector(root, hybrid_chunk_size=CHUNK, keep_free=0)
    steps = [lab.generate(prompt, f"{n}") for n, prompt in enumerate(PROMPTS)]
    first = lab.run(lab.request(MODEL, [*steps, *lab.SETTLE], transfer=transfer, engine=ENGINE))
    for n in (2, 5, 6):
        assert lab.generates(first)[f"{n}"]["num_cached_tokens"] == len(SYSTEM)
    prefixes = [_paths(root, prompt) for prompt in PROMPTS]
    system = prefixes[0][: len(SYSTEM) // CHUNK]
    assert all(os.path.exists(path) for prefix in prefixes for path in prefix)

    whole = len(_reach(prefixes)[0])
    file_nbytes = os.stat(system[0]).st_blocks * 512

    # Negative control: with the times at which they were stored, which is all that was known before.
    shutil.copytree(root, tmp_path / "control")
    _prune(str(tmp_path / "control"), whole // 2 * file_nbytes, as_stored=True)
    control = [[path.replace(root, f"{tmp_path}/control") for path in one] for one in prefixes]
    there, hit = _reach(control)
    assert len(hit) < 0.6 * len(there)
    assert not any(os.path.exists(path.replace(root, f"{tmp_path}/control")) for path in system)

    for share in (0.8, 0.5, 0.3):
        _prune(root, int(share * whole) * file_nbytes)
        there, hit = _reach(prefixes)
        assert (share - 0.1) * whole < len(there) <= share * whole + 1
        assert len(hit) >= 0.99 * len(there)
    again = lab.run(lab.request(MODEL, [*steps], transfer=transfer, engine=ENGINE))
    for n, prefix in enumerate(prefixes):
        found = sum(path in hit for path in prefix) * CHUNK
        assert lab.generates(again)[f"{n}"]["num_cached_tokens"] >= found
        assert lab.generates(again)[f"{n}"]["tokens"] == lab.generates(first)[f"{n}"]["tokens"]


def _paths(root: str, prompt: list[int]) -> list[str]:
    """Return the files of a prompt's chunks, the head first."""
    words = ("explain", "--tokens", "-", "--json")
    done = fskv(*words, root=root, stdin=json.dumps(prompt))
    assert done.summary["hit_tokens"] == done.summary["best_tokens"]
    return [line["files"][0]["path"] for line in done.lines if line["type"] == "chunk"]


def _prune(root: str, nbytes: int, *, as_stored: bool = False) -> None:
    for path in lab.chunks(root) if as_stored else ():
        with open(path, "rb") as file:
            raw = file.read(MAX_HEADER_NBYTES)
        at_ns = parse_header(raw[: header_length(raw)]).written_at_ms * 10**6
        os.utime(path, ns=(at_ns, at_ns))
    fskv("prune", "--max-size", str(nbytes), "--yes", root=root)


def _reach(prefixes: list[list[str]]) -> tuple[set[str], set[str]]:
    """Return which files are there, and which of them a hit can reach."""
    there, hit = set(), set()
    for prefix in prefixes:
        present = [os.path.exists(path) for path in prefix]
        there |= {path for path, here in zip(prefix, present, strict=True) if here}
        hit |= set(prefix[: (*present, False).index(False)])
    return there, hit
