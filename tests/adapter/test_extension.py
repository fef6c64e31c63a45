"""Without the C extension an engine refuses in one sentence before any weights, and commands read a root."""

from __future__ import annotations

import subprocess
import sys

import engine_lab
import pytest
import world
from places import REPOSITORY
from world import World

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")
pytestmark = world.VLLM

SENTENCE = "fskv.errors.ConfigError: fskv's C extension cannot be loaded"


def run(code, *, there):
    missing = "" if there else "import sys; sys.modules['fskv._native'] = None\n"
    return subprocess.run(
        [sys.executable, "-c", missing + code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(*words):
    return f"import sys; sys.argv = {['fskv', *words]!r}\nfrom tools.cli import main; main()"


@pytest.mark.parametrize("there", [False, True], ids=["missing", "control"])
def test_what_other_engines_stand_on_refuses_in_one_sentence(there):
    done = run("import fskv.offload.kv_store", there=there)
    assert (done.returncode == 0) is there, done.stderr
    assert (SENTENCE in done.stderr) is not there


def test_vllm_hears_it_while_it_builds_its_configuration(tmp_path):
    """It asks for the connector's class then. The plug-in itself is imported by every process.

    The control is every engine that starts.
    """
    program = tmp_path / "way_in.py"
    program.write_text("""
import sys
sys.modules["fskv._native"] = None
from fskv.engines.vllm.plugin import register
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
try:
    KVConnectorFactory._registry["FskvConnector"]()
except Exception as error:
    print(f"{type(error).__module__}.{type(error).__name__}: {error}")
""")
    assert SENTENCE in engine_lab.run_program(str(program))


def test_the_command_line_reads_a_root(tmp_path):
    made = World(tmp_path / "kv", faults=False)
    made.put(1, made.content())
    for words in (["ls"], ["du"], ["verify", "--read-data"]):
        done = run(command(*words, "--root", made.root), there=False)
        assert done.returncode in (0, 1), (
            done.stderr
        )  # 1: a chunk of the test's own making is stale
        assert "Traceback" not in done.stderr
    done = run(command("--version"), there=False)
    assert "which engines need" in done.stdout
    done = run(command("doctor", "--root", made.root), there=False)
    assert "engines refuse to start" in done.stdout
    assert "Traceback" not in done.stderr
    done = run(command("bench", made.root), there=False)
    assert done.returncode == 2
    assert "C extension cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr
