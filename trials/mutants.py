"""Does a test notice when the product breaks a promise? Deliberate faults, one after the other.

Each fault of `trials.mutant_kinds` is made in a fresh copy of the tree (what git knows or would add, and the
built extension, which is built anew where the fault is in C). There the tests run until one fails: first the
files that stand for the promise, then, if none of theirs did, all that `make test` selects below tests/unit,
tests/adapter, tests/tools and tests/engines, the fast ones first. A fault that nothing notices has SURVIVED:
a test is missing. tests/meta is left out: it compares the tree with itself, and these faults with it. In the
end the tests that have noticed run on an unchanged copy: what fails there as well has noticed nothing.

Exit code 1 when a fault survived; 2 when one does not fit the tree any more, when the tests could not be run,
or when the unchanged tree fails them (`--control`).

    python -m trials.mutants [NAME ...] [--list] [--control] [--near] [--json] [--select "tests/unit -k x"]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.report import command, publish, say
from trials.mutant_kinds import FAULTS, Fault, FaultError

REPOSITORY = Path(__file__).resolve().parents[1]
_MARKS = ("-m", "not slow and not shared_fs")
_FOLDERS = ("tests/unit", "tests/adapter", "tests/tools", "tests/engines")
_ALWAYS = ("-q", "-p", "no:cacheprovider")
_BUILD = "import sys; from benchmarks.gpu.extension import build; sys.exit(build())"
_WHERE = """
import importlib.util as u
print(*(u.find_spec(n).origin for n in ("fskv", "fskv_tools", "fskv._native") if u.find_spec(n)), sep="\\n")
"""
_LIMIT_S = 5400.0  # of one run of the tests; it is over long before
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one fault."""

    fault: str
    killed: bool
    by: str  # the test; empty for a survivor
    problem: str  # why nobody knows, mostly empty
    expected: bool  # one of the files that stand for the promise has noticed
    seconds: float


# --- a copy of the tree -----------------------------------------------------------------


