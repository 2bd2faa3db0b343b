"""Results in place in a proof: each chunk must come so, and nothing beside the results may be written.

In calls it depends on the time whether a sender finds a post. In a proof the ranks meet behind each post.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from fusedcomm.algorithms.in_place import in_place_from
from fusedcomm.errors import PeerTimeoutError
from fusedcomm.runtime.device_results import ALIGNMENT, DeviceResults
from fusedcomm.runtime.group_member import Member
from fusedcomm.runtime.vote import agree


def heap_bytes(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
    """The size of a heap that holds results of these shapes at a time, between guards."""
    return sum(_block_bytes(math.prod(shape) * dtype.itemsize) for shape in shapes) + 2 * ALIGNMENT


class ProofHeap:
    """The heap of a Member that is made for a proof. It is NaN but for what the problems write."""

    def __init__(self, own: Member, op: str, dtype: torch.dtype) -> None:
        assert isinstance(own.results, DeviceResults) and own.workspace is not None
        self._own, self._op, self._dtype = own, op, dtype
        self._heap, self._workspace = own.results, own.workspace
        self._heap.least_bytes = 0
        self._num_free = own.topology.results_bytes
        self._rest().fill_(math.nan)
        self._num_free -= ALIGNMENT
        self._guard = self._heap.empty([ALIGNMENT // dtype.itemsize], dtype)  # before all results

    def meet(self) -> None:
        """Wait until all ranks have posted. Raises PeerError, in half of the time that a vote takes, or less."""
        finish(self._own.device)
        self._workspace.check(self._op)
        own, bound = self._own, self._workspace.timeout_s
        what, departures = f"{self._op}, posts of a proof", own.departures
        store = PrefixStore("posts", own.store)
        agree(store, own.rank, own.group_size, {}, what=what, departures=departures, timeout_s=bound)

    def check(self, result: Tensor) -> None:
        """Raise what is wrong behind the last round of a problem, whose result is kept."""
        finish(self._own.device)
        self._workspace.check(self._op)
        came = in_place_from(self._workspace)
        if missing := [rank for rank in range(self._own.group_size) if rank not in came]:
            text = f"{self._op}: chunks of ranks {missing} came through the slots, although their place was posted"
            raise PeerTimeoutError(text, peers=missing, op=self._op, epoch=self._workspace.epoch)
        self._num_free -= _block_bytes(result.nbytes)
        if not all(bool(t.isnan().all()) for t in (self._guard, self._rest())):
            raise RuntimeError(f"{self._op}: a rank has written beside a result of rank {self._own.rank}")

    def _rest(self) -> Tensor:
        """All that is free, in one block."""
        rest = self._heap.empty([self._num_free // self._dtype.itemsize], self._dtype)
        assert self._heap.place(rest) is not None
        return rest


def finish(device: torch.device) -> None:
    """Wait for the current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _block_bytes(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
