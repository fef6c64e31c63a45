"""The command line as a whole: what every command has in common, and `ls` and `dir`.

Commands have tests of their own beside this; here each is run on roots of every kind, and no traceback, no
file out of place and no wrong exit code may come of it.
"""

from __future__ import annotations

import errno
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest
from tool_lab import check_lines, key_of, run, spoil

from fskv import __version__
from fskv.format.chunk_file import FORMAT_VERSION
from fskv.index import scan

# --- what all have in common ------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["ls --fresh", "ls --chunks", "du", "verify", "report --html {out}"]
)
def test_a_problem_goes_before_a_part_that_was_not_done(lab, monkeypatch, words):
    """3 means: no problem in what could be looked at."""
    one, other = lab.namespace(), lab.namespace(model_name="other")
    lab.chunk(other, 1)
    deny_listing(monkeypatch, os.path.dirname(lab.chunk(one, 1)))
    command = words.format(out=f"{lab.path}.html").split()
    assert run(*command, root=lab.path).exit_code == 3
    manifest = pathlib.Path(other.directory.path, "namespace.json")
    manifest.write_text("{}")
    assert run(*command, root=lab.path).exit_code == 1
    monkeypatch.undo()
    assert run(*command, root=lab.path).exit_code == 1


@pytest.mark.parametrize(
    "words",
    [
        *("ls --fresh", "ls --chunks", "du", "verify"),
        *("prune --unused-for 1d --dry-run", "rm org --dry-run", "copy --create --to {to}"),
    ],
)
def test_a_directory_that_cannot_be_listed_is_named_once_and_in_words(
    lab, tmp_path, monkeypatch, words
):
    (tmp_path / "to").mkdir()
    words = words.format(to=tmp_path / "to")
    directory = os.path.dirname(lab.chunk(lab.namespace(), 1))
    deny_listing(monkeypatch, directory)
    done = run(*words.split(), root=lab.path)
    assert done.exit_code == 3
    told = [line for line in done.stderr.splitlines() if "cannot be listed" in line]
    assert told == [f"{directory}: cannot be listed: denied"]


def deny_listing(monkeypatch, unlistable):
    real = scan._listed

    def fail(path, *rest):
        if path == unlistable:
            raise PermissionError(13, "denied", path)
        return real(path, *rest)

    monkeypatch.setattr(scan, "_listed", fail)


def test_an_unknown_command_is_a_usage_error_that_suggests_one():
    done = run("lss")
    assert done.exit_code == 2
    assert "Did you mean 'ls'" in done.stderr


def test_without_a_root_it_says_how_to_give_one():
    done = run("ls")
    assert done.exit_code == 2
    assert "--root" in done.stderr


def test_the_root_may_come_from_the_environment(lab):
    lab.namespace()
    assert run("ls", "-q", env={"FSKV_ROOT": lab.path}).stdout.count("\n") == 1


BROKEN = '{\n "kv_connector": "FskvConnector",\n "timestamp": }\n'
READS_JSON = {  # by an option or a word, which comes last
    "doctor": ["doctor", "--config"],
    "plan": ["plan"],
    "explain": ["explain", "--tokens"],
    "diff": ["diff"],
}


@pytest.mark.parametrize("name", READS_JSON)
def test_a_broken_json_file_is_one_line_that_names_file_line_and_column(lab, tmp_path, name):
    given = tmp_path / "given.json"
    lab.namespace()
    for content, where in ((BROKEN, "line 3 column 15"), (f"\n\n\n{BROKEN}", "line 6 column 15")):
        given.write_text(content)
        twice = [str(given)] * (1 + (name == "diff"))
        done = run(*READS_JSON[name], *twice, root=None if name == "plan" else lab.path)
        assert (done.exit_code in (1, 2, 10), done.stderr.count("\n")) == (True, 1), done
        assert f"{given}: no JSON: Expecting value: {where}" in done.stderr, done.stderr


@pytest.mark.parametrize("words", ["ls --chunks -q", "--help", "ls --help", "", "du"])
@pytest.mark.parametrize("num_chunks", [1, 3000], ids=["in the buffer", "more than a buffer"])
def test_the_reader_of_the_output_may_go_away(lab, words, num_chunks):
    if num_chunks > 1 and words != "ls --chunks -q":
        pytest.skip("as the other")
    lab.chunks(lab.namespace(pages=(16,)), range(num_chunks))
    read, write = os.pipe()
    os.close(read)  # nobody has read anything
    done = subprocess.run(
        [sys.executable, "-m", "fskv_tools", *words.split()],
        env={**os.environ, "FSKV_ROOT": lab.path},
        stdout=write,
        stderr=write if not words else subprocess.PIPE,
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr or b"") == (141, b"")


