"""Calls of all ops: their inputs and expected results, and how a virtual rank runs them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.env import WITH_WORKSPACE
from fusedcomm.memory import topology
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import table
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.testing.virtual import VirtualGroup, run_op

FINGERPRINT = 7
ALGORITHMS = WITH_WORKSPACE
OPS = [op for op, spec in table.OPS.items() if not (spec.is_plain or spec.is_scaled) and spec.num_results == 1]


def _as_it_is(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True)
class GpuInputs:
    """The contribution of one rank."""

    x: Tensor
    ws: list[Tensor]
    biases: list[Tensor | None]


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

    def exchange(self, group_size: int) -> Exchange:
        x, ws = self.local_shape(group_size), [self.w_shape(group_size, n) for n in self.n]
        if self.op == "matmul_all_to_all":
            return shapes.matmul_all_to_all(x, ws[0], self.out_shape, self.gather_dim, self.scatter_dim, group_size)
        if self.op == "all_to_all_matmul":
            return shapes.all_to_all_matmul(x, ws[0], self.gather_dim, self.scatter_dim, group_size)
        if self.op == "all_gather_matmul":
            return shapes.all_gather_matmul(x, ws, self.gather_dim, group_size)
        if self.op == "matmul_reduce_scatter":
            return shapes.matmul_reduce_scatter(x, ws[0], self.reduce_op, self.scatter_dim, group_size)
        return shapes.matmul_all_reduce(x, ws[0], self.reduce_op, group_size)

    def inputs(self, group_size: int, rank: int, dtype: torch.dtype, device: torch.device, seed: int) -> GpuInputs:
        """Small integers, so sums are exact in every order. matmul_all_reduce has the same bias on all ranks.

        On device "meta" the tensors have no memory.
        """
        meta = device.type == "meta"
        generator = torch.Generator("cpu" if meta else device).manual_seed(100 * seed + rank)

        def integers(*shape: int) -> Tensor:
            if meta:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)

        x = integers(*self.local_shape(group_size))
        ws = [integers(*self.w_shape(group_size, n)) for n in self.n]
        if self.transposed:
            ws = [w.mT.contiguous().mT for w in ws]
        if self.op == "matmul_all_reduce":
            generator.manual_seed(100 * seed)
        scattered = self.op == "matmul_reduce_scatter" and self.exchange(group_size).splits_columns
        biases = [integers(n // group_size if scattered else n) if self.bias else None for n in self.n]
        return GpuInputs(x, ws, biases)

    def expected(
        self, group_size: int, dtype: torch.dtype, device: torch.device, seed: int, unfused: bool = False
    ) -> list[list[Tensor]]:
        """Every rank's results by torch's own matmul and without communication. `unfused` rounds a sum before it adds
        the bias, the others once, behind it.
        """
        every = [self.inputs(group_size, rank, dtype, device, seed) for rank in range(group_size)]
        exact = [
            GpuInputs(
                each.x.float(), [w.float() for w in each.ws], [None if b is None else b.float() for b in each.biases]
            )
            for each in every
        ]

        def rounded(t: Tensor) -> Tensor:
            return t.to(dtype).float()

        outs = self.program(exact, rounded, rounded if unfused else _as_it_is)
        return [[t.to(dtype) for t in each] for each in outs]

    def program(
        self,
        every: list[GpuInputs],
        part_of: Callable[[Tensor], Tensor] = _as_it_is,
        total_of: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> list[list[Tensor]]:
        """Every rank's results. ``part_of`` and ``total_of`` change a partial sum, and a sum."""
        size = len(every)
        if self.gathers:
            if self.op == "all_to_all_matmul":
                xs = _exchanged([i.x.chunk(size, self.scatter_dim) for i in every], self.gather_dim)
            else:  # each rank gathers
                xs = [torch.cat([i.x for i in every], self.gather_dim) for _ in every]
            outs = [
                [_product(x.flatten(-self.k_dims), w, bias) for w, bias in zip(i.ws, i.biases, strict=True)]
                for x, i in zip(xs, every, strict=True)
            ]
            return [[*each, x] for each, x in zip(outs, xs, strict=True)] if self.return_gathered else outs
        biases = [i.biases[0] for i in every]
        if self.op == "matmul_all_to_all":
            ys = [_product(i.x, i.ws[0], bias) for i, bias in zip(every, biases, strict=True)]
            ys = ys if self.out_shape is None else [y.unflatten(-1, self.out_shape) for y in ys]
            return [[out] for out in _exchanged([y.chunk(size, self.scatter_dim) for y in ys], self.gather_dim)]
        whole = self.op == "matmul_all_reduce"
        dim = self.exchange(size).split_dim if whole else self.scatter_dim
        parts = [part_of(torch.matmul(i.x, i.ws[0])).chunk(size, dim) for i in every]
        totals = [torch.stack([part[rank] for part in parts]).sum(0) for rank in range(size)]
        totals = [total_of(total / size if self.reduce_op == "avg" else total) for total in totals]
        totals = [torch.cat(totals, dim) for _ in every] if whole else totals
        return [[t if bias is None else t + bias] for t, bias in zip(totals, biases, strict=True)]

    def call(self, inputs: GpuInputs) -> list[Tensor]:
        """Call the op as users do."""
        args, options = self.arguments(inputs)
        outs = getattr(fusedcomm, self.op)(*args, **options)
        return outs if isinstance(outs, list) else [outs]

    def arguments(self, inputs: GpuInputs) -> tuple[list[Any], dict[str, Any]]:
        x, w, bias = inputs.x, inputs.ws[0], inputs.biases[0]
        if self.op == "matmul_all_to_all":
            return [x, w, self.gather_dim, self.scatter_dim], {"bias": bias, "out_shape": self.out_shape}
        if self.op == "all_to_all_matmul":
            return [x, w, self.gather_dim, self.scatter_dim], {"bias": bias}
        if self.op == "all_gather_matmul":
            return [x, inputs.ws, self.gather_dim], {"bias": inputs.biases}
        dims = [self.scatter_dim] if self.op == "matmul_reduce_scatter" else []
        return [x, w, *dims], {"reduce_op": self.reduce_op, "bias": bias}

    def run(self, workspace: Workspace, algorithm: str, inputs: GpuInputs) -> list[Tensor]:
        """Run the op as a virtual rank does."""
        exchange = self.exchange(workspace.group_size)
        made = (inputs.x, inputs.ws, inputs.biases, workspace.group_size, workspace.group_name)
        args = Arguments(*made, reduce_op=self.reduce_op, return_gathered=self.return_gathered)
        return run_op(self.op, algorithm, exchange, workspace, args, FINGERPRINT)


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.matmul(x, w)
    return y if bias is None else y + bias


