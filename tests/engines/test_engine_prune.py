"""`fskv prune`, once and with --watch, against two live engines on one root: no error on either side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import engine_lab as lab
import pytest
import world
from world import wait_for

from trials.soak_judge import Sampler, bad_lines, count

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")
pytestmark = [*world.VLLM, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
PROMPT_TOKENS = 1100
FILE_NBYTES = (128 + 4) << 10
RESET = lab.RESET
FIRST, SECOND, THIRD = range(10), range(10, 18), range(18, 28)
WRITTEN_NBYTES = 3 * len(THIRD) // 2 * (PROMPT_TOKENS // 128) * FILE_NBYTES  # beside the watcher


def _ask(number: int, label: str) -> dict:
    return lab.generate(MODEL.tokens(f"prune-{number}", PROMPT_TOKENS), label)


def _steps(talk: lab.Conversation, own: int) -> list[int]:
    """Say what one engine does; returns its two pauses. Every second prompt is both engines' own."""

    def prompts(numbers):
        return [n if n % 2 else n + 1000 * own for n in numbers]

    talk.say(*(_ask(n, f"cold {n}") for n in prompts(FIRST)), *lab.SETTLE)
    pauses = [talk.pause()]
    for n in prompts(SECOND):  # the prune runs beside these
        talk.say(_ask(n, f"cold {n}"), {"sleep": 0.2})
    for n in (*prompts(FIRST), *prompts(SECOND)):  # some of it is gone, and some goes now
        talk.say(RESET, _ask(n, f"again {n}"))
    talk.say(*lab.SETTLE)
    pauses.append(talk.pause())
    for n in prompts(THIRD):  # the watcher runs beside these
        talk.say(_ask(n, f"cold {n}"), {"sleep": 0.3})
    last = prompts(THIRD)[-1]
    talk.say(*lab.SETTLE, RESET, _ask(last, f"again {last}"), {"metrics": True})
    return pauses


def _fskv(*words: str, root: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fskv_tools", *words, "--root", root]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _said(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return out, err


def test_two_live_engines_are_pruned_once_and_then_watched(root, tmp_path):
    transfer = lab.connector(root, hybrid_chunk_size=128, keep_free=0)
    talks, engines = [], []
    for own in (1, 2):
        talk = lab.Conversation(tmp_path / f"engine{own}")
        talks.append((talk.directory, _steps(talk, own)))
        request = lab.request(MODEL, talk.steps, transfer=transfer)
        engines.append(lab.start_engine(request, talk.directory))

    def both_are_at(number):
        def reached():
            assert all(engine.running for engine in engines)
            return all((at / f"{pauses[number]}.reached").exists() for at, pauses in talks)

        wait_for(reached, lab.ENGINE_TIMEOUT_S)

    def go_on(number):
        for directory, pauses in talks:
            (directory / f"{pauses[number]}.go").touch()

    sampler = Sampler(root, 0.05)
    watcher = None
    try:
        both_are_at(0)
        sampler.start()
        stored = count(root)[0]
        assert stored > 100 * FILE_NBYTES
        bound = stored // 2
        first = {path: os.stat(path).st_ino for path in lab.chunks(root)}
        go_on(0)
        removed = 0
        for _ in range(5):  # where not enough can be removed it says so
            once = _fskv("prune", "--max-size", str(bound), "--yes", "--json", root=root)
            summary = json.loads(_said(once)[0].splitlines()[-1])
            assert summary["unremovable"] == 0
            assert once.returncode == (0 if summary["reached"] else 3), summary
            removed += summary["removed_nbytes"]
            if summary["reached"]:
                break
        assert summary["reached"]
        assert removed >= stored - bound
        # Half of what had to go at least: the engines use and write files all the time.
        gone = [path for path, inode in first.items() if not _is_same(path, inode)]
        assert len(gone) * FILE_NBYTES >= (stored - bound) // 2

        both_are_at(1)
        assert count(root)[0] > bound, "nothing bounds the engines yet"
        watcher = _fskv("prune", "--watch", "--max-size", str(bound), "--yes", root=root)
        wait_for(lambda: count(root)[0] <= bound, 60)
        reached = len(sampler.nbytes) + 1
        go_on(1)
        results = [engine.wait() for engine in engines]
        assert watcher.poll() is None
        sampler.stop()
        # How much is above the bound for a moment is a question of how fast the machine is: less than half of
        # what the engines wrote. See docs/architecture.md, "Capacity".
        assert max(sampler.nbytes[reached:]) <= bound + WRITTEN_NBYTES // 2
        assert max(sampler.nbytes[reached:]) > bound // 2, "it was not held by removing everything"
        wait_for(lambda: count(root)[0] <= bound, 60)
        watcher.send_signal(signal.SIGTERM)
        assert "counts and prunes" in _said(watcher)[1]
        assert watcher.returncode == 0
    finally:
        for engine in engines:
            engine.kill()
        if watcher is not None:
            watcher.kill()
            watcher.communicate()
        sampler.stop()
    _judge(results, root)


def _is_same(path: str, inode: int) -> bool:
    """Return whether a path names the file of this inode: one that was removed may be stored again."""
    try:
        return os.stat(path).st_ino == inode
    except FileNotFoundError:
        return False


def _judge(results: list[dict], root: str) -> None:
    tokens: dict[str, list[int]] = {}
    hits = recomputed = 0
    for result in results:
        assert result["exit_code"] == 0, result.get("error")
        assert bad_lines(result["log_path"]) == []
        for label, one in lab.generates(result).items():
            when, _, number = label.partition(" ")
            # The same prompt has the same tokens, whichever engine, loaded or recomputed.
            assert one["tokens"] == tokens.setdefault(number, one["tokens"]), label
            if when == "again":
                hits += one["num_cached_tokens"] > 0
                recomputed += one["num_cached_tokens"] < PROMPT_TOKENS // 128 * 128
        (metrics,) = lab.metrics(result)
        for reason in ("corrupt", "stale"):
            assert lab.counter(metrics, "load_failures", reason=reason) == 0
    assert hits, "nothing was ever loaded"
    assert recomputed, "nothing of it had been pruned"
    lab.assert_sound(root)
