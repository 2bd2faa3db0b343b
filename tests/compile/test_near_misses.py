"""Programs that look as if they could be fused: their matmuls stay as they were, and the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fusedcomm.compile.passes import FusedcommPass, Settings
from fusedcomm.compile.reports import CompileReport
from tests.helpers.graphs import aten_graph, collectives_of, targets
from tests.helpers.merge_world import fake_world
from tests.helpers.program_parts import DIM, HEADS, B, K, N, T, all_gather, heads_first, tokens_first, world

R = 2  # ranks
Program = Callable[..., Any]


def exchanged(t: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(t, received, sent, world()))


def parallel_embedding(x: Tensor, table: Tensor) -> Tensor:
    tokens = x.long()
    outside = (tokens < 0) | (tokens >= K)
    found = torch.nn.functional.embedding(tokens.masked_fill(outside, 0), table)
    return funcol.all_reduce(found.masked_fill(outside[..., None], 0.0), "sum", world())


def multiplied_by_itself(x: Tensor) -> Tensor:
    gathered = all_gather(x, 0, world())
    return gathered @ gathered.mT.relu()


X, W = (B, T, K), (K, N)
ARRIVING = (B, T * R, HEADS // R, DIM)  # whole sequences of some heads
NEAR_MISSES: dict[str, tuple[Program, list[tuple[int, ...]], str]] = {
    "result is returned": (
        lambda x, w: (y := x @ w, heads_first(y.view(B, T, HEADS, DIM), R)),
        [X, W],
        "matmul_all_to_all: the matmul's result is also returned by the function, or kept for its backward",
    ),
    "result is used": (
        lambda x, w: (heads_first((y := x @ w).view(B, T, HEADS, DIM), R), y.sum()),
        [X, W],
        "matmul_all_to_all: the matmul's result is also used by sum",
    ),
    "something is computed between": (
        lambda x, w: heads_first((x @ w).relu().view(B, T, HEADS, DIM), R),
        [X, W],
        "matmul_all_to_all: what is exchanged is not the result of a matmul but of relu",
    ),
    "heads of keys are repeated": (
        lambda x, w: heads_first((x @ w).view(B, T, HEADS // 2, DIM).repeat_interleave(2, 2), R),
        [X, (K, N // 2)],
        "matmul_all_to_all: the matmul's result is repeated 2 times before it is sent: send it once, by matmul_all",
    ),
    "something is computed after": (
        lambda x, w: tokens_first(x, R).relu().flatten(2) @ w,
        [ARRIVING, (N, K)],
        "all_to_all_matmul: what arrives goes to relu, not to a matmul",
    ),
    "uneven splits": (
        lambda x, w: exchanged(x @ w, [T + 1] * R, [T + 1, T - 1]),
        [(T * R, K), W],
        "matmul_all_to_all: its splits are not known to be even: it sends [",
    ),
    "rounded before it is sent": (
        lambda x, w: heads_first((x @ w).bfloat16().view(B, T, HEADS, DIM), R),
        [X, W],
        "matmul_all_to_all: the matmul's result is rounded to torch.bfloat16 before it is sent",
    ),
    "rounded after the gather": (
        lambda x, w: all_gather(x, 0, world()).to(torch.float8_e4m3fn).to(x.dtype) @ w,
        [X, W],
        "all_gather_matmul: what arrives is rounded to torch.float8_e4m3fn, and cast again, before the matmul",
    ),
    "cast up before the matmul": (
        lambda x, w: tokens_first(x.bfloat16(), R).flatten(2).float() @ w,
        [ARRIVING, (N, K)],
        "all_to_all_matmul: what arrives is cast to a larger dtype before the matmul",
    ),
    "right operand": (
        lambda x, w: w @ tokens_first(x, R).flatten(0, 1).flatten(1),
        [ARRIVING, (K, B * T)],
        "all_to_all_matmul: what arrives is the right operand of the matmul",
    ),
    "logits are gathered": (
        lambda x, w: all_gather((x @ w).view(B, T, N), 2, world()),
        [(B * T, K), W],
        "all_gather_matmul: the gathered tensor is the result of a matmul: no op fuses that order",
    ),
    "part of the vocabulary": (
        parallel_embedding,
        [(B, T), W],
        "matmul_all_reduce: what is reduced is looked up in a table, as a parallel embedding does: no op fuses that",
    ),
    "weight from what arrives": (
        multiplied_by_itself,
        [(T, K)],
        "all_gather_matmul: the weight is computed from what arrives",
    ),
    "bias of the rows": (
        lambda x, w, bias: heads_first(torch.addmm(bias, x, w).view(1, T, HEADS, DIM), R),
        [(T, K), W, (T, 1)],
        "matmul_all_to_all: what addmm adds is not one number per column",
    ),
    "maximum": (
        lambda x, w: funcol.all_reduce(x @ w, "max", world()),
        [(T, K), W],
        "matmul_all_reduce: reduce_op must be sum or avg, got max",
    ),
    "cast before the sum": (
        lambda x, w: funcol.all_reduce((x.bfloat16() @ w.bfloat16()).float(), "sum", world()),
        [(T, K), W],
        "matmul_all_reduce: the matmul's result is cast before it is reduced",
    ),
    "scaled": (
        lambda x, w, bias: funcol.all_reduce(torch.addmm(bias, x, w, alpha=2), "sum", world()),
        [(T, K), W, (N,)],
        "matmul_all_reduce: addmm scales its operands",
    ),
    "double precision": (
        lambda x, w: funcol.all_reduce(x.double() @ w.double(), "sum", world()),
        [(T, K), W],
        "matmul_all_reduce: the matmul's dtype is torch.float64, and must be float32, float16 or bfloat16",
    ),
    "coalesced": (
        lambda x, w: funcol.all_reduce_coalesced([x @ w, x @ w.relu()], "sum", world()),
        [(T, K), W],
        "no op of fusedcomm fuses all_reduce_coalesced",
    ),
}


NOT_SERVED = {"uneven splits", "maximum", "double precision", "coalesced"}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_the_matmul_stays_and_the_reason_is_said(name: str) -> None:
    program, shapes, reason = NEAR_MISSES[name]
    report = CompileReport()
    with fake_world([*range(R)]):
        graph = aten_graph(program, [torch.ones(shape) for shape in shapes]).graph
        before = str(graph), targets(graph, "aten")
        FusedcommPass(Settings(), report)(graph)
    (line,) = report.collectives
    kind = line.collective
    if name in NOT_SERVED:
        assert str(graph) == before[0]
        assert (line.status, line.op, line.saving_us) == ("exposed", None, 0.0)
    else:
        assert targets(graph, "fusedcomm") == [kind] and not collectives_of(graph)
        assert [each for each in targets(graph, "aten") if each != "reshape"] == [
            each for each in before[1] if each != "reshape"
        ]
        assert (line.status, line.op, line.saving_us) == ("plain", kind, 0.0)
    assert any(each.startswith(reason) for each in line.reason.split("; ")), line.reason
