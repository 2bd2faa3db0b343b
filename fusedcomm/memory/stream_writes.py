"""Words written by a CUDA stream itself, in its order; a kernel would need room on the device.

A matmul that occupies every SM until its end holds up each kernel launched beside it, also one that only sets a flag.
"""

from __future__ import annotations

import ctypes
import functools

import torch

_CAN_WRITE_64_BITS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a fence for the whole system comes before the write


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the driver and the GPU have such writes. Ranks may differ: a peer sees the same word either way."""
    value = ctypes.c_int()
    try:
        found = _driver().cuDeviceGetAttribute(ctypes.byref(value), _CAN_WRITE_64_BITS, device.index or 0)
    except (OSError, AttributeError):
        return False
    return found == 0 and value.value == 1


def write(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write 64 bits to ``address``, of this GPU or a peer, behind the stream's earlier work (release)."""
    failed = _write()(stream.cuda_stream, address, value, _DEFAULT)
    if failed:
        raise RuntimeError(f"the CUDA driver must write a word for a stream, but cuStreamWriteValue64 gave {failed}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _write() -> ctypes._NamedFuncPointer:
    function = _driver().cuStreamWriteValue64_v2
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    return function
