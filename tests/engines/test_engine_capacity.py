"""A real engine that writes more than it may: bounds are kept, full disks survived."""

from __future__ import annotations

import contextlib
import os
import pathlib

import engine_lab as lab
import pytest
import world

from fskv.bounds.limits import GUARD_PART
from trials.soak_judge import Sampler, bad_lines, count

pytestmark = [*world.VLLM, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK_TOKENS = 128
PROMPT_TOKENS = 1100
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS  # of a prompt
FILE_NBYTES = (128 + 4) << 10
BOUND = 120 * FILE_NBYTES
MOST = BOUND + BOUND // GUARD_PART  # more than that no engine stores
# The leader looks four times a second, and what does not fit meanwhile is not stored: on a busy machine the
# next request for it stores it.
MOMENT = {"sleep": 0.5}
RESET = lab.RESET


def _ask(number: int, label: str) -> dict:
    return lab.generate(MODEL.tokens(f"capacity-{number}", PROMPT_TOKENS), label)


def _more(numbers) -> list[dict]:
    """Ask three times more, so that all is stored."""
    return [step for n in (*numbers,) * 3 for step in (RESET, _ask(n, f"more {n}"), MOMENT)]


def _options(root: str, **options) -> dict:
    # Bounds are tried with all chunks: of prompts that never come again few would be stored.
    small = {"hybrid_chunk_size": CHUNK_TOKENS, "keep_free": 0, "admission": "all"}
    return lab.connector(root, **{**small, **options})


@pytest.fixture
def full_disk(tmp_path, small_disk, request):
    """A file system of its own that a test may fill (by parameter: its size): its path."""
    point = tmp_path / "small"
    point.mkdir()
    small_disk(str(point), getattr(request, "param", "192m"))
    (point / "root").mkdir()
    return point


def _run(request: dict, root: str, directory: pathlib.Path) -> tuple[dict, Sampler]:
    """Run an engine to its end, with the files of the root counted all the time."""
    sampler = Sampler(root, 0.05)
    sampler.start()
    try:
        result = lab.run(request, directory=directory)
    finally:
        sampler.stop()
    assert bad_lines(result["log_path"]) == []
    lab.assert_sound(root)
    return result, sampler


def test_an_engine_that_writes_several_times_its_bound_keeps_it_and_what_was_used_last(
    root, tmp_path
):
    num_prompts, num_recent = 34, 3
    steps = []
    for number in range(num_prompts):
        steps += [_ask(number, f"cold {number}"), MOMENT]
    recent = range(num_prompts - num_recent, num_prompts)
    steps += _more(recent)
    for number in (*recent, 0, 1):
        steps += [RESET, _ask(number, f"again {number}")]
    steps.append({"metrics": True})
    request = lab.request(MODEL, steps, transfer=_options(root, max_bytes=BOUND))
    result, sampler = _run(request, root, tmp_path / "engine")
    done = lab.generates(result)
    (metrics,) = lab.metrics(result)
    assert lab.counter(metrics, "stored_bytes") > 2 * BOUND
    assert max(sampler.nbytes) <= MOST
    assert max(sampler.nbytes) > 0.8 * BOUND, "it was not even reached"
    for number in (*recent, 0, 1):
        again = done[f"again {number}"]
        assert (again["num_cached_tokens"] > 0) is (number in recent), f"prompt {number}"
        assert again["tokens"] == done[f"cold {number}"]["tokens"]


def test_negative_control_an_engine_without_a_bound_exceeds_it(root, tmp_path):
    steps = [_ask(number, f"cold {number}") for number in range(BOUND // FILE_NBYTES // CHUNKS + 3)]
    request = lab.request(MODEL, [*steps, *lab.SETTLE], transfer=_options(root))
    _, sampler = _run(request, root, tmp_path / "engine")
    assert max(sampler.nbytes) > MOST


@pytest.mark.parametrize("full_disk", ["32m"], indirect=True)
@pytest.mark.parametrize("keep_free", ["50%", pytest.param(0, id="negative_control")])
def test_what_is_to_stay_free_stays_free_and_what_was_used_last_is_kept(
    full_disk, tmp_path, keep_free
):
    root = str(full_disk / "root")
    num_prompts = 20  # two thirds of the file system
    last = num_prompts - 1
    moment = [MOMENT] if keep_free else []  # without it nothing has to be pruned
    steps = []
    for number in range(num_prompts):
        steps += [_ask(number, f"cold {number}"), *moment]
    steps += [
        *_more([last]),
        RESET,
        _ask(last, "again"),
        RESET,
        _ask(0, "first"),
        {"metrics": True},
    ]
    request = lab.request(MODEL, steps, transfer=_options(root, keep_free=keep_free))
    whole = os.statvfs(full_disk)
    result, sampler = _run(request, root, tmp_path / "engine")
    done = lab.generates(result)
    (metrics,) = lab.metrics(result)
    most = whole.f_blocks * whole.f_frsize // 2
    assert lab.counter(metrics, "stored_bytes") > most
    if keep_free:
        assert 0.5 * most < max(sampler.nbytes) <= 1.1 * most
    else:
        assert max(sampler.nbytes) > most
    assert (done["first"]["num_cached_tokens"] == 0) is bool(keep_free), "it was used first"
    assert done["again"]["num_cached_tokens"] > 0
    for again, cold in (("again", f"cold {last}"), ("first", "cold 0")):
        assert done[again]["tokens"] == done[cold]["tokens"]


@pytest.mark.parametrize("full_disk", ["48m"], indirect=True)
@pytest.mark.parametrize("keep_free", ["50%", pytest.param(0, id="negative_control")])
def test_where_pruning_cannot_help_nothing_is_stored_and_what_is_free_is_said(full_disk, keep_free):
    root = str(full_disk / "root")
    (full_disk / "ballast").write_bytes(bytes(38 << 20))  # nobody's to prune
    steps = [_ask(0, "cold"), *lab.SETTLE, {"sleep": 1.5}, RESET, _ask(0, "again")]
    transfer = _options(root, keep_free=keep_free)
    result = lab.run(lab.request(MODEL, [*steps, {"metrics": True}], transfer=transfer))
    done = lab.generates(result)
    (metrics,) = lab.metrics(result)
    assert done["again"]["tokens"] == done["cold"]["tokens"]
    assert bad_lines(result["log_path"]) == []
    info = os.statvfs(full_disk)
    free = info.f_bavail * info.f_frsize
    assert lab.counter(metrics, "root_free_bytes") == pytest.approx(free, rel=0.2)
    skipped = lab.counter(metrics, "stores_skipped", reason="capacity")
    assert (len(lab.chunks(root)), skipped >= CHUNKS) == (
        (0, True) if keep_free else (CHUNKS, False)
    )


@pytest.mark.parametrize(
    "left_nbytes",
    [
        64 << 10,  # for small files, but for no chunk
        pytest.param(0, marks=pytest.mark.slow),
    ],
)
def test_on_a_full_disk_loads_go_on_and_stores_do_again_after_the_prune(
    full_disk, tmp_path, left_nbytes
):
    root = str(full_disk / "root")
    num_prompts = 100
    last = num_prompts - 1
    before = []

    def fill() -> None:
        before.append(count(root)[0])
        with contextlib.suppress(OSError), open(full_disk / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(full_disk).f_bavail == 0
        os.truncate(full_disk / "ballast", (full_disk / "ballast").stat().st_size - left_nbytes)

    talk = lab.Conversation(tmp_path)
    talk.say(*(_ask(number, f"cold {number}") for number in range(num_prompts)), *lab.SETTLE)
    talk.meanwhile(fill)
    talk.say(_ask(1000, "without room"))
    talk.say(RESET, _ask(last, "loaded while full"))
    talk.say({"sleep": 5}, *lab.SETTLE)  # the prune, and the end of the pause
    talk.say(_ask(1001, "with room"), *lab.SETTLE)
    talk.say(RESET, _ask(1001, "with room again"), RESET, _ask(1000, "without room again"))
    talk.say(RESET, _ask(last, "kept"), RESET, _ask(0, "pruned"), lab.METRICS)
    result = talk.run(MODEL, transfer=_options(root))
    assert bad_lines(result["log_path"]) == []
    assert before[0] >= num_prompts * CHUNKS * FILE_NBYTES * 0.9
    (metrics,) = lab.metrics(result)
    assert lab.counter(metrics, "stores_skipped", reason="no_space") > 0
    # Else what was pruned to have room for the news may be asked for before the news.
    if left_nbytes:
        assert lab.counter(metrics, "load_failures") == 0
    done = lab.generates(result)
    cached = {label: one["num_cached_tokens"] for label, one in done.items()}
    whole = CHUNKS * CHUNK_TOKENS
    assert cached["without room"] == cached["pruned"] == 0
    assert cached["without room again"] < whole, "there was no room to store it"
    for label in ("loaded while full", "with room again", "kept"):
        assert cached[label] == whole, label
    for again, cold in (
        ("without room again", "without room"),
        ("with room again", "with room"),
        ("loaded while full", f"cold {last}"),
        ("kept", f"cold {last}"),
        ("pruned", "cold 0"),
    ):
        assert done[again]["tokens"] == done[cold]["tokens"], again
    lab.assert_sound(root)
