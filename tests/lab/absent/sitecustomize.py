"""Packages that the environment lacks, FSKV_ABSENT="one two", are found and have every name in them.

For engines whose model's file imports what its text, or one small image, does not use.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types


class _Name(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "0.99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ.get("FSKV_ABSENT", "").split():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
