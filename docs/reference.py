"""Writes the generated reference pages: options.md, metrics.md and cli.md, out of the code.

`make reference` runs it. `tests/meta/test_reference.py` compares the files with these pages.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

from fskv_tools import manual

from fskv.config import MIB, StoreConfig
from fskv.sizes import Share

_DOCS = pathlib.Path(__file__).resolve().parent

_OPTIONS = """# Options

`make reference` writes this page out of `fskv/config.py`.

With vLLM the options go into `kv_connector_extra_config` of `--kv-transfer-config`
([example](vllm.md#configure)), with SGLang into its [extra configuration](sglang.md), with LMCache into
`adapter_params` ([example](lmcache.md)). Defaults are shown as JSON.

fskv refuses an unknown option and an impossible value at the start, before weights are read. The error is one
sentence. `fskv doctor --config FILE` gives the same error without an engine. FILE holds the JSON or the whole line
of `vllm serve`.

{table}
## Values

- A size is a whole number of bytes, or a text with a unit. kB, MB, GB and TB are powers of 1000. KiB, MiB, GiB and
  TiB are powers of 1024. `keep_free` may be a percentage of the file system.
- Seconds are plain numbers.
- `staging_bytes` must hold `io_threads` + 1 chunk files, or two files with `io_threads` `auto`. With CUDA fskv pins
  this memory at the start, and 48 KiB more for each I/O thread. Copies take up to 64 MiB of GPU memory, which neither
  `staging_bytes` nor vLLM's memory budget includes.
- The options of vLLM's own connector `offload_prompt_only` and `self_describing_kv_events` pass through. fskv refuses
  `block_size`, `blocks_per_chunk`, `spec_name`, `spec_module_path` and `cpu_bytes_to_use`. It refuses
  `sync_load_budget_bytes` unless it is 0, and here `kv_load_failure_policy` unless it is `recompute`.
"""


def options() -> str:
    """Return the page of the options."""
    rows = ["| option | default | unit | effect | change it when |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(StoreConfig):
        default = "required" if field.default is dataclasses.MISSING else _default(field.default)
        words = (field.metadata[name] for name in ("unit", "effect", "when"))
        rows.append(f"| `{field.name}` | {default} | {' | '.join(words)} |")
    return _OPTIONS.format(table="\n".join(rows) + "\n")


def _default(value: object) -> str:
    if isinstance(value, Share):
        value = str(value)
    if isinstance(value, int) and value >= MIB:
        value = f"{value // MIB}MiB"
    return f"`{json.dumps(value)}`"


PAGES: dict[str, Callable[[], str]] = {"options": options, "cli": manual.page}


if __name__ == "__main__":
    for _name, _page in PAGES.items():
        (_DOCS / f"{_name}.md").write_text(_page(), encoding="utf-8")
