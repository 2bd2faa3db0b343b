"""Calls whose right results are known, and memory around them that nobody may write to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedcomm
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.geometry.cut import chunk_parts
from fusedcomm.ops.exact_problem import difference
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.runtime.results import Results
from fusedcomm.runtime.segment import NUM_SLOTS
from fusedcomm.runtime.workspace import Workspace

SLOT_BYTES = 1 << 12  # the least slot in ranks that meet faults, so that growth is cheap and guards are quickly checked
SMALL = MatmulSize(rows=13, k=5, n=7)
OTHER = MatmulSize(rows=19, k=11, n=8)
LARGE = MatmulSize(rows=61, k=58, n=59)  # needs more than SLOT_BYTES, whichever part is sent
RESULTS_BYTES = 1 << 16  # more than the results of all calls of a cell
PATTERN = 0x5A
BAND = 64  # elements


@dataclass(frozen=True)
class KnownCall:
    """A call on integers so small that every sum is exact in every dtype and order. It is equal on all ranks."""

    op: str
    group_size: int
    size: MatmulSize = SMALL
    dtype: torch.dtype = torch.float32
    seed: int = 0
    uneven: bool = False  # parts are those of torch.chunk, as the program of all ranks cuts them too

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        bench, size = PROGRAMS[self.op], self.size if self.uneven else self._divisible
        shape: tuple[int, ...] = self._uneven_shape(rank) if self.uneven else bench.x_shape(size, self.group_size)
        return self._integers(shape, 2 * rank), self._integers((size.k, size.n), 2 * rank + 1)

    def run(self, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        options = {"gather_size": self._gathered} if self.uneven and self._gathered else {}
        return getattr(fusedcomm, self.op)(x, w, *PROGRAMS[self.op].dims(x), group, **options)

    @property
    def _divisible(self) -> MatmulSize:
        return PROGRAMS[self.op].divisible(self.size, self.group_size)

    @property
    def _gathered(self) -> int | None:
        """The size that ranks have parts of, if the op gathers."""
        rows, k = self.size.rows, self.size.k
        return {"matmul_all_to_all": rows, "all_to_all_matmul": k, "all_gather_matmul": rows}.get(self.op)

    def _uneven_shape(self, rank: int) -> tuple[int, int]:
        rows, k = self.size.rows, self.size.k
        part = chunk_parts(self._gathered or 0, self.group_size).sizes[rank]
        return {"all_to_all_matmul": (rows, part), "matmul_reduce_scatter": (rows, k)}.get(self.op, (part, k))

    def wrong(self, result: Tensor, rank: int) -> str | None:
        """Where the result of ``rank`` differs from that of one process that has all ranks' inputs; None if nowhere."""
        xs, ws = zip(*(self.inputs(r) for r in range(self.group_size)), strict=True)
        outs = PROGRAMS[self.op].program([x.double() for x in xs], [w.double() for w in ws])
        return difference(result, outs[rank].to(self.dtype))

    def _integers(self, shape: tuple[int, ...], which: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.seed + which)
        return torch.randint(-2, 3, shape, generator=generator, device="cpu").to(self.dtype)


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
