"""A running node program (shared_fs.node), as the tests see it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shared_fs.letterbox import Letterbox

if TYPE_CHECKING:
    from shared_fs.netns import Client

_TESTS = Path(__file__).resolve().parents[1]
_REPLY_S = 90.0  # longer than any limit in the program: only one in state D takes so long


class Program:
    """Steps of shared_fs.node as methods: `program.lookup(numbers=[1])`."""

    def __init__(self, directory: str, node: Client) -> None:
        self.box = Letterbox(directory)
        self._node = node
        path = os.pathsep.join([str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")])
        env = f"PYTHONPATH={shlex.quote(path)} PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1"
        command = f"{sys.executable} -m shared_fs.node {directory} >{directory}/log 2>&1"
        node.launch(f"echo $$ >{directory}/pid; exec env {env} {command}")

    def kill(self) -> None:
        """End the program, also while its threads hang in the file system."""
        with contextlib.suppress(FileNotFoundError), open(f"{self.box.directory}/pid") as file:
            self._node.end(int(file.read()))

    def post(self, step: str, **arguments) -> str:
        return self.box.post(step=step, **arguments)

    def wait(self, ticket: str, timeout_s: float = _REPLY_S) -> dict:
        return self.box.wait(ticket, timeout_s)

    def ask(self, step: str, **arguments) -> dict:
        return self.wait(self.post(step, **arguments))

    # --- what most tests need ---------------------------------------------------------------

    def store(self, *numbers: int, **options) -> list[str]:
        return self.ask("store", numbers=numbers, **options)["statuses"]

    def load(self, *numbers: int) -> list[str]:
        """Load and compare: what is ok holds what was stored, what is not was not touched."""
        reply = self.ask("load", numbers=numbers)
        assert reply["num_wrong"] == 0, f"chunks {numbers} are {reply['statuses']}: wrong pages"
        return reply["statuses"]

    def comes_to_load(self, *numbers: int) -> bool:
        """Look until all hit, then load, as a request that comes back; False if it has to come once more."""
        self.ask("lookup", numbers=numbers, until_hit=True, limit_s=30)
        return self.load(*numbers) == ["ok"] * len(numbers)

    def look(self, *numbers: int, **options) -> list[str]:
        answers = self.ask("lookup", numbers=numbers, **options)["answers"]
        return [presence for presence, _ in answers]

    def path(self, number: int) -> str:
        """The chunk's path below the root."""
        return self.ask("path", number=number)["path"]
