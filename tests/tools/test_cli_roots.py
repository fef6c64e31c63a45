"""Every command on roots of every kind, and with arguments of every kind.

No traceback, no undocumented field or exit code, nothing unprintable, and no file that a command which only
looks has changed. `run` calls in this process and lets any exception through but those of an exit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import threading
import unicodedata

import pytest
from fskv_tools import cli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_lab import Lab, check_lines, key_of, lines_of, run, spoil
from world import damage

EXITS = {0, 1, 2, 3, 10}

# What only looks: command -> arguments; {ns} and {key} are put in, {out} is a path outside of the root.
LOOKS = {
    "ls": ["ls"],
    "ls fresh": ["ls", "--fresh", "--sort", "used"],
    "ls chunks": ["ls", "--chunks"],
    "ls paths": ["ls", "--path"],
    "du": ["du"],
    "inspect": ["inspect", "{key}"],
    "verify": ["verify", "--read-data"],
    "diff": ["diff", "{ns}", "{ns}"],
    "explain": ["explain", "{ns}", "--tokens", "[1, 2, 3, 4, 5]"],
    "doctor": ["doctor"],
    "top": ["top", "--once", "--interval", "0.2"],
    "report": ["report", "--html", "{out}/page.html"],
    "copy": ["copy", "--to", "{out}/copy", "--create", "--dry-run"],
    "prune": ["prune", "--max-size", "1MiB", "--dry-run"],
    "prune unused": ["prune", "--unused-for", "1d", "--dry-run"],
    "rm": ["rm", "{ns}", "--dry-run"],
    "prune garbage": ["prune", "--dry-run"],
}
# What a neighbour may write as the epoch of a namespace, and engines' own.
EPOCHS = [
    *({"private": f"{number:032x}"} for number in range(3)),
    {"model": {"run": "r7", "version": "42"}, "draft": {"checkpoint": "sampled:" + "e" * 64}},
    {"private": {"\x1b[31m": ["\n", None]}},
    {"model": "\u202e" * 5000, "\r\n[bold]": [1e300, {"": True}]},
    {"model": functools.reduce(lambda tree, _: {"run": tree}, range(30), "deep")},
]
NO_JSON = {"ls paths", "report", "top"}


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out" / "copy").mkdir(parents=True)
    return str(tmp_path / "out")


def words(name, where, out):
    values = {"{ns}": where.id if where else "some", "{key}": key_of(3).hex()}
    return [values.get(word, word.replace("{out}", out)) for word in LOOKS[name]]


def content(directory):
    """Return what is in a tree: kind, length and bytes of each entry."""
    found = {}
    for parent, directories, files in os.walk(os.fsencode(directory)):
        for name in directories + files:
            path = os.path.join(parent, name)
            info = os.lstat(path)
            digest = b""
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    digest = hashlib.sha256(file.read()).digest()
            found[path] = (info.st_mode, info.st_ino, digest)
    # Where engines tell each other things a command may have made room for a probe.
    return {k: v for k, v in found.items() if b"/.fskv-" not in k}


def check(name, done):
    assert done.exit_code in EXITS, done
    shown = done.stdout + done.stderr
    if done.stderr.startswith("Usage:"):  # typer's words, with the user's own in them
        assert not any(unicodedata.category(c) == "Cc" and c != "\n" for c in shown)
    else:
        assert all(c.isprintable() or c == "\n" for c in shown)
    if done.lines:
        check_lines(name.split()[0], done.lines)


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("kind", ["good", "empty", "hostile", "damaged", "epochs"])
def test_a_command_that_looks_says_what_it_finds_and_changes_nothing(kind, name, lab, out):
    where = None
    if kind != "empty":
        where = lab.namespace()
        paths = lab.chunks(where, range(12))
    if kind == "hostile":
        spoil(lab, where)
    if kind == "epochs":
        for epoch in EPOCHS:
            lab.chunks(lab.namespace(epoch=epoch), range(2))
    if kind == "damaged":
        other = lab.namespace(model_name="org/other")
        lab.chunks(other, range(3))
        damage(f"{other.directory.path}/namespace.json", 5)
        damage(paths[0], 100)
        damage(paths[1], os.path.getsize(paths[1]) - 1)
        os.truncate(paths[2], 5000)
        os.truncate(paths[3], 0)
        shutil.copy(paths[4], paths[5])
    before = content(lab.path)
    for options in ([],) if name in NO_JSON else ([], ["--json"]):
        shutil.rmtree(out)
        os.makedirs(f"{out}/copy")
        done = run(*words(name, where, out), *options, root=lab.path)
        check(name, done)
        if kind in ("good", "epochs") and name != "explain":
            assert done.exit_code == 0, done
        if options:
            assert (done.summary is not None) == (done.exit_code in (0, 1, 3)), done
    assert content(lab.path) == before


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_no_root_is_exit_10_for_every_command(name, tmp_path, out):
    roots = [
        tmp_path / kind for kind in ("missing", "empty", "newer", "damaged", "foreign", "file")
    ]
    for path in roots[1:-1]:
        path.mkdir()
    (tmp_path / "newer" / "fskv.json").write_text('{"format": 2}')
    (tmp_path / "damaged" / "fskv.json").write_text("")
    (tmp_path / "foreign" / "holiday.jpg").write_bytes(b"")
    (tmp_path / "file").write_text("")
    for path in roots:
        before = content(tmp_path)
        done = run(*words(name, None, out), root=path)
        check(name, done)
        # To doctor it is a finding, unless an engine would make it a root.
        expected = (path.name != "empty") if name == "doctor" else 10
        assert done.exit_code == expected, (path, done)
        assert content(tmp_path) == before
        assert path.name != "missing" or not path.exists()


def test_a_command_meets_a_root_that_changes_under_it(lab, out):
    """Another process stores, renames and unlinks all the time."""
    where = lab.namespace()
    lab.chunks(where, range(200))
    stop = threading.Event()

    def churn():
        number = 0
        while not stop.is_set():
            number = (number + 1) % 200
            path = lab.chunk(where, number)  # in place: its writer renames, so a copy is put there
            shutil.copy(path, f"{path}.tmp")
            os.rename(f"{path}.tmp", path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(lab.chunk(where, (number + 100) % 200))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for name in LOOKS:
            if name != "verify":  # its own tests write as writers do
                check(name, run(*words(name, where, out), root=lab.path))
    finally:
        stop.set()
        thread.join()


# --- arguments --------------------------------------------------------------------------

NASTY = [
    *("", "-", "--", "-1", "0", "1", "9" * 40, "1e999", "nan", "inf", "0x10", "1/0", "1/8", "9/8"),
    *("5%", "101%", "999999999TiB", "1.5GiB", "2GB", "12h", "9999w", "..", "../..", "/", "~"),
    *("/dev/null", "%s%n", "\x1b[31m", "\n", "\u202e", "\ud800", "é", "a" * 5000, "[1,2", "{}"),
    *("[" * 5000, "null", "org", "g0", "cpu-x86_64/org--model@", "0" * 64, "abc.g0"),
    *("abc.g99999999999", "@", "*", "?", "'", ";", "$(x)"),
]
FUZZED = sorted({entry.name for entry in cli.COMMANDS} - {"bench"})


def option_names(name):
    return [
        declared
        for one in cli.load(name).params
        if one.param_type_name == "option"
        for declared in one.opts
        # A daemon; a file that is to be made anywhere; a server.
        if declared not in ("--watch", "--html", "--metrics", "--root", "--to")
    ]


@pytest.mark.parametrize("name", FUZZED)
def test_no_argument_makes_a_traceback(name, tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("fuzz")
    lab = Lab(directory / "kv")
    where = lab.namespace()
    lab.chunks(where, range(3))
    monkeypatch.chdir(directory)
    options = option_names(name)
    word = st.one_of(
        st.sampled_from(NASTY), st.sampled_from(options or NASTY), st.text(max_size=20)
    )
    always = {"top": ["--once", "--interval", "0.2"], "doctor": ["--timeout", "5"]}.get(name, [])
    codes = set()

    @settings(
        max_examples=20 if name in ("doctor", "top", "report", "copy") else 40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(word, max_size=5))
    def attempt(arguments):
        text = [part.replace("\0", "") for part in arguments if part != "--interval"]
        done = run(name, *text, *always, root=lab.path, stdin="")
        codes.add(done.exit_code)
        check(name, done)

    attempt()
    assert 2 in codes  # nonsense was met


def test_negative_control_the_checks_here_see_what_they_look_for(lab):
    where = lab.namespace()
    before = content(lab.path)
    path = lab.chunk(where, 1)
    assert content(lab.path) != before
    before = content(lab.path)
    damage(path, 9)
    assert content(lab.path) != before
    done = run("ls", "--json", root=lab.path)
    del done.lines[0]["digest"]
    with pytest.raises(AssertionError):
        check("ls", done)
    assert lines_of("ls")
    assert json.dumps(done.summary)
