"""Builds the C sources of tests and faults: shims and stubs, never part of the product."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from places import LAB, REPOSITORY

SOURCES = {
    source.stem: source
    for source in (*(LAB / "native").glob("*.c"), REPOSITORY / "faults" / "disk.c")
}
_FLAGS = ("-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter")


def build(name: str, directory: Path, *flags: str, file_name: str | None = None) -> str:
    """Return the path of the library made from the source called NAME; made once for each content of it.

    Skips the test where there is no C compiler. Safe when several processes build at once.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler here (cc or gcc): {SOURCES[name]} cannot be built")
    source = SOURCES[name]
    command = [compiler, *_FLAGS, *flags]
    digest = hashlib.sha256("\0".join(command).encode() + source.read_bytes()).hexdigest()[:16]
    library = directory / digest / (file_name or f"lib{name}.so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".so")
        os.close(handle)
        done = subprocess.run(
            [*command, "-o", unfinished, str(source), "-ldl", "-lpthread"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{source} does not compile:\n{done.stderr}"
        os.chmod(unfinished, 0o755)
        os.rename(unfinished, library)
    return str(library)
