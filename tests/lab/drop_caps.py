"""Importing this takes root's right to read everything: what has mode 000 is denied to it, too."""

import ctypes

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
_header = (ctypes.c_uint32 * 2)(0x20080522, 0)
_data = (ctypes.c_uint32 * 6)()
_libc = ctypes.CDLL(None, use_errno=True)
if _libc.capget(_header, _data) == 0:
    for _at in range(3):
        _data[_at] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    _libc.capset(_header, _data)
