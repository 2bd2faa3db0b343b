"""Scaled matmuls of float8: the kernels by themselves against torch._scaled_mm, and all ops on virtual ranks.

Values are small positive integers, and scales powers of two: a float32 result is exact, but only if no more than a
block of K is added up in the fewer bits of Hopper's float8 tensor cores.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT, assert_equal, whole_group
from fusedcomm.bench.gpu_check.kernel_speed import SHAPES, TINY, KernelProblem, MatmulShape, alone, beside
from fusedcomm.bench.virtual import VirtualGroup, run_op
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import table
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.whole_group import WholeGroup
from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.geometry import packed_gathers, shapes
from fusedcomm.plan.scaled_programs import OfPayload
from fusedcomm.plan.scaling import RECIPES, Payload, Recipe, Scaled, Scaling, num_blocks

DTYPE = torch.bfloat16
GROUP_SIZE = 2
VALUES = torch.float8_e4m3fn
DIMS: dict[str, list[tuple[int, ...]]] = {  # of ops on x [rows, K] or the product [rows, N]
    "scaled_matmul_all_to_all": [(0, 1)],
    "scaled_all_to_all_matmul": [(1, 0)],
    "scaled_all_gather_matmul": [(0,), (1,)],
    "scaled_matmul_reduce_scatter": [(0,)],
    "scaled_matmul_all_reduce": [()],
}


class Operand(NamedTuple):
    """[rows, K], with scales, and the product of both."""

    values: Tensor
    scale: Tensor
    exact: Tensor


def operand(rows: int, k: int, scaling: Scaling, device: torch.device, seed: int = 0) -> Operand:
    generator = torch.Generator("cpu").manual_seed(seed)
    of_each = scaling.rows or rows, scaling.k or k
    shape = [num_blocks(rows, scaling.rows), num_blocks(k, scaling.k)] if scaling.rows else [1]
    if device.type == "meta":
        values = torch.empty(rows, k, device=device)
        return Operand(values.to(VALUES), torch.empty(shape, device=device), values)
    values = torch.randint(0, 4, (rows, k), generator=generator).to(device)
    scale = (2.0 ** torch.randint(-1, 2, shape, generator=generator)).to(device)
    each = scale.view(num_blocks(rows, scaling.rows), -1)
    each = each.repeat_interleave(of_each[0], 0)[:rows].repeat_interleave(of_each[1], 1)[:, :k]
    return Operand(values.to(VALUES), scale, values.double() * each)


class Pair(NamedTuple):
    """The operands of a matmul, w.mT [N, K], and their recipe."""

    x: Operand
    w: Operand
    recipe: Recipe

    @property
    def scale_w(self) -> Tensor:
        return self.w.scale.mT if self.w.scale.ndim > 1 else self.w.scale


def pair(m: int, k: int, n: int, recipe: Recipe, device: torch.device, seed: int = 0) -> Pair:
    return Pair(operand(m, k, recipe.x, device, 2 * seed), operand(n, k, recipe.w, device, 2 * seed + 1), recipe)


def push(of: Pair, dtype: torch.dtype, fast: bool = False) -> KernelProblem:
    """The push kernel in a group of one rank."""
    x, w = of.x.values, of.w.values.mT
    exchange = shapes.matmul_all_to_all(x.shape, w.shape, None, 0, 1, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, slot = alone(exchange, dtype, x.device)

    def program(s: Builder, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> None:
        launches.push(s, Scaled(x, scale_x, dtype), Scaled(w, scale_w, dtype, fast=fast), None, spans)

    run = launch_now.prepared(program, workspace, FINGERPRINT, x, w, of.x.scale, of.scale_w)
    return KernelProblem(workspace, slot.view(len(x), -1), run)


def gather(of: Pair, dtype: torch.dtype, fast: bool = False) -> KernelProblem:
    """The gather kernel in a group of one rank, which has sent already."""
    x, w, block = of.x.values, of.w.values.mT, of.recipe.x.k
    exchange = packed_gathers.all_gather_matmul(x.shape, [w.shape], 0, 1, block=block)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    workspace, _ = alone(exchange, torch.uint8, x.device)
    payload, out = Payload(VALUES, (x.shape[1],), block), x.new_empty(exchange.out_shape, dtype=dtype)
    rows = x.new_zeros(exchange.packed[0], dtype=torch.uint8)
    for to, source in payload.packed(rows, x, of.x.scale, payload.ks):
        to.copy_(source)
    launch_now.pack(rows, spans, workspace, FINGERPRINT)

    def program(s: Builder, out: Tensor, w: Tensor, scale_w: Tensor) -> None:
        launches.gather_matmul(s, out, OfPayload(w, scale_w, dtype, payload, fast=fast), None, spans, end_round=False)

    return KernelProblem(workspace, out, launch_now.prepared(program, workspace, FINGERPRINT, out, w, of.scale_w))


KERNELS: dict[str, Callable[..., KernelProblem]] = {"push": push, "gather": gather}


def jobs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every launch of a kernel by itself, on tensors without memory."""
    every = itertools.product(KERNELS, _shapes(True), RECIPES, (torch.float32, DTYPE), (False, True))
    for name, shape, recipe, dtype, fast in every:
        of = shape.m, shape.k, shape.n, recipe, torch.device("meta")
        yield (
            f"{name} {shape.name}, {recipe.x.name}, {dtype}" + ", fast" * fast,
            partial(_launch, name, of, dtype, fast),
        )


