"""Bytes that each op sends, forward and backward, measured, against the table in docs/ops.md.

What `chunked` writes to peers is counted where it arrives: each part of a peer's slot holds a sentinel before, and is
compared at the signal. The group's own collectives would be seen by a dispatch mode.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import fusedcomm
from fusedcomm.run import python_executor
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import TABLES, as_list
from tests.helpers.problems import OPS, Problem, flat, integers, leaves, unflat, whole_group
from tests.helpers.spies import Dispatched, pushed, saved_for_backward

PROBLEMS = {
    "matmul_all_to_all": Problem("traffic", (2, 3, 5), 8, 1, 2, bias=True),
    "all_to_all_matmul": Problem("traffic", (2, 3, 5), 8, 2, 1, bias=True, op="all_to_all_matmul"),
    "all_gather_matmul": Problem("traffic", (2, 3, 5), (8, 7), 1, bias=(True, True), op="all_gather_matmul"),
    "matmul_reduce_scatter": Problem("traffic", (2, 3, 5), 8, scatter_dim=1, bias=True, op="matmul_reduce_scatter"),
    "matmul_all_reduce": Problem("traffic", (2, 12, 5), 8, bias=True, op="matmul_all_reduce"),
}

FROZEN = ("", "w", "x", "xw")


@dataclass(frozen=True)
class Row:
    """In parts of (R - 1) / R of the largest tensor next to the collective: y, the exchanged or gathered x."""

    op: str
    forward: float
    backward: float
    frozen: str = ""
    save: bool = True

    def __str__(self) -> str:
        return f"{self.op}-frozen-{self.frozen or 'nothing'}{'' if self.save else '-not-saved'}"


TABLE = [
    *(Row("matmul_all_to_all", 1, 1, frozen) for frozen in ("", "w", "wb", "x", "xw")),
    *(Row(op, 1, "x" not in frozen, frozen) for op in ("all_to_all_matmul", "all_gather_matmul") for frozen in FROZEN),
    *(
        Row(op, 1, parts, frozen, save=False)
        for op in ("all_to_all_matmul", "all_gather_matmul")
        for parts, frozen in ((2, ""), (1, "x"), (1, "w"))
    ),
    *(Row("matmul_reduce_scatter", 1, frozen != "xw", frozen) for frozen in FROZEN),
    *(Row("matmul_all_reduce", 2, 0, frozen) for frozen in ("", "x")),
]


def largest(problem: Problem, group_size: int) -> int:
    """The bytes of the tensor next to the collective, where it is whole."""
    x, (w, *_), _ = problem.sizes(group_size)
    if problem.op in ("all_to_all_matmul", "all_gather_matmul"):
        return 4 * torch.Size(problem.gathered_shape(x, group_size)).numel()
    return 4 * torch.Size([*x[:-1], w[-1]]).numel()


def options(row: Row) -> dict[str, bool]:
    name = {"all_to_all_matmul": "save_exchanged", "all_gather_matmul": "save_gathered"}.get(row.op)
    return {name: row.save} if name else {}


@on_ranks(3)
@pytest.mark.parametrize("op", OPS)
def test_bytes_sent(rank: int, op: str) -> None:
    problem, size = PROBLEMS[op], dist.get_world_size()
    whole = largest(problem, size) * (size - 1) / size
    rows = [row for row in TABLE if row.op == op]
    for row in rows:
        tensors = leaves(problem, rank, size, frozen=row.frozen)
        with fusedcomm.force_algorithm("chunked", strict=True):
            with pushed() as fused, Dispatched() as plain:
                outs = as_list(problem.call(unflat(problem, tensors), **options(row)))
            assert (fused.num_bytes, plain.collective_bytes(size)) == (row.forward * whole, 0), row
            assert {dst for dst, _ in fused.chunks} == set(range(size)) - {rank}
            with pushed() as fused, Dispatched() as plain:
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
            counted = fused.num_bytes, plain.collective_bytes(size)
            assert counted == (row.backward * whole, 0), row
    with fusedcomm.force_algorithm("chunked", strict=True), torch.no_grad(), pushed() as fused, Dispatched() as plain:
        problem.call(integers(problem, rank, size))
    assert plain.names("fusedcomm") == [op]
    assert (fused.num_bytes, plain.collective_bytes(size)) == (rows[0].forward * whole, 0)


@on_ranks(2)
def test_what_is_not_written_is_not_counted(rank: int) -> None:
    """Negative control: a chunk that is not written counts as nothing, and is wrong."""
    problem, size = Problem("wide", (2, 3, 5), 128, 1, 2), dist.get_world_size()
    multiply = python_executor.multiply

    def half(x: torch.Tensor, w: torch.Tensor, bias: Any, out: torch.Tensor, *, adds: bool) -> None:
        before = out.clone()
        multiply(x, w, bias, out, adds=adds)
        out[len(out) // 2 :] = before[len(out) // 2 :]

    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True), pushed() as fused:
        patch.setattr(python_executor, "multiply", half)
        problem.call(integers(problem, rank, size))
    assert fused.num_bytes == largest(problem, size) * (size - 1) / size / 2


# what is computed, and kept, for the backward

# By op and frozen inputs: the ops and the number of matmuls of the backward.
BACKWARD: dict[str, dict[str, tuple[list[str], int]]] = {
    "matmul_all_to_all": {
        "": (["all_to_all_matmul"], 1),
        "x": (["all_to_all"], 1),
        "w": (["all_to_all_matmul"], 0),
        "b": (["all_to_all_matmul"], 1),
        "wb": (["all_to_all_matmul"], 0),
        "xw": (["all_to_all"], 0),
    },
    "all_to_all_matmul": {
        "": (["matmul_all_to_all"], 1),
        "x": ([], 1),
        "w": (["matmul_all_to_all"], 0),
        "b": (["matmul_all_to_all"], 1),
        "xw": ([], 0),
    },
    "all_gather_matmul": {
        "": (["matmul_reduce_scatter"], 2),
        "x": ([], 2),
        "w": (["matmul_reduce_scatter"], 0),
        "b": (["matmul_reduce_scatter"], 2),
        "xw": ([], 0),
    },
    "matmul_reduce_scatter": {
        "": (["all_gather_matmul"], 1),
        "x": (["all_gather"], 1),
        "w": (["all_gather_matmul"], 0),
        "b": (["all_gather_matmul"], 1),
        "xw": ([], 0),
    },
    "matmul_all_reduce": {"": ([], 2), "x": ([], 1), "w": ([], 1), "b": ([], 2), "xw": ([], 0)},
}


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_nothing_is_computed_for_a_frozen_input(rank: int, op: str) -> None:
    problem = PROBLEMS[op]
    for frozen, (fused, matmuls) in BACKWARD[op].items():
        tensors = leaves(problem, rank, 2, frozen=frozen)
        outs = as_list(problem.call(unflat(problem, tensors)))
        with Dispatched() as dispatched:
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        assert dispatched.names("fusedcomm") == fused, frozen
        assert dispatched.names("_c10d_functional") == [], frozen
        assert dispatched.matmuls() == matmuls, frozen
        if fused in (["all_to_all_matmul"], ["all_gather_matmul"]):  # exchanges the gradient for grad w or grad bias
            wanted = "w" not in frozen or (op == "matmul_all_to_all" and "b" not in frozen)
            at = 5 if fused == ["all_to_all_matmul"] else 4
            assert dispatched.arguments(f"fusedcomm::{fused[0]}")[at] == wanted, frozen
        assert [t.grad is not None for t in tensors] == [t.requires_grad for t in tensors], frozen


def kept_bytes(row: Row, rank: int) -> int:
    """The bytes saved in memory that is not the caller's own."""
    problem = PROBLEMS[row.op]
    tensors = leaves(problem, rank, dist.get_world_size(), frozen=row.frozen)
    with saved_for_backward() as saved:
        outs = as_list(problem.call(unflat(problem, tensors), **options(row)))
    assert any(out.requires_grad for out in outs)
    own = {t.untyped_storage().data_ptr() for t in tensors}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in own)


