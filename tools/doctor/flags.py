"""The options that the installed vLLM takes on its command line, and which of a line are not among them.

They are read out of vLLM's source, where they are fields of its argument classes and literals of its parsers:
importing vLLM takes half a minute.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import glob
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache

_SOURCES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
_OPTION = re.compile(r"--[a-z][-a-z0-9]*")


@cache
def known() -> frozenset[str]:
    """Return the options of the installed vLLM, such as `--model`; none where it is not installed."""
    found = importlib.util.find_spec("vllm")
    where, names = os.path.dirname(found.origin or "") if found else "", set()
    paths = [path for each in _SOURCES for path in glob.glob(f"{where}/{each}", recursive=True)]
    for path in paths if where else ():
        with contextlib.suppress(OSError, ValueError, SyntaxError), open(path, "rb") as file:
            for node in ast.walk(ast.parse(file.read())):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add("--" + node.target.id.replace("_", "-"))
                elif isinstance(node, ast.Constant) and _OPTION.fullmatch(str(node.value)):
                    names.add(str(node.value))
    return frozenset(names)


def unknown(options: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each option that vLLM does not take. An unambiguous beginning of one is taken."""
    for option in options:
        name = "--" + re.sub("^no-", "", option.removeprefix("--").replace("_", "-"))
        if not any(each.startswith(name) for each in known()):
            near = difflib.get_close_matches(name, sorted(known()), n=1, cutoff=0.7)
            more = f"; did you mean {near[0]}?" if near else ""
            yield f"{option}: found an option that `vllm serve` does not have{more}"