def completions(*words, **env):
    done = subprocess.run(
        [sys.executable, "-m", "fskv_tools"],
        env={
            **os.environ,
            **env,
            "_FSKV_COMPLETE": "complete_bash",
            "COMP_WORDS": shlex.join(["fskv", *words]),
            "COMP_CWORD": str(len(words)),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    "words",
    [*("ls", "du", "verify", "rm", "explain", "copy"), *("diff", "diff x", "prune --namespace")],
)
def test_every_command_that_takes_a_namespace_completes_it(lab, words):
    """Negative control: what begins otherwise is not offered."""
    where = lab.namespace(model_name="meta-llama/model")
    lab.namespace(model_name="other")
    name = where.id.partition("/")[2]
    shown = name.replace("--", "/", 1)
    cases = {"meta-llama/": [shown], where.id[:20]: [where.id], "meta-llama": [name], "nothing": []}
    for begin in cases if words == "ls" else ["meta-llama/"]:
        assert completions(*words.split(), begin, FSKV_ROOT=lab.path) == cases[begin]
    assert run("ls", "-q", shown, root=lab.path).stdout == f"{where.id}\n", "it is understood"


def test_a_shell_completes_commands_and_options(lab, tmp_path):
    assert completions("verif") == ["verify"]
    assert "--fresh" in completions("ls", "--fr")
    assert completions("ls", "org", FSKV_ROOT=str(tmp_path / "nothing")) == []


def test_the_option_version_says_all_that_a_report_of_a_bug_needs():
    found = f"fskv {__version__}, on-disk format {FORMAT_VERSION}, with the C extension\n"
    assert run("--version").stdout == run("-V").stdout == found


# --- ls -------------------------------------------------------------------------


def test_ls_counts_chunks_files_and_bytes_as_they_are_on_disk(lab):
    one = lab.namespace()
    other = lab.namespace(model_name="org/other", tenant="acme")
    paths = lab.chunks(one, range(30))
    ranks = lab.chunks(other, range(7), rank=0) + lab.chunks(other, range(7), rank=1)
    done = run("ls", "--json", root=lab.path)
    found = {line["namespace"]: line for line in done.lines[:-1]}
    assert found[one.id]["chunks"] == found[one.id]["files"] == 30
    assert (found[other.id]["chunks"], found[other.id]["files"]) == (7, 14)
    assert found[one.id]["nbytes"] == sum(os.stat(path).st_blocks * 512 for path in paths)
    assert found[other.id]["tenant"] == "acme"
    assert done.summary["files"] == len(paths) + len(ranks)
    check_lines("ls", done.lines)
    assert done.exit_code == 0


def test_private_epochs_are_one_line_beside_their_base(lab):
    """The controls: an epoch with a source and another tenant's have lines of their own, and so has JSON."""
    base, named = lab.namespace(), {"model": {"run": "r7", "version": "42"}}
    lab.chunk(base, 0)
    sourced, other = lab.namespace(epoch=named), lab.namespace(tenant="acme")
    private = [lab.namespace(epoch={"private": f"{number:032x}"}) for number in range(40)]
    private.append(lab.namespace(epoch={"private": "0" * 32}, tenant="acme"))
    for where in (sourced, other, *private):
        lab.chunks(where, range(2))
    lines = [
        *(base.id, f"{sourced.id} (model run r7 version 42)", f"{base.id} (40 private epochs)"),
        *(other.id, f"{private[-1].id} (private)"),
    ]
    for words in (
        *(("ls",), ("du",), ("rm", "-n", "org--model"), ("prune", "-n", "--max-size", "1KiB")),
        ("top", "--once", "--interval", "0.1"),
    ):
        done = run(*words, root=lab.path, env={"COLUMNS": "140"})
        shown = " ".join(done.stdout.split())
        for line in lines:
            assert line.partition("/")[2] in shown, (words, line)
        assert not any(where.identity.digest16 in shown for where in private[:-1])
        assert "44 namespaces" in shown + done.stderr or words[0] in ("prune", "top")
    for command, kind in (("ls", "namespace"), ("du", "use")):
        found = run(command, "--json", root=lab.path).lines
        epochs = {one["namespace"]: one["epoch"] for one in found if one["type"] == kind}
        assert epochs[sourced.id] == named
        assert all(epochs[where.id] == where.identity.epoch for where in (base, *private))
    said = " ".join(run("doctor", root=lab.path).stdout.split())
    assert "44 namespaces, 42 of them epochs" in said
    assert "do not share: tenant" in said
    assert "do not share: epoch" not in said


def test_ls_lists_chunks_in_any_order_and_no_more_than_asked_for(lab):
    where = lab.namespace()
    by_age = [lab.chunk(where, number, age_s=86400 * number) for number in range(20)]
    spoil(lab, where)
    everything = run("ls", "--chunks", "--json", root=lab.path)
    assert {line["path"] for line in everything.lines[:-1]} == set(by_age)
    check_lines("ls", everything.lines)
    oldest = run("ls", "--chunks", "--sort", "used", "--limit", "3", "--json", root=lab.path)
    assert [line["path"] for line in oldest.lines[:-1]] == by_age[:-4:-1]
    every = run("ls", "--chunks", "--sort", "used", "--json", root=lab.path)
    assert [line["path"] for line in every.lines[:-1]] == by_age[::-1]


def test_ids_that_are_printed_are_understood(lab, tmp_path):
    one = lab.namespace()
    other = lab.namespace(model_name="org/other")
    lab.chunks(one, range(5))
    path = lab.chunk(other, 77)
    ids = run("ls", "--chunks", "-q", root=lab.path).stdout.split()
    assert len(ids) == 6
    for text in (*ids, key_of(77).hex(), path, os.path.basename(path)):
        found = run("inspect", text, root=lab.path)
        assert found.exit_code == 0, found.stderr
    where = other.directory.path
    os.symlink(where, tmp_path / "a link to it")
    for text in (
        *("org--other", "other", other.id, other.id[:17], other.identity.digest16[:6]),
        *(where, f"{where}/", os.path.relpath(where), tmp_path / "a link to it"),
    ):
        assert run("ls", "--path", text, root=lab.path).stdout == f"{where}\n"
    assert run("ls", "--path", tmp_path, root=lab.path).exit_code == 2  # a directory of none
    both = run("ls", "--path", "org", root=lab.path).stdout.split()
    assert both == [one.directory.path, where]
    assert run("ls", "--path", "nothing-like-it", root=lab.path).exit_code == 2
    ambiguous = run("rm", "-n", "org", root=lab.path)
    assert ambiguous.exit_code == 2
    assert one.id in ambiguous.stderr
    assert other.id in ambiguous.stderr


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        ("ls", ">&-", 1),
        ("ls", "2>&-", 0),
        ("ls", "<&- >&- 2>&-", 1),
        ("verify --remove-bad", "<&-", 2),
        ("prune --max-size 1", "<&-", 2),
        ("--help", ">/dev/full", 1),
        ("ls", ">/dev/full", 1),
    ],
)
def test_closed_and_full_streams_are_no_traceback(lab, words, redirection, code):
    paths = lab.chunks(lab.namespace(), range(3))
    command = f'"{sys.executable}" -m fskv_tools {words} {redirection}'
    around = {**os.environ, "FSKV_ROOT": lab.path}
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=around, timeout=60)
    assert b"Traceback" not in done.stdout + done.stderr, done.stderr
    assert b"Errno" not in done.stderr
    assert done.returncode == code
    assert all(os.path.exists(path) for path in paths)


