"""The namespaces of a root: directories with a `namespace.json` that describes them.

A name alone proves nothing. A directory without such a manifest is foreign: it counts against the bounds of
the root, and nothing in it is touched (docs/format.md).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterable

from fskv.root.beneath import opened
from fskv.root.root import FORMAT_FILE, MANIFEST_FILE, read_namespace

logger = logging.getLogger(__name__)

_MAX_TOLD = 20  # directories: of a root that has thousands nobody reads them all
# A link is nobody's.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
# Any other error is of a mount that has trouble, and says nothing about what is there.
_TELLING = (*_GONE, errno.EACCES, errno.EPERM)
_NAMESPACE = re.compile(r".+@[0-9a-f]{16}", re.DOTALL)


class Manifests:
    """The manifests of a root's directories. Each is read again when it has changed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.foreign: set[str] = set()
        self.private: set[str] = set()  # of one engine, which uses none again that it has left
        self.tenants: dict[str, str] = {}
        self._judged: dict[str, tuple[int, ...]] = {}
        self._num_told = 0

    def _tell(self, name: str, error: Exception) -> None:
        self._num_told += 1
        if self._num_told <= _MAX_TOLD:
            logger.warning("fskv: %s is foreign; it counts and stays as it is: %s", name, error)
        if self._num_told == _MAX_TOLD:
            logger.warning(
                "fskv: of other directories that are foreign nothing is said; see `fskv ls`"
            )

    def forget(self, name: str) -> None:
        self.foreign.discard(name)
        self.private.discard(name)
        self.tenants.pop(name, None)
        self._judged.pop(name, None)

    def is_there(self, name: str) -> bool:
        """Return whether there may be a directory of that name, and no link."""
        try:
            with opened(self._root, f"{self._root}/{name}", os.O_PATH):
                return True
        except OSError as error:
            return error.errno not in _GONE

    def gone(self, names: Iterable[str]) -> set[str]:
        """Return the given directories that are gone; raises OSError if the root itself is away."""
        missing = {name for name in names if not self.is_there(name)}
        if missing:
            os.stat(f"{self._root}/{FORMAT_FILE}")
        return {name for name in missing if not self.is_there(name)}  # it was away for a moment

    def state(self, name: str) -> tuple[int, ...]:
        """Return a value that changes with a namespace's manifest; empty if there is none."""
        return self._look(name) or ()

    def _look(self, name: str) -> tuple[int, ...] | None:
        """Return what `state` returns, or None after an error that proves nothing."""
        try:
            with opened(self._root, f"{self._root}/{name}", os.O_PATH) as fd:
                info = os.stat(MANIFEST_FILE, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            return () if error.errno in _GONE else None
        return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns

    def judge(self, name: str) -> None:
        """Find out whether a directory is a namespace, and whose.

        Raises OSError where the root is away: what was known stays known.
        """
        state, known = self._look(name), self._judged.get(name)
        if known and state == ():
            os.stat(f"{self._root}/{FORMAT_FILE}")
            state = self._look(name)  # it was away for a moment
        if known and state in (known, None):
            return
        identity = None
        # Without a manifest: a link leads there; or its engine is just starting, and the manifest comes last.
        if state:
            try:
                identity = read_namespace(self._root, name)
            except Exception as error:  # it is one of many, and anything may be in it
                cause = error.__cause__
                if known and isinstance(cause, OSError) and cause.errno not in _TELLING:
                    return  # it is asked again
                if name not in self.foreign:
                    self._tell(name, error)
                if isinstance(cause, OSError):
                    state = None  # what it says is not known: it is asked again
        self._judged[name] = state or ()
        self.tenants.pop(name, None)
        if identity is not None and identity.tenant is not None:
            self.tenants[name] = identity.tenant
        (self.foreign.add if identity is None else self.foreign.discard)(name)
        is_private = identity is not None and identity.is_private
        (self.private.add if is_private else self.private.discard)(name)


def namespaces_of_ours(root: str, names: Iterable[str]) -> list[str]:
    """Return the directories that have a manifest that describes them, and that are no links."""
    found = []
    for name in names:
        with contextlib.suppress(Exception):  # anything may be in a manifest
            with opened(root, f"{root}/{name}", os.O_PATH):
                read_namespace(root, name)
            found.append(name)
    return found


def all_namespaces(root: str) -> set[str]:
    """Return every directory that may be a namespace; raises OSError where the root cannot be listed."""
    found = set()
    with os.scandir(root) as arches:
        for arch in arches:
            if arch.name.startswith(".") or not arch.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), os.scandir(arch.path) as models:
                for model in models:
                    if _NAMESPACE.fullmatch(model.name) and model.is_dir(follow_symlinks=False):
                        found.add(f"{arch.name}/{model.name}")
    return found
