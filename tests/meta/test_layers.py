"""The house keeps its floors: imports point down, each package has one home, and files stay small."""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import sys
import tokenize
import tomllib

import pytest
from places import REPOSITORY

MAX_CODE_LINES = 425  # docstrings and comments do not count: nobody pays for explaining

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

# docs/architecture.md, "The house". A name ending in "." is a room and all that is in it; the longest name
# that fits counts.
LAYERS = {
    0: (
        *("fskv", "fskv._native", "fskv._version"),
        *("fskv.errors", "fskv.native", "fskv.sizes", "fskv.types"),
    ),
    1: (
        "fskv.config",
        "fskv.kv_transfer.",
        "fskv.format.",
        "fskv.hybrid_planner",
        "fskv.namespace",
        "fskv.root.mounts",
    ),
    2: (
        "fskv.data_path.breaker",
        "fskv.data_path.threads",
        "fskv.gds_io",
        "fskv.identity.",
        "fskv.index.",
        "fskv.observe.",
        "fskv.root.",
        "fskv.data_path.transports.",
    ),
    3: ("fskv.bounds.", "fskv.data_path.", "fskv.maintenance", "fskv.offload."),
    4: ("fskv.engines.", "tools."),
}

# package -> where it may be imported. Everything that is not here and not in the standard library is new.
HOMES = {
    "vllm": ("fskv.engines.",),
    "sglang": ("fskv.engines.sglang.",),
    "lmcache": ("fskv.engines.lmcache.",),
    "msgspec": ("fskv.engines.sglang.server",),
    "kvikio": ("fskv.gds_io", "fskv.data_path.transports."),
    # what images are, as vLLM's own names of them are made
    # what vLLM's models were built with, and where their parts lie
    "transformers": ("fskv.engines.",),
    "huggingface_hub": ("fskv.identity.checkpoint_place",),
    # bounds: the messages between an engine and the process that maintains its root
    "msgpack": ("fskv.format.chunk_file", "fskv.index.", "fskv.bounds."),
    # block_hashes: the engine's own keys, where it hashes with xxhash
    "xxhash": (
        *("fskv.format.chunk_file", "fskv.format.integrity", "fskv.namespace"),
        *("fskv.index.", "tools.block_hashes"),
    ),
    # bench --cuda: KV pages on a GPU
    "torch": (
        *("fskv.gds_io", "fskv.data_path.transports.", "fskv.offload.mover"),
        *("fskv.engines.", "tools.bench.store", "tools.commands.bench"),
    ),
    "triton": ("fskv.data_path.transports.",),
    "numpy": (
        "fskv.format.spans",
        "fskv.gds_io",
        "fskv.data_path.transports.",
        "fskv.engines.",
        "fskv.index.",
        "fskv.bounds.evict",
        "tools.survey",
        "tools.pruning",
        "tools.bench.store",
    ),
    "aiofiles": ("fskv.index.", "fskv.bounds.evict"),
    "typer": ("tools.",),
    "rich": ("tools.",),
    # top and report read what engines publish, prune --watch publishes
    "prometheus_client": (
        *("tools.endpoint", "tools.exporter"),
        "fskv.engines.prometheus",
    ),
    # report
    "matplotlib": ("tools.report.",),
    "jinja2": ("tools.report.",),
    # block_hashes: the engine's own keys, where it hashes with a *_cbor algorithm
    "cbor2": ("tools.block_hashes",),
    # explain --prompt --tokenizer, where vLLM is
    "tokenizers": ("tools.explain.tokens",),
    # doctor --config, where vLLM is
    "yaml": ("tools.doctor.serve_line",),
}
# Only where they are used, so that a machine without them can import the module.
LAZY = {
    "torch": ("fskv.gds_io", "fskv.data_path.transports.", "fskv.offload.", "tools."),
    "huggingface_hub": ("fskv.",),
    "kvikio": ("fskv.",),
    "triton": ("fskv.",),
    "matplotlib": ("tools.",),
    "jinja2": ("tools.",),
    "yaml": ("tools.",),
    "cbor2": ("tools.",),
}
# What a pure module has no use for: files, clocks, threads, processes, the network.
IMPURE = {
    "asyncio",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}


PACKAGES = {
    ".".join(init.parent.relative_to(REPOSITORY).parts)
    for folder in ("fskv", "tools")
    for init in (REPOSITORY / folder).rglob("__init__.py")
}


def within(module, names):
    return any(
        module.startswith(name) or module == name[:-1] if name.endswith(".") else module == name
        for name in names
    )


def layer_of(module):
    fitting = [
        (len(name), layer)
        for layer, names in LAYERS.items()
        for name in names
        if within(module, (name,))
    ]
    return max(fitting)[1] if fitting else None


