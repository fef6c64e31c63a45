"""The engine-neutral core: `Lookup` beside an engine's scheduler, `Mover` beside its KV pages.

`open_store` gives both to an engine in one process, and `BlockingStore` waits for them. docs/engine.md has an
example, and the way of an engine with several processes.
"""

from fskv.offload.blocking import BlockingStore, Page
from fskv.offload.kv_store import KvStore, open_store
from fskv.offload.lookup import Lookup
from fskv.offload.mover import Mover, News

__all__ = ["BlockingStore", "KvStore", "Lookup", "Mover", "News", "Page", "open_store"]
