"""`fskv bench --peers` on a client of NFS, of CephFS and of MooseFS: a program, no test.

    cd tests && python -m shared_fs.rates [NFS CephFS MooseFS]

Prints a row for each operation: the rate by that of vLLM's own file I/O in the same rounds. Absolute rates of
such servers, which share the cores with the client, say nothing. Needs root and what `install` installs.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from shared_fs import uml_rack
from shared_fs.ceph import Ceph
from shared_fs.moose import Moose

_BENCH = "bench --peers --json --chunk-kib 512,2048 --threads 4 --rounds 5 --total-mib 32"
_LIMIT_S = 900.0


@contextlib.contextmanager
def nfs() -> Iterator[tuple[uml_rack.UmlNode, str]]:
    rack = uml_rack.Rack()
    try:
        rack.up()
        yield rack.a, rack.a.mount("4.2")
    finally:
        rack.down()


@contextlib.contextmanager
def mounted(kind: type[Ceph | Moose]) -> Iterator[tuple[object, str]]:
    cluster = kind()
    try:
        cluster.up()
        yield cluster.a, cluster.a.mount
    finally:
        cluster.down()


PLACES = {"NFS": nfs, "CephFS": lambda: mounted(Ceph), "MooseFS": lambda: mounted(Moose)}


def main(names: list[str]) -> int:
    print("| | operation | chunk | path | by fs_io_C |", "|---|---|---|---|---|", sep="\n")
    for name in names or PLACES:
        with PLACES[name]() as (node, directory):
            repository = Path(__file__).parents[2]
            words = f"{shlex.quote(sys.executable)} -m tools {_BENCH} {shlex.quote(directory)}"
            said = node.run(f"cd {shlex.quote(str(repository))} && {words}", timeout_s=_LIMIT_S)
        rows, _ = json.JSONDecoder().raw_decode(said, said.index("["))  # the advice follows
        for row in rows:
            if (ratio := row.get("ratio_to_fs_io_c")) is not None:
                cells = (row["op"], f"{row['chunk_nbytes'] >> 10} KiB", row["path"], f"{ratio:.2f}")
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
