"""What a command costs from start to exit, on a small root: CPU time of its process, and wall time.

Every command once in each round, one after the other, each as a process of its own, as a user starts it.
Without --root the root is made: a namespace of 100 small files.

    python -m benchmarks.command_start [--root DIR] [--rounds 7] [--json]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks.options import parser, positive, settings
from benchmarks.report import command, publish, show, spread
from benchmarks.rig import BenchmarkError
from benchmarks.verify import make_root

_COMMANDS = ("version", "ls --path", "--help", "ls --json", "ls", "du")
_NEEDS_ROOT = {"ls", "du"}


def once(words: list[str]) -> tuple[float, float]:
    """Return CPU and wall time of a command in ms; raises BenchmarkError if it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fskv_tools", *words], capture_output=True, check=False
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise BenchmarkError(
            f"fskv {' '.join(words)}: exit code {done.returncode}: {done.stderr!r:.300}"
        )
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu * 1000, wall * 1000


def main() -> int:
    made = parser("command_start", __doc__)
    made.add_argument("--root", help="a cache root (one of 100 files)")
    made.add_argument("--rounds", type=positive, default=7, help="(7)")
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="fskv-start-", dir=options.dir) as directory:
        root = options.root or os.path.join(directory, "root")
        if options.root is None:
            make_root(root, 100, 16 * 1024)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in _COMMANDS}
        for _ in range(options.rounds):
            for name, values in times.items():
                words = name.split()
                values.append(once(words + ["--root", root] * (words[0] in _NEEDS_ROOT)))
    cpu = {name: spread([one for one, _ in values], 1) for name, values in times.items()}
    wall = {name: spread([one for _, one in values], 1) for name, values in times.items()}
    publish(
        "command_start",
        {**settings(options), "cpu_ms": cpu, "wall_ms": wall},
        (
            "from start to exit, ms: median [least - greatest]",
            ("command", "CPU", "wall"),
            [(f"fskv {name}", show(cpu[name], 0), show(wall[name], 0)) for name in _COMMANDS],
        ),
        as_json=options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(command("command_start", main))
