"""Child process of test_engine_multi: demo/engine.py with a further step, and with a protection taken out.

python multi_engine.py VARIANT request.json result.json

The step {"together": [prompt, ...], "max_tokens": 16, "label": ...} runs prompts at the same time, which
needs blocks of all of them. VARIANT is "as_is", or for a negative control "untold": children do not hear
which blocks a load of another one overwrites; "patient": who has not answered is waited for. Both are how it
is under vLLM's own MultiConnector. "cpu_pool" is as it is, where vLLM's CPU pool needs no GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import places  # noqa: F401


def main() -> int:
    from demo import engine

    variant = sys.argv[1]
    if variant == "untold":
        from fskv.engines.vllm import connector as one
        from fskv.engines.vllm_multi import connector as several

        for module in (one, several):
            assert callable(module.tell_allocated)
            module.tell_allocated = lambda scheduler, blocks: None
    elif variant == "patient":
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        from fskv.engines.vllm_multi.connector import FskvMultiConnector

        theirs = MultiConnector.get_num_new_matched_tokens
        FskvMultiConnector.get_num_new_matched_tokens = theirs
    elif variant == "cpu_pool":
        import cpu_pool

        cpu_pool.replace_copies()
    else:
        assert variant == "as_is", variant

    class Child(engine.Child):
        def _do(self, step: dict[str, Any]) -> dict[str, Any]:
            if "together" not in step:
                return super()._do(step)
            from vllm import SamplingParams

            sampling = SamplingParams(
                temperature=0,
                max_tokens=step["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                seed=0,
            )
            prompts = [{"prompt_token_ids": prompt} for prompt in step["together"]]
            outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
            preemptions = [m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
            return {
                "step": "together",
                "label": step["label"],
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "num_preemptions": sum(m.value for m in preemptions),
            }

    engine.Child = Child
    return engine.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
