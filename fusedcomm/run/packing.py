"""A launch of a compiled Triton kernel, packed as the driver takes it: parameters in one block of bytes.

The layout is that of Triton's own launchers (backends/nvidia/driver.py and driver.c of 3.6 and 3.9): the signature
without constants, tuples flattened, then the pointers of both scratch memories. A descriptor is a tensor map by value,
then its sizes and strides.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from fusedcomm.memory.topology import driver_version, triton_version
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.schedule import Described, Fingerprint, Launch, Place, Table

_MAP_BYTES = 128
_SMALL_BYTES = 128 << 10
_LAST_OLD_DRIVER = 13010  # 13.1
_FORMATS = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f"}
_PDL, _COOPERATIVE = 6, 2  # CU_LAUNCH_ATTRIBUTE_*


class NotPackableError(RuntimeError):
    """The launch is one that only Triton's launcher can do."""


class Packed(NamedTuple):
    """The arguments of ``native.Plan.launch`` behind the places."""

    function: int
    grid: tuple[int, int, int]  # blocks, threads of a block, bytes of shared memory
    attributes: list[tuple[int, list[int]]]
    parameters: bytes
    offsets: list[int]
    addresses: list[tuple[int, int]]  # where an address stands; the index of its place
    maps: list[tuple[int, int, tuple[int, int, int, int], list[int], list[int], list[int]]]


def pack(work: Launch, compiled: Any, workspace: Workspace, fingerprint: int) -> tuple[list[Place], Packed]:
    """``compiled``: the kernel that Triton has found for the launch."""
    _check(compiled)
    block = _Block(workspace, fingerprint, iter(getattr(compiled.metadata, "tensordesc_meta", None) or []))
    for kind, value in zip(compiled.src.signature.values(), work.arguments, strict=True):
        block.add(kind, value)
    block.scratch()
    meta = compiled.metadata
    attributes = [(_PDL, [1])] * bool(meta.launch_pdl) + [(_COOPERATIVE, [1])] * bool(meta.launch_cooperative_grid)
    grid = work.num_programs, 32 * meta.num_warps, meta.shared
    packed = Packed(compiled.function, grid, attributes, bytes(block.data), block.offsets, block.addresses, block.maps)
    return block.places, packed


def _check(compiled: Any) -> None:
    from triton import knobs

    meta = compiled.metadata
    if not isinstance(getattr(compiled, "function", None), int) or meta.num_ctas != 1:
        raise NotPackableError("the kernel is not loaded, or has clusters")
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise NotPackableError("the kernel needs scratch memory")
    if _hooked(knobs.runtime.launch_enter_hook) or _hooked(knobs.runtime.launch_exit_hook):
        raise NotPackableError("a hook wants to see each launch")


def _hooked(hook: Any) -> bool:
    return bool(hook) and bool(getattr(hook, "calls", True))


class _Block:
    """The parameters in the making."""

    def __init__(self, workspace: Workspace, fingerprint: int, descriptors: Iterator[Any]) -> None:
        self.data = bytearray()
        self.offsets: list[int] = []
        self.addresses: list[tuple[int, int]] = []
        self.maps: list[Any] = []
        self.places: list[Place] = []
        self._workspace, self._fingerprint, self._descriptors = workspace, fingerprint, descriptors

    def add(self, kind: Any, value: Any) -> None:
        match kind, value:
            case tuple(), _:
                for each in zip(kind, value, strict=True):
                    self.add(*each)
            case "constexpr", _:
                pass
            case str(), Described() if kind.startswith("tensordesc"):
                self._describe(value, next(self._descriptors))
            case str(), Place() if kind.startswith("*"):
                self.addresses.append((self._put("Q", 0), len(self.places)))
                self.places.append(value)
            case str(), Table() if kind.startswith("*"):
                self._put("Q", self._workspace.segments.data_ptr())
            case str(), Fingerprint():
                self._put(_FORMATS[kind], self._fingerprint)
            case str(), int() | float() if kind in _FORMATS:
                self._put(_FORMATS[kind], value)
            case _:
                raise NotPackableError(f"an argument of kind {kind} is {value}")

    def scratch(self) -> None:
        self._put("Q", 0)
        self._put("Q", 0)

    def _put(self, code: str, value: int | float) -> int:
        size = struct.calcsize(code)
        return self._append(struct.pack(code, value), size)

    def _append(self, data: bytes, alignment: int) -> int:
        self.data.extend(bytes(-len(self.data) % alignment))
        self.offsets.append(len(self.data))
        self.data.extend(data)
        return self.offsets[-1]

    def _describe(self, described: Described, meta: dict[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        place, sizes, strides, _ = described
        at, size = self._append(bytes(_MAP_BYTES), _MAP_BYTES), meta["elem_size"]
        steps = [size * stride for stride in strides]
        last_byte = sum((each - 1) * step for each, step in zip(sizes, steps, strict=True))
        is_small = triton_version() >= (3, 7) and driver_version() <= _LAST_OLD_DRIVER and last_byte + 1 < _SMALL_BYTES
        facts = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["swizzle"], 0, int(is_small)
        box = list(meta["block_size"])
        self.maps.append((at, len(self.places), facts, list(sizes)[::-1], steps[-2::-1], box[::-1]))
        self.places.append(place)
        for each in sizes:
            self._put("i", each)
        for each in strides:
            self._put("q", each)
