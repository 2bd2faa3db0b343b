"""Memory without bytes: meta tensors with made-up addresses, and when the allocator has them back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.schedule.region import Region, region

_ALIGNMENT = 512  # bytes: torch's caching allocator


@dataclass
class Memory:
    """``start``: where in the memory of this name it begins. ``stream``: the stream it was allocated for. ``used_on``:
    streams that ``record_stream`` was called with.
    """

    name: str
    address: int
    num_bytes: int
    storage: StorageWeakRef
    stream: int | None = None
    start: int = 0
    used_on: set[int] = field(default_factory=set)


class Memories:
    def __init__(self, first_address: int) -> None:
        self._by_storage: dict[int, Memory] = {}
        self._next = first_address
        self.num_added = 0

    def add(
        self, t: Tensor, name: str, stream: int | None = None, address: int | None = None, start: int = 0
    ) -> Memory:
        storage = t.untyped_storage()
        self.num_added += 1
        if address is None:
            address, self._next = self._next, self._next + -(-max(storage.nbytes(), 1) // _ALIGNMENT) * _ALIGNMENT
        memory = Memory(name, address, storage.nbytes(), StorageWeakRef(storage), stream, start)
        self._by_storage[storage._cdata] = memory
        return memory

    def find(self, t: Tensor) -> Memory | None:
        return self._by_storage.get(t.untyped_storage()._cdata)

    def at(self, address: int) -> Memory:
        for memory in self._by_storage.values():
            if memory.address <= address < memory.address + memory.num_bytes:
                return memory
        raise LookupError(f"no memory at {address:#x}")

    def freed(self) -> list[Memory]:
        """What nobody has held since the last time."""
        gone = [key for key, memory in self._by_storage.items() if memory.storage.expired()]
        return [self._by_storage.pop(key) for key in gone]

    def address(self, t: Tensor) -> int:
        memory = self.find(t)
        assert memory is not None, f"not made in this recording: {t.shape}"
        return memory.address + int(t.storage_offset()) * t.itemsize if t.numel() else 0

    def region(self, t: Tensor) -> Region | None:
        memory = self.find(t)
        assert memory is not None, f"not made in this recording: {t.shape}"
        return region(memory.name, memory.start + t.storage_offset() * t.itemsize, t.shape, t.stride(), t.itemsize)
