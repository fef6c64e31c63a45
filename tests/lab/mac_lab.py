"""Keys for sealed chunk files, and a root with sealed files, one of them forged."""

from __future__ import annotations

import hashlib

from world import damage

from fskv.format.mac import MacKey, MacKeys

SECRETS = {name: hashlib.sha256(name.encode()).digest() for name in ("old", "new", "third")}


def key(name):
    return MacKey(name, SECRETS[name])


def keys(*names):
    """Return what a store asks; the first writes."""
    ring = MacKeys([key(name) for name in names])
    return lambda: ring


def key_lines(*names):
    return "".join(f"{name} {SECRETS[name].hex()}\n" for name in names)


def key_file(path, *names, mode=0o600):
    path.write_text(key_lines(*names))
    path.chmod(mode)
    return path


class Tools:
    """A root with sealed chunk files, of which one has a forged payload, and the key file."""

    def __init__(self, path, make_world):
        self.root = str(path / "kv")
        self.keys = str(key_file(path / "keys", "new"))
        self.other_keys = str(key_file(path / "other-keys", "third"))
        self.world = make_world(root=self.root, keys=keys("new"))
        for number in range(4):
            self.world.put(number, self.world.content(number))
        self.bad = self.world.path(3)

    def forge(self):
        """Write another payload with the unkeyed checksum right."""
        damage(self.bad, self.world.base + 9)
