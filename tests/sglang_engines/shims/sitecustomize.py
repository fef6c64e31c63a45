"""Lets SGLang run a Llama on a CPU without its kernels' packages; in front of PYTHONPATH of a test's engine.

Three things stand in: modules that are imported and never called (sgl_kernel, torchvision, torchaudio), host
pools whose memory is not pinned, and two copies of pages between host and device that are kernels elsewhere.
"""

import importlib.abc
import importlib.machinery
import sys
import types

_ABSENT = ("sgl_kernel", "torchvision", "torchaudio")
_POOLS = "sglang.srt.mem_cache.pool_host."


class _Anything(type):
    """A class whose every attribute is its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def _load_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Host to device, one layer: transfer_kv_per_layer_direct_pf_lf."""
    pairs = zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True)
    for source, target in pairs:
        for host, device in zip(src_ptrs, dst_ptrs, strict=True):
            device[target : target + page_size].copy_(host[source // page_size, layer_id])


def _back_up_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Device to host, all layers: transfer_kv_all_layer_direct_lf_pf."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pairs = zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True)
    for source, target in pairs:
        for number, device in enumerate(src_ptrs):
            page = dst_ptrs[number // layers][target // page_size, number % layers]
            page.copy_(device[source : source + page_size])


def _unpinned(module):
    make = module.HostKVCache.__init__

    def unpinned(self, **options):
        make(self, **{**options, "pin_memory": False})

    module.HostKVCache.__init__ = unpinned


def _copies(module):
    module.transfer_kv_per_layer_direct_pf_lf = _load_pages
    module.transfer_kv_all_layer_direct_lf_pf = _back_up_pages


_AFTER = {f"{_POOLS}base": _unpinned, f"{_POOLS}mha": _copies}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in _AFTER:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                run, change = spec.loader.exec_module, _AFTER[name]
                spec.loader.exec_module = lambda module: (run(module), change(module))
            return spec
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _StandIns())