def module_name(path):
    parts = list(path.relative_to(REPOSITORY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(source, module):
    """List (imported module, whether importing `module` imports it) of a module's source."""
    tree = ast.parse(source)
    lazy = set()
    for node in ast.walk(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body if function or checking else []:
            lazy.update(id(inner) for inner in ast.walk(statement))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                names = [f"{module.rsplit('.', node.level)[0]}.{node.module or ''}".rstrip(".")]
            elif node.module.replace("fskv_tools", "tools") in PACKAGES:
                # `from package import name`: the name may be a module of it
                for alias in node.names:
                    names.append(f"{node.module}.{alias.name}")
            else:
                names = [node.module]
        found += [(name.replace("fskv_tools", "tools"), id(node) not in lazy) for name in names]
    return found


def code_lines(source):
    """Return how many lines hold code."""
    explained = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                explained |= set(range(first.lineno, first.end_lineno + 1))
    held = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            held |= set(range(token.start[0], token.end[0] + 1))
    return len(held - explained)


def complaints(module, source):
    """Say what is wrong with a module, one line each."""
    own = layer_of(module)
    if own is None:
        return [f"{module} has no layer"]
    found = []
    if (count := code_lines(source)) > MAX_CODE_LINES:
        found.append(f"{module} has {count} lines of code, more than {MAX_CODE_LINES}")
    for name, at_import in imports(source, module):
        package = name.partition(".")[0]
        if package in ("fskv", "tools"):
            layer = layer_of(name)
            if layer is None:
                layer = layer_of(name.rpartition(".")[0])
            if layer is None or layer > own:
                found.append(f"{module} (layer {own}) imports {name} (layer {layer})")
            if own == 4 and layer == 4 and package != module.partition(".")[0]:
                found.append(f"{module} imports {name}: engines and tools never each other")
            if within(name, ("tools.commands.",)) and not within(module, ("tools.commands.",)):
                found.append(f"{module} imports {name}: a room knows no command")
        elif package in sys.stdlib_module_names:
            if own <= 1 and package in IMPURE:
                found.append(f"{module} is pure and imports {package}")
        elif not within(module, HOMES.get(package, ())):
            found.append(f"{module} is no home of {package}")
        elif at_import and within(module, LAZY.get(package, ())):
            found.append(f"{module} imports {package} before it is needed")
    return found


def modules():
    for folder in ("fskv", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield path, module_name(path)


@pytest.mark.parametrize(
    ("path", "module"), [pytest.param(path, module, id=module) for path, module in modules()]
)
def test_a_module_imports_only_what_its_layer_may_and_is_small(path, module):
    source = path.read_text(encoding="utf-8")
    assert complaints(module, source) == []


def test_no_two_modules_of_a_layer_import_each_other():
    graph = {}
    known = {module for _, module in modules()}
    for path, module in modules():
        names = {name for name, _ in imports(path.read_text(encoding="utf-8"), module)}
        graph[module] = {n if n in known else n.rpartition(".")[0] for n in names} & known

    def walk(module, path):
        assert module not in path, f"a circle of imports: {' -> '.join([*path, module])}"
        for name in graph[module] - {module, "fskv"}:
            walk(name, [*path, module])

    for module in graph:
        walk(module, [])


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
        ("fskv.gds_io", "try:\n    import kvikio\nexcept ImportError: pass", "before it is needed"),
        ("fskv.errors", "import requests", "no home of requests"),
        ("fskv.format.chunk_file", "from time import time", "is pure and imports time"),
        ("fskv.unheard_of", "", "has no layer"),
    ],
)
def test_negative_control_a_bad_import_is_found(module, source, complaint):
    assert any(complaint in found for found in complaints(module, source))


def test_negative_control_a_long_file_and_a_good_one_are_told_apart():
    good = (
        "import os\nfrom fskv.data_path.transports import host\ndef f():\n    import torch, kvikio"
    )
    most = good + "\n1" * (MAX_CODE_LINES - code_lines(good))
    assert complaints("fskv.gds_io", most) == []
    explained = f'"""Say.\n\nWhy."""\n{most}\n# because\n\n'
    assert complaints("fskv.gds_io", explained) == []
    assert complaints("fskv.gds_io", most + "\n1") != []


def packages_of(tree):
    """Return the packages of a source tree by the names under which they are installed."""
    return {
        ".".join([installed, *init.parent.relative_to(tree / directory).parts])
        for directory, installed in (("fskv", "fskv"), ("tools", "fskv_tools"))
        for init in (tree / directory).rglob("__init__.py")
    }


def test_an_installation_has_every_package(tmp_path):
    """A package that the list lacks is there in a checkout and absent after `pip install .`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["packages"]) == packages_of(REPOSITORY)
    for path in ("fskv/__init__.py", "tools/__init__.py", "tools/new/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert packages_of(tmp_path) == {"fskv", "fskv_tools", "fskv_tools.new"}  # it sees a new one


def loaded_by(statement):
    """Return the packages that a fresh interpreter has loaded after `statement`."""
    code = f"import sys; {statement}; print(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_fskv_loads_neither_torch_nor_an_engine():
    heavy = {"torch", "vllm", "kvikio", "cupy", "triton"}
    assert not loaded_by("import fskv") & (heavy | {"numpy"})
    everything = ", ".join(
        module for _, module in modules() if module.startswith("fskv") and "engines" not in module
    )
    assert not loaded_by(f"import {everything}") & heavy
    assert "numpy" in loaded_by("import numpy")  # the probe itself sees what is loaded
