"""The first process of a User-Mode-Linux node: runs the shell commands that arrive in its letterbox."""

from __future__ import annotations

import subprocess
import sys

from shared_fs.letterbox import serve


def run(request: dict) -> dict:
    """Run a command to its end, on a thread of its own: one that hangs must not block the next."""
    done = subprocess.run(
        ["/bin/bash", "-c", request["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        check=False,
    )
    return {"code": done.returncode, "output": done.stdout.decode(errors="replace")}


if __name__ == "__main__":
    serve(sys.argv[1], run, parallel=True)
