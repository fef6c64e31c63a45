"""A root is opened only if it is one, and a namespace only by the identity that it was made for."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest
from places import REPOSITORY
from world import make_identity

import fskv.root.root
from fskv import namespace
from fskv.errors import ConfigError, IdentityMismatch, RootError
from fskv.namespace import chunk_path, directory
from fskv.root.neighbours import beside
from fskv.root.root import Root


def identity(**changes):
    return make_identity(**{"arch": "sm_90", "model_config": {"rope_theta": 500000.0}, **changes})


@pytest.fixture
def path(tmp_path):
    (tmp_path / "kv").mkdir()
    return tmp_path / "kv"


def opened(path, **options):
    return Root.open(str(path), **{"create": True, **options})


def open_text(path):
    with open(path) as file:
        return file.read()


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def tree(path):
    found = (os.path.join(d, name) for d, _, names in os.walk(path) for name in names)
    return sorted(os.path.relpath(name, path) for name in found)


# --- the root ---------------------------------------------------------------------------


def test_an_empty_directory_becomes_a_root_that_describes_itself(path):
    root = opened(path)
    assert root.path == str(path)
    assert json.loads((path / "fskv.json").read_text()) == {"format": 1}
    tag = (path / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert tree(path) == ["CACHEDIR.TAG", "fskv.json"]  # no probe and no part is left
    assert opened(f"{path}/") == root
    assert opened(path, create=False) == root


@pytest.mark.parametrize("bad", ["", "kv", "./kv", "~/kv", "/kv\n", "/kv\0", "/kv\ud800"])
def test_a_path_that_cannot_be_meant_is_a_config_error(bad):
    with pytest.raises(ConfigError, match="option 'root': found"):
        Root.open(bad, create=True)


def test_a_missing_root_is_refused_and_not_created(path):
    missing = path / "gone"
    with pytest.raises(RootError, match=r"option 'root'.*gone.*does not exist.*fix the mount"):
        opened(missing)
    assert not missing.exists()


def test_a_file_and_a_dangling_link_are_refused_as_root(path):
    (path / "file").write_text("x")
    (path / "link").symlink_to("nowhere")
    for name, finding in (("file", "not a directory"), ("link", "does not exist")):
        with pytest.raises(RootError, match=finding):
            opened(path / name)
    with pytest.raises(RootError, match="does not exist"):
        opened(path / "file" / "below")


def test_a_link_to_a_directory_is_a_good_root(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    opened(tmp_path / "link")
    assert (path / "fskv.json").exists()


@pytest.mark.parametrize("name", ["notes.txt", "sm_90", ".bashrc", "a\nb", "\udcff"])
def test_a_directory_with_foreign_content_is_refused_untouched(path, name):
    with open(os.path.join(path, name), "w"):
        pass
    with pytest.raises(RootError, match="not an fskv root and not empty") as error:
        opened(path)
    assert str(error.value).isprintable()
    assert len(os.listdir(path)) == 1


BENIGN = ["lost+found", ".snapshot", ".nfs00000000012", ".fskv-x.part", "CACHEDIR.TAG"]


@pytest.mark.parametrize("name", BENIGN)
def test_what_file_systems_leave_behind_is_not_foreign(path, name):
    (path / name).touch()
    opened(path)
    assert (path / name).exists()


def test_an_empty_directory_is_refused_where_creating_is_not_allowed(path):
    for options in ({"create": False}, {"create": False, "writable": False}):
        with pytest.raises(RootError, match="is the file system mounted"):
            opened(path, **options)
    assert not os.listdir(path)


def test_an_empty_directory_that_may_not_be_written_stays_empty(path):
    assert opened(path, writable=False).path == str(path)  # it would be made into a root
    assert not os.listdir(path)


@pytest.mark.parametrize("format_", [0, 2, 10**30])
def test_another_format_is_refused_in_one_sentence(path, format_):
    (path / "fskv.json").write_text(json.dumps({"format": format_}))
    with pytest.raises(RootError, match=f"has format {format_}, this fskv reads 1"):
        opened(path)
    assert os.listdir(path) == ["fskv.json"]


DAMAGED = [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 50_000, b"1" * 10_000]
WRONG_FORMATS = [b'{"format": %s}' % value for value in (b"true", b"1.0", b'"1"', b"NaN")]
AMBIGUOUS = b'{"format": 1, "format": 1}'


@pytest.mark.parametrize("content", [*DAMAGED, *WRONG_FORMATS, AMBIGUOUS, b" " * 100_000])
def test_a_damaged_format_file_is_refused_and_kept(path, content):
    (path / "fskv.json").write_bytes(content)
    with pytest.raises(RootError, match=r"fskv\.json"):
        opened(path)
    assert (path / "fskv.json").read_bytes() == content


def test_a_format_file_that_is_no_file_is_refused(path):
    for make in (os.mkfifo, os.mkdir, lambda p: os.symlink("nowhere", p)):
        target = path / "fskv.json"
        make(target)
        with pytest.raises(RootError, match=r"fskv\.json"):
            opened(path)
        target.rmdir() if target.is_dir() else target.unlink()


@pytest.mark.parametrize(
    "modes", [{"dir_mode": 0o770, "file_mode": 0o660}, {}], ids=["group", "own"]
)
@pytest.mark.parametrize("umask", [0, 0o077])
def test_modes_are_exact_whatever_the_umask(path, modes, umask):
    """By default nobody else can look."""
    old = os.umask(umask)
    try:
        ns = opened(path, **modes).open_namespace(identity())
    finally:
        os.umask(old)
    for made in (path / "fskv.json", f"{ns.path}/namespace.json"):
        assert mode(made) == modes.get("file_mode", 0o600)
    for made in (ns.path, os.path.dirname(ns.path), f"{ns.path}/chunks", f"{ns.path}/tmp"):
        assert mode(made) == modes.get("dir_mode", 0o700)


def test_the_setgid_bit_of_a_group_shared_root_is_inherited(path):
    path.chmod(0o2770)
    ns = opened(path, dir_mode=0o770).open_namespace(identity())
    assert mode(f"{ns.path}/chunks") == 0o2770


# --- disks that say no ------------------------------------------------------------------


OPEN_AS_NOBODY = """
import os, sys
from fskv.errors import RootError
from fskv.root.root import Root
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    Root.open(sys.argv[1], create=True)
except RootError as error:
    print(error)