def _exchanged(blocks: Sequence[Sequence[Tensor]], gather_dim: int) -> list[Tensor]:
    """Concatenate ``blocks[src][dst]`` over src, for every dst."""
    return [torch.cat([each[rank] for each in blocks], gather_dim) for rank in range(len(blocks))]


def _cases(op: str, *cases: tuple[Any, ...]) -> list[GpuCase]:
    return [dataclasses.replace(GpuCase(op, *args[:3]), **args[3]) for args in cases]


# The first of an op is plain, the second ragged.
CASES = [
    *_cases(
        "matmul_all_to_all",
        ("rows-to-columns", (1024, 512), (2048,), {"scatter_dim": 1}),
        ("ragged", (1000, 392), (1048,), {"scatter_dim": 1, "bias": True}),
        ("linear-weight", (1024, 512), (2048,), {"scatter_dim": 1, "bias": True, "transposed": True}),
        (
            "heads-batched",
            (2, 512, 256),
            (2048,),
            {"gather_dim": 1, "scatter_dim": -2, "out_shape": (16, 128), "batched": True},
        ),
        (
            "packed-qkv",
            (2, 512, 256),
            (3 * 16 * 64,),
            {"gather_dim": 1, "scatter_dim": 3, "out_shape": (3, 16, 64), "bias": True},
        ),
        ("columns-to-rows", (2, 512, 256), (1024,), {"gather_dim": 2, "scatter_dim": 1}),
        ("batch-scattered", (8, 256, 256), (512,), {"gather_dim": 1, "scatter_dim": 0, "batched": True}),
        ("zero-rows", (0, 64), (128,), {"scatter_dim": 1}),
    ),
    *_cases(
        "all_to_all_matmul",
        (
            "heads-gathered",
            (2, 512, 16, 64),
            (1024,),
            {"gather_dim": 2, "scatter_dim": 1, "k_dims": 2, "bias": True, "return_gathered": True},
        ),
        ("ragged", (1000, 392), (1048,), {"gather_dim": 1, "scatter_dim": 0, "bias": True}),
        ("rows-gathered", (1024, 512), (2048,), {"gather_dim": 0, "scatter_dim": 1, "transposed": True}),
        ("batch-scattered", (8, 256, 256), (512,), {"gather_dim": 1, "scatter_dim": 0, "batched": True}),
    ),
    *_cases(
        "all_gather_matmul",
        ("rows", (1024, 512), (2048,), {"return_gathered": True}),
        ("ragged", (1000, 392), (1048,), {"bias": True}),
        ("list-qkv", (2, 512, 256), (512, 256, 256), {"gather_dim": 1, "bias": True, "transposed": True}),
        ("k-gathered", (1024, 512), (1024,), {"gather_dim": 1}),
        ("batched", (2, 512, 256), (512,), {"gather_dim": 1, "batched": True}),
    ),
    *_cases(
        "matmul_reduce_scatter",
        ("rows", (1024, 512), (2048,), {}),
        ("ragged", (1000, 392), (1048,), {"bias": True, "reduce_op": "avg"}),
        ("columns", (1024, 512), (2048,), {"scatter_dim": 1, "bias": True, "transposed": True}),
        ("batched", (2, 512, 256), (512,), {"scatter_dim": 1, "batched": True}),
    ),
    *_cases(
        "matmul_all_reduce",
        ("rows", (1024, 512), (2048,), {"bias": True}),
        ("ragged", (1001, 392), (1048,), {"bias": True, "reduce_op": "avg"}),
        ("batched", (8, 256, 256), (512,), {"batched": True}),
    ),
]
SMALL = [  # for Triton's interpreter
    *_cases(
        "matmul_all_to_all",
        ("rows-to-columns", (16, 24), (32,), {"scatter_dim": 1, "bias": True}),
        ("packed-qkv", (2, 6, 8), (48,), {"gather_dim": 1, "scatter_dim": 3, "out_shape": (3, 4, 4), "bias": True}),
    ),
    *_cases(
        "all_to_all_matmul",
        (
            "heads-gathered",
            (2, 6, 4, 8),
            (24,),
            {"gather_dim": 2, "scatter_dim": 1, "k_dims": 2, "return_gathered": True},
        ),
    ),
    *_cases("all_gather_matmul", ("list-qkv", (2, 6, 16), (16, 8, 8), {"gather_dim": 1, "bias": True})),
    *_cases("matmul_reduce_scatter", ("rows", (16, 24), (32,), {"bias": True, "reduce_op": "avg"})),
    *_cases("matmul_all_reduce", ("columns", (15, 24), (32,), {"bias": True})),
]


