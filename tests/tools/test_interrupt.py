"""Ctrl-C in each command, at moments spread over all that it does: 130, no traceback, nothing half done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from places import REPOSITORY
from tool_lab import Lab, key_of

DRIVER = REPOSITORY / "tests" / "lab" / "interrupted.py"
NOISE = ("Traceback", "Exception ignored", "was destroyed", "never awaited", "Error")
COMMANDS = {
    "ls": "ls --fresh",
    "ls --chunks": "ls --chunks",
    "ls --path": "ls --path org/model",
    "top": "top --once",
    "report": "report --html {at}/out/page.html",
    "du": "du",
    "inspect": f"inspect {key_of(77).hex()}",
    "verify": "verify --read-data",
    "doctor": "doctor",
    "prune": "prune --max-size 100KiB --yes",
    "rm": "rm org/model --yes",
    "prune garbage": "prune --yes",
    "copy": "copy --to {at}/new --create",
    "diff": "diff org/model org/other",
    "explain": f"explain org/model --tokens [{','.join(map(str, range(640)))}]",
    "plan": "plan {at}/config.json",
    "replay": "replay {at}/trace",
    "bench": "bench {at}/out --chunk-kib 64 --threads 1 --rounds 1 --total-mib 1",
}


@pytest.fixture
def template(tmp_path):
    """A root, and what the commands are given."""
    place = tmp_path / "template"
    lab = Lab(place / "kv")
    for name in ("org/model", "org/other"):
        where = lab.namespace(model_name=name, hash_seed="default")
        lab.chunks(where, range(20))
    lab.chunk(where, 77)
    for name in ("out", "new"):
        (place / name).mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "dtype": "float16"}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 4096}
    (place / "config.json").write_text(json.dumps(config))
    request = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    (place / "trace").write_text(f"{json.dumps(request)}\n" * 3)
    return place


def start(template, at, line, *options):
    """Run a command on a copy, with SIGINT before its call `at`; returns what it said and where."""
    place = template.parent / f"at-{at}"
    shutil.copytree(template, place)
    words = [word.format(at=place) for word in line.split()]
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(at), *options, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "FSKV_ROOT": str(place / "kv")},
        timeout=120,
        start_new_session=True,
    )
    return done, place


def interrupt(template, line, moments):
    whole, _ = start(template, 0, line)
    assert whole.returncode in (0, 1, 3), whole.stderr
    calls = int(whole.stderr.split()[-1])
    for number in range(moments):
        at = int(calls * (number + 0.5) / moments)
        done, place = start(template, at, line)
        # Until `fskv` handles it, it dies of it: a shell says 130.
        code = 130 if done.returncode == -signal.SIGINT else done.returncode
        assert (code, noise(done)) == (130, []), (at, calls, done.stderr)
        assert half_done(template, place) == [], (at, calls)
        shutil.rmtree(place)


def noise(done):
    return [word for word in NOISE if word in done.stderr]


def half_done(template, place):
    """Return the files that are neither whole nor gone."""
    files = [path for path in place.rglob("*") if path.is_file()]
    found = [path for path in files if path.suffix == ".part" or "fskv-bench" in str(path)]
    for path in files:
        under = path.relative_to(place).parts
        source = template.joinpath("kv", *under[1:])
        if path.suffix == ".kv" and source.exists() and path.read_bytes() != source.read_bytes():
            found.append(path)
    return found


@pytest.mark.parametrize("name", ["copy", "rm"])
def test_ctrl_c_is_130_without_a_traceback_and_nothing_is_half_done(template, name):
    interrupt(template, COMMANDS[name], 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_twenty_moments(template, name):
    interrupt(template, COMMANDS[name], 20)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])  # from its half on typer 0.29 has a handler, too
def test_negative_control_without_the_handler_it_is_a_traceback(template, share):
    whole, _ = start(template, 0, COMMANDS["ls --path"], "plain")
    at = int(int(whole.stderr.split()[-1]) * share)
    done, _ = start(template, at, COMMANDS["ls --path"], "plain")
    assert "Traceback" in noise(done)


KILL = "os.kill(os.getpid(), 2)"
LOST = f"""
    class Last:
        def __del__(self): {KILL}
    Last()
    time.sleep(2)"""


@pytest.mark.parametrize("handled", [True, False])
def test_an_interrupt_that_a_destructor_loses_is_one_word(tmp_path, handled):
    """Negative control: with Python's own handler it is a traceback."""
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import fskv_tools.{'__main__' if handled else 'cli'} as program\n"
        "from fskv_tools import root_view\n"
        f"def view(root):{LOST}\n"
        "root_view.RootView.open = view\n"
        "program.main()\n"
    )
    words = [sys.executable, "-c", script, "ls", "--root", "/x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    if handled:
        assert (done.returncode, done.stderr) == (130, "interrupted\n")
    else:
        assert noise(done)


def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    script = (
        "import os, time, fskv_tools.__main__ as program\n"
        "from fskv_tools import root_view\n"
        "def view(root):\n"
        f"    try: {KILL}\n    finally: {KILL}; time.sleep(60)\n"
        "root_view.RootView.open = view\n"
        "program.main()\n"
    )
    words = [sys.executable, "-c", script, "ls", "--root", "/x"]
    assert subprocess.run(words, timeout=30).returncode == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("protected", [True, False])
def test_whatever_signal_ends_a_copy_leaves_no_part(template, number, protected):
    """A signal comes while the pool starts a thread, which is then in no list of the pool.

    Negative control: where the signal interrupts the main thread, the thread's part stays.
    """
    script = (
        "import contextlib, os, threading, time\n"
        "import fskv_tools.__main__ as program\n"
        "from fskv_tools import copying\n"
        "from fskv_tools.commands import copy\n"
        + "copy.stopped_by_signals = lambda: contextlib.nullcontext(threading.Event())\n"
        * (not protected)
        + "real, calls, sent = copying.publish_chunk, iter([1]), threading.Event()\n"
        "def publish(*words):\n"
        f"    if next(calls, 0): os.kill(os.getpid(), {number:d}); sent.set(); time.sleep(0.5)\n"
        "    real(*words)\n"
        "copying.publish_chunk = publish\n"
        "started = threading.Thread.start\n"
        "def start(thread):\n"
        "    started(thread)\n"
        '    if thread.name.startswith("ThreadPool"): sent.wait(20)\n'
        "threading.Thread.start = start\n"
        "program.main()\n"
    )
    new = template / "new"
    words = ["copy", "--root", str(template / "kv"), "--to", str(new), "--create"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (128 + number, "interrupted\n")
    assert bool(list(new.rglob("*.part"))) is not protected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", ["copy", "rm", "prune"])
def test_the_exit_code_names_the_signal(template, name, number):
    script = (
        "import contextlib, os\n"
        "import fskv_tools.__main__ as program\n"
        f"from fskv_tools.commands import {name} as command\n"
        "real = command.stopped_by_signals\n"
        "@contextlib.contextmanager\n"
        "def stopped():\n"
        f"    with real() as stop: os.kill(os.getpid(), {number:d}); yield stop\n"
        "command.stopped_by_signals = stopped\n"
        "program.main()\n"
    )
    words = [word.format(at=template) for word in COMMANDS[name].split()]
    done = subprocess.run(
        [sys.executable, "-c", script, *words, "--root", str(template / "kv")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.endswith("interrupted\n")