"""


def run_python(code, *args, prefix=()):
    command = [*prefix, sys.executable, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("mode_", [0o555, 0o311, 0o000])
def test_a_root_without_permission_is_a_root_error_that_says_so(mode_):
    path = tempfile.mkdtemp()  # not tmp_path: nobody cannot reach it
    try:
        os.chmod(path, mode_)
        done = run_python(OPEN_AS_NOBODY, path)
        assert "no permission" in done.stdout, done
        assert path in done.stdout
    finally:
        os.chmod(path, 0o700)
        shutil.rmtree(path)


@pytest.fixture
def faults(monkeypatch):
    """Make an os function fail the first `times` calls on a path that matches; lists the hits."""

    def add(function, error, pattern="", times=10**9):
        real, hits = getattr(os, function), []

        def call(path, *args, **kwargs):
            if re.search(pattern, os.fspath(path)) and len(hits) < times:
                hits.append(path)
                raise OSError(error, os.strerror(error), path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, function, call)
        return hits

    return add


@pytest.mark.parametrize("function", ["open", "mkdir", "link", "scandir", "unlink"])
def test_one_stale_handle_is_retried(path, faults, function):
    hits = faults(function, errno.ESTALE, times=1)
    ns = opened(path).open_namespace(identity())
    assert len(hits) == 1
    assert json.loads(open_text(f"{ns.path}/namespace.json")) == identity().to_manifest()


def test_a_handle_that_stays_stale_is_a_root_error(path, faults):
    hits = faults("scandir", errno.ESTALE)
    with pytest.raises(RootError, match="stale file handle"):
        opened(path)
    assert len(hits) == 2


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("function", ["open", "mkdir", "scandir"])
def test_every_os_error_becomes_a_root_error_that_names_a_path(path, faults, error, function):
    faults(function, error)
    with pytest.raises(RootError, match=str(path)):
        opened(path).open_namespace(identity())


def test_a_full_disk_does_not_close_an_existing_namespace(path, faults):
    opened(path).open_namespace(identity())
    hits = faults("open", errno.ENOSPC, pattern=r"\.part$")
    opened(path).open_namespace(identity())
    assert len(hits) == 2
    with pytest.raises(RootError, match="no space"):
        opened(path).open_namespace(identity(tenant="blue"))


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_works(path, faults, error):
    faults("link", error)
    ns = opened(path).open_namespace(identity())
    manifest = os.path.relpath(f"{ns.path}/namespace.json", path)
    assert tree(path) == sorted(["CACHEDIR.TAG", "fskv.json", manifest])
    opened(path).open_namespace(identity())


def test_a_failed_publication_leaves_no_part_and_no_half_file(path, faults):
    faults("link", errno.EIO)
    with pytest.raises(RootError):
        opened(path)
    assert not os.listdir(path)


# --- namespaces -------------------------------------------------------------------------


def test_a_namespace_is_made_as_the_format_says(path):
    one = identity()
    ns = opened(path).open_namespace(one)
    assert ns.path == f"{path}/{directory(one)}"
    assert ns.digest == one.digest
    assert sorted(os.listdir(ns.path)) == ["chunks", "namespace.json", "tmp"]
    assert not os.listdir(f"{ns.path}/tmp")
    assert json.loads(open_text(f"{ns.path}/namespace.json")) == one.to_manifest()
    assert ns.chunk_path(b"k", 1, 2) == f"{ns.path}/{chunk_path(b'k', 1, 2)}"


def test_opening_again_does_not_touch_the_manifest(path):
    ns = opened(path).open_namespace(identity())
    before = os.stat(f"{ns.path}/namespace.json")
    assert opened(path).open_namespace(identity()) == ns
    assert os.path.samestat(os.stat(f"{ns.path}/namespace.json"), before)


def change_manifest(path, **changes):
    manifest = f"{opened(path).open_namespace(identity()).path}/namespace.json"
    content = json.dumps({**identity().to_manifest(), **changes})
    with open(manifest, "w") as file:
        file.write(content)
    return manifest, content


def test_another_identity_in_the_directory_is_refused_by_name_and_kept(path):
    manifest, content = change_manifest(
        path, model_config={"rope_theta": 10000.0}, model_dtype="float64"
    )
    with pytest.raises(IdentityMismatch) as error:
        opened(path).open_namespace(identity())
    for part in (
        manifest,
        "model_config.rope_theta",
        "500000.0 in this engine",
        "10000.0",
        "model_dtype",
    ):
        assert part in str(error.value)
    assert open_text(manifest) == content


def test_without_the_comparison_the_other_identity_would_be_accepted(path, monkeypatch):
    # The negative control of the test above: what it sees is the comparison, nothing else.
    change_manifest(path, model_config={"rope_theta": 10000.0})
    monkeypatch.setattr(namespace, "diff", lambda a, b: [])
    opened(path).open_namespace(identity())


@pytest.mark.parametrize("content", [*DAMAGED, *WRONG_FORMATS, AMBIGUOUS, b'{"format": 1}'])
def test_a_damaged_manifest_is_a_mismatch_and_kept(path, content):
    ns = opened(path).open_namespace(identity())
    with open(f"{ns.path}/namespace.json", "wb") as file:
        file.write(content)
    with pytest.raises(IdentityMismatch, match=r"namespace\.json"):
        opened(path).open_namespace(identity())
    assert (path / directory(identity()) / "namespace.json").read_bytes() == content


def test_a_manifest_of_a_later_fskv_is_a_mismatch_that_names_the_field(path):
    change_manifest(path, colour="red")
    with pytest.raises(IdentityMismatch, match="colour"):
        opened(path).open_namespace(identity())


# --- many at once -----------------------------------------------------------------------


def open_both(path, barrier, results):
    barrier.wait(60)
    try:
        ns = Root.open(path, create=True).open_namespace(identity())
        results.put((ns.path, os.stat(f"{ns.path}/namespace.json").st_ino, None))
    except Exception as error:
        results.put((None, None, repr(error)))


def test_eight_processes_open_a_new_root_at_once_and_agree(path):
    context = multiprocessing.get_context("forkserver")
    barrier, results = context.Barrier(8), context.SimpleQueue()
    args = (str(path), barrier, results)
    workers = [context.Process(target=open_both, args=args) for _ in range(8)]
    for worker in workers:
        worker.start()
    found = {results.get() for _ in workers}
    for worker in workers:
        worker.join(60)
    assert [error for _, _, error in found if error] == []
    assert len(found) == 1  # one path, one manifest inode
    ns_path = f"{directory(identity())}/namespace.json"
    assert tree(path) == sorted(["CACHEDIR.TAG", "fskv.json", ns_path])


def test_the_loser_of_a_race_reads_what_the_winner_wrote(path, monkeypatch):
    ns_path = f"{path}/{directory(identity())}"
    link = os.link

    def slow_link(tmp, target, **options):
        if target == "namespace.json":
            other = {**identity().to_manifest(), "model_dtype": "float64"}
            with open(f"{ns_path}/{target}", "x") as file:
                json.dump(other, file)
        link(tmp, target, **options)

    monkeypatch.setattr(os, "link", slow_link)
    with pytest.raises(IdentityMismatch, match="model_dtype"):
        opened(path).open_namespace(identity())
    assert os.listdir(f"{ns_path}/tmp") == []


def test_a_root_made_between_listing_and_reading_is_recognised(path, monkeypatch):
    # Another engine's directory shows up in the listing: then its fskv.json is there to be read.
    real = fskv.root.root._foreign_names

    def late(listed):
        (path / "fskv.json").write_text('{"format": 1}')
        (path / "sm_90").mkdir(exist_ok=True)
        return real(listed)

    monkeypatch.setattr(fskv.root.root, "_foreign_names", late)
    opened(path, create=False)


# --- why nobody else's chunks are hit --------------------------------------------------------


def test_the_start_says_why_prompts_will_miss(path):
    root = opened(path)
    own = identity()

    def said():
        return beside(str(path), own)

    assert said() == "", "nothing is known before it is open"
    space = root.open_namespace(own)
    assert said() == "new namespace, nothing is stored in it yet; no other of this model here"
    root.open_namespace(identity(model_name="another", weights="named:other"))
    assert said().endswith(", the nearest of another differs in: model_name, weights")
    root.open_namespace(identity(weights="named:other", tenant="t", model_dtype="float64"))
    root.open_namespace(identity(hash_seed="PYTHONHASHSEED=7"))
    for number in range(20):
        root.open_namespace(identity(epoch={"private": f"{number:032x}"}))
    nearest = "2 others of this model here, the nearest differs in: hash_seed"
    assert said() == f"new namespace, nothing is stored in it yet; {nearest}"
    odd = path / own.arch
    (odd / "x@0000000000000000").mkdir()
    (odd / "x@0000000000000000" / "namespace.json").write_text("{")
    (odd / "y@0000000000000000").write_text("a file")
    (pathlib.Path(space.path) / "chunks" / "abc").mkdir()
    assert said() == nearest, "the control: it is not new any more"
    own = identity(epoch={"private": "f" * 32})
    assert said() == f"new namespace, nothing is stored in it yet; {nearest}"


def test_a_namespace_that_nobody_is_beside_needs_no_word(path):
    space = opened(path).open_namespace(identity())
    (pathlib.Path(space.path) / "chunks" / "abc").mkdir()
    assert beside(str(path), identity()) == ""


@pytest.mark.parametrize("times", [1, 2])
def test_a_namespace_that_goes_while_it_is_opened_is_made_again(path, monkeypatch, times):
    """Who keeps the bounds removes an empty one; the control: where it goes each time it is an error."""
    root = opened(path)
    left = [None] * times
    make = Root._make_directories

    def gone_again(self, namespace_path):
        make(self, namespace_path)
        if left:
            left.pop()
            shutil.rmtree(namespace_path)

    monkeypatch.setattr(Root, "_make_directories", gone_again)
    if times == 1:
        assert os.path.exists(f"{root.open_namespace(identity()).path}/namespace.json")
    else:
        with pytest.raises(RootError):
            root.open_namespace(identity())
