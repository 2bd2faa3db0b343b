"""Calls of all ops: their inputs and expected results, and how a virtual rank runs them."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fusedcomm
from fusedcomm.bench.virtual import VirtualGroup, run_op
from fusedcomm.env import WITH_WORKSPACE
from fusedcomm.memory import topology
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import table
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.whole_group import PROGRAMS, WholeGroup
from fusedcomm.plan.geometry.exchange import Exchange

FINGERPRINT = 7
ALGORITHMS = WITH_WORKSPACE
OPS = [op for op, spec in table.OPS.items() if not (spec.is_plain or spec.is_scaled) and spec.num_results == 1]


def whole_group(op: str, gather_dim: int, scatter_dim: int) -> WholeGroup:
    """The collective of an op between these dims, as a program of all ranks."""
    program = copy.copy(PROGRAMS[op])
    program.gather_dim = None if program.gather_dim is None else gather_dim
    program.scatter_dim = None if program.scatter_dim is None else scatter_dim
    return program


def _as_it_is(t: Tensor) -> Tensor:
    return t


class GpuInputs(NamedTuple):
    """The contribution of one rank."""

    x: Tensor
    ws: list[Tensor]
    biases: list[Tensor | None]


def refill(inputs: Any, others: Any) -> None:
    """Copy the tensors of ``others`` into those of ``inputs``, which a graph reads."""
    for to, source in zip(pytree.tree_leaves(inputs), pytree.tree_leaves(others), strict=True):
        if to is not None:
            to.copy_(source)


@dataclass(frozen=True)
class GpuCase:
    """A call. ``x_shape`` is one rank's, times R at the gathered dim of the gather ops; every w has ``n`` columns."""

    op: str
    name: str
    x_shape: tuple[int, ...]
    n: tuple[int, ...]
    gather_dim: int = 0
    scatter_dim: int = 0
    out_shape: tuple[int, ...] | None = None
    k_dims: int = 1
    batched: bool = False
    bias: bool = False
    transposed: bool = False  # w is stored as nn.Linear stores its weight
    reduce_op: str = "sum"
    return_gathered: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.name}"

    @property
    def gathers(self) -> bool:
        return table.OPS[self.op].gathers

    def local_shape(self, group_size: int) -> list[int]:
        shape = list(self.x_shape)
        if self.gathers:
            shape[self.gather_dim] //= group_size
        return shape

    def w_shape(self, group_size: int, n: int) -> list[int]:
        shape = list(self.x_shape)
        if self.op == "all_to_all_matmul":
            shape[self.scatter_dim] //= group_size
        lead, k = shape[: -self.k_dims], shape[-self.k_dims :]
        return [*(lead[:-1] if self.batched else []), torch.Size(k).numel(), n]

    def program(
        self,
        every: list[GpuInputs],
        part_of: Callable[[Tensor], Tensor] = _as_it_is,
        total_of: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> list[list[Tensor]]:
        """Every rank's results. ``part_of`` and ``total_of`` change a partial sum, and a sum."""
        whole = whole_group(self.op, self.gather_dim, self.scatter_dim)
        if self.gathers:
            xs = whole.exchanged([i.x for i in every])
            outs = [
                [_product(x.flatten(-self.k_dims), w, bias) for w, bias in zip(i.ws, i.biases, strict=True)]
                for x, i in zip(xs, every, strict=True)
            ]
            return [[*each, x] for each, x in zip(outs, xs, strict=True)] if self.return_gathered else outs
        if whole.kind == "all_to_all":
            ys = [_product(i.x, i.ws[0], i.biases[0]) for i in every]
            ys = ys if self.out_shape is None else [y.unflatten(-1, self.out_shape) for y in ys]
            return [[out] for out in whole.exchanged(ys)]
        totals = whole.exchanged([part_of(torch.matmul(i.x, i.ws[0])) for i in every])
        if whole.kind == "all_reduce":
            totals = [total.clone() for total in totals]  # a result of its own for each rank, as time is measured too
        totals = [total_of(total / len(every) if self.reduce_op == "avg" else total) for total in totals]
        biases = [i.biases[0] for i in every]
        return [[t if bias is None else t + bias] for t, bias in zip(totals, biases, strict=True)]


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.matmul(x, w)
    return y if bias is None else y + bias


_push, _exchange, _gather, _scatter, _reduce = (partial(GpuCase, op) for op in PROGRAMS)
HEADS: Any = {"gather_dim": 2, "scatter_dim": 1, "k_dims": 2}  # of x [B, S, H, D], projected out of attention
# The first of an op is plain, the second ragged.
CASES = [
    _push("rows-to-columns", (1024, 512), (2048,), scatter_dim=1),
    _push("ragged", (1000, 392), (1048,), scatter_dim=1, bias=True),
    _push("linear-weight", (1024, 512), (2048,), scatter_dim=1, bias=True, transposed=True),
    _push("heads-batched", (2, 512, 256), (2048,), gather_dim=1, scatter_dim=-2, out_shape=(16, 128), batched=True),
    _push("packed-qkv", (2, 512, 256), (3 * 16 * 64,), gather_dim=1, scatter_dim=3, out_shape=(3, 16, 64), bias=True),
    _push("columns-to-rows", (2, 512, 256), (1024,), gather_dim=2, scatter_dim=1),
    _push("batch-scattered", (8, 256, 256), (512,), gather_dim=1, scatter_dim=0, batched=True),
    _push("zero-rows", (0, 64), (128,), scatter_dim=1),
    _exchange("heads-gathered", (2, 512, 16, 64), (1024,), **HEADS, bias=True, return_gathered=True),
    _exchange("ragged", (1000, 392), (1048,), gather_dim=1, scatter_dim=0, bias=True),
    _exchange("rows-gathered", (1024, 512), (2048,), gather_dim=0, scatter_dim=1, transposed=True),
    _exchange("batch-scattered", (8, 256, 256), (512,), gather_dim=1, scatter_dim=0, batched=True),
    _gather("rows", (1024, 512), (2048,), return_gathered=True),
    _gather("ragged", (1000, 392), (1048,), bias=True),
    _gather("list-qkv", (2, 512, 256), (512, 256, 256), gather_dim=1, bias=True, transposed=True),
    _gather("k-gathered", (1024, 512), (1024,), gather_dim=1),
    _gather("batched", (2, 512, 256), (512,), gather_dim=1, batched=True),
    _scatter("rows", (1024, 512), (2048,)),
    _scatter("ragged", (1000, 392), (1048,), bias=True, reduce_op="avg"),
    _scatter("columns", (1024, 512), (2048,), scatter_dim=1, bias=True, transposed=True),
    _scatter("batched", (2, 512, 256), (512,), scatter_dim=1, batched=True),
    _reduce("rows", (1024, 512), (2048,), bias=True),
    _reduce("ragged", (1001, 392), (1048,), bias=True, reduce_op="avg"),
    _reduce("batched", (8, 256, 256), (512,), batched=True),
]
SMALL = [  # for Triton's interpreter
    _push("rows-to-columns", (16, 24), (32,), scatter_dim=1, bias=True),
    _push("packed-qkv", (2, 6, 8), (48,), gather_dim=1, scatter_dim=3, out_shape=(3, 4, 4), bias=True),
    _exchange("heads-gathered", (2, 6, 4, 8), (24,), **HEADS, return_gathered=True),
    _gather("list-qkv", (2, 6, 16), (16, 8, 8), gather_dim=1, bias=True),
    _scatter("rows", (16, 24), (32,), bias=True, reduce_op="avg"),
    _reduce("columns", (15, 24), (32,), bias=True),
]


def first_of(op: str, cuda: bool) -> GpuCase:
    return next(case for case in (CASES if cuda else SMALL) if case.op == op)


class GpuCall(NamedTuple):
    """A case in a group, a virtual one with slots for one of ``num_rounds`` equal rounds."""

    group_size: int
    dtype: torch.dtype
    case: GpuCase
    num_rounds: int = 1
    algorithm: str = "fused"

    def __str__(self) -> str:
        return f"{self.case} {str(self.dtype).removeprefix('torch.')} R={self.group_size}"

    @property
    def op(self) -> str:
        return self.case.op

    def inputs(self, device: torch.device, seed: int) -> list[GpuInputs]:
        """Every rank's: small integers, so sums are exact in every order. On device "meta" they have no memory."""
        return [self._inputs_of(rank, device, seed) for rank in range(self.group_size)]

    def _inputs_of(self, rank: int, device: torch.device, seed: int) -> GpuInputs:
        case, size, meta = self.case, self.group_size, device.type == "meta"
        generator = torch.Generator("cpu" if meta else device).manual_seed(100 * seed + rank)

        def integers(*shape: int) -> Tensor:
            if meta:
                return torch.empty(shape, dtype=self.dtype, device=device)
            return torch.randint(-2, 3, shape, generator=generator, device=device).to(self.dtype)

        x = integers(*case.local_shape(size))
        ws = [integers(*case.w_shape(size, n)) for n in case.n]
        if case.transposed:
            ws = [w.mT.contiguous().mT for w in ws]
        if case.op == "matmul_all_reduce":  # the same bias on all ranks
            generator.manual_seed(100 * seed)
        scattered = case.op == "matmul_reduce_scatter" and case.scatter_dim == x.ndim - 1
        biases = [integers(n // size if scattered else n) if case.bias else None for n in case.n]
        return GpuInputs(x, ws, biases)

    def expected(self, every: list[GpuInputs]) -> list[list[Tensor]]:
        """Every rank's results by torch's own matmul and without communication. `unfused` rounds a sum before it adds
        the bias, the others once, behind it.
        """

        def rounded(t: Tensor) -> Tensor:
            return t.to(self.dtype).float()

        exact = pytree.tree_map_only(Tensor, Tensor.float, every)
        outs = self.case.program(exact, rounded, rounded if self.algorithm == "unfused" else _as_it_is)
        return [[t.to(self.dtype) for t in each] for each in outs]

    def public(self, inputs: GpuInputs) -> list[Tensor]:
        """Call the op as users do."""
        outs = getattr(fusedcomm, self.op)(**self.options(inputs))
        return outs if isinstance(outs, list) else [outs]

    def options(self, inputs: GpuInputs) -> dict[str, Any]:
        """The arguments of the public op."""
        many = table.OPS[self.op].takes_lists
        w, bias = (inputs.ws, inputs.biases) if many else (inputs.ws[0], inputs.biases[0])
        known = {**vars(self.case), "x": inputs.x, "w": w, "bias": bias}
        return {
            name: known[name] for name in inspect.signature(getattr(fusedcomm, self.op)).parameters if name in known
        }

    def arguments(self, inputs: GpuInputs, group_name: str = "") -> Arguments:
        case = self.case
        made = Arguments(*inputs, self.group_size, group_name, out_shape=case.out_shape, reduce_op=case.reduce_op)
        made = made._replace(gather_dim=case.gather_dim, scatter_dim=case.scatter_dim)
        return made._replace(return_gathered=case.return_gathered)

    def exchange(self) -> Exchange:
        inputs = self._inputs_of(0, torch.device("meta"), 0)
        return table.OPS[self.op].exchange_of(self.arguments(inputs))

    def run(self, workspace: Workspace, inputs: GpuInputs) -> list[Tensor]:
        """Run the op as a virtual rank does."""
        args = self.arguments(inputs, workspace.group_name)
        exchange = table.OPS[self.op].exchange_of(args)
        return run_op(self.op, self.algorithm, exchange, workspace, args, FINGERPRINT)

    def group(self, device: torch.device, shares_gpu: bool = True) -> VirtualGroup:
        """A group that has run the case once, on each rank; without a GPU also as if each had a GPU of its own."""
        chunk_bytes = self.exchange().chunk_numel * self.dtype.itemsize
        group = VirtualGroup(self.group_size, max(128, chunk_bytes * self.group_size // self.num_rounds), device)
        for workspace in group.workspaces if not shares_gpu else ():
            workspace.num_sms, workspace.shares_gpu = topology.num_sms(device), False
        inputs = self._inputs_of(0, device, 0)
        group.load(lambda workspace: self.run(workspace, inputs), FINGERPRINT)
        return group

    def check(self, device: torch.device, times: int = 3) -> dict[str, Any]:
        """Call back to back with fresh inputs; every result must be exact."""
        group = self.group(device)
        for seed in range(times):
            every = self.inputs(device, seed)
            results = group.run(self.run, every)
            group.check(self.op)
            for rank, expected in enumerate(self.expected(every)):
                assert_equal(results[rank], expected, f"{self} {self.algorithm} rank {rank} call {seed}")
        return {"calls": times * self.group_size}


def first_calls(cuda: bool, group_size: int = 2) -> list[GpuCall]:
    return [GpuCall(group_size, torch.bfloat16, first_of(op, cuda)) for op in OPS]


def assert_equal(outs: Sequence[Tensor], expected: Sequence[Tensor], where: str) -> None:
    """``expected`` may end with a gathered x that the caller did not get."""
    for i, (out, want) in enumerate(zip(outs, expected, strict=False)):
        if not torch.equal(out, want):
            wrong = (out != want).sum().item() if out.shape == want.shape else "all"
            raise AssertionError(f"{where}: {wrong} of {out.numel()} elements of result {i} wrong")
