"""fskv's storage for SGLang that heeds no update of the weights: a negative control."""

from fskv.engines.sglang import FskvStorage
from fskv.engines.sglang.server import Updates

__all__ = ["FskvStorage"]


def _heed_not(_, method, *args, **kwargs):
    return method(*args, **kwargs)


Updates.update = _heed_not
