"""A trial or a benchmark as a command whose last word is one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys

from places import REPOSITORY


def facts_of(module, directory, *arguments, timeout=200):
    """Run it on a directory, and return its exit code and facts; nothing of it may be left there.

    The timeout only bounds a hang.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, "--json", "--dir", str(directory), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert list(directory.iterdir()) == [], "something was left behind"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done.returncode, json.loads(lines[0])
