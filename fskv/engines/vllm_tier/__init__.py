"""vLLM imports FskvTier from here, as users write: `"module_path": "fskv.engines.vllm_tier"`."""

from fskv.engines.vllm.version import refusing

with refusing():
    from fskv.engines.vllm_tier.tier import FskvTier as FskvTier
