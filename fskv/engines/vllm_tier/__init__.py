"""vLLM imports FskvTier from here, as users write: `"module_path": "fskv.engines.vllm_tier"`.

First comes a check: where vLLM lacks what the tier builds on, one sentence says so.
"""

from fskv.engines.vllm.version import Needed, check

_TIERING = "vllm.v1.kv_offload.tiering"
NEEDED: Needed = (
    (f"{_TIERING}.base", "SecondaryTierManager", "no tiers stand behind its CPU cache"),
    (f"{_TIERING}.base", "TransferJob", ""),
    (f"{_TIERING}.base", "JobResult", ""),
    (f"{_TIERING}.spec", "TieringOffloadingSpec", ""),
)

check(needed=NEEDED)

from fskv.engines.vllm_tier.tier import FskvTier as FskvTier  # noqa: E402
