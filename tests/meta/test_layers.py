"""The house keeps its floors: imports point down, each package has one home, and files stay small."""

from __future__ import annotations

import ast
import fnmatch
import functools
import graphlib
import re
import subprocess
import sys
import tomllib

import pytest
from places import REPOSITORY
from test_docs import rows, text_of

MAX_LINES = 550  # explanations included

# The table of docs/architecture.md, "The house": the layer of each pattern. The longest that matches counts.
LAYERS = {
    pattern: int(layer[1:])
    for layer, (cell, _) in rows(text_of("docs/architecture.md"), "layer").items()
    for pattern in re.findall(r"`(.*?)`", cell)
}

# package -> where it may be imported. Everything that is not here and not in the standard library is new.
HOMES = {
    "vllm": ("fskv.engines*",),
    "sglang": ("fskv.engines.sglang*",),
    "lmcache": ("fskv.engines.lmcache*",),
    "msgspec": ("fskv.engines.sglang.server",),
    "kvikio": ("fskv.gds_io", "fskv.data_path.transports*"),
    # what vLLM's models were built with, and where their parts lie
    "transformers": ("fskv.engines*",),
    "huggingface_hub": ("fskv.identity.checkpoint_place",),
    # bounds: the messages between an engine and the process that maintains its root
    "msgpack": ("fskv.format.chunk_file", "fskv.index*", "fskv.bounds*"),
    # block_hashes: the engine's own keys, where it hashes with xxhash
    "xxhash": (
        *("fskv.format.chunk_file", "fskv.format.integrity", "fskv.namespace"),
        *("fskv.index*", "tools.block_hashes"),
    ),
    # bench --cuda: KV pages on a GPU
    "torch": (
        *("fskv.gds_io", "fskv.data_path.transports*", "fskv.offload.mover"),
        *("fskv.engines*", "tools.bench.store", "tools.commands.bench"),
    ),
    "triton": ("fskv.data_path.transports*",),
    "numpy": (
        *("fskv.format.spans", "fskv.gds_io", "fskv.data_path.transports*", "fskv.engines*"),
        *("fskv.index*", "fskv.bounds.evict"),
        *("tools.pruning", "tools.usage", "tools.bench.store"),
    ),
    "aiofiles": ("fskv.index*", "fskv.bounds.evict"),
    "typer": ("tools*",),
    "rich": ("tools*",),
    # top reads what engines publish, prune --watch publishes
    "prometheus_client": ("tools.endpoint", "tools.exporter", "fskv.engines.prometheus"),
    # report
    "jinja2": ("tools.commands.report",),
    "cryptography": ("tools.check.sealed",),
    # block_hashes: the engine's own keys, where it hashes with a *_cbor algorithm
    "cbor2": ("tools.block_hashes",),
    # explain --prompt --tokenizer, where vLLM is
    "tokenizers": ("tools.explain.tokens",),
    # doctor --config, where vLLM is
    "yaml": ("tools.doctor.serve_line",),
}
# What a pure module has no use for: files, clocks, threads, processes, the network.
IMPURE = {
    *("asyncio", "io", "mmap", "multiprocessing", "os", "pathlib", "shutil", "socket"),
    *("subprocess", "tempfile", "threading", "time"),
}


def module_name(path):
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for folder in ("fskv", "tools")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
}

KNOWN = {*MODULES, "fskv._native"}


def within(module, patterns):
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def layer_of(module):
    fitting = [pattern for pattern in LAYERS if within(module, [pattern])]
    return LAYERS[max(fitting, key=len)] if fitting else None


