"""How tables look: at 80 and 140 columns and without a terminal, whatever the names in them."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from pseudo_terminal import Terminal
from rich.cells import cell_len
from tool_lab import Lab, run, spoil


def on_terminal(columns, *words):
    """Run `fskv` on a terminal of so many columns; returns its lines without colours."""
    terminal = Terminal(*words, size=(50, columns), stderr=subprocess.PIPE)
    terminal.end()
    with terminal.child.stderr as said:
        assert b"Traceback" not in said.read()
    return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", terminal.seen).decode().splitlines()


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path / "kv")
    for name in ("org/short", "meta-llama/Llama-3.3-70B-Instruct", "an-organisation/" + "x" * 70):
        lab.chunks(lab.namespace(model_name=name, tenant="search"), range(3))
    return lab


PROMPT = f"explain --tokens {json.dumps(list(range(1000, 1064))).replace(' ', '')}"


@pytest.mark.parametrize("words", ["ls --chunks", "du", "plan NAMESPACE", PROMPT])
def test_a_narrow_terminal_breaks_no_word(tmp_path, monkeypatch, words):
    """Negative control: the lines of a wide terminal are too long for it."""
    lab = Lab(tmp_path / "kv")
    where = lab.namespace(hash_seed="default")
    lab.chunks(where, range(3))
    monkeypatch.chdir(tmp_path)
    words = [*words.replace("NAMESPACE", where.id).split(), "--root", "kv"]
    wide, narrow = (on_terminal(columns, *words) for columns in (140, 60))
    longest = [
        max(cell_len(line.rpartition("\r")[2]) for line in lines) for lines in (wide, narrow)
    ]
    assert longest[0] > 60 >= longest[1], narrow


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_listing_fits_and_every_digest_stays_whole(lab, columns):
    lines = on_terminal(columns, "ls", "--root", lab.path)
    assert max(map(cell_len, lines)) <= columns
    assert lines[0].split()[:2] == ["ARCH", "MODEL@DIGEST"]  # no blank line above
    assert lines[0].split()[-2:] == ["LAST", "USED"]  # the last column is not cut
    assert sum("search" in line for line in lines) == 3  # tenants
    ids = run("ls", "-q", root=lab.path).stdout.split()
    for one in ids:
        digest = one[-17:]
        assert any(digest in line for line in lines), (digest, lines)
    if columns == 140:
        assert any("meta-llama--Llama-3.3-70B-Instruct@" in line for line in lines)


def test_without_a_terminal_a_row_is_one_line_and_nothing_is_cut(lab):
    done = run("ls", root=lab.path)
    ids = run("ls", "-q", root=lab.path).stdout.split()
    rows = done.stdout.splitlines()
    assert len(rows) == 1 + len(ids) + 1
    for one in ids:
        assert sum(one.partition("/")[2] in row for row in rows) == 1


def test_hostile_names_are_shown_and_move_nothing(lab):
    where = lab.namespace(model_name="org/third")
    spoil(lab, where)
    os.mkdir(f"{lab.path}/cpu-x86_64/\x1b[2J\u202e[red]\n@{'0' * 16}")
    lines = on_terminal(80, "ls", "--root", lab.path)
    assert max(map(cell_len, lines)) <= 80
    assert any("@" + "0" * 16 in line for line in lines)
    assert "[red]" in "".join(lines)  # a text, no markup
    assert not any("\u202e" in line or "\x1b" in line for line in lines)
