"""Programs that look as if they could be fused: their graphs stay as they were, and the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers.graphs import aten_graph
from tests.helpers.merge_world import fake_world
from tests.helpers.program_parts import (
    DIM,
    HEADS,
    B,
    K,
    N,
    T,
    all_gather,
    heads_first,
    reduce_scatter,
    tokens_first,
    world,
)

Program = Callable[..., Any]
NEAR_MISSES: dict[str, tuple[Callable[[int], tuple[Program, list[tuple[int, ...]]]], str]] = {}


def near_miss(reason: str) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        NEAR_MISSES[make.__name__.replace("_", "-")] = (make, reason)
        return make

    return add


@near_miss("matmul_all_to_all: the matmul's result is also returned by the function, or kept for its backward")
def result_is_returned(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return y, heads_first(y.view(B, T, HEADS, DIM), r)

    return program, [(B, T, K), (K, N)]


@near_miss("matmul_all_to_all: the matmul's result is also used by sum")
def result_is_used(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        return heads_first(y.view(B, T, HEADS, DIM), r), y.sum()

    return program, [(B, T, K), (K, N)]


@near_miss("matmul_all_to_all: what is exchanged is not the result of a matmul but of relu")
def something_is_computed_between(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return heads_first((x @ w).relu().view(B, T, HEADS, DIM), r)

    return program, [(B, T, K), (K, N)]


REPEATED = "matmul_all_to_all: the matmul's result is repeated 2 times before it is sent: send it once, by matmul_all"


@near_miss(REPEATED)
def heads_of_keys_are_repeated(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return heads_first((x @ w).view(B, T, HEADS // 2, DIM).repeat_interleave(2, 2), r)

    return program, [(B, T, K), (K, N // 2)]


@near_miss(REPEATED)
def one_head_of_keys_is_expanded(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return heads_first((x @ w).view(B, T, 1, DIM).expand(B, T, 2, DIM), r)

    return program, [(B, T, K), (K, DIM)]


@near_miss("all_to_all_matmul: what arrives goes to relu, not to a matmul")
def something_is_computed_after(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return tokens_first(x, r).relu().flatten(2) @ w

    return program, [(B, T * r, HEADS // r, DIM), (N, K)]


@near_miss("matmul_all_to_all: its splits are not known to be even: it sends [")
def uneven_splits(r: int) -> Any:
    splits = [T + 1] + [T] * (r - 2) + [T - 1]

    def program(x: Tensor, w: Tensor) -> Any:
        rank = torch.distributed.get_rank()
        return funcol.wait_tensor(funcol.all_to_all_single(x @ w, [splits[rank]] * r, splits, world()))

    return program, [(T * r, K), (K, N)]


@near_miss("matmul_all_to_all: the matmul's result is rounded to a smaller dtype before it is sent")
def rounded_before_it_is_sent(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return heads_first((x @ w).bfloat16().view(B, T, HEADS, DIM), r)

    return program, [(B, T, K), (K, N)]


@near_miss("all_to_all_matmul: what arrives is cast to a larger dtype before the matmul")
def cast_up_before_the_matmul(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return tokens_first(x.bfloat16(), r).flatten(2).float() @ w

    return program, [(B, T * r, HEADS // r, DIM), (N, K)]


@near_miss("all_to_all_matmul: what arrives is the right operand of the matmul")
def right_operand(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return w @ tokens_first(x, r).flatten(0, 1).flatten(1)

    return program, [(B, T * r, HEADS // r, DIM), (K, B * T)]


@near_miss("all_gather_matmul: the gathered tensor is the result of a matmul: no op fuses that order")
def logits_are_gathered(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return all_gather((x @ w).view(B, T, N), 2, world())

    return program, [(B * T, K), (K, N)]


@near_miss("matmul_all_reduce: what is reduced is looked up in a table, as a parallel embedding does: no op fuses that")
def a_part_of_the_vocabulary(r: int) -> Any:
    def program(x: Tensor, table: Tensor) -> Any:
        tokens = x.long()
        outside = (tokens < 0) | (tokens >= K)
        found = torch.nn.functional.embedding(tokens.masked_fill(outside, 0), table)
        return funcol.all_reduce(found.masked_fill(outside[..., None], 0.0), "sum", world())

    return program, [(B, T), (K, N)]


@near_miss("all_gather_matmul: what arrives is the right operand of the matmul")
def gathered_weight(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return x @ all_gather(w, 0, world())  # FSDP

    return program, [(T, K), (K // r, N)]


@near_miss("all_gather_matmul: the weight is computed from what arrives")
def weight_from_what_arrives(r: int) -> Any:
    def program(x: Tensor) -> Any:
        gathered = all_gather(x, 0, world())
        return gathered @ gathered.mT.relu()

    return program, [(T, K)]


@near_miss("matmul_all_to_all: what addmm adds is not one number per column")
def bias_of_the_rows(r: int) -> Any:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        return heads_first(torch.addmm(bias, x, w).view(1, T, HEADS, DIM), r)

    return program, [(T, K), (K, N), (T, 1)]


@near_miss("matmul_all_to_all: what is exchanged is not the result of a matmul but of add")
def number_is_added(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return heads_first((x @ w + 2.0).view(B, T, HEADS, DIM), r)

    return program, [(B, T, K), (K, N)]


@near_miss("matmul_reduce_scatter: every rank adds its bias before the reduction")
def bias_before_the_sum(r: int) -> Any:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        return reduce_scatter(torch.addmm(bias, x, w), "sum", 0, world())

    return program, [(T * r, K), (K, N), (N,)]


@near_miss("matmul_all_reduce: reduce_op must be sum or avg, got max")
def maximum(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return funcol.all_reduce(x @ w, "max", world())

    return program, [(T, K), (K, N)]


@near_miss("matmul_all_reduce: the matmul's result is cast before it is reduced")
def cast_before_the_sum(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return funcol.all_reduce((x.bfloat16() @ w.bfloat16()).float(), "sum", world())

    return program, [(T, K), (K, N)]


@near_miss("matmul_all_reduce: addmm scales its operands")
def scaled(r: int) -> Any:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        return funcol.all_reduce(torch.addmm(bias, x, w, alpha=2), "sum", world())

    return program, [(T, K), (K, N), (N,)]


@near_miss("matmul_all_reduce: the matmul's dtype is torch.float64, and must be float32, float16 or bfloat16")
def double_precision(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return funcol.all_reduce(x.double() @ w.double(), "sum", world())

    return program, [(T, K), (K, N)]


@near_miss("no op of fusedcomm fuses all_reduce_coalesced")
def coalesced(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        return funcol.all_reduce_coalesced([x @ w, x @ w.relu()], "sum", world())

    return program, [(T, K), (K, N)]


@near_miss("matmul_all_to_all: the rows of a batched matmul are exchanged in parts")
def rows_of_a_batch_in_parts(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Any:
        y = torch.bmm(x, w).view(B, T // r, r, N)
        return funcol.wait_tensor(funcol.all_to_all_single(y.movedim(2, 0).contiguous(), None, None, world()))

    return program, [(B, T, K), (B, K, N)]


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_the_graph_stays_and_the_reason_is_said(name: str) -> None:
    make, reason = NEAR_MISSES[name]
    report = CompileReport()
    with fake_world([0, 1]):
        program, shapes = make(2)
        graph = aten_graph(program, [torch.ones(shape) for shape in shapes]).graph
        before = str(graph)
        FusedcommPass(Settings(commute=False), report)(graph)
    assert str(graph) == before
    (line,) = report.collectives
    assert (line.status, line.op, line.saving_us) == ("exposed", None, 0.0)
    assert any(each.startswith(reason) for each in line.reason.split("; ")), line.reason
