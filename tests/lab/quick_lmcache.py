"""fskv's adapter for LMCache, in a server of a test that cannot wait."""

from quick_constants import set_constants

from fskv.engines.lmcache import FskvAdapter

__all__ = ["FskvAdapter"]

set_constants(quarantine_s=0.1, negative_ttl_s=0.1, probe_s=1.0)