@pytest.mark.parametrize("words", [("rm", "/"), ("prune", "--max-size", "1", "--namespace", "")])
def test_an_empty_name_is_not_the_only_namespace(lab, words):
    """An empty variable of a script would have everything removed."""
    paths = lab.chunks(lab.namespace(), range(3))
    done = run(*words, "--yes", root=lab.path)
    assert done.exit_code == 2
    assert all(os.path.exists(path) for path in paths)


@pytest.mark.parametrize("words", [("doctor", "--timeout"), ("top", "--once", "--interval")])
def test_no_number_of_seconds_is_a_usage_error(lab, words):
    for text in ("nan", "-nan", "inf", "-5"):
        done = run(*words, text, root=lab.path)
        assert (done.exit_code, "Traceback" in done.stderr) == (2, False), text


@pytest.mark.parametrize(
    "words",
    [("ls",), ("du", "--json"), ("verify",), ("prune", "--max-size", "1", "-n"), ("prune", "-n")],
)
@pytest.mark.parametrize("readable", [False, True])
def test_what_cannot_be_listed_is_not_taken_for_empty(lab, monkeypatch, words, readable):
    """Negative control: where it can be listed, all is well."""
    where = lab.namespace()
    lab.chunks(where, range(3))
    arch = f"{lab.path}/{where.id.split('/')[0]}"
    real = os.scandir

    def scandir(path="."):
        if path == arch and not readable:  # root would be allowed to, whatever its mode
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    done = run(*words, root=lab.path)
    assert done.exit_code == (0 if readable else 3), done.stderr
    assert (f"{arch}: cannot be listed" in done.stderr) is not readable


