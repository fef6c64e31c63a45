"""Does a test notice when a safety check is gone? Deliberate faults, one after the other.

`mutants.diff` holds the faults. A row of tests/promises.tsv with `mutant NAME` names the test of a fault.
All of them run on an unchanged copy of the tree first. Then each fault is made in a copy of its own, and its
tests run until one fails.

Exit code 1 when a fault survived; 2 when one does not fit the tree any more, or its tests fail without it.

    python -m trials.mutants [NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import command

REPOSITORY = Path(__file__).resolve().parents[1]
_FAULTS = "trials/mutants.diff"
_PROMISES = "tests/promises.tsv"
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", ".*_cache", "__pycache__")
_BUILD = "import sys; from benchmarks.gpu.extension import build; sys.exit(build())"
_WHERE = "import fskv, fskv_tools; print(fskv.__file__, fskv_tools.__file__)"
_TEST = re.compile(r"\t(\w+/test_\w+[.]py::\w+)\t")
_LIMIT_S = 1800.0  # of one run of tests; it is over long before


class FaultError(ValueError):
    """A fault that cannot be made or judged."""


@dataclass(slots=True)
class Fault:
    """One change of one file, and the tests that have to notice it."""

    name: str
    path: str
    tests: list[str]
    removed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def is_native(self) -> bool:
        """Whether the C extension has to be built anew."""
        return self.path.endswith(".c")

    def apply(self, text: str) -> str:
        """Return the file's text with the fault in it; raises FaultError."""
        end = "" if self.added else "\n"
        old, new = "\n".join(self.removed) + end, "\n".join(self.added)
        if (count := text.count(old)) != 1 or old == new:
            raise FaultError(f"{self.name}: its text is {count} times in {self.path}, not once")
        return text.replace(old, new)


def tests_of(name: str, promises: str) -> list[str]:
    """Return the tests of the rows of the table that name a fault."""
    rows = [line for line in promises.splitlines() if f"mutant `{name}`" in line]
    return [f"tests/{_TEST.findall(row)[0]}" for row in rows]


def read_faults() -> dict[str, Fault]:
    """Return all faults by their names; raises FaultError for one that no promise names."""
    promises = (REPOSITORY / _PROMISES).read_text()
    found: dict[str, Fault] = {}
    path = ""
    for line in (REPOSITORY / _FAULTS).read_text().splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "===":
            path = rest
        elif kind == "@@":
            fault = found[rest] = Fault(rest, path, tests_of(rest, promises))
            if not fault.tests:
                raise FaultError(f"{rest}: no row of {_PROMISES} names it")
        elif line.startswith("-"):
            fault.removed.append(line[1:])
        elif line.startswith("+"):
            fault.added.append(line[1:])
    return found


class Copy:
    """A copy of the tree with its own C extension."""

    def __init__(self, directory: str) -> None:
        self.path = Path(directory) / "tree"
        shutil.copytree(REPOSITORY, self.path, ignore=_NOT_COPIED, symlinks=True)
        # As an installation has it: before that of the environment on the path.
        (self.path / "fskv_tools").symlink_to("tools")

    def make(self, fault: Fault) -> None:
        """Put a fault into this copy; raises FaultError."""
        path = self.path / fault.path
        path.write_text(fault.apply(path.read_text()))
        if fault.is_native:
            code, said = self._run("-c", _BUILD)
            if code:
                raise FaultError(f"{fault.name}: the extension does not build: {said}")

    def failing(self, tests: Sequence[str]) -> str:
        """Run tests until one fails; return what failed, empty where all pass. Raises FaultError."""
        # -P: by the path that a child process gets, and not because it starts in the copy.
        _, found = self._run("-P", "-c", _WHERE)
        if found.count(f"{self.path}/") != 2:
            raise FaultError(f"not the code of the copy would run: {found}")
        code, said = self._run(
            *("-m", "pytest", "-xq", "-p", "no:cacheprovider"),
            *(f"--basetemp={self.path.parent / 'tmp'}", *tests),
        )
        if code == 0:
            return ""
        if code in (3, 4, 5):  # pytest did not run them
            raise FaultError(f"pytest {' '.join(tests)}: {said[-2000:]}")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return failed[1] if failed else f"exit code {code}"

    def _run(self, *words: str) -> tuple[int, str]:
        environment = {
            "FSKV_CHECKPOINTS": str(REPOSITORY / ".cache" / "checkpoints"),  # made once for all
            **os.environ,
            "PYTHONPATH": str(self.path),
        }
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=self.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                return 1, f"not over after {_LIMIT_S:.0f} s"
            finally:  # after Ctrl-C too: nothing of it goes on
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said


@contextlib.contextmanager
def fresh_copy() -> Iterator[Copy]:
    # A faulty product may leave what cannot be removed.
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o755)  # some tests start a process as another user  # noqa: S103
        yield Copy(directory)


def survivors(faults: Sequence[Fault]) -> list[str]:
    """Run the tests of each fault without it and with it; return the faults that nothing noticed."""
    with fresh_copy() as copy:
        if failed := copy.failing(sorted({test for fault in faults for test in fault.tests})):
            raise FaultError(f"{failed} fails without any fault")
    found = []
    for fault in faults:
        begin = time.monotonic()
        with fresh_copy() as copy:
            copy.make(fault)
            failed = copy.failing(fault.tests)
        if not failed:
            found.append(fault.name)
        word = f"killed by {failed}" if failed else "SURVIVED"
        print(f"{fault.name:38} {time.monotonic() - begin:4.0f} s  {word}", flush=True)
    return found


def run(names: Sequence[str]) -> int:
    faults = read_faults()
    if unknown := [name for name in names if name not in faults]:
        raise FaultError(f"{unknown[0]}: no such fault; {_FAULTS} names them")
    chosen = [faults[name] for name in names or faults]
    for fault in chosen:
        fault.apply((REPOSITORY / fault.path).read_text())
    survived = survivors(chosen)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed", *survived)
    return bool(survived)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trials.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults (all)")
    names = parser.parse_args(arguments).names
    return command("trials.mutants", lambda: run(names))


if __name__ == "__main__":
    sys.exit(main())
