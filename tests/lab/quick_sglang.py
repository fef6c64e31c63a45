"""fskv's storage for SGLang, in an engine of a test that cannot wait."""

from quick_constants import set_constants

from fskv.engines.sglang import FskvStorage

__all__ = ["FskvStorage"]

set_constants(quarantine_s=0.1, negative_ttl_s=0.1, probe_s=1.0)
