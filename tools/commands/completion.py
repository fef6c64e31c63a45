"""`fskv completion`: the script that a shell needs to complete fskv's commands, options and namespaces."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def command(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the completion script of a shell.

    For bash: `fskv completion bash > ~/.local/share/bash-completion/completions/fskv`.
    """
    script = get_completion_script(
        prog_name="fskv", complete_var="_FSKV_COMPLETE", shell=shell.value
    )
    print(script)
