"""Gives a child process the libcuda of native/cuda_stub.c, so that the real kvikio runs without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def build_stub(native_library: Callable[..., str]) -> str:
    """Build the stub as libcuda.so.1; returns its path, for `load_stub` in a child."""
    return native_library("cuda_stub", "-Wl,-soname,libcuda.so.1", file_name="libcuda.so.1")


def load_stub(path: str) -> CudaStub:
    """Load the stub into this process, before kvikio's first I/O; kvikio finds it by its soname.

    Only for a child process: what comes after sees a libcuda.
    """
    return CudaStub(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))


class CudaStub:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fskv_stub_device.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.fskv_stub_num_copies.restype = ctypes.c_long
        library.fskv_stub_fail_copies.argtypes = [ctypes.c_long]

    def declare_device(self, pointer: int, nbytes: int) -> None:
        """Take this range of host memory for device memory from now on."""
        assert self._library.fskv_stub_device(pointer, nbytes) >= 0, "too many ranges"

    @property
    def num_copies(self) -> int:
        """How many copies from or to "device memory" were made."""
        return self._library.fskv_stub_num_copies()

    def fail_copies(self, num: int) -> None:
        """Let the next `num` copies fail."""
        self._library.fskv_stub_fail_copies(num)


class DeviceArray:
    """A numpy uint8 array that says it is on the device; declare its memory to the stub as well."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "data": (array.ctypes.data, False),
            "shape": array.shape,
            "typestr": "|u1",
            "version": 3,
            "strides": None,
        }
