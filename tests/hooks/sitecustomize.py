"""Scripts faults below the store into an engine's processes; put on PYTHONPATH by the engine tests.

While the file named by FSKV_TEST_HANG_READS exists, no read of a chunk file returns, as on a dead mount.
"""

import os
import time

_hang_file = os.environ.get("FSKV_TEST_HANG_READS")
if _hang_file:
    from fskv.transports import host

    _read_into = host._HostChunk.read_into

    def _hanging_read_into(self, slot, slot_offset, file_offset, nbytes):
        while os.path.exists(_hang_file):
            time.sleep(0.02)
        return _read_into(self, slot, slot_offset, file_offset, nbytes)

    host._HostChunk.read_into = _hanging_read_into

if os.environ.get("FSKV_TEST_DROP_CAPS"):
    # root reads files of mode 000; without these two capabilities it does not.
    import ctypes

    CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
    _header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _data = (ctypes.c_uint32 * 6)()
    _libc = ctypes.CDLL(None, use_errno=True)
    if _libc.capget(_header, _data) == 0:
        for _at in range(3):
            _data[_at] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
        _libc.capset(_header, _data)
