"""`fskv version`."""

from __future__ import annotations

import importlib.util

from fskv import __version__
from fskv.format import chunk_file

from ..options import JsonOption
from ..terminal import emit

LINES = {
    "summary": {
        "version": "of fskv",
        "format": "of the files that it reads and writes",
        "native": "whether the C extension was built",
    }
}


def command(as_json: JsonOption = False) -> None:
    """Print the version of fskv, of the on-disk format, and whether the C extension was built."""
    built = importlib.util.find_spec("fskv._native") is not None
    if as_json:
        emit("summary", version=__version__, format=chunk_file.FORMAT_VERSION, native=built)
        return
    how = "with the C extension" if built else "without the C extension, which engines need"
    print(f"fskv {__version__}, on-disk format {chunk_file.FORMAT_VERSION}, {how}")
