"""Calls with known results, and guarded memory around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.ops.exact_problem import difference
from fusedcomm.runtime.results import Results
from fusedcomm.runtime.segment import NUM_SLOTS
from fusedcomm.runtime.workspace import Workspace
from tests.helpers.problems import Problem, expected, integers

SLOT_BYTES = 1 << 12  # the least slot in ranks that meet faults, so that growth is cheap and guards are quickly checked
SMALL = (13, 5, 7)  # rows, K, N
OTHER = (11, 8, 9)
LARGE = (61, 58, 59)  # needs more than SLOT_BYTES, whichever part is sent
DIMS = {  # gather_dim, scatter_dim
    "matmul_all_to_all": (0, 1),
    "all_to_all_matmul": (0, 1),
    "all_gather_matmul": (0, None),
    "matmul_reduce_scatter": (None, 0),
    "matmul_all_reduce": (None, None),
}
RESULTS_BYTES = 1 << 16  # more than the results of all calls of a cell
PATTERN = 0x5A
BAND = 64  # elements


@dataclass(frozen=True)
class KnownCall:
    """A call on integers so small that every sum is exact in every dtype and order. It is equal on all ranks."""

    op: str
    group_size: int
    size: tuple[int, int, int] = SMALL
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def problem(self) -> Problem:
        rows, k, n = self.size
        return Problem("known", (rows, k), n, *DIMS[self.op], op=self.op)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        x, w, _ = integers(self.problem, rank, self.group_size, self.dtype, self.seed)
        return x, w

    def run(self, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        return self.problem.call((x, w, None), group)

    def wrong(self, result: Tensor, rank: int) -> str | None:
        """Where the result of ``rank`` differs from that of one process that has all ranks' inputs; None if nowhere."""
        return difference(result, expected(self.problem, self.group_size, self.dtype, self.seed)[rank])


def warm_results(workspace: Workspace) -> None:
    """Let this rank and its peers find the memory of results warm, as after many calls whose results were dropped."""
    assert isinstance(workspace.results, Results)
    for _ in range(3):
        workspace.results.empty([RESULTS_BYTES], torch.uint8)
    for rank in range(workspace.group_size):
        workspace.results.at_peer(rank, 0, RESULTS_BYTES)


class Guarded:
    """Tensors of this rank, each in the middle of a larger one. Neither they nor what is around them may change."""

    def __init__(self) -> None:
        self._whole: list[tuple[Tensor, Tensor]] = []

    def copy_of(self, t: Tensor) -> Tensor:
        whole = torch.full((t.numel() + 2 * BAND,), float(PATTERN), dtype=t.dtype, device=t.device)
        inside = whole[BAND:-BAND].view(t.shape)
        inside.copy_(t)
        self._whole.append((whole, whole.clone()))
        return inside

    def changed(self) -> bool:
        return not all(torch.equal(now, before) for now, before in self._whole)


class GuardedSegment:
    """This rank's segment of a workspace, filled with a pattern where no call writes: beyond what its slots hold.

    ``idle``: no call is made at all, so the header and all of the slots must stay as they are.
    """

    def __init__(self, workspace: Workspace, idle: bool = False) -> None:
        segment = workspace.buffers[workspace.rank]
        first = workspace.layout.header_bytes
        self.regions = [segment] if idle else []
        for slot in range(NUM_SLOTS):
            start = first + slot * workspace.slot_bytes
            tail = segment[start if idle else start + workspace.slot_bytes // 2 : start + workspace.slot_bytes]
            tail.fill_(PATTERN)
            self.regions.append(tail)
        self.before = [region.clone() for region in self.regions]

    def changed(self) -> bool:
        return not all(torch.equal(now, before) for now, before in zip(self.regions, self.before, strict=True))
