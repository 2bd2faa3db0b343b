"""Results in place on GPUs: this rank's heap of results, in symmetric memory, whose blocks are reused in stream order.

A block that a tensor has left is memory of the stream that it was made on, as in torch's allocator, and no other stream
gets it. All that used it on that stream comes before what the next owner launches there: also what peers have written,
for which the stream has waited. But torch's allocator does not know this memory: `Tensor.record_stream` does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1 << 20  # smaller results are copied out in less time than a post takes to launch; chosen, not measured
ALIGNMENT = 512  # bytes: that of torch's allocator

_in_use: set[DeviceResults] = set()  # heaps in which tensors live, which must stay mapped


@dataclass(frozen=True, order=True)
class FreeBlock:
    start: int
    num_bytes: int
    stream: int | None = field(compare=False)  # the one that has used it; None: none has

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class DeviceResults:
    """``buffers``: uint8 tensors over every rank's heap; ``rank`` has its own; ``owner`` keeps the mapping alive.

    ``tensor_at(offset, shape, dtype)`` is a tensor in this rank's heap, with a storage of its own.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        rank: int,
        tensor_at: Callable[[int, Sequence[int], torch.dtype], Tensor],
        owner: Any = None,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        self.device = buffers[rank].device
        self.addresses = torch.tensor([each.data_ptr() for each in buffers], dtype=torch.int64, device=self.device)
        self._base = buffers[rank].data_ptr()
        self._free = [FreeBlock(0, buffers[rank].numel() // ALIGNMENT * ALIGNMENT, None)]  # in order
        self._live: dict[int, tuple[FreeBlock, StorageWeakRef]] = {}  # by start
        self._tensor_at, self.least_bytes, self._owner = tensor_at, least_bytes, owner
        self._is_retired = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for a result on the current stream: in a block, or in ordinary memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        block = None
        if num_bytes >= max(self.least_bytes, 1) and not self._is_retired:
            self._collect()
            block = self._take(-(-num_bytes // ALIGNMENT) * ALIGNMENT, self._stream())
        if block is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        made = self._tensor_at(block.start, shape, dtype)
        self._live[block.start] = block, StorageWeakRef(made.untyped_storage())
        _in_use.add(self)
        return made

    def place(self, t: Tensor) -> int | None:
        """Where peers may write ``t``, a result made here, or None where they may not."""
        start = t.data_ptr() - self._base
        return None if self._is_retired or start not in self._live else start

    def retire(self) -> None:
        """Give no block out again: a peer that was stopped in a call may write to one that this rank has posted."""
        self._is_retired = True

    def give_back(self) -> None:
        """Let the memory go when no tensor is left in it, here or in a heap that was dropped before."""
        for heap in list(_in_use):
            heap._collect()

    def _stream(self) -> int:
        """Where kernels are only interpreted or compiled, there is one."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def _take(self, num_bytes: int, stream: int) -> FreeBlock | None:
        """The smallest block that is large enough: one that the stream has used, or else one that none has."""
        fitting = [each for each in self._free if each.num_bytes >= num_bytes and each.stream in (stream, None)]
        if not fitting:
            return None
        found = min(fitting, key=lambda each: (each.stream is None, each.num_bytes))
        self._free.remove(found)
        if found.num_bytes > num_bytes:
            self._free.append(FreeBlock(found.start + num_bytes, found.num_bytes - num_bytes, found.stream))
            self._free.sort()
        return FreeBlock(found.start, num_bytes, stream)

    def _collect(self) -> None:
        """Free the blocks whose tensors are gone. All that used them has been launched by now."""
        gone = [start for start, (_, storage) in self._live.items() if storage.expired()]
        for start in gone:
            self._free.append(self._live.pop(start)[0])
        if gone:
            self._free = _joined(sorted(self._free))
        if not self._live:
            _in_use.discard(self)


def _joined(blocks: Sequence[FreeBlock]) -> list[FreeBlock]:
    """Neighbours of one stream as one block."""
    found: list[FreeBlock] = []
    for block in blocks:
        if found and (found[-1].end, found[-1].stream) == (block.start, block.stream):
            block = FreeBlock(found[-1].start, found.pop().num_bytes + block.num_bytes, block.stream)
        found.append(block)
    return found
