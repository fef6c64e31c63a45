"""What every engine stands on, free of any: `Lookup` beside its scheduler, `Mover` beside its KV pages.

`open_store` gives both to an engine in one process. docs/engine.md has an example, and how an engine of
several processes does it.
"""

from fskv.offload.kv_store import KvStore, open_store
from fskv.offload.lookup import Lookup
from fskv.offload.mover import Mover
from fskv.offload.news import News

__all__ = ["KvStore", "Lookup", "Mover", "News", "open_store"]