def _launch(name: str, of: tuple[Any, ...], dtype: torch.dtype, fast: bool) -> None:
    KERNELS[name](pair(*of), dtype, fast).run()


def _shapes(cuda: bool) -> list[MatmulShape]:
    return [SHAPES[0], SHAPES[2]] if cuda else [TINY]


def cases(device: torch.device) -> child.Cases:
    cuda = device.type == "cuda"
    values: child.Cases = {
        f"values of {op}, {recipe.x.name}, dims {dims}": partial(check, op, dims, recipe, device)
        for op, of_op in DIMS.items()
        for dims, recipe in itertools.product(of_op, RECIPES)
    }
    every = itertools.product(_shapes(cuda), RECIPES, (False, True), KERNELS)
    return values | {
        f"{name} {shape.name}, {recipe.x.name}" + ", fast" * fast: partial(_compare, name, shape, recipe, fast, device)
        for shape, recipe, fast, name in every
        if not (fast and recipe.x.k)
    }


def _compare(name: str, shape: MatmulShape, recipe: Recipe, fast: bool, device: torch.device) -> dict[str, Any]:
    """Values in float32; times of a bfloat16 result, and torch's, for block-wise scales with one scale in all."""
    of = pair(shape.m, shape.k, shape.n, recipe, device)
    problem, exact = KERNELS[name](of, torch.float32, fast), (of.x.exact @ of.w.exact.mT).float()
    problem.run()
    problem.workspace.check("scaled matmul")
    error = ((problem.out - exact).norm() / exact.norm()).item()
    assert error < 1e-3 * fast or torch.equal(problem.out, exact), f"{shape.name} {recipe.x.name}: error {error}"
    problem = KERNELS[name](of, DTYPE, fast)
    scales = of.x.scale, of.scale_w
    if recipe.x.k:
        scales = (torch.ones(1, device=device),) * 2
    scaled_mm = partial(torch._scaled_mm, of.x.values, of.w.values.mT, *scales, out_dtype=DTYPE, use_fast_accum=fast)
    return beside("torch", scaled_mm, problem, shape.flops) | {"error": error}


def check(op: str, dims: tuple[int, ...], recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """One call of every virtual rank by `fused`."""
    cuda = device.type == "cuda"
    size, (m, k, n) = (GROUP_SIZE, (512, 1024, 1024)) if cuda else (1, (16, 144, 128))
    spec, gathers_k = table.OPS[op], op in ("scaled_all_to_all_matmul", "scaled_all_gather_matmul") and dims[0] == 1
    local = [pair(m, k // size if gathers_k else k, n, recipe, device, rank) for rank in range(size)]
    whole = [pair(m, k, n, recipe, device, 10 + rank) for rank in range(size)] if spec.gathers else local
    program = whole_group(op.removeprefix("scaled_"), dims[0] if dims else 0, dims[-1] if dims else 0)
    facts: Any = {"gather_dim": program.gather_dim or 0, "scatter_dim": program.scatter_dim or 0, "out_dtype": DTYPE}
    every = []
    for x, w in zip(local, whole, strict=True):
        args = Arguments(x.x.values, [w.w.values.mT], [None], size, f"virtual {size}", scale_x=x.x.scale, **facts)
        every.append(args._replace(scale_w=[w.scale_w] if spec.takes_lists else w.scale_w))
    exchange, sent = spec.exchange_of(every[0]), spec.sent_dtype(every[0]).itemsize
    group = VirtualGroup(size, max(128, exchange.chunk_numel * sent * size), device)

    def run(workspace: Workspace, args: Arguments) -> list[Tensor]:
        return run_op(op, "fused", exchange, workspace, args, FINGERPRINT)

    group.load(lambda workspace: run(workspace, every[0]), FINGERPRINT)
    results = group.run(run, every)
    group.check(op)
    for rank, (result, expected) in enumerate(zip(results, _expected(program, local, whole), strict=True)):
        assert_equal(result[:1], [expected], f"{op} rank {rank}")
    return {"calls": size}


def _expected(program: WholeGroup, local: list[Pair], whole: list[Pair]) -> list[Tensor]:
    if program.gathers:
        xs = program.exchanged([each.x.exact for each in local])
        return [(x @ each.w.exact.mT).to(DTYPE) for x, each in zip(xs, whole, strict=True)]
    ys = [(each.x.exact @ each.w.exact.mT).to(DTYPE).double() for each in local]  # sums are of rounded results
    return [y.to(DTYPE) for y in program.exchanged(ys)]
