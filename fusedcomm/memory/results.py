"""Results in place: this rank's heap of results and its peers', in symmetric memory (docs/protocol.md, CPUs alone)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedcomm.kernels.native_part import loaded
from fusedcomm.memory import canaries

LEAST_BYTES = 1024  # smaller results take no block, which is whole pages: a program may keep many of them


class Results:
    """``buffers``: uint8 tensors over every rank's heap; ``segment``: this rank's, as it was allocated; ``owner`` keeps
    the mapping alive. ``guarded``: each result lies between guard bytes.
    """

    def __init__(self, buffers: list[Tensor], *, segment: Tensor, owner: Any, guarded: bool = False) -> None:
        self.buffers = buffers
        self.heap = loaded().ResultsHeap(segment, LEAST_BYTES, buffers)
        self.guarded = guarded
        self._owner = owner

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for a result: in a warm block, or in ordinary memory."""
        if self.guarded:
            num_bytes = math.prod(shape) * dtype.itemsize
            block = self.heap.empty([num_bytes + 2 * canaries.GUARD_BYTES], torch.uint8)
            return canaries.paint_around(block).view(dtype).view(list(shape))
        made: Tensor = self.heap.empty(list(shape), dtype)
        return made

    def retire(self) -> None:
        """Reuse no block: a peer stopped in a call may still write to a posted one."""
        self.heap.retire()

    def give_back(self) -> None:
        """Give free memory back to the system. Live results keep their place."""
        self.heap.trim(0)