def tree_files() -> list[str]:
    """Return the files of the tree, from its root. Raises FaultError where git does not know it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        raise FaultError(f"{REPOSITORY}: not a checkout: {listed.stderr.decode().strip()}")
    names = listed.stdout.decode().split("\0")
    return [name for name in names if name and (REPOSITORY / name).is_file()]


class Copy:
    """The tree once more, somewhere else, with its own extension."""

    def __init__(self, directory: str) -> None:
        self.path = Path(directory) / "tree"
        self._scratch = Path(directory) / "t"
        extensions = [str(p.relative_to(REPOSITORY)) for p in self._extensions(REPOSITORY)]
        for name in (*tree_files(), *extensions):
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target)
        # As an installation has it: before that of the environment on the path.
        (self.path / "fskv_tools").symlink_to("tools")

    def make(self, fault: Fault) -> None:
        """Put a fault into this copy; raises FaultError."""
        path = self.path / fault.path
        path.write_text(fault.apply(path.read_text()))
        if fault.is_native:
            self.build(fault.name)

    def build(self, why: str) -> None:
        """Build the extension anew; raises FaultError."""
        for old in self._extensions(self.path):
            old.unlink()
        done = self._run([sys.executable, "-c", _BUILD], _LIMIT_S)
        if done.returncode:
            raise FaultError(f"{why}: the extension does not build:\n{done.stdout[-3000:]}")

    def test(self, words: Sequence[str], *, stop: bool = True) -> list[str]:
        """Run tests, with `stop` until one fails; returns those that failed. Raises FaultError."""
        self._check_what_runs()
        line = [sys.executable, "-m", "pytest", *words, *_ALWAYS, f"--basetemp={self._scratch}"]
        try:
            done = self._run(line + ["-x"] * stop, _LIMIT_S)
        except subprocess.TimeoutExpired:
            return [f"not over after {_LIMIT_S:.0f} s"]
        if done.returncode == 0:
            return []
        if done.returncode < 0:
            return [f"ended by {signal.Signals(-done.returncode).name}"]
        failed = [str(test) for test in _FAILED.findall(done.stdout)]
        if not failed:  # no test of that name, an option that pytest does not know
            raise FaultError(f"pytest {shlex.join(words)}:\n{done.stdout[-3000:]}")
        return failed

    def _check_what_runs(self) -> None:
        # -P: by the path that a child process gets, and not because it starts in the copy.
        found = self._run([sys.executable, "-P", "-c", _WHERE], _LIMIT_S).stdout.split("\n")
        wanted = 3 if self._extensions(self.path) else 2
        inside = [line for line in found if line.startswith(f"{self.path}/")]
        if len(inside) != wanted:
            raise FaultError(f"not the code of the copy would run: {', '.join(found)}")

    def _run(self, line: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        environment = {
            "FSKV_CHECKPOINTS": str(REPOSITORY / ".cache" / "checkpoints"),  # made once for all
            **os.environ,
            "PYTHONPATH": str(self.path),
        }
        with subprocess.Popen(
            line,
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
                output, _ = process.communicate(timeout=limit_s)
            except BaseException:  # Ctrl-C too: nothing of it goes on
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(line, process.returncode, output)

    @staticmethod
    def _extensions(tree: Path) -> list[Path]:
        return sorted(tree.glob("fskv/_native*.so"))


@contextlib.contextmanager
def fresh_copy() -> Iterator[Copy]:
    # A faulty product may leave what cannot be removed.
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o755)  # some tests start a process as another user  # noqa: S103
        yield Copy(directory)


# --- one fault after the other ----------------------------------------------------------


def selections(fault: Fault, options: argparse.Namespace) -> list[list[str]]:
    """Return what to run, as words for pytest: each only if the one before has noticed nothing."""
    if options.select is not None:
        return [shlex.split(options.select)]
    near = [*fault.tests, *_MARKS]
    return [near] if options.near else [near, [*_FOLDERS, *_MARKS]]


def examine(fault: Fault, options: argparse.Namespace) -> Result:
    """Make the fault in a copy and run tests there."""
    start = time.monotonic()
    failed, problem, expected = [""], "", True
    try:
        with fresh_copy() as copy:
            copy.make(fault)
            for number, words in enumerate(selections(fault, options)):
                failed, expected = copy.test(words) or [""], number == 0
                if failed[0]:
                    break
    except FaultError as error:
        problem = str(error)
    seconds = round(time.monotonic() - start, 1)
    return Result(fault.name, bool(failed[0]), failed[0], problem, expected, seconds)


def confirmed(results: Sequence[Result]) -> list[Result]:
    """Run what has killed on the unchanged tree: a test that fails there too has noticed nothing."""
    tests = sorted({result.by for result in results if "::" in result.by})
    if not tests:
        return list(results)
    say("the tests that have killed, on the unchanged tree ...")
    with fresh_copy() as copy:
        wrong = copy.test(tests, stop=False)
    problem = "the test that noticed fails on the unchanged tree too: "
    return [
        replace(one, killed=False, problem=problem + one.by) if one.by in wrong else one
        for one in results
    ]


def control(faults: Sequence[Fault], options: argparse.Namespace) -> None:
    """Run the same tests on the unchanged tree; raises FaultError where one fails."""
    with fresh_copy() as copy:
        if any(fault.is_native for fault in faults):
            copy.build("control")
        if options.select is not None:
            words = shlex.split(options.select)
        elif options.near:
            words = [*dict.fromkeys(test for fault in faults for test in fault.tests), *_MARKS]
        else:
            words = [*_FOLDERS, *_MARKS]
        say("control: the tests on the unchanged tree ...")
        failed = copy.test(words)
    if failed:
        raise FaultError(f"control: the unchanged tree fails {failed[0]}")


def chosen(names: Sequence[str]) -> list[Fault]:
    """Return the faults of these names, all if there are none; each fits the tree. Raises FaultError."""
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in by_name]:
        raise FaultError(f"{unknown[0]}: no such fault; --list names them")
    found = [by_name[name] for name in names] or list(FAULTS)
    for fault in found:
        fault.apply((REPOSITORY / fault.path).read_text())
    return found


def run(options: argparse.Namespace) -> int:
    faults = chosen(options.names)
    if options.list:
        for fault in faults:
            print(f"{fault.name:31} {fault.path:31} {fault.promise}")
        return 0
    if options.control:
        control(faults, options)
    results = []
    for number, fault in enumerate(faults, 1):
        results.append(examine(fault, options))
        print(f"{number} of {len(faults)}: {_line(results[-1])}", file=sys.stderr)
    results = confirmed(results)
    report(results, options)
    if any(result.problem for result in results):
        return 2
    return 0 if all(result.killed for result in results) else 1


# --- what is said -----------------------------------------------------------------------


def _line(result: Result) -> str:
    word = "PROBLEM" if result.problem else "killed" if result.killed else "SURVIVED"
    return f"{result.fault:31} {word:8} {result.seconds:5.0f} s  {_by(result)}".rstrip()


def _by(result: Result) -> str:
    """Return the test that noticed; one of the files that stand for the promise, or it is said."""
    if result.problem:
        return result.problem.partition("\n")[0]
    own = result.expected or not result.killed
    return result.by if own else f"{result.by} (and none of its own tests)"


def report(results: Sequence[Result], options: argparse.Namespace) -> None:
    survived = [one.fault for one in results if not one.killed and not one.problem]
    killed = sum(result.killed for result in results)
    if options.json:
        facts = {
            "selection": options.select or ("near" if options.near else "all"),
            "faults": [asdict(result) for result in results],
            "survived": survived,
        }
        publish("mutants", facts, ("", (), ()), as_json=True)
        return
    print(f"{'fault':31} {'':8} {'time':>7}  by")
    for result in results:
        print(_line(result))
    print(f"{killed} of {len(results)} killed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="trials.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="faults (all)")
    add("--list", action="store_true", help="name the faults and the promises that they break")
    add("--json", action="store_true", help="print one line of JSON instead of the table")
    add("--control", action="store_true", help="first the same tests on the unchanged tree")
    add("--near", action="store_true", help="only the tests that stand for each promise (minutes)")
    add("--select", metavar="WORDS", help="these words for pytest instead, for every fault")
    options = parser.parse_args(arguments)
    return command("trials.mutants", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