@on_ranks(2)
def test_only_an_exchanged_or_gathered_x_is_kept_and_only_where_it_should_be(rank: int) -> None:
    size = dist.get_world_size()
    for op in OPS:
        gathers = op in ("all_to_all_matmul", "all_gather_matmul")
        assert kept_bytes(Row(op, 0, 0), rank) == (largest(PROBLEMS[op], size) if gathers else 0)
        assert kept_bytes(Row(op, 0, 0, "w"), rank) == 0
        assert kept_bytes(Row(op, 0, 0, save=False), rank) == 0


# FLOPs that FlopCounterMode counts
def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@on_ranks(3)
@pytest.mark.parametrize("op", OPS)
def test_forward(rank: int, op: str) -> None:
    size = dist.get_world_size()
    for problem in TABLES[op]:
        inputs = [flat(integers(problem, r, size)) for r in range(size)]
        got = counted(lambda problem=problem, mine=inputs[rank]: problem.call(unflat(problem, mine)))
        assert got == counted(lambda problem=problem, all_=inputs: whole_group(problem, all_, size)) // size, problem


@on_ranks(2)
def test_backward_counts_twice_the_forward(rank: int) -> None:
    problem = Problem("heads", (2, 6, 5), 12, 1, -2, out_shape=(4, 3))
    x, w, _ = integers(problem, rank, 2)
    x.requires_grad_()
    w.requires_grad_()
    forward = 2 * math.prod(x.shape) * w.shape[-1]
    assert counted(lambda: problem.call((x, w, None)).sum().backward()) == 3 * forward
    meta = torch.empty(x.shape, device="meta")
    assert counted(lambda: problem.call((meta, w.to("meta"), None))) == forward
