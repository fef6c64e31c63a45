"""Child process of test_engine_unruly: one engine, few blocks, and requests that do not behave. See there.

python unruly_scenario.py ROOT|- [HOW...]; prints a JSON line. Without a root it is an engine without fskv
that computes each prompt by itself. `bad_read`, `two_loads` and `failed_first` are parts of their own, the
last two with sliding windows. The others are negative controls: `late_reads`, a load writes its pages
whenever its read returns; `unflushed_stores`, stores are not made to read their blocks before these change
hands; `kept_reservation` and `no_windows`, vLLM reserves as it does; `in_place`, a failed load keeps its
place.
"""

from __future__ import annotations

import pathlib
import sys
import threading
import time
from typing import Any

from quick_constants import set_constants
from scenarios import make_llm, sampling, tell
from world import wait_for

MAX_MODEL_LEN = 2048
# Blocks that are full together, one of them vLLM's own: model and number.
_ENGINES = {"two_loads": ("gpt_oss", 33), "failed_first": ("gpt_oss", 41)}
_USUAL_ENGINE = ("llama", 23)
DEADLINE_S = 2.0
QUARANTINE_S = 0.1
_LONGEST_S = 240.0
_BLOCKED_S = 20.0
NUM_CROWD, NUM_MANY = 3, 500


def prompts(model: Any) -> dict[str, list[int]]:
    found = {"main": model.main_prompt()}
    for name in (
        "after_hung",
        "after_slow",
        "stored",
        "after_stored",
        "deferred",
        "after_deferred",
    ):
        found[name] = model.tokens(name, 1930)
    for number in range(NUM_CROWD):
        # Seven blocks each, and an eighth after some tokens, for which there is no room for all.
        found[f"crowd {number}"] = model.tokens(f"crowd {number}", 890)
    for number in range(NUM_MANY):
        shared = model.tokens(f"shared {number % 5}", 256)
        found[f"many {number}"] = shared + model.tokens(f"many {number}", 100)
    return found


def num_tokens(label: str) -> int:
    return 100 if label.startswith("crowd") else 16


