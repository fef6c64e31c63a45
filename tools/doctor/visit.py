"""The checks in their order: the machine, then the root from what cannot hang to what writes."""

from __future__ import annotations

from . import contents, machine, mount, probes, space
from .finding import Check

OF_MACHINE = (
    Check("versions", machine.versions),
    Check("environment", machine.environment),
    Check("limits", machine.limits),
    Check("cuda", machine.cuda),
    Check("gds", machine.gds),
)
OF_ROOT = (
    Check("mount", mount.look, of_root=True),
    Check("root", contents.state, of_root=True),
    Check("mount", mount.place, of_root=True),
    Check("trash", mount.trash, of_root=True),
    Check("permissions", contents.permissions, of_root=True),
    Check("space", space.look, of_root=True),
    Check("write", probes.write, of_root=True, writes=True),
    Check("O_DIRECT", probes.direct_io, of_root=True, writes=True),
    Check("rename", probes.rename_and_links, of_root=True, writes=True),
    Check("locks", probes.locks, of_root=True, writes=True),
    Check("round trip", probes.round_trip, of_root=True, writes=True),
)
OF_CONTENTS = (
    Check("lease", contents.lease, of_root=True),
    Check("engines", contents.engines, of_root=True),
    Check("namespaces", contents.namespaces, of_root=True),
    Check("leftovers", contents.leftovers, of_root=True),
)
