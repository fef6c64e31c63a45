"""Many writers, one bound: whatever they read late, and whoever dies when, the disk never holds more."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from capacity_lab import dead_name

from fskv.bounds import ledger as book_module
from fskv.bounds import quota as claims_module
from fskv.bounds.ledger import CLAIMS_DIR, Ledger, shortened
from fskv.bounds.quota import (
    Claim,
    Limits,
    Scope,
    Usage,
    excess,
    grant,
    inodes_short,
    is_near,
    last_use_step_s,
    overdrawn,
    scopes,
    with_intervals_of,
)
from fskv.root.filesystem import Space
from fskv.sizes import Share

NS = "cpu/model@0123456789abcdef"
OTHER_NS = "cpu/other@fedcba9876543210"
LIMIT = 10_000
SPACE = Space(1 << 40, 1 << 40, 0, 0)


def make_claim(name="a-1-00000000-1", **changes):
    fields = {"namespace": NS, "tenant": None, "limits": Limits(max_nbytes=LIMIT)}
    return Claim(name, **{**fields, **changes})


# --- the invariant, for any interleaving ------------------------------------------------------


class Engine:
    """A writer: every act of it is a step of its own, so that others come between any two."""

    def __init__(self, name, world):
        self.world = world
        self.name = name
        self.granted = self.used = self.written = 0  # granted: in its published claim
        self.allowed = 0  # what it believes that it may use
        self.acts = self.maintain()
        self.publish()

    def publish(self, granted=None):
        self.granted = self.granted if granted is None else granted
        claim = make_claim(
            self.name,
            granted=self.granted,
            written=self.written,
            wanted=self.world.rng.choice((0, 300, 2000, 6000)),
        )
        self.claim = self.world.claims[self.name] = claim

    def maintain(self):
        """One round of the maintenance process after another; each yield is where others may act."""
        world = self.world
        while True:
            usage = world.usage
            self.reads = world.num_counts
            yield
            claims = list(world.claims.values())
            yield
            if self.name not in world.claims:
                self.publish()  # it was thought dead
                continue
            alive = sum(not claim.closed for claim in claims)
            amount = grant(
                self.claim, self.allowed - self.used, scopes(claims, usage, SPACE), alive
            )
            yield
            if amount:
                self.publish(self.granted + amount)
                yield
                claims = list(world.claims.values())
                if overdrawn(self.claim, claims, usage, SPACE):
                    self.publish(self.granted - amount)
                else:
                    self.allowed += amount
            self.reads = None
            yield

    def write(self, nbytes):
        nbytes = min(nbytes, self.allowed - self.used)
        self.used += nbytes
        self.world.disk += nbytes
        self.unreported = getattr(self, "unreported", 0) + nbytes

    def report(self):
        self.written += getattr(self, "unreported", 0)
        self.unreported = 0
        if self.name in self.world.claims:
            self.publish()


class World:
    def __init__(self, seed, flaw=None):
        self.rng = random.Random(seed)
        self.flaw = flaw
        self.disk = self.rng.randrange(LIMIT)
        self.claims = {}
        self.usage = Usage({NS: (self.disk, 1)})
        self.num_counts = 0
        self.engines = []
        self.dead = {}  # name -> number of the first count that began after its death
        self.counting = self.count()

    def count(self):
        """The holder of the lease, over and over."""
        while True:
            claims = dict(self.claims)
            yield
            # A file that comes while the disk is being walked may be in the count or not.
            before = self.disk
            yield
            counted = self.rng.randint(*sorted((before, self.disk)))
            if self.flaw == "claims after count":
                yield
                claims = dict(self.claims)
            self.num_counts += 1
            written = {name: claim.written for name, claim in claims.items()}
            self.usage = Usage({NS: (counted, 1)}, counted=written)
            yield
            for name, seen_dead in list(self.dead.items()):
                if name not in claims or not seen_dead:
                    self.dead[name] = True
                    continue
                # In the product: 20 s after. Here: when nobody computes with an older usage.
                oldest = min(
                    (e.reads for e in self.engines if getattr(e, "reads", None) is not None),
                    default=self.num_counts,
                )
                if oldest >= self.num_counts:
                    self.claims.pop(name, None)
                    del self.dead[name]
            yield

    def step(self):
        rng = self.rng
        act = rng.random()
        if act < 0.02 and len(self.engines) < 6:
            self.engines.append(Engine(f"e-{rng.getrandbits(40)}", self))
        elif act < 0.03 and self.engines:
            gone = self.engines.pop(rng.randrange(len(self.engines)))
            self.dead[gone.name] = False
        elif act < 0.25:
            next(self.counting)
        elif act < 0.29:
            self.disk -= rng.randrange(self.disk + 1)  # a prune
        elif self.engines:
            # Some are slow: they stand still for long between any two acts.
            engine = self.engines[int(len(self.engines) * rng.random() ** 2)]
            if act < 0.65:
                next(engine.acts)
            elif act < 0.85:
                engine.write(rng.randrange(4000))
            else:
                engine.report()

    def promised(self):
        return self.disk + sum(max(0, e.allowed - e.used) for e in self.engines)


def worst(seed, flaw=None, steps=1500):
    world = World(seed, flaw)
    most = 0
    for _ in range(steps):
        world.step()
        most = max(most, world.promised())
    return most


@pytest.fixture
def large_grants(monkeypatch):
    """Grants of up to everything: what small ones would only hide."""
    monkeypatch.setattr(claims_module, "GRANT_PART", 1)


@pytest.mark.parametrize("seeds", [range(at, at + 40) for at in range(0, 160, 40)], ids=str)
def test_disk_and_unused_grants_stay_within_the_bound(large_grants, seeds):
    for seed in seeds:
        assert worst(seed) <= LIMIT, seed


def test_a_count_with_claims_read_after_it_breaks_the_bound(large_grants):
    """Negative control of the walk above."""
    assert any(worst(seed, "claims after count") > LIMIT for seed in range(200))


def test_a_grant_that_was_computed_long_ago_is_taken_back(large_grants):
    slow, quick = make_claim("slow"), make_claim("quick")
    stale = scopes([slow, quick], Usage({NS: (0, 0)}), SPACE)
    for _ in range(20):  # meanwhile the other one is granted nearly everything
        more = grant(quick, 0, scopes([slow, quick], Usage({NS: (0, 0)}), SPACE), 2)
        quick = replace(quick, granted=quick.granted + more)
    slow = replace(slow, granted=grant(slow, 0, stale, 2))
    assert slow.granted + quick.granted > LIMIT  # the negative control: without the second look
    assert overdrawn(slow, [slow, quick], Usage({NS: (0, 0)}), SPACE)
    assert overdrawn(slow, [quick], Usage(), SPACE)  # somebody has withdrawn it
    assert not overdrawn(quick, [quick], Usage({NS: (0, 0)}), SPACE)


def test_a_dead_engines_claim_must_outlast_those_who_compute_with_the_usage_before_it():
    before = Usage({NS: (0, 0)})
    dead, mine = make_claim("dead", granted=9000, written=9000), make_claim("mine", wanted=4000)
    with_it, without_it = (
        grant(mine, 0, scopes(claims, before, SPACE), 1) for claims in ([dead, mine], [mine])
    )
    assert 9000 + with_it <= LIMIT < 9000 + without_it


def test_all_who_ask_in_the_same_moment_get_no_more_than_there_is():
    for count in (1, 2, 7, 100):
        claims = [make_claim(f"e-{n}") for n in range(count)]
        bounds = scopes(claims, Usage({NS: (LIMIT // 3, 1)}), SPACE)
        assert (
            sum(grant(claim, 0, bounds, count) for claim in claims) <= bounds[0].headroom // 2 + 1
        )


def test_what_an_engine_waits_for_is_granted_if_it_fits():
    mine = make_claim(wanted=1200)
    scope = Scope("root", None, LIMIT, 0, 0)
    assert grant(mine, 0, [scope], 2) == 1200
    assert grant(mine, 1000, [scope], 2) == 200  # so much is missing
    assert grant(mine, 1200, [scope], 2) == 0
    assert grant(mine, 0, [replace(scope, counted=LIMIT - 1500)], 2) < 1200


@pytest.mark.parametrize("part", [claims_module.AT_HAND_PART, 1])
def test_a_bound_that_is_smaller_than_what_an_engine_wants_is_kept_mostly_full(monkeypatch, part):
    """With 1, the negative control: all that it wants is kept at hand, and the bound stays half empty."""
    monkeypatch.setattr(claims_module, "AT_HAND_PART", part)
    mine = make_claim(wanted=2 * LIMIT)
    disk, used, fill = 0, 0, []
    for _ in range(200):
        usage = Usage({NS: (disk, 1)}, counted={mine.name: used})
        more = grant(mine, mine.granted - used, scopes([mine], usage, SPACE), 1)
        step = min(LIMIT // 40, mine.granted + more - used)
        disk, used = disk + step, used + step
        assert disk <= LIMIT
        mine = replace(mine, granted=mine.granted + more, written=used)
        (scope,) = scopes([mine], Usage({NS: (disk, 1)}, counted={mine.name: used}), SPACE)
        if is_near(scope, [mine]):
            disk -= min(disk, excess(scope, [mine]))
        fill.append(disk)
    kept = min(fill[100:])
    assert kept > 0.6 * LIMIT if part > 1 else kept < 0.5 * LIMIT


# --- bounds -----------------------------------------------------------------------------------


def test_bounds_of_namespaces_and_tenants_stand_next_to_the_root_s():
    claims = [
        make_claim("a", tenant="t", limits=Limits(100, 0, 60, 50), granted=10),
        make_claim("b", limits=Limits(90), granted=5, written=5),
        make_claim("c", namespace=OTHER_NS, tenant="t", limits=Limits(None, 0, 70, 55), granted=7),
        make_claim("d", limits=Limits(1), granted=3, closed=True),
    ]
    usage = Usage({NS: (20, 1), OTHER_NS: (30, 1)}, counted={"b": 4})
    found = {(s.kind, s.name): s for s in scopes(claims, usage, SPACE)}
    # The smallest limit of the living; what the closed one was granted still counts.
    assert found["root", None] == Scope("root", None, 90, 50, 10 + 1 + 7 + 3)
    assert found["namespace", NS] == Scope("namespace", NS, 60, 20, 10 + 1 + 3)
    assert found["namespace", OTHER_NS] == Scope("namespace", OTHER_NS, 70, 30, 7)
    assert found["tenant", "t"].limit == 50
    assert grant(claims[1], 0, found.values(), 3) <= 14
    assert len(found) == 4


def test_what_must_stay_free_is_a_number_or_a_share_the_larger_one_wins():
    space = Space(1000, 400, 100, 10)
    claims = [
        make_claim("a", limits=Limits(keep_free=100), granted=30, written=10),
        make_claim("b", limits=Limits(keep_free=Share(25))),
    ]
    assert scopes(claims, Usage(), space) == [Scope("free", None, 750, 600, 20)]
    assert inodes_short(claims, space) == 15
    assert inodes_short([replace(c, closed=True) for c in claims], space) == 0
    assert inodes_short(claims[:1], space) == 0
    assert inodes_short(claims, replace(space, total_inodes=0)) == 0
    (more_than_there_is,) = scopes(
        [make_claim("a", limits=Limits(keep_free=1 << 50))], Usage(), space
    )
    assert more_than_there_is.limit == 0


def test_the_largest_step_of_a_last_use_counts_of_all_who_were_there_lately():
    usage = Usage(touch_intervals={3600: 900, 7200: 500})
    assert last_use_step_s([], None, 0) == last_use_step_s([make_claim()], Usage(), 0) == 600
    assert last_use_step_s([make_claim(touch_interval_s=60)], usage, 1000) == 600
    assert last_use_step_s([make_claim(touch_interval_s=4000)], usage, 600) == 4000
    assert last_use_step_s([], usage, 600) == 3600
    assert last_use_step_s([], usage, 500) == 7200


def test_the_steps_of_those_who_were_there_are_remembered_and_never_many():
    claims = [make_claim(touch_interval_s=s) for s in (0, 600, 3600)]
    assert with_intervals_of({7200: 5, 3600: 5}, claims, 9) == {7200: 5, 3600: 9}
    hostile = [make_claim(touch_interval_s=601 + n) for n in range(1000)]
    assert with_intervals_of({}, hostile, 9) == {1600: 9}


# --- files ------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path):
    (tmp_path / CLAIMS_DIR).mkdir()
    return tmp_path


def test_claims_and_usage_are_read_as_they_were_written(shared):
    book = Ledger(str(shared))
    claim = make_claim(
        tenant="t",
        limits=Limits(1, Share(2.5), 3, None),
        granted=9,
        written=8,
        wanted=7,
        closed=True,
        touch_interval_s=86400,
    )
    usage = Usage({NS: (5, 2)}, {NS: "t"}, {"a": 3}, 1, 2, 3, 4, 5, {86400: 17})
    book.publish(claim)
    book.publish_usage(usage)
    assert book.claims() == [claim]
    assert book.usage() == usage
    assert sorted(os.listdir(shared)) == ["claims", "usage.json"]
    book.withdraw(claim.name)
    assert book.claims() == []


@pytest.mark.parametrize("told_late", [True, False], ids=["", "negative control"])
def test_a_claim_that_has_no_bytes_for_want_of_room_is_not_published(
    shared, monkeypatch, told_late
):
    """As on a full pool of CephFS: write and close are well, and fsync alone says that there is no room."""
    monkeypatch.setattr(book_module, "is_full_late", lambda _: told_late)
    book, before = Ledger(str(shared)), make_claim()
    book.publish(before)

    def no_space(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def encoded_as_zeros(tree):
        return bytes(len(encoded(tree)))

    encoded = book_module._encoded
    monkeypatch.setattr(os, "fsync", no_space)
    monkeypatch.setattr(book_module, "_encoded", encoded_as_zeros)
    with pytest.raises(OSError, match="space") if told_late else contextlib.nullcontext():
        book.publish(replace(before, granted=before.granted + 1))
    assert book.claims() == ([before] if told_late else [])


def test_claims_and_usage_of_an_older_version_are_read(shared):
    """Who does not say what a last use is rounded to is taken to have the default."""
    book = Ledger(str(shared))
    book.publish(make_claim(touch_interval_s=5))
    book.publish_usage(Usage({NS: (5, 2)}, touch_intervals={7200: 1}))
    for path in (shared / CLAIMS_DIR / f"{make_claim().name}.json", shared / "usage.json"):
        tree = json.loads(path.read_text())
        assert tree.pop("touch_interval_s", 5) == 5
        assert tree.pop("touch_intervals", None) in (None, {"7200": 1})
        path.write_text(json.dumps(tree))
    assert book.claims() == [make_claim(touch_interval_s=600)]
    assert book.usage() == Usage({NS: (5, 2)})
    for far in (-1, "x", 1 << 62):
        path.write_text(json.dumps({**tree, "touch_intervals": {str(far): 1}}))
        assert book.usage() is None
    path.write_text(json.dumps({**tree, "touch_intervals": {str(1 << 61): 1}}))
    assert book.usage().touch_intervals == {86400 * 365: 1}


def test_damaged_foreign_and_hostile_files_are_no_claims_and_raise_nothing(shared):
    book = Ledger(str(shared))
    book.publish(make_claim("good"))
    directory = shared / CLAIMS_DIR
    good = json.loads((directory / "good.json").read_text())

    def change(**changes):
        return json.dumps(good | {"name": "bad"} | changes)

    keep = {"percent": float("nan")}
    contents = [
        "",
        "[",
        "[]",
        "[" * 100_000,
        "9" * 5000,
        "\x00" * 100,
        change(granted=-1),
        change(granted=1 << 70),
        change(granted=1.5),
        change(written=True),
        change(limits=None),
        change(limits={**good["limits"], "keep_free": keep}),
        change(limits={**good["limits"], "keep_free": {"percent": 1e9}}),
        change(limits={**good["limits"], "max_nbytes": -5}),
        change(name="else"),
        change(namespace="../../etc@0123456789abcdef"),
        change(namespace="/etc/x@0123456789abcdef"),
    ]
    for content in contents:
        (directory / "bad.json").write_text(content)
        assert [claim.name for claim in book.claims()] == ["good"], content[:40]
    (directory / "bad.json").unlink()
    os.symlink(directory / "good.json", directory / "bad.json")
    os.mkdir(directory / "dir.json")
    os.mkfifo(directory / "fifo.json")
    open(os.fsencode(directory) + b"/\xff.json", "w").close()
    assert [claim.name for claim in book.claims()] == ["good"]
    (directory / "other.json").write_text(json.dumps(good | {"name": "other"}))
    assert len(book.claims()) == 2  # the negative control
    for content in contents[:6]:
        (shared / "usage.json").write_text(content)
        assert book.usage() is None


def test_a_claim_is_short_and_what_is_longer_is_neither_read_nor_written(shared):
    book = Ledger(str(shared))
    names = {f"a/{n:0100}@{n:016x}": 1 for n in range(1000)}
    long = make_claim("long", namespace=None, limits=Limits(namespaces=names))
    with pytest.raises(OSError, match="more than the 65536 that are read"):
        book.publish(long)
    assert book.claims() == []
    tree = json.dumps(asdict(long))
    (shared / CLAIMS_DIR / "long.json").write_text(tree)
    assert book.claims() == []
    assert "longer than 65536" in book.left_out[str(shared / CLAIMS_DIR / "long.json")]
    few = make_claim("few", namespace=None, limits=Limits(namespaces={NS: 1}))
    book.publish(few)
    assert book.claims() == [few]  # the control


def test_what_is_no_claim_is_not_read_again_before_it_changes(shared, monkeypatch):
    book = Ledger(str(shared))
    path = shared / CLAIMS_DIR / "h.json"
    path.write_text("[" * 1000)
    read = []
    real = book_module._content
    monkeypatch.setattr(book_module, "_content", lambda *args: read.append(args) or real(*args))
    assert [book.claims() for _ in range(3)] == [[], [], []]
    assert len(read) == 1
    book.publish(make_claim("h"))
    assert [len(book.claims()) for _ in range(3)] == [1, 1, 1]
    assert len(read) == 4


@pytest.mark.parametrize("is_file", [False, True])
def test_what_is_no_file_takes_no_place_of_a_claim(shared, monkeypatch, is_file):
    """It is never removed. The control: of files no more than the first are read."""
    book = Ledger(str(shared))
    monkeypatch.setattr(book_module, "_MAX_CLAIMS", 5)
    for number in range(5):
        book.publish(make_claim(f"h{number}"))
    for number in range(50):
        path = shared / CLAIMS_DIR / f"x{number}.json"
        path.touch() if is_file else path.mkdir()
    seen = len(book.claims()) + len(book.left_out)
    assert seen == 5
    assert bool(book.left_out) is is_file


def test_all_claims_together_are_short(shared, monkeypatch):
    book = Ledger(str(shared))
    for number in range(20):
        book.publish(make_claim(f"h{number}"))
    assert len(book.claims()) == 20
    nbytes = len((shared / CLAIMS_DIR / "h1.json").read_bytes())
    monkeypatch.setattr(book_module, "_MAX_CLAIMS_NBYTES", 5 * nbytes + 10)
    assert 3 <= len(Ledger(str(shared)).claims()) <= 5


def test_junk_among_the_claims_goes_when_it_is_a_day_old(shared):
    book = Ledger(str(shared))
    directory = shared / CLAIMS_DIR
    now_ns = time.time_ns()
    ages = {"young": 3600, "old": 90_000, "of tomorrow": -90_000}
    kinds = ("junk-1.json", "node9-1-00000000-1.part", "notes.txt", "good.json")
    for age, seconds in ages.items():
        for kind in kinds:
            path = directory / f"{age.replace(' ', '-')}-{kind}"
            path.write_text("[")
            if kind == "good.json":
                book.publish(make_claim(path.stem))
            os.utime(path, ns=(now_ns - seconds * 10**9,) * 2)
    for name in ("link-1.json", "fifo-1.json", "dir-1.json"):
        path = directory / name
        {"link": lambda p: os.symlink("/etc/passwd", p), "fifo": os.mkfifo, "dir": os.mkdir}[
            name.partition("-")[0]
        ](path)
        os.utime(path, (0, 0), follow_symlinks=False)
    dead = [shared / f"{dead_name()}.part", directory / f"{dead_name()}.part"]
    before = set(os.listdir(directory))
    for path in dead:
        path.touch()
    book.claims()
    book.remove_orphans(0)
    assert not any(path.exists() for path in dead)
    assert set(os.listdir(directory)) == before  # nobody knows what time it is
    book.remove_orphans(now_ns)
    gone = {f"{age}-{kind}" for age in ("old", "of-tomorrow") for kind in kinds[:2]}
    assert before - set(os.listdir(directory)) == gone


def test_limits_of_names_that_do_not_exist_are_no_bounds_and_sums_are_made_once():
    walks = []

    class Namespaces(dict):
        def items(self):
            walks.append(1)
            return super().items()

    usage = Usage(Namespaces({NS: (5, 1), OTHER_NS: (7, 1)}), {NS: "t"})
    many = Limits(
        namespaces={NS: 10, OTHER_NS: 20} | {f"a/m@{n:016x}": 1 for n in range(1000)},
        tenants={"t": 9} | {f"t{n}": 1 for n in range(1000)},
    )
    claims = [
        make_claim("w", namespace=None, limits=many),
        make_claim("e", limits=Limits(), granted=3),
    ]
    found = {
        (s.kind, s.name): (s.limit, s.counted, s.outstanding) for s in scopes(claims, usage, SPACE)
    }
    assert found == {
        ("namespace", NS): (10, 5, 3),
        ("namespace", OTHER_NS): (20, 7, 0),
        ("tenant", "t"): (9, 5, 3),
    }
    assert len(walks) == 1


def test_a_usage_that_would_be_too_long_adds_up_the_smallest_and_is_still_read(shared, monkeypatch):
    """Negative control: as it is, it is refused."""
    monkeypatch.setattr(book_module, "MAX_USAGE_NBYTES", 8000)
    book = Ledger(str(shared))
    names = [f"arch/model-{n}@{n:016x}" for n in range(500)]
    usage = Usage(
        {name: (n * 4096, n) for n, name in enumerate(names)},
        dict.fromkeys(names, "é\ud800"),
        {"a": 1},
    )
    with pytest.raises(OSError, match="more than the 8000"):
        book.publish_usage(usage)
    assert book.usage() is None
    needed = {names[3]}
    book.publish_usage(shortened(usage, needed))
    found = book.usage()
    assert (found.nbytes, found.num_files) == (usage.nbytes, usage.num_files)
    assert needed < found.namespaces.keys()
    assert names[499] in found.namespaces
    assert names[4] not in found.namespaces
    assert 20 < len(found.namespaces) < 100
    assert found.tenants.keys() == found.namespaces.keys()
    assert shortened(found, needed) == found
    (bound,) = scopes([make_claim("e", limits=Limits(max_nbytes=1 << 40))], found, SPACE)
    assert bound.counted == usage.nbytes


def test_a_forked_child_names_parts_as_its_own():
    """Or maintenance takes them for a dead process's once the parent has ended."""
    code = """
import os
from fskv.root.process_id import is_our_part, part_names
names = part_names()
assert is_our_part(next(names))
if os.fork():
    os._exit(os.wait()[1])
print(os.getpid(), next(names))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, name = run.stdout.split()
    assert name.rsplit("-", 3)[1] == pid
