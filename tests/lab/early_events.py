"""Child process of test_engine_events: demo/engine.py with a fskv that announces chunks as it takes them.

The negative control: what the test sees of this engine, it must not see of a right one.
"""

from __future__ import annotations

import sys

import places  # noqa: F401


def main() -> int:
    from demo import engine
    from fskv.engines.vllm.manager import FskvManager, to_chunk

    prepare_store = FskvManager.prepare_store

    def announce_at_once(self, keys, req_context):
        output = prepare_store(self, keys, req_context)
        for key in output.keys_to_store:
            self.events.stored(to_chunk(key))
        return output

    FskvManager.prepare_store = announce_at_once
    return engine.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
