"""Are the answers the same with KV from files? Greedy answers of a real model to many questions.

One engine computes a document's KV, stores it, and answers every question with what it computed. A second one
loads the document for each question, its own prefix cache emptied before. Then the files of one KV group are
zeroed, under right checksums, and it answers again: the control, which must give other answers.

    python -m benchmarks.answers --model DIR [--questions 200] [--tokens 1100] [--dir DIR] [--json]

DIR holds real weights and tokenizer.json. Needs vLLM. Exit code 1: an answer differs, or none does in the
control.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.options import parser, positive, settings
from benchmarks.questions import Documents
from benchmarks.report import judged, publish
from benchmarks.rig import BenchmarkError, work_directory
from demo.engine import SETTLE, generates, start_engine
from faults.files import by_group, chunk_files, zero_payload

BLOCK_TOKENS, ANSWER_TOKENS = 128, 12
ENGINE_S = 7200.0
RESET = {"reset_prefix_cache": True}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines and compare; the facts."""
    document = Documents(options.model, number=1, tokens=options.tokens)
    prompts = [document.prompt(0, number) for number in range(options.questions)]
    with work_directory(options.dir) as directory:
        root = f"{directory}/root"
        os.mkdir(root)
        first = _run(options, root, f"{directory}/first", [*_asked(prompts, "computed"), *SETTLE])
        loaded = [step for asked in _asked(prompts, "loaded") for step in (asked, RESET)]
        zeroed = [step for asked in _asked(prompts, "zeroed") for step in (asked, RESET)]
        reached, go = f"{directory}/reached", f"{directory}/go"
        pause = [{"touch_file": reached}, {"wait_for_file": go, "timeout_s": 600}]
        engine = _start(options, root, f"{directory}/second", [*loaded, *pause, *zeroed])
        try:
            while engine.running and not os.path.exists(reached):
                time.sleep(0.5)
            groups = by_group(chunk_files(root))
            for path in groups[max(groups)]:  # the last one is of full attention
                zero_payload(path)
            with open(go, "w"):
                pass
            second = engine.wait(ENGINE_S)
        finally:
            engine.kill()
    if second["exit_code"] != 0:
        raise BenchmarkError(f"the engine failed: {second.get('error')}")
    answers = generates(first) | generates(second)
    facts: dict[str, Any] = {"settings": settings(options), "groups": len(groups)}
    for how in ("loaded", "zeroed"):
        pairs = [(answers[f"computed{n}"], answers[f"{how}{n}"]) for n in range(len(prompts))]
        facts[how] = {
            "same": sum(one["tokens"] == other["tokens"] for one, other in pairs),
            "from_files": min(other["num_cached_tokens"] for _, other in pairs),
        }
    facts["good"] = (
        facts["loaded"]["same"] == options.questions
        and facts["loaded"]["from_files"] > 0
        and facts["zeroed"]["same"] < options.questions
    )
    return facts


def _asked(prompts: list[list[int]], label: str) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": prompt, "max_tokens": ANSWER_TOKENS, "label": f"{label}{number}"}
        for number, prompt in enumerate(prompts)
    ]


def _has_windows(options: argparse.Namespace) -> bool:
    with open(f"{options.model}/config.json") as file:
        config = json.load(file)
    kinds = config.get("layer_types")
    return "sliding_attention" in kinds if kinds else bool(config.get("sliding_window"))


def _start(options: argparse.Namespace, root: str, directory: str, steps: list[Any]) -> Any:
    fskv = {
        "root": root,
        "hybrid_chunk_size": BLOCK_TOKENS,
        "lookup_timeout_s": 60,  # a busy machine is waited for
        "maintenance": "off",
    }
    return start_engine(
        {
            "model": options.model,
            "engine": {
                "dtype": "float32",
                "block_size": BLOCK_TOKENS,
                # A model without windows is refused with it.
                "prefix_cache_retention_interval": BLOCK_TOKENS if _has_windows(options) else 0,
            },
            "kv_transfer_config": {
                "kv_connector": "FskvConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": fskv,
            },
            "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            "flush": False,
            "steps": steps,
        },
        directory,
    )


def _run(
    options: argparse.Namespace, root: str, directory: str, steps: list[Any]
) -> dict[str, Any]:
    result: dict[str, Any] = _start(options, root, directory, steps).wait(ENGINE_S)
    if result["exit_code"] != 0:
        raise BenchmarkError(f"the engine failed: {result.get('error')} (see {result['log_path']})")
    return result


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = [
        [
            name,
            f"{facts[how]['same']} of {options.questions}",
            str(facts[how]["from_files"]),
        ]
        for how, name in (
            ("loaded", "KV loaded from files"),
            ("zeroed", "control: one group zeroed"),
        )
    ]
    asked = f"{options.questions} questions, {ANSWER_TOKENS} tokens of answer each"
    title = f"{asked}, {facts['groups']} KV groups."
    columns = ("", "answers as computed", "tokens from files, least")
    publish("answers", facts, (title, columns, rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("answers", __doc__)
    made.add_argument("--model", required=True, help="directory of a checkpoint with real weights")
    made.add_argument("--questions", type=positive, default=200, help="(200)")
    made.add_argument("--tokens", type=positive, default=1100, help="of the document (1100)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return judged("answers", parse(arguments), measure, report)


if __name__ == "__main__":
    sys.exit(main())
