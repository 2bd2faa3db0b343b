"""Calls with known results, and guarded memory around them."""

from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedcomm
from fusedcomm.memory.segment import NUM_SLOTS
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import routed
from fusedcomm.ops.exact_problem import NormProblem, ScaledProblem, difference
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize
from tests.helpers.problems import Problem, expected, integers
from tests.helpers.token_rows import routings

SLOT_BYTES = 1 << 12  # the least slot in ranks that meet faults, so that growth is cheap and guards are quickly checked
SMALL = (13, 5, 6)  # rows, K, N; a sum that the ranks cannot share is never prepared
OTHER = (11, 8, 9)
LARGE = (61, 58, 59)  # needs more than SLOT_BYTES, whichever part is sent
DIMS = {  # gather_dim, scatter_dim
    "matmul_all_to_all": (0, 1),
    "all_to_all_matmul": (0, 1),
    "all_gather_matmul": (0, None),
    "matmul_reduce_scatter": (None, 0),
    "matmul_all_reduce": (None, None),
}
NORMS, SCALED = ("matmul_all_reduce_norm", "matmul_reduce_scatter_norm"), "scaled_all_gather_matmul"
DISPATCH, COMBINE, PRODUCTS = "moe_dispatch", "moe_combine", "grouped_matmul_combine"
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
    def called(self) -> str:
        """The torch op."""
        return COMBINE if self.op == PRODUCTS else self.op

    @property
    def problem(self) -> Problem:
        rows, k, n = self.size
        return Problem("known", (rows, k), n, *DIMS[self.op], op=self.op)

    @property
    def norm(self) -> NormProblem:
        return NormProblem(PROGRAMS[self.op.removesuffix("_norm")], MatmulSize(*self.size), self.group_size, self.seed)

    @property
    def scaled(self) -> ScaledProblem:
        return ScaledProblem(PROGRAMS["all_gather_matmul"], MatmulSize(*self.size), self.group_size, seed=self.seed)

    @property
    def tokens(self) -> Any:
        from tests.ops import test_moe  # imports this file

        return test_moe.Problem(test_moe.Case(lead=3), self.group_size, self.seed)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor]:
        if self.op == DISPATCH:
            return self.tokens.xs[rank].to(self.dtype), self.tokens.ids[rank]
        if self.called == COMBINE:
            ids, case = [each.flatten() for each in self.tokens.ids], self.tokens.case
            routing = routings(ids, case.k, self.tokens.num_experts, self.tokens.capacity)[rank]
            return self.tokens.rows(rank)[0].to(self.dtype), routing
        if self.op in NORMS:
            return self.norm.sums.xs[rank].to(self.dtype), self.norm.sums.ws[rank].to(self.dtype)
        if self.op == SCALED:
            x, w = self.scaled.values[rank]
            return x.to(self.dtype), w.to(self.dtype)
        x, w, _ = integers(self.problem, rank, self.group_size, self.dtype, self.seed)
        return x, w

    def run(self, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        """``w``: the experts of a dispatch's x, or the routing of a combine's."""
        if self.op in (DISPATCH, COMBINE, PRODUCTS):
            rank, own, tokens = dist.get_rank(group), self.tokens.case.own, self.tokens
            experts, scores = (t.to(self.dtype) for t in (tokens.w[rank * own :][:own], tokens.scores[rank]))
            with mock.patch.object(routed, "num_pieces", return_value=2):
                if self.op == DISPATCH:
                    facts = tokens.num_experts, tokens.capacity, group
                    return cast(Tensor, fusedcomm.dispatch_grouped_matmul(x, w, experts, *facts)[0])
            if self.op == PRODUCTS:
                return fusedcomm.grouped_matmul_combine(x, experts, w, scores, group)
            return fusedcomm.moe_combine(x, w, scores, group)
        if self.op in NORMS:
            rank, problem = dist.get_rank(group), self.norm
            given = (t.to(self.dtype) for t in (problem.residuals[rank] + problem.sums.biases[rank], problem.weight))
            return torch.stack(getattr(fusedcomm, self.op)(x, w, *given, *[0] * problem.scatters, group, eps=0.0))
        if self.op == SCALED:
            rank, values = dist.get_rank(group), (t.to(torch.float8_e4m3fn) for t in (x, w))
            bias = self.scaled.biases[rank].to(self.dtype)
            made: Tensor = fusedcomm.scaled_all_gather_matmul(
                *values, *self.scaled.scales[rank], 0, group, bias=bias, out_dtype=self.dtype
            )
            return made
        return self.problem.call((x, w, None), group)

    def wrong(self, result: Tensor, rank: int) -> str | None:
        """Where the result of ``rank`` differs from that of one process that has all ranks' inputs; None if nowhere."""
        if self.op in NORMS:
            return difference(result, torch.stack(self.norm.results(rank)).to(self.dtype))
        if self.op == SCALED:
            return difference(result, self.scaled.results()[rank].to(self.dtype))
        if self.op == DISPATCH:
            return difference(result, self.tokens.products(rank).to(self.dtype))
        if self.called == COMBINE:
            w = self.tokens.w if self.op == PRODUCTS else None
            want = self.tokens.ys(self.tokens.xs, self.tokens.scores, w)[rank]
            return difference(result, want.to(self.dtype))
        return difference(result, expected(self.problem, self.group_size, self.dtype, self.seed)[rank])


class Guarded:
    """Memory that may not change, by what it is."""

    def __init__(self) -> None:
        self._regions: list[tuple[str, Tensor, Tensor]] = []

    def watch(self, name: str, region: Tensor) -> None:
        self._regions.append((name, region, region.clone()))

    def copy_of(self, t: Tensor) -> Tensor:
        """A copy in the middle of a larger tensor, which is watched."""
        whole = torch.full((t.numel() + 2 * BAND,), float(PATTERN), dtype=t.dtype, device=t.device)
        inside = whole[BAND:-BAND].view(t.shape)
        inside.copy_(t)
        self.watch("an input, or what is around it,", whole)
        return inside

    def watch_segment(self, workspace: Workspace, idle: bool) -> None:
        """A pattern where no call writes: behind the slots, or, if ``idle``, in all of them and the header."""
        segment, num_bytes = workspace.buffers[workspace.rank], workspace.slot_bytes
        slots = segment[workspace.layout.header_bytes :].split(num_bytes)[:NUM_SLOTS]
        unused = [slot if idle else slot[num_bytes // 2 :] for slot in slots]
        for part in unused:
            part.fill_(PATTERN)
        for region in [segment] if idle else unused:
            self.watch("a segment", region)

    def changed(self) -> list[str]:
        return [f"{name} has changed" for name, now, before in self._regions if not torch.equal(now, before)]