def test_what_mkfs_left_for_its_superuser_is_no_directory_of_namespaces(lab, monkeypatch):
    lab.namespace()
    left = f"{lab.path}/lost+found"
    os.mkdir(left)
    real = os.scandir

    def scandir(path="."):
        if path == left:  # 0700 of root
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    done = run("ls", root=lab.path)
    assert (done.exit_code, "lost+found" in done.stderr) == (0, False)


def test_ctrl_c_while_modules_are_imported_is_no_traceback(tmp_path):
    """A typer that interrupts its own import. Negative control: without __main__ it is a traceback."""
    (tmp_path / "typer.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    around = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for words, traceback in (
        (["-m", "fskv_tools"], False),
        (["-c", "import fskv_tools.cli"], True),
    ):
        done = subprocess.run([sys.executable, *words], capture_output=True, env=around, timeout=60)
        assert done.returncode == (-signal.SIGINT if traceback else 130)
        assert (b"Traceback" in done.stderr) is traceback


@pytest.mark.parametrize("forbidden", ["\n", "\x1b[2J", "\x9b2J"])
def test_a_name_forges_no_line_and_moves_no_cursor(lab, monkeypatch, forbidden):
    """Names that a neighbour chose: all that `fskv` prints is its own."""
    for arch in ("arch", f"a{forbidden}FORGED"):
        os.makedirs(f"{lab.path}/{arch}/org--m{forbidden}FORGED@{'0' * 16}/chunks/abc")
    real = os.scandir
    for denied in (None, f"{lab.path}/a{forbidden}FORGED"):

        def scandir(path=".", denied=denied):
            if denied is not None and str(path).startswith(denied):
                raise PermissionError(13, "denied", path)
            return real(path)

        for words in (
            *(("ls",), ("ls", "-q"), ("ls", "--chunks"), ("du",), ("verify",), ("prune", "-n")),
            *(
                ("prune", "--max-size", "1", "-n"),
                ("rm", "arch/org", "-n"),
                ("ls", "--path", "arch/org"),
            ),
            *(("top", "--once", "--interval", "0.1"), ("doctor", "--no-write")),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(os, "scandir", scandir)
                done = run(*words, root=lab.path)
            lines = (done.stdout + done.stderr).split("\n")
            assert all(line.isprintable() for line in lines), words
            assert not [line for line in lines if line.startswith("FORGED")], words


def test_what_may_be_several_chunks_is_not_said_to_be_none(lab):
    where = lab.namespace()
    one, other = (os.path.dirname(lab.chunk(where, number)) for number in (1, 2))
    for path in os.listdir(other):
        os.rename(f"{other}/{path}", f"{one}/{os.path.basename(one)}{path[3:]}")
    assert "may be any of" in run("inspect", os.path.basename(one), root=lab.path).stderr
    done = run("inspect", os.path.basename(one)[:2], root=lab.path)
    assert (done.exit_code, "three digits" in done.stderr) == (2, True)


def test_any_unique_beginning_names_a_namespace_and_a_whole_name_its_model(lab, tmp_path):
    """As README says it: of the model, or of the digest."""
    where = lab.namespace(model_name="org/small", hash_seed="default")
    lab.chunks(where, range(3))
    other = lab.namespace(model_name="org/small-instruct", hash_seed="default").id
    to = tmp_path / "to"
    to.mkdir()
    commands = (
        *(("ls",), ("du",), ("verify",), ("rm", "-n"), ("diff", other)),
        ("explain", "--tokens", "[1]"),
        ("copy", "--to", to, "--create"),
        ("prune", "--max-size", "1GiB", "-n", "--namespace"),
    )
    for words in commands:
        for text in ("small", "org/small", where.identity.digest16[:5], where.id[:-3]):
            done = run(*words, text, root=lab.path)
            assert done.exit_code in (0, 1), (words, done.stderr)
            assert other not in done.stdout or words[0] == "diff", words
        # The control: a beginning of both models.
        several = words[0] in ("ls", "du", "verify", "copy")
        assert run(*words, "smal", root=lab.path).exit_code == 2 or several
        assert run(*words, "xy", root=lab.path).exit_code == 2
