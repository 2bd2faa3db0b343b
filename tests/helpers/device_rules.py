"""What a device refuses, as rules over what reaches its driver: each says what must hold, and the value.

The rules of a tensor map are those of cuTensorMapEncodeTiled in the CUDA driver API; those of a launch are the limits
of cuLaunchKernelEx and of the architecture; those of a write are cuStreamWriteValue64's. Three rules are the package's
own: every address lies in a tensor of the call; a launch has no attribute but that of an early start, as no kernel here
asks for clusters or a cooperative grid; and a write has the fence that makes it a release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.helpers.cubin import CubinKernel

REGISTERS = 64 << 10  # per multiprocessor
EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
DEFAULT_SHARED = 48 << 10  # what a block may have without asking
_SWIZZLED = (None, 32, 64, 128)  # by CUtensorMapSwizzle: bytes that a row of a box may have
_GRID = (2**31 - 1, 65535, 65535)
_ITEMSIZES = {0: 1, 6: 2, 7: 4, 9: 2, 11: 4}  # by CUtensorMapDataType: uint8, float16, float32, bfloat16, TF32

Range = tuple[int, int]  # addresses: the first, and the one behind the last


@dataclass(frozen=True)
class TensorMap:
    """Arguments of cuTensorMapEncodeTiled: the innermost dim comes first. strides [rank - 1] in bytes."""

    data_type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int

    @property
    def itemsize(self) -> int:
        return _ITEMSIZES[self.data_type]

    @property
    def end(self) -> int:
        last = sum((dim - 1) * step for dim, step in zip(self.dims, (self.itemsize, *self.strides), strict=True))
        return self.address + last + self.itemsize


@dataclass(frozen=True)
class Launch:
    """Arguments of cuLaunchKernelEx. ``arguments`` are the bytes of each of the kernel's parameters."""

    kernel: CubinKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # dynamic, bytes
    most_shared: int  # what cuFuncSetAttribute has set, or the default
    stream: int
    attributes: tuple[int, ...]
    arguments: tuple[bytes, ...]


@dataclass(frozen=True)
class Write:
    stream: int
    address: int
    value: int
    flags: int


def tensor_map_violations(map: TensorMap, arch: int, tensors: Sequence[Range]) -> Iterator[str]:
    rank = len(map.dims)
    if arch < 90:
        yield f"tensor map: the device must be sm_90 or later, got sm_{arch}"
    if not 1 <= rank <= 5:
        yield f"tensor map rank: it must be 1 to 5, got {rank}"
        return
    if map.data_type not in _ITEMSIZES:
        yield f"tensor map data type: it must be one that the kernels load, got {map.data_type}"
        return
    if map.address % 16:
        yield f"tensor map address: it must be a multiple of 16, got {map.address:#x}"
    if not all(0 < dim <= 2**32 for dim in map.dims):
        yield f"tensor map dims: they must be 1 to 2**32, got {map.dims}"
    if not all(0 < stride < 2**40 and stride % 16 == 0 for stride in map.strides):
        yield f"tensor map strides: they must be multiples of 16 below 2**40 bytes, got {map.strides}"
    for stride, inner, dim in zip(map.strides, (map.itemsize, *map.strides), map.dims, strict=False):
        if stride < inner * dim:
            yield f"tensor map strides: what they step over must not overlap, got {map.strides} for dims {map.dims}"
    if not all(0 < size <= 256 for size in map.box):
        yield f"tensor map box: its sizes must be 1 to 256, got {map.box}"
    if not all(1 <= stride <= 8 for stride in map.element_strides):
        yield f"tensor map element strides: they must be 1 to 8, got {map.element_strides}"
    if map.interleave:
        yield f"tensor map interleave: it must be none, got {map.interleave}"
    row = map.box[0] * map.itemsize
    if row % 16:
        yield f"tensor map box: a row must be a multiple of 16 bytes, got {row}"
    if not 0 <= map.swizzle < len(_SWIZZLED):
        yield f"tensor map swizzle: it must be below {len(_SWIZZLED)}, got {map.swizzle}"
    elif row > (_SWIZZLED[map.swizzle] or row):
        yield f"tensor map swizzle: a row of a box must have at most {_SWIZZLED[map.swizzle]} bytes, got {row}"
    if not _within(map.address, map.end, tensors):
        yield f"tensor map address: it must lie in a tensor of the call up to its end, got {map.address:#x}"


def launch_violations(launch: Launch) -> Iterator[str]:
    kernel, threads = launch.kernel, launch.block[0] * launch.block[1] * launch.block[2]
    if not all(0 < size <= most for size, most in zip(launch.grid, _GRID, strict=True)):
        yield f"grid: its sizes must be 1 to {_GRID}, got {launch.grid}"
    if kernel.required and threads != kernel.threads:
        yield f"block: it must have the {kernel.threads} threads that the kernel was compiled for, got {threads}"
    if not 0 < threads <= min(kernel.threads, 1024) or threads % 32:
        yield f"block: it must be whole warps, at most {min(kernel.threads, 1024)} threads, got {threads}"
    if registers_of(kernel, threads) > REGISTERS:
        yield f"registers: a block must have at most {REGISTERS}, got {registers_of(kernel, threads)}"
    if launch.shared > launch.most_shared:
        yield f"dynamic shared memory: it must be at most {launch.most_shared} bytes, got {launch.shared}"
    if set(launch.attributes) - {EARLY_START}:
        yield f"launch attributes: there must be none but {EARLY_START}, got {launch.attributes}"


def argument_violations(launch: Launch, expected: Sequence[Argument], tensors: Sequence[Range]) -> Iterator[str]:
    """``expected``: what the package passed, as the kernel's parameters."""
    sizes = tuple(argument.size for argument in expected)
    if sizes != launch.kernel.parameters:
        yield f"arguments: the cubin takes sizes {launch.kernel.parameters}, got {sizes}"
        return
    for argument, data in zip(expected, launch.arguments, strict=True):
        if argument.data is not None and argument.data != data:
            yield f"argument {argument.name}: it must be {argument.data.hex()}, got {data.hex()}"
        address = int.from_bytes(data, "little")
        if argument.is_pointer and not _within(address, address + 1, tensors):
            yield f"pointer {argument.name}: it must lie in a tensor of the call, got {address:#x}"


@dataclass(frozen=True)
class Argument:
    """One of a kernel's parameters. ``data`` is None where only the driver knows it: a tensor map's."""

    name: str
    size: int
    data: bytes | None
    is_pointer: bool = False


def write_violations(write: Write, streams: Sequence[int], tensors: Sequence[Range]) -> Iterator[str]:
    if write.stream not in streams:
        yield f"stream write: the stream must be one of {list(streams)}, got {write.stream:#x}"
    if write.address % 8:
        yield f"stream write: the address must be a multiple of 8, got {write.address:#x}"
    if not _within(write.address, write.address + 8, tensors):
        yield f"stream write: the word must lie in a tensor of the call, got {write.address:#x}"
    if write.flags:  # anything else leaves out the fence, and peers would see the word before the data
        yield f"stream write: the flags must be 0, got {write.flags}"


def registers_of(kernel: CubinKernel, threads: int) -> int:
    """Registers of a block: each warp gets whole groups of 256."""
    return -(-threads // 32) * (-(-kernel.registers * 32 // 256) * 256)


def _within(first: int, end: int, tensors: Sequence[Range]) -> bool:
    return any(start <= first and end <= stop for start, stop in tensors)