def first_of(op: str, cuda: bool) -> GpuCase:
    return next(case for case in (CASES if cuda else SMALL) if case.op == op)


class GpuCall(NamedTuple):
    """A case in a virtual group with slots for one of ``num_rounds`` equal rounds."""

    group_size: int
    dtype: torch.dtype
    case: GpuCase
    num_rounds: int = 1

    def __str__(self) -> str:
        return f"{self.case} {str(self.dtype).removeprefix('torch.')} R={self.group_size}"

    def group(self, algorithm: str, device: torch.device, shares_gpu: bool = True) -> VirtualGroup:
        """A group that has run the case once, on each rank; without a GPU also as if each had a GPU of its own."""
        chunk_bytes = self.case.exchange(self.group_size).chunk_numel * self.dtype.itemsize
        group = VirtualGroup(self.group_size, max(128, chunk_bytes * self.group_size // self.num_rounds), device)
        for workspace in group.workspaces if not shares_gpu else ():
            workspace.num_sms, workspace.shares_gpu = topology.num_sms(device), False
        inputs = self.inputs(0, device, 0)
        group.load(lambda workspace: self.case.run(workspace, algorithm, inputs), FINGERPRINT)
        return group

    def inputs(self, rank: int, device: torch.device, seed: int) -> GpuInputs:
        return self.case.inputs(self.group_size, rank, self.dtype, device, seed)

    def check(self, algorithm: str, device: torch.device, times: int = 3) -> dict[str, Any]:
        """Call back to back with fresh inputs; every result must be exact."""
        case, group = self.case, self.group(algorithm, device)
        for seed in range(times):
            inputs = [self.inputs(rank, device, seed) for rank in range(self.group_size)]
            results = group.run(lambda workspace, args: case.run(workspace, algorithm, args), inputs)
            group.check(case.op)
            for rank, expected in enumerate(case.expected(self.group_size, self.dtype, device, seed)):
                assert_equal(results[rank], expected, f"{self} {algorithm} rank {rank} call {seed}")
        return {"calls": times * self.group_size}


def assert_equal(outs: list[Tensor], expected: list[Tensor], where: str) -> None:
    """``expected`` may end with a gathered x that the caller did not get."""
    for i, (out, want) in enumerate(zip(outs, expected, strict=False)):
        if not torch.equal(out, want):
            wrong = (out != want).sum().item() if out.shape == want.shape else "all"
            raise AssertionError(f"{where}: {wrong} of {out.numel()} elements of result {i} wrong")
