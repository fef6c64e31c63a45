"""A real engine that writes more than it may: bounds are kept, full disks survived, routers told."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import subprocess

import engine_lab as lab
import pytest
import router_lab
import world
from world import wait_for

from fskv.bounds.limits import GUARD_PART
from trials.shared_root_judge import Sampler, bad_lines, count

pytestmark = [*world.VLLM, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK_TOKENS = 128
PROMPT_TOKENS = 1100
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS  # of a prompt
FILE_NBYTES = (128 + 4) << 10
BOUND = 120 * FILE_NBYTES
MOST = BOUND + BOUND // GUARD_PART  # more than that no engine stores
# The leader looks four times a second, and what does not fit meanwhile is not stored.
MOMENT = {"sleep": 0.5}
RESET = {"reset_prefix_cache": True}
root, router = router_lab.root, router_lab.router


def _ask(number: int, label: str) -> dict:
    return lab.generate(MODEL.tokens(f"capacity-{number}", PROMPT_TOKENS), label)


def _options(root: str, **options) -> dict:
    small = {"hybrid_chunk_size": CHUNK_TOKENS, "keep_free": 0}
    return lab.connector(root, **{**small, **options})


@pytest.fixture
def full_disk(tmp_path, request):
    """A file system of its own that a test may fill (by parameter: its size): its path."""
    size = getattr(request, "param", "192m")
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "fskv-test", str(point)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], capture_output=True, timeout=60, check=True)


def _run(request: dict, root: str, directory: pathlib.Path) -> tuple[dict, Sampler]:
    """Run an engine to its end, with the files of the root counted all the time."""
    sampler = Sampler(root, 0.05)
    sampler.start()
    try:
        result = lab.start_engine(request, str(directory)).wait(lab.ENGINE_TIMEOUT_S)
    finally:
        sampler.stop()
    assert result["exit_code"] == 0, result.get("error")
    return result, sampler


def test_an_engine_that_writes_several_times_its_bound_keeps_it_and_what_was_used_last(
    root, router, tmp_path
):
    num_prompts, num_recent = 34, 3
    steps = []
    for number in range(num_prompts):
        steps += [_ask(number, f"cold {number}"), MOMENT]
    recent = range(num_prompts - num_recent, num_prompts)
    for number in (*recent, 0, 1):
        steps += [RESET, _ask(number, f"again {number}")]
    steps += [{"metrics": True}, {"sleep": 3}, *lab.SETTLE, *lab.SETTLE]
    request = lab.request(
        MODEL,
        steps,
        transfer=_options(root, max_bytes=BOUND),
        engine={
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": router.endpoint,
            }
        },
        env={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},  # whole hashes: they are names of files
    )
    result, sampler = _run(request, root, tmp_path / "engine")
    done = lab.generates(result)

    (metrics,) = lab.metrics(result)
    written = lab.counter(metrics, "stored_bytes")
    assert written > 2 * BOUND
    assert max(sampler.nbytes) <= MOST
    assert max(sampler.nbytes) > 0.8 * BOUND, "it was not even reached"
    assert bad_lines(result["log_path"]) == []
    lab.assert_sound(root)

    for number in recent:
        again = done[f"again {number}"]
        assert again["num_cached_tokens"] > 0, f"prompt {number} was used last"
        assert again["tokens"] == done[f"cold {number}"]["tokens"]
    for number in (0, 1):
        again = done[f"again {number}"]
        assert again["num_cached_tokens"] == 0, f"prompt {number} was used first"
        assert again["tokens"] == done[f"cold {number}"]["tokens"]

    # What a router has been told is what is there.
    there = {os.path.basename(path) for path in lab.chunks(root)}

    def told() -> set[str]:
        balance = collections.Counter(name for name, _, _ in list(router.stored))
        # One event takes back many chunks; a chunk is a block here.
        balance.subtract(router_lab.file_name(h) for hashes in list(router.removed) for h in hashes)
        assert set(balance.values()) <= {0, 1}, "each is announced once, and once taken back"
        return {name for name, left in balance.items() if left}

    wait_for(lambda: told() == there)
    num_removed = sum(len(hashes) for hashes in router.removed)
    assert num_removed >= (written - MOST) // FILE_NBYTES


@pytest.mark.slow
def test_the_bound_holds_for_the_files_of_kv_heads_too(root, tmp_path):
    bound = 60 * FILE_NBYTES
    steps = [
        step for number in range(40) for step in (_ask(number, f"cold {number}"), {"sleep": 0.2})
    ]
    transfer = _options(root, max_bytes=bound, canonical_layout=True)
    steps += [*lab.SETTLE, RESET, _ask(39, "again"), {"metrics": True}]
    result, sampler = _run(lab.request(MODEL, steps, transfer=transfer), root, tmp_path / "engine")
    (metrics,) = lab.metrics(result)
    assert lab.counter(metrics, "stored_bytes") > 2 * bound
    assert 0.5 * bound < max(sampler.nbytes) <= bound + bound // GUARD_PART
    assert any(".r1." in path for path in lab.chunks(root)), "a chunk is several files"
    done = lab.generates(result)
    assert done["again"]["tokens"] == done["cold 39"]["tokens"]
    lab.assert_sound(root)


def test_negative_control_an_engine_without_a_bound_exceeds_it(root, tmp_path):
    steps = [_ask(number, f"cold {number}") for number in range(BOUND // FILE_NBYTES // CHUNKS + 3)]
    transfer = _options(root)
    _, sampler = _run(
        lab.request(MODEL, [*steps, *lab.SETTLE], transfer=transfer), root, tmp_path / "engine"
    )
    assert max(sampler.nbytes) > MOST


@pytest.mark.parametrize("full_disk", ["32m"], indirect=True)
@pytest.mark.parametrize("keep_free", ["50%", pytest.param(0, id="negative_control")])
def test_what_is_to_stay_free_stays_free_and_what_was_used_last_is_kept(
    full_disk, tmp_path, keep_free
):
    root = str(full_disk / "root")
    os.mkdir(root)
    num_prompts = 20  # two thirds of the file system
    last = num_prompts - 1
    moment = [MOMENT] if keep_free else []  # without it nothing has to be pruned
    steps = []
    for number in range(num_prompts):
        steps += [_ask(number, f"cold {number}"), *moment]
    steps += [RESET, _ask(last, "again"), RESET, _ask(0, "first"), {"metrics": True}]
    request = lab.request(MODEL, steps, transfer=_options(root, keep_free=keep_free))
    whole = os.statvfs(full_disk)
    result, sampler = _run(request, root, tmp_path / "engine")
    done = lab.generates(result)
    (metrics,) = lab.metrics(result)
    assert lab.counter(metrics, "stored_bytes") > 0.5 * whole.f_blocks * whole.f_frsize
    most = whole.f_blocks * whole.f_frsize // 2
    if keep_free:
        assert 0.5 * most < max(sampler.nbytes) <= 1.1 * most
        assert done["first"]["num_cached_tokens"] == 0, "pruned: it was used first"
    else:
        assert max(sampler.nbytes) > most
        assert done["first"]["num_cached_tokens"] > 0
    assert done["again"]["num_cached_tokens"] > 0
    for again, cold in (("again", f"cold {last}"), ("first", "cold 0")):
        assert done[again]["tokens"] == done[cold]["tokens"]
    assert bad_lines(result["log_path"]) == []
    lab.assert_sound(root)


@pytest.mark.parametrize("full_disk", ["48m"], indirect=True)
@pytest.mark.parametrize("keep_free", ["50%", pytest.param(0, id="negative_control")])
def test_where_pruning_cannot_help_nothing_is_stored_and_what_is_free_is_said(
    full_disk, tmp_path, keep_free
):
    root = str(full_disk / "root")
    os.mkdir(root)
    (full_disk / "ballast").write_bytes(bytes(38 << 20))  # nobody's to prune
    steps = [
        _ask(0, "cold"),
        *lab.SETTLE,
        {"sleep": 1.5},
        RESET,
        _ask(0, "again"),
        {"metrics": True},
    ]
    request = lab.request(MODEL, steps, transfer=_options(root, keep_free=keep_free))
    result = lab.run(request)
    done = lab.generates(result)
    (metrics,) = lab.metrics(result)
    assert done["again"]["tokens"] == done["cold"]["tokens"]
    assert bad_lines(result["log_path"]) == []
    info = os.statvfs(full_disk)
    free = info.f_bavail * info.f_frsize
    assert lab.counter(metrics, "root_free_bytes") == pytest.approx(free, rel=0.2)
    if keep_free:
        assert lab.chunks(root) == []
        assert lab.counter(metrics, "stores_skipped", reason="capacity") >= CHUNKS
    else:
        assert len(lab.chunks(root)) == CHUNKS
        assert lab.counter(metrics, "stores_skipped") == 0
        assert done["again"]["num_cached_tokens"] > 0


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
    os.mkdir(root)
    num_prompts = 100
    last = num_prompts - 1
    talk = lab.Conversation(tmp_path)
    talk.say(*(_ask(number, f"cold {number}") for number in range(num_prompts)), *lab.SETTLE)
    stored = talk.pause()
    talk.say(_ask(1000, "without room"))
    talk.say(RESET, _ask(last, "loaded while full"))
    talk.say({"sleep": 5}, *lab.SETTLE)  # the prune, and the end of the pause
    talk.say(_ask(1001, "with room"), *lab.SETTLE)
    talk.say(RESET, _ask(1001, "with room again"), RESET, _ask(1000, "without room again"))
    talk.say(RESET, _ask(last, "kept"), RESET, _ask(0, "pruned"), {"metrics": True})
    request = lab.request(MODEL, talk.steps, transfer=_options(root))
    engine = lab.start_engine(request, str(tmp_path / "engine"))
    before = []

    def fill() -> None:
        before.append(count(root)[0])
        with contextlib.suppress(OSError), open(full_disk / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(full_disk).f_bavail == 0
        os.truncate(full_disk / "ballast", (full_disk / "ballast").stat().st_size - left_nbytes)

    try:
        talk.resume(engine, stored, fill)
        result = engine.wait(lab.ENGINE_TIMEOUT_S)
    finally:
        engine.kill()
    assert result["exit_code"] == 0, result.get("error")
    assert bad_lines(result["log_path"]) == []
    assert before[0] >= num_prompts * CHUNKS * FILE_NBYTES * 0.9
    done = lab.generates(result)
    log = pathlib.Path(result["log_path"]).read_text()
    assert "the disk is full: nothing is stored for" in log
    (metrics,) = lab.metrics(result)
    assert lab.counter(metrics, "stores_skipped", reason="no_space") > 0
    # Else what was pruned to have room for the news may be asked for before the news.
    if left_nbytes:
        assert lab.counter(metrics, "load_failures") == 0

    whole = CHUNKS * CHUNK_TOKENS
    assert done["without room"]["num_cached_tokens"] == 0
    assert done["without room again"]["num_cached_tokens"] < whole, "there was no room to store it"
    assert done["loaded while full"]["num_cached_tokens"] == whole
    assert done["with room again"]["num_cached_tokens"] == whole
    assert done["kept"]["num_cached_tokens"] == whole
    assert done["pruned"]["num_cached_tokens"] == 0
    for again, cold in (
        ("without room again", "without room"),
        ("with room again", "with room"),
        ("loaded while full", f"cold {last}"),
        ("kept", f"cold {last}"),
        ("pruned", "cold 0"),
    ):
        assert done[again]["tokens"] == done[cold]["tokens"], again
    lab.assert_sound(root)
