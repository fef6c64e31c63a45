"""Which limits hold, when something goes for them and how much, and what an engine is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fskv.bounds.limits import (
    Heartbeat,
    Limits,
    Scope,
    Usage,
    inodes_short,
    root_state,
    smallest,
    unused_limit_s,
)
from fskv.root.filesystem import Space
from fskv.sizes import Share
from fskv.types import MAX_COUNT

NS = "cpu/model@0123456789abcdef"
OTHER_NS = "cpu/other@fedcba9876543210"
SPACE = Space(1000, 400, 100, 10)


def beat(name="a", **changes):
    return Heartbeat(name, **{"namespace": NS, "tenant": None, "limits": Limits(), **changes})


def test_of_all_limits_the_smallest_hold():
    beats = [
        beat("a", tenant="t", limits=Limits(100, 100, 50)),
        beat("b", limits=Limits(90, Share(25))),
        beat("w", namespace=None, limits=Limits(tenant_max_nbytes=70, tenants={"u": 5, "x": 1})),
        beat("v", namespace=None, limits=Limits(tenants={"t": 60})),
    ]
    assert smallest(beats, ["t", "u"], SPACE) == (90, 250, {"t": 50, "u": 5})
    assert smallest([], ["t"], SPACE) == (None, 0, {})
    assert smallest([beat(limits=Limits(keep_free=1 << 50))], [], SPACE)[1] == 1000


def test_of_a_watcher_limits_of_tenants_that_do_not_exist_are_no_bounds():
    tenants = {f"t{n}": 1 for n in range(1000)}
    watcher = beat(namespace=None, limits=Limits(tenants=tenants))
    assert smallest([watcher], ["t7"], SPACE) == (None, 0, {"t7": 1})


def test_inodes_and_unused_files():
    limits = [Limits(keep_free=100), Limits(keep_free=Share(25), unused_s=9), Limits(unused_s=5)]
    assert inodes_short(limits, SPACE) == 15
    assert inodes_short(limits[:1], SPACE) == 0
    assert inodes_short(limits, replace(SPACE, total_inodes=0)) == 0
    assert unused_limit_s(limits) == 5
    assert unused_limit_s(limits[:1]) is None


@pytest.mark.parametrize(
    ("growth", "margin"),
    [(0, 0.01), (1_000, 0.01), (25_000, 0.05), (1_000_000, 0.10)],
)
def test_something_goes_two_looks_of_growth_below_a_bound(growth, margin):
    usage, limit = Usage(growth=growth, look_s=1.0), 1_000_000
    high = round(limit * (1 - margin))
    assert Scope("root", None, limit, high).excess(usage) == 0
    assert Scope("root", None, limit, high + 1).excess(usage) == 0.02 * limit + 1


def test_of_a_file_system_that_others_fill_little_goes_beyond_keep_free():
    """The control: of our own bound the marks are shares of the bound."""
    usage = Usage(namespaces={NS: (5_000, 1)}, max_nbytes=1_000_000)
    free, root = Scope("free", None, 1_000_000, 999_990), Scope("root", None, 1_000_000, 999_990)
    assert free.excess(usage) == 999_990 - (1_000_000 - 50 - 100)
    assert root.excess(usage) > 20_000


def test_an_engine_is_told_the_bounds_that_hold_for_it_and_its_own_at_once():
    usage = Usage(
        namespaces={NS: (20, 1), OTHER_NS: (30, 2)},
        tenants={NS: "t", OTHER_NS: "u"},
        max_nbytes=90,
        tenant_limits={"t": 50, "u": 1},
    )
    state = root_state(usage, SPACE, beat(tenant="t"), holder=True)
    assert state.bounds == {"root": (90, 40), "tenant": (50, 30)}
    # The leader has not heard of these yet.
    own = beat(tenant="t", limits=Limits(60, 300, 25))
    state = root_state(usage, SPACE, own, holder=False)
    assert state.bounds == {"root": (60, 10), "tenant": (25, 5), "free": (700, 100)}
    assert state.usage.kept_free == 300
    assert not root_state(None, SPACE, own, holder=False).known, "nobody has counted yet"
    assert root_state(None, SPACE, beat(), holder=False).known, "no bound is on the sizes"


def test_sums_beyond_64_bits_are_numbers_that_a_message_can_hold():
    large = MAX_COUNT
    usage = Usage(
        namespaces={f"a/m@{n:016x}": (large, large) for n in range(5)}, others=(large, large)
    )
    assert root_state(usage, SPACE, beat(), holder=False).usage.nbytes == large