@functools.cache
def imports(source, module):
    """Return the modules that a module's source imports, at its own import or later."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = f"{module.rsplit('.', node.level)[0]}.{base}".rstrip(".")
            base = base.replace("fskv_tools", "tools")
            # `from package import name`: the name may be a module of it
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in KNOWN else base for name in inner}
    return found


def complaints(module, source):
    """Say what is wrong with a module, one line each."""
    own = layer_of(module)
    if own is None:
        return [f"{module} has no layer"]
    found = []
    if (count := source.count("\n")) > MAX_LINES:
        found.append(f"{module} has {count} lines, more than {MAX_LINES}")
    for name in imports(source, module):
        package = name.partition(".")[0]
        if package in ("fskv", "tools"):
            layer = layer_of(name)
            if layer is None or layer > own:
                found.append(f"{module} (layer {own}) imports {name} (layer {layer})")
            if own == layer == 4 and package != module.partition(".")[0]:
                found.append(f"{module} imports {name}: engines and tools never each other")
            if within(name, ["tools.commands*"]) and not within(module, ["tools.commands*"]):
                found.append(f"{module} imports {name}: a room knows no command")
        elif package in sys.stdlib_module_names:
            if own <= 1 and package in IMPURE:
                found.append(f"{module} is pure and imports {package}")
        elif not within(module, HOMES.get(package, ())):
            found.append(f"{module} is no home of {package}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may_and_is_small(module):
    assert complaints(module, MODULES[module].read_text(encoding="utf-8")) == []


def test_every_pattern_of_the_table_is_of_a_module():
    assert [one for one in LAYERS if not fnmatch.filter(KNOWN, one)] == []


def test_no_two_modules_of_a_layer_import_each_other():
    graph = {
        module: imports(path.read_text(encoding="utf-8"), module) & MODULES.keys()
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(
        {module: names - {module, "fskv"} for module, names in graph.items()}
    ).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("fskv.types", "import fskv.errors, fskv.config", "imports fskv.config (layer 1)"),
        ("fskv.config", "from fskv.data_path import store", "fskv.data_path.store (layer 3)"),
        (
            "fskv.root.root",
            "def f():\n    from fskv.data_path.runner import JobRunner",
            "imports fskv.data_path.runner",
        ),
        ("fskv.data_path.store", "from fskv.engines.vllm import worker", "imports fskv.engines"),
        ("fskv.engines.vllm.worker", "from fskv_tools import cli", "never each other"),
        ("tools.cli", "import fskv.engines.vllm.worker", "never each other"),
        ("tools.usage", "from .commands.du import By", "knows no command"),
        ("fskv.data_path.store", "from msgpack import packb", "no home of msgpack"),
        ("fskv.errors", "import requests", "no home of requests"),
        ("fskv.format.chunk_file", "from time import time", "is pure and imports time"),
        ("fskv.unheard_of", "", "has no layer"),
    ],
)
def test_negative_control_a_bad_import_is_found(module, source, complaint):
    assert any(complaint in found for found in complaints(module, source))


def test_negative_control_a_long_file_is_found():
    good = (
        "import os\nfrom fskv.data_path.transports import host\ndef f():\n    import torch, kvikio"
    )
    assert complaints("fskv.gds_io", good) == []
    assert "lines" in complaints("fskv.gds_io", good + "\n" * MAX_LINES)[0]


def test_an_installation_has_every_package():
    """A package that the list lacks is there in a checkout and absent after `pip install .`."""
    project = tomllib.loads(text_of("pyproject.toml"))
    assert set(project["tool"]["setuptools"]["packages"]) == {
        re.sub(r"^tools", "fskv_tools", module)
        for module, path in MODULES.items()
        if path.name == "__init__.py"
    }


def loaded_by(*modules):
    """Return the packages that a fresh interpreter has loaded after these imports."""
    statement = f"import {', '.join(modules)}"
    code = f"import sys; {statement}; print(*{{n.partition('.')[0] for n in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_fskv_or_its_tools_loads_neither_torch_nor_an_engine():
    """What a machine may lack, or what takes long, is imported where it is used."""
    heavy = {"torch", "vllm", "kvikio", "cupy", "triton", "huggingface_hub"}
    assert not loaded_by("fskv") & (heavy | {"numpy"})
    core = [name for name in MODULES if within(name, ["fskv*"]) and "engines" not in name]
    assert not loaded_by(*core) & heavy
    tools = [name.replace("tools", "fskv_tools", 1) for name in MODULES if within(name, ["tools*"])]
    lazy = {"jinja2", "yaml", "cbor2", "cryptography"}
    assert not loaded_by(*(one for one in tools if "__main__" not in one)) & (heavy | lazy)
    assert "numpy" in loaded_by("numpy")  # the probe itself sees what is loaded
