"""Which limits hold, when something goes for them and how much, and what an engine is told."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from fskv.bounds.limits import (
    Heartbeat,
    Limits,
    Scope,
    Usage,
    inodes_short,
    scopes,
    smallest,
    unused_limit_s,
)
from fskv.bounds.state import BoundsSaid, RootState, root_state
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


def test_the_bounds_in_force_with_what_is_in_use_the_widest_last():
    usage = Usage(
        namespaces={NS: (20, 1), OTHER_NS: (30, 1)},
        others=(7, 1),
        tenants={NS: "t", OTHER_NS: "u"},
        max_nbytes=90,
        kept_free=250,
        tenant_limits={"t": 50},
    )
    assert scopes(usage, SPACE) == [
        Scope("tenant", "t", 50, 20),
        Scope("root", None, 90, 57),
        Scope("free", None, 750, 600),
    ]
    assert scopes(usage, Space(0, 0, 0, 0))[-1].kind == "root"  # nobody knows the size


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


def test_an_engine_is_told_the_bounds_that_hold_for_it_and_its_own_part():
    usage = Usage(
        sequence=7,
        namespaces={NS: (20, 1), OTHER_NS: (30, 2)},
        tenants={NS: "t", OTHER_NS: "u"},
        counted={"a": 12},
        max_nbytes=90,
        tenant_limits={"t": 50, "u": 1},
    )
    state = root_state(usage, SPACE, beat(tenant="t", written=15), holder=True)
    assert state.bounds == {"root": (90, 40), "tenant": (50, 30)}
    assert (state.known, state.sequence, state.counted, state.seen_written) == (True, 7, 12, 15)
    assert (state.nbytes, state.files, state.namespace_nbytes, state.tenant_nbytes) == (
        *(50, 3),
        *(20, 20),
    )
    # A limit of its own that the leader has not heard of holds at once.
    own = beat(tenant="t", limits=Limits(60, 300, 25))
    state = root_state(usage, SPACE, own, holder=False)
    assert state.bounds == {"root": (60, 10), "tenant": (25, 5), "free": (700, 100)}
    assert state.kept_free == 300


@pytest.mark.parametrize(
    ("limits", "known"), [(Limits(), True), (Limits(keep_free=5), True), (Limits(9), False)]
)
def test_without_a_count_stores_begin_only_where_no_bound_is_on_sizes(limits, known):
    assert root_state(None, SPACE, beat(limits=limits), holder=False).known is known


def test_sums_beyond_64_bits_are_numbers_that_a_message_can_hold():
    large = MAX_COUNT
    usage = Usage(
        namespaces={f"a/m@{n:016x}": (large, large) for n in range(5)}, others=(large, large)
    )
    assert root_state(usage, SPACE, beat(), holder=False).nbytes == large


def test_a_bound_is_said_once_and_again_when_it_is_another():
    said = BoundsSaid()
    state = RootState(root_limit=100, root_left=1, free_limit=1000, free_left=1)
    assert said.news(state) == [("root", 100), ("free", 1000)]
    assert said.news(replace(state, root_left=0, free_limit=1005)) == []
    assert said.news(replace(state, root_limit=99)) == [("root", 99)]


def test_a_state_of_other_types_is_refused():
    for field, value in asdict(RootState()).items():
        other = "7" if not isinstance(value, str) else 7
        with pytest.raises(TypeError):
            RootState(**{field: other})
