"""The third part of the storm: a mount that fails, hangs and lies, below an engine's data path.

The mount is faults/mount.py, a pass-through FUSE file system that a list of rules makes fail. One
process after the other, outside the interpreter and in Python, is told what to store and to load; each step
says how that must end, and no step may serve a wrong byte.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from faults import mount
from trials.storm_accounts import Left, Watched, accounts, parts_below
from trials.storm_content import FILE_NBYTES, Judge, file_name, poison
from trials.storm_party import Setting, open_namespace
from trials.storm_process import obey

_PLACES = 8
_PATIENT_S = 20.0  # deadlines where nothing hangs: a busy machine is no fault
_IMPATIENT_S = 0.5  # and where something does
_FAILURES = 6
_PROBE_S = 0.2
_TRIES = 20
_IN_TIME_S = 20.0  # generous: only tells a deadline from a hang

_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "flip in the header": ({"ops": ["read"], "suffix": ".kv", "flip": 40}, "corrupt"),
    "flip in the payload": ({"ops": ["read"], "suffix": ".kv", "flip": 150_000}, "corrupt"),
    "flip in the last row": ({"ops": ["read"], "suffix": ".kv", "flip": 259_000}, "corrupt"),
    "reads end early": ({"ops": ["read"], "suffix": ".kv", "ends_at": 100_000}, "corrupt"),
    "zeros from the middle": ({"ops": ["read"], "suffix": ".kv", "zero_from": 100_000}, "corrupt"),
    "length too small": ({"ops": ["getattr"], "suffix": ".kv", "nbytes": 8192}, "corrupt"),
    "length too large": (
        {"ops": ["getattr"], "suffix": ".kv", "nbytes": FILE_NBYTES + 4096},
        "corrupt",
    ),
    "ESTALE for ever": ({"ops": ["read"], "suffix": ".kv", "errno": "ESTALE"}, "stale"),
    "EACCES": ({"ops": ["open"], "suffix": ".kv", "errno": "EACCES"}, "denied"),
}
_HARMLESS: dict[str, dict[str, Any]] = {
    "short reads": {"ops": ["read"], "suffix": ".kv", "short": 20480},
    "delayed reads": {"ops": ["read"], "suffix": ".kv", "delay_s": 0.05, "count": 2},
    "ESTALE once": {"ops": ["read"], "suffix": ".kv", "errno": "ESTALE", "count": 1},
}
_WRITE_FAILURES = ("create", "write", "rename")


def bad_mount(
    directory: str, seed: int, direct_io: str, broken: str | None, limit_s: float
) -> dict[str, Any]:
    """Run this part and return its facts."""
    missing = mount.why_not()
    if missing:
        return {"skipped": missing, "problems": []}
    part = _BadMount(directory)
    with mount.FaultyMount(os.path.join(directory, "fuse")) as mounted:
        root = os.path.join(mounted.path, "root")
        os.mkdir(root)
        setting = Setting(
            root=root,
            pages_path="",
            num_places=_PLACES,
            num_chunks=_PLACES,
            seed=seed,
            native=True,
            direct_io=direct_io,
            ends_at=time.monotonic() + limit_s,
            deadline_s=_PATIENT_S,
            lookup_timeout_s=_PATIENT_S,
            failures=_FAILURES,
            probe_s=_PROBE_S,
            broken=broken,
        )
        # The patches of a negative control are of Python.
        for native in (True, False) if broken in (None, "ending") else (False,):
            part.run(mounted, replace(setting, native=native))
    return part.facts()


class _BadMount:
    """The steps, on one mount; the controller's thread owns everything."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._judge = Judge()
        self._left: list[Left] = []
        self._problems: list[str] = []
        self._steps: dict[str, dict[str, Any]] = {}
        self._num_faults = 0
        self._name = ""
        self._step = ""
        self._cleared = True
        self._numbers: list[int] = []
        self._mount: Any = None
        self._chunks_dir = ""
        self._station: Watched  # set by run

    def run(self, mounted: Any, setting: Setting) -> None:
        """Go through all steps with one process."""
        self._mount = mounted
        self._chunks_dir = os.path.join(open_namespace(setting.root).path, "chunks")
        self._name = "native" if setting.native else "Python"
        first = 0 if setting.native else 1000
        self._numbers = list(range(first, first + _PLACES))
        setting = replace(setting, pages_path=os.path.join(self._directory, f"pages-{self._name}"))
        self._station = Watched(self._name, obey, setting)
        try:
            self._healthy()
            self._read_errors()
            self._lookup_errors()
            self._write_errors()
            self._wrong_reads()
            self._harmless()
            self._wrong_writes()
            self._hanging_reads()
            self._hanging_writes()
            self._hanging_lookups()
            self._begin("the end")
            self._left.append(self._station.account(self._station.ask("close")["slots"]))
            self._no_parts(setting.root)
        finally:
            mounted.clear()  # or the process could not even be killed
            self._station.kill()

    # --- steps ------------------------------------------------------------------------------

    def _healthy(self) -> None:
        self._begin("healthy")
        self._store({"ok"})
        self._lookup({"hit"})
        self._load({"ok"})

    def _read_errors(self) -> None:
        self._begin("EIO of reads", {"ops": ["read", "open"], "suffix": ".kv", "errno": "EIO"})
        self._load({"io_error"})
        self._expect_state("breaker_open", wanted=True)
        for _ in range(_TRIES):  # one operation may be let through, and on a slow machine at once
            if self._load({"breaker", "io_error"}, self._numbers[:1])["statuses"] == ["breaker"]:
                break
        else:
            self._problem("nothing was refused")
        self._recovered()
        self._expect_state("breaker_open", wanted=False)

    def _lookup_errors(self) -> None:
        self._begin("EIO of lookups", {"ops": ["getattr"], "suffix": ".kv", "errno": "EIO"})
        for _ in range(_FAILURES):  # a batch is one sign
            self._lookup({"io_error", "breaker"})
            time.sleep(_PROBE_S)
        self._expect_state("index_breaker_open", wanted=True)
        self._clear()
        time.sleep(2 * _PROBE_S)
        self._station.ask("lookup", self._numbers[:1])
        self._lookup({"hit"})
        self._expect_state("index_breaker_open", wanted=False)

    def _write_errors(self) -> None:
        for op in _WRITE_FAILURES:
            self._begin(f"EIO of {op}", {"ops": [op], "suffix": ".part", "errno": "EIO"})
            self._remove()
            self._store({"io_error"})
            self._no_parts()
            self._recovered()

    def _wrong_reads(self) -> None:
        for step, (rule, status) in _DAMAGE.items():
            self._begin(step, rule)
            self._load({status})
            self._recovered()

    def _harmless(self) -> None:
        for step, rule in _HARMLESS.items():
            self._begin(step, rule)
            self._load({"ok"})
            self._clear()

    def _wrong_writes(self) -> None:
        self._begin("short writes", {"ops": ["write"], "suffix": ".part", "short": 20480})
        self._remove()
        self._store({"ok", "no_space"})
        self._no_parts()
        self._recovered()
        self._begin("flips of writes", {"ops": ["write"], "suffix": ".part", "flip": 150_000})
        self._remove()
        self._store({"ok"})
        self._load({"corrupt"})
        self._recovered()

    def _hanging_reads(self) -> None:
        """One file hangs: its load ends at the deadline, others go on beside it, and all comes back."""
        stuck = self._numbers[0]
        self._begin(
            "hanging read",
            {"ops": ["read"], "contains": os.path.basename(file_name(stuck)), "hang": True},
        )
        told = self._load({"timed_out"}, numbers=[stuck])
        if told["seconds"] > _IN_TIME_S:
            self._problem(f"reported after {told['seconds']} s")
        end = time.monotonic() + _IN_TIME_S
        # The thread is written off a moment after the job: its own time began later.
        while not (state := self._station.ask("state"))["hung"] and time.monotonic() < end:
            time.sleep(_PROBE_S / 10)
        self._steps[self._key]["parked"] = state["slots"]
        if not state["hung"] or not state["slots"]:
            self._problem(f"no thread hangs with its slot: {state}")
        self._station.ask("patience", _PATIENT_S)
        self._load({"ok"}, numbers=self._numbers[1:], first_place=1)
        # The pages are somebody else's now. What comes late must not reach them.
        self._station.pages.write(0, poison(77))
        self._clear()
        self._settled()
        if self._station.pages.read(0) != poison(77):
            self._judge.count_wrong(stuck, "late bytes in pages that were given up")
        self._recovered()

    def _hanging_writes(self) -> None:
        for op in ("write", "rename"):
            self._begin(f"hanging {op}", {"ops": [op], "suffix": ".part", "hang": True})
            self._remove()
            self._store({"timed_out", "skipped"}, numbers=self._numbers[:2])
            self._clear()
            self._settled()
            self._no_parts()
            self._recovered()

    def _hanging_lookups(self) -> None:
        self._begin("hanging lookups", {"ops": ["getattr"], "suffix": ".kv", "hang": True})
        self._lookup({"timed_out"})
        self._clear()
        self._settled()
        self._lookup({"hit", "timed_out", "breaker"}, numbers=self._numbers[:1])
        time.sleep(2 * _PROBE_S)
        self._lookup({"hit"})

    # --- what steps are made of -------------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"{self._name}: {self._step}"

    def _begin(self, step: str, *rules: dict[str, Any]) -> None:
        self._step = step
        self._steps[self._key] = {}
        hangs = any("hang" in rule for rule in rules)
        self._station.ask("patience", _IMPATIENT_S if hangs else _PATIENT_S)
        self._mount.set(*rules)
        self._cleared = not rules

    def _problem(self, text: str) -> None:
        self._problems.append(f"{self._key}: {text}")

    def _store(self, allowed: set[str], numbers: list[int] | None = None) -> dict[str, Any]:
        return self._job("store", allowed, numbers or self._numbers)

    def _load(
        self, allowed: set[str], numbers: list[int] | None = None, first_place: int = 0
    ) -> dict[str, Any]:
        numbers = numbers or self._numbers
        told = self._job("load", allowed, numbers, first_place)
        if not told["failed"]:
            for place, number in enumerate(numbers, first_place):
                self._judge.look(self._station.pages, number, place, self._key)
        return told

    def _job(self, what: str, allowed: set[str], numbers: list[int], *more: int) -> dict[str, Any]:
        told: dict[str, Any] = self._station.ask(what, numbers, *more)
        self._note(what, told["statuses"], allowed)
        return told

    def _lookup(self, allowed: set[str], numbers: list[int] | None = None) -> None:
        self._note("lookup", self._station.ask("lookup", numbers or self._numbers), allowed)

    def _note(self, what: str, statuses: list[str], allowed: set[str]) -> None:
        counted = Counter(f"{what} {status}" for status in statuses)
        step = self._steps[self._key]
        for name, count in counted.items():
            step[name] = step.get(name, 0) + count
        if not set(statuses) <= allowed:
            self._problem(f"{dict(counted)}, expected {sorted(allowed)}")

    def _expect_state(self, name: str, *, wanted: bool) -> None:
        if self._station.ask("state")[name] is not wanted:
            self._problem(f"{name} is {not wanted}")

    def _clear(self) -> None:
        """Take the fault away. The step has seen it, or it has shown nothing."""
        if self._cleared:
            return
        self._cleared = True
        fired = self._mount.fired()
        self._num_faults += fired
        if not fired:
            self._problem("no call met the fault")
        self._mount.clear()
        self._station.ask("patience", _PATIENT_S)

    def _recovered(self) -> None:
        """Without the fault everything is stored again where it must be, and served."""
        self._clear()
        end = time.monotonic() + _IN_TIME_S
        # An open breaker lets one through now and then; whatever that finds closes it.
        while self._station.ask("load", self._numbers[:1])["statuses"] == ["breaker"]:
            if time.monotonic() > end:
                self._problem("the breaker stays open")
                return
            time.sleep(_PROBE_S / 2)
        self._store({"ok", "exists"})
        first = self._station.ask("load", self._numbers)
        if first["failed"]:  # of the right length, but not right, and nobody had looked yet
            self._store({"ok", "exists"})
        self._load({"ok"})

    def _settled(self) -> None:
        state = self._station.ask("settle")
        if not state["settled"] or state["hung"] or state["slots"]:
            self._problem(f"after the release {state}")

    def _no_parts(self, below: str | None = None) -> None:
        parts = parts_below(below or self._chunks_dir)
        if parts:
            self._problem(f"{len(parts)} parts are left")

    def _remove(self) -> None:
        """Remove the files from behind the mount, so that stores have something to do."""
        chunks_dir = self._chunks_dir.replace(self._mount.path, self._mount.backing, 1)
        for number in self._numbers:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(chunks_dir, file_name(number)))

    def facts(self) -> dict[str, Any]:
        used = accounts(self._left, self._judge, self._problems)
        ended: Counter[str] = Counter()
        for step in self._steps.values():
            ended.update({name: n for name, n in step.items() if name != "parked"})
        return {
            "wrong_by_step": dict(self._judge.wrong_by_note),
            "faults_met": self._num_faults,
            "num_steps": len(self._steps),
            "ended": dict(sorted(ended.items())),
            "by_step": self._steps,
            **used,
            "problems": self._problems,
        }
