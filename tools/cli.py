"""The `fskv` command: which commands there are, and how each of them ends.

A command's module is imported when the command is used, so that a start costs what that command needs:
`fskv --version` imports neither numpy nor rich, and nothing but `bench --cuda` imports torch.

Results go to stdout, everything else to stderr. No traceback reaches the user for what a disk or an argument
can do: `tools.exits` has the exceptions and the exit codes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import signal
import sys
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from fskv import __version__
from fskv.errors import ConfigError, FskvError, RootError

from . import interrupt
from .exits import UNSEEN, CommandError, Exit, leave
from .terminal import say


class Entry(NamedTuple):
    """A command in the table: `help` is what `fskv --help` says of it."""

    name: str
    panel: str
    help: str

    @property
    def module(self) -> str:
        return f"{__package__}.commands.{self.name}"


LOOK, TRUST, BOUND = "Look", "Check and explain", "Keep in bounds or move"
MEASURE = "Measure"
COMMANDS = (
    Entry("ls", LOOK, "List namespaces, or the chunks in them."),
    Entry("top", LOOK, "Watch a root and its engines on a live screen."),
    Entry("report", LOOK, "Write one HTML page about a root."),
    Entry("du", LOOK, "Show disk usage by namespace, tenant and group."),
    Entry("inspect", LOOK, "Show a chunk file's header, spans and rows, and judge it."),
    Entry("verify", TRUST, "Check names, headers and data of chunk files."),
    Entry("doctor", TRUST, "Check machine, mount and root, with remedies."),
    Entry("prune", BOUND, "Remove garbage and the least recently used chunks, once or always."),
    Entry("rm", BOUND, "Remove whole namespaces."),
    Entry("copy", BOUND, "Copy chunks from one root to another, every byte checked."),
    Entry("diff", TRUST, "Say why two engines do not share."),
    Entry("explain", TRUST, "Say why a prompt would hit or miss."),
    Entry("plan", MEASURE, "Plan chunks, disk and load time from a model's config.json."),
    Entry("bench", MEASURE, "Measure a mount: how fast is it, and which options suit it?"),
    Entry("replay", MEASURE, "Replay a request trace: how much would hit at which size?"),
)
_BY_NAME = {entry.name: entry for entry in COMMANDS}
_METAVARS = {"int range": "N", "float range": "NUMBER", "str": "TEXT"}  # as docs/cli.md has them


def load(name: str) -> Any:
    """Import a command's module and return its command object."""
    function = importlib.import_module(_BY_NAME[name].module).command
    # No boxes: their columns cut the names of options on a narrow terminal.
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    one.command(name, help=_paragraphs(function.__doc__))(function)
    command = typer.main.get_command(one)
    command.name = name
    for parameter in command.params:
        parameter.metavar = parameter.metavar or _METAVARS.get(parameter.type.name)
    return command


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph: a terminal breaks them."""
    return "\n\n".join(
        " ".join(paragraph.split()) for paragraph in inspect.cleandoc(docstring).split("\n\n")
    )


class _Group(TyperGroup):
    """The group of commands: loads a command on use, and turns its exceptions into a sentence and an exit
    code.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_BY_NAME)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command that can be listed; see `resolve_command`."""
        entry = _BY_NAME.get(cmd_name)
        if entry is None:
            return None
        listed = typer.core.TyperCommand(entry.name, help=entry.help, rich_help_panel=entry.panel)
        listed.short_help = entry.help
        return listed

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, args)
        except (BrokenPipeError, SystemExit) as error:  # of the help; rich makes exit code 1 of it
            if isinstance(error, SystemExit) and error.code != 1:
                raise  # of --show-completion
            leave(signal.SIGPIPE)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is to run, imported."""
        self.commands = {name: self.get_command(ctx, name) for name in _BY_NAME}  # "did you mean"
        name, command, rest = super().resolve_command(ctx, args)
        command = load(name) if name in _BY_NAME else command
        interrupt.arm()
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        UNSEEN.clear()
        try:
            result = super().invoke(ctx)
        except typer.Exit as ended:
            if ended.exit_code == Exit.OK and UNSEEN:
                raise typer.Exit(Exit.PARTIAL) from None
            raise
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(Exit.INTERRUPTED) from None
        except BrokenPipeError:
            leave(signal.SIGPIPE)
        except (CommandError, FskvError, OSError, MemoryError) as error:
            say(f"fskv: {_words(error)}")
            raise typer.Exit(_code(error)) from None
        if UNSEEN:
            raise typer.Exit(Exit.PARTIAL)
        return result


def _words(error: Exception) -> str:
    """Return the words of an error, without the system's number for it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).removeprefix("option 'root': ") or type(error).__name__


def _code(error: Exception) -> Exit:
    if isinstance(error, CommandError):
        return error.exit
    if isinstance(error, RootError):
        return Exit.NOT_A_ROOT
    return Exit.USAGE if isinstance(error, ConfigError) else Exit.PROBLEMS


app = typer.Typer(
    name="fskv",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from fskv.format.chunk_file import FORMAT_VERSION

        built = importlib.util.find_spec("fskv._native") is not None
        how = "with the C extension" if built else "without the C extension, which engines need"
        print(f"fskv {__version__}, on-disk format {FORMAT_VERSION}, {how}")
        raise typer.Exit


@app.callback()
def _fskv(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the versions."
        ),
    ] = False,
) -> None:
    """Look into an fskv cache root, explain it, check it, measure it, and keep it in bounds.

    Commands that read a root take --root DIR or the environment variable FSKV_ROOT.

    Exit codes: 0 all is well, 1 problems found, 2 bad argument, 3 a part not done, 10 not a root.
    """


def main() -> None:
    """Entry point of the console script."""
    _open_streams()
    try:
        try:
            app(prog_name="fskv")
        finally:
            interrupt.disarm()
            sys.stdout.flush()
    except BaseException as ended:
        if number := interrupt.disarm():
            _interrupted(number, ended)
        if isinstance(ended, BrokenPipeError):
            leave(signal.SIGPIPE)
        if not isinstance(ended, OSError):
            raise
        say(f"fskv: output: {_words(ended)}")  # of the help, or of what was left in the buffer
        # The rest of the buffer has no reader; Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.PROBLEMS)


def _interrupted(number: int, ended: BaseException) -> NoReturn:
    """End after a signal, whatever KeyboardInterrupt has become on its way, before destructors tell of it."""
    if getattr(ended, "code", None) != Exit.INTERRUPTED:
        say("interrupted")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    leave(number)


def _open_streams() -> None:
    """Replace streams that were closed (`>&-`): no file of a root may get the number of a stream.

    The new stdin is empty, the new stderr discards its text, and a write to the new stdout fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            os.set_inheritable(os.open(os.devnull, flags), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