class Scenario:
    def __init__(self, root: str, how: list[str]) -> None:
        import engine_lab as lab

        from faults import transport as faults
        from fskv import config
        from fskv.engines.vllm import failed_loads

        self.faults = faults
        name, self.num_blocks = _ENGINES.get(how[0] if how else "", _USUAL_ENGINE)
        model = lab.MODELS[name]
        self.prompts = prompts(model)
        self.root = root
        self.script = faults.Script()
        transfer = None
        if root != "-":
            faults.install(self.script)
            # What a failed load has left is hit again by what is before the bad chunk, however slow this is.
            quarantine_s = _LONGEST_S if how[:1] == ["bad_read"] else QUARANTINE_S
            set_constants(failures=1_000_000)
            if name == "llama":
                set_constants(quarantine_s=quarantine_s)
            config._MOST_BASES = 100  # no store is given up while a slow machine computes
            options = {
                # One thread reads in order, so the bad read is that of the ninth chunk.
                "io_threads": 1 if how[:1] == ["bad_read"] else 2,
                "load_deadline_s": DEADLINE_S,
                **({"hybrid_chunk_size": 128} if name == "llama" else {}),
            }
            transfer = lab.connector(root, **options)
        if "late_reads" in how:
            from fskv.data_path.job import Job

            Job.abandon = lambda job: None
        if "unflushed_stores" in how:
            from fskv.engines.vllm.worker import FskvWorker

            FskvWorker.wait = lambda worker, job_ids: None
        if "kept_reservation" in how:
            failed_loads.release_reservation = lambda scheduler, request: None
        if "no_windows" in how:
            from vllm.v1.core.sched.scheduler import Scheduler

            Scheduler._request_remaining_blocks.by_fskv = True  # fskv takes it for its own
        if "in_place" in how:
            failed_loads.FailedLoads.failed = lambda loads, req_ids: None
        few = {"num_gpu_blocks_override": self.num_blocks} if transfer else {}
        few |= {"max_model_len": MAX_MODEL_LEN}
        self.llm = make_llm(model, lab.checkpoint(name), transfer, **few)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    # --- what every part uses -----------------------------------------------------------------

    @property
    def transport(self) -> Any:
        return self.worker.mover._transport

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.spec.worker

    @property
    def manager(self) -> Any:
        return self.core.scheduler.connector._manager

    def add(self, label: str) -> None:
        prompt = {"prompt_token_ids": self.prompts[label]}
        self.engine.add_request(label, prompt, sampling(num_tokens(label)))

    def abort(self, label: str) -> None:
        self.engine.abort_request([label])
        self.step()

    def step(self) -> None:
        outputs = self.engine.step()
        if not outputs:
            # vLLM's own loop sleeps too, or each Python step of an I/O thread takes 5 ms.
            time.sleep(0.001)
        for output in outputs:
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens

    def steps_to(self, condition: Any, seconds: float) -> bool:
        """Step until the condition holds; return whether it did so within the time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.step()
        return True

    def step_until(self, condition: Any) -> None:
        assert self.steps_to(condition, _LONGEST_S), "in vain"

    def ended(self, *labels: str) -> bool:
        return all(len(self.tokens.get(label, ())) == num_tokens(label) for label in labels)

    def finish(self, *labels: str) -> None:
        self.step_until(lambda: self.ended(*labels))

    def make(self, script: Any) -> None:
        self.transport.script = script

    def calm(self) -> None:
        self.make(self.faults.Script())
        self.transport.release()

    def settle(self) -> None:
        """Step until no request and no chunk is left; an idle engine hears of no store."""
        runner = self.worker.mover._runner
        end = time.monotonic() + _LONGEST_S
        while True:
            self.add_small()
            self.step_until(lambda: not self.core.scheduler.has_requests())
            if runner.num_open_stores == runner.num_running == 0:
                return
            assert time.monotonic() < end, "in vain"

    def add_small(self) -> None:
        self.engine.add_request(f"small {time.monotonic()}", {"prompt_token_ids": [1]}, sampling(1))

    def left(self) -> dict[str, int]:
        """Return what should be nothing when no request is left."""
        from fskv.observe.metrics import SLOTS_IN_USE, THREADS_HUNG

        scheduler, gauges = self.core.scheduler, self.worker.mover.gauges()
        of_connector = scheduler.connector.connector_scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "blocks": self.num_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(scheduler.requests),
            "tracked": len(of_connector._req_status),
            "jobs": len(of_connector._jobs),
            "loading": len(of_connector._chunks_being_loaded or ()),
            "running": self.worker.mover._runner.num_running,
            "stores": self.worker.mover._runner.num_open_stores,
            "storing": len(self.manager.chunks.storing),
            "told": len(self.manager._told),
            **{metric.name: int(gauges[metric]) for metric in (SLOTS_IN_USE, THREADS_HUNG)},
        }

    # --- the parts ----------------------------------------------------------------------------

    def reference(self) -> None:
        for label in self.prompts:
            self.add(label)
            self.finish(label)

    def abort_during_a_load(self, reads: str, after: str) -> None:
        """The aborted request's blocks go to `after` when its load has ended, and late bytes do not."""
        self.make(self.faults.Script(read=reads))
        self.add("main")
        self.step_until(lambda: self.transport.num_running["read"] > 0)
        self.abort("main")
        self.add(after)
        self.step_until(lambda: len(self.tokens.get(after, ())) >= 2)
        self.calm()
        wait_for(lambda: self.worker.mover._runner.num_running == 0, _LONGEST_S)
        self.finish(after)
        self.settle()
        time.sleep(2 * QUARANTINE_S)  # then what was late may be loaded again

    def fail_a_load(self) -> bool:
        """Return whether the request, hit again by what is before the bad chunk, came to its end."""
        self.make(self.faults.Script(read="........E"))
        self.add("main")
        return self.steps_to(lambda: self.ended("main"), _BLOCKED_S)

    def load_together(self, *, damaged: bool) -> tuple[bool, dict[str, list[int]]]:
        """Load two prompts at once; return whether both came to their ends, and what they gave before.

        There is room for both loads, and for the rest of one. The first one's files may be spoilt.
        """
        labels = ("after_hung", "after_slow")
        files = []
        for label in labels:
            self.add(label)
            self.finish(label)
            self.settle()
            files.append(set(pathlib.Path(self.root).rglob("*.kv")))
            assert self.llm.reset_prefix_cache()
        for path in files[0] if damaged else ():
            content = path.read_bytes()
            path.write_bytes(content[:-5000] + bytes([content[-5000] ^ 16]) + content[-4999:])
        computed, self.tokens, self.cached = self.tokens, {}, {}
        self.make(self.faults.Script(read="H*"))
        for label in labels:
            self.add(label)
        self.step_until(lambda: self.transport.num_running["read"] > 0)
        self.step()  # the second one is admitted, or not
        self.calm()
        wait_for(lambda: self.worker.mover._runner.num_running == 0, _LONGEST_S)
        both_ended = self.steps_to(lambda: self.ended(*labels), _BLOCKED_S)
        return both_ended, {label: computed[label] for label in labels}

    def abort_during_a_store(self) -> None:
        self.make(self.faults.Script(write="H*"))
        self.add("stored")
        self.step_until(
            lambda: (
                len(self.tokens.get("stored", ())) >= 2
                and self.worker.mover._runner.num_open_stores > 2
            )
        )
        self.abort("stored")
        self.tokens.pop("stored")
        self.add("after_stored")
        self.finish("after_stored")
        self.calm()
        self.settle()
        assert self.llm.reset_prefix_cache()
        self.add("stored")
        self.finish("stored")
        self.settle()

    def abort_while_deferred(self) -> bool:
        """Return whether the request was deferred when it was aborted."""
        gate = threading.Event()
        presence = self.manager.chunks.presence
        look = presence._probe

        def hang(*arguments: Any) -> Any:
            gate.wait(_LONGEST_S)
            return look(*arguments)

        presence._probe = hang
        self.add("deferred")
        self.step()
        # Known to the connector, and not scheduled.
        scheduler = self.core.scheduler
        known = bool(scheduler.connector.connector_scheduler._req_status)
        deferred = known and not scheduler.running
        self.abort("deferred")
        self.add("after_deferred")
        self.finish("after_deferred")
        presence._probe = look
        gate.set()
        self.settle()
        return deferred

    def crowd(self) -> int:
        labels = [f"crowd {number}" for number in range(NUM_CROWD)]
        for label in labels:
            self.add(label)
        self.finish(*labels)
        self.settle()
        found = [m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        return int(sum(found))

    def many(self) -> int:
        """Run them twice, as many as there are at once; return the tokens that came from files."""
        labels = [f"many {number}" for number in range(NUM_MANY)]
        for _ in range(2):
            for label in labels:
                self.tokens.pop(label, None)
                self.add(label)
            self.finish(*labels)
            self.settle()
            assert self.llm.reset_prefix_cache()
        return sum(self.cached[label] for label in labels)

    def too_long(self) -> str:
        """Return how vLLM refuses a request that is longer than its cache."""
        from vllm.exceptions import VLLMValidationError

        try:
            prompt = {"prompt_token_ids": [1] * (MAX_MODEL_LEN + 1)}
            self.engine.add_request("too long", prompt, sampling(1))
        except (ValueError, VLLMValidationError) as error:
            return str(error)
        return ""


def main() -> None:
    root, *how = sys.argv[1:]
    scenario = Scenario(root, how)
    answer: dict[str, Any] = {}
    left: dict[str, dict[str, int]] = {}
    if root == "-":
        scenario.reference()
    elif how == ["late_reads"]:
        scenario.abort_during_a_load("H*", "after_hung")
    elif how == ["unflushed_stores"]:
        scenario.abort_during_a_store()
    elif how[:1] == ["bad_read"]:
        answer["ended"] = scenario.fail_a_load()
    elif how[:1] in (["two_loads"], ["failed_first"]):
        damaged = how[0] == "failed_first"
        answer["ended"], answer["computed"] = scenario.load_together(damaged=damaged)
    else:
        parts: dict[str, Any] = {
            "hung": lambda: scenario.abort_during_a_load("H*", "after_hung"),
            "slow": lambda: scenario.abort_during_a_load("L*", "after_slow"),
            "stored": scenario.abort_during_a_store,
            "deferred": scenario.abort_while_deferred,
            "crowd": scenario.crowd,
            "too_long": scenario.too_long,
            "many": scenario.many,
        }
        for name, part in parts.items():
            answer[name] = part()
            left[name] = scenario.left()
    answer = {"tokens": scenario.tokens, "cached": scenario.cached, "left": left, **answer}
    scenario.engine.engine_core.shutdown()
    tell(answer)


if __name__ == "__main__":
    main()
