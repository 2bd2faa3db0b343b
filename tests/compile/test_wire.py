"""The matmul beside a collective changes nothing that a rank sends, nor its order, or all ranks have agreed to it."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedcomm.compile import passes
from fusedcomm.compile.graph.collectives import is_op
from fusedcomm.compile.graph.sequence import Sequence
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.compile.merge.sums import SumMerger
from fusedcomm.memory.consent import OTHER, YES, Answer
from tests.helpers.graphs import aten_graph, collectives_of, run_passes, targets
from tests.helpers.merge_world import fake_world
from tests.helpers.program_parts import (
    DIM,
    HEADS,
    AllToAll,
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

R, X, W, REORDER = 2, (4, 6), (6, 8), "reorder_for_compute_comm_overlap"
SCHEDULING = "aten_distributed_optimizations.enable_overlap_scheduling"
Program = Callable[..., Any]
NO = Answer(OTHER, (1,), (1,))


def reduced(x: Tensor) -> Tensor:
    return torch.distributed._functional_collectives.all_reduce(x, "sum", world())


def passed(program: Program, *shapes: tuple[int, ...], answer: Answer | None = None, device: str = "cpu") -> Any:
    """The graph after the passes, whose ranks give ``answer`` to any change of what is sent."""
    ask = mock.patch.object(Sequence, "ask", return_value=answer or Answer(YES))
    with fake_world([*range(R)]), ask, FakeTensorMode():
        graph = aten_graph(program, [torch.empty(shape, device=device) for shape in shapes]).graph
        return graph, run_passes(graph)


def ops(program: Program, *shapes: tuple[int, ...], **given: Any) -> list[tuple[str, str]]:
    """(op, wire) in the order of the graph."""
    graph, _ = passed(program, *shapes, **given)
    return [(node.target._opname, argument_of(node, "wire")) for node in graph.nodes if is_op(node)]


def heads(y: Tensor) -> Tensor:
    return y.view(-1, 4, 4, 2)  # [batch, tokens, heads, head_dim]


def rms_normed(r: Tensor) -> Tensor:
    return r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + 1e-6)


def normed(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return rms_normed(residual + reduced(x @ w))


def rows_normed(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return rms_normed(residual + reduce_scatter(x @ w, "sum", 0, world()))


def multiplied(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def computed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()


def read(x: Tensor, w: Tensor) -> Tensor:
    return x.sin()


WITH_AND_WITHOUT: dict[str, tuple[Callable[[Program], Program], Program, Program]] = {
    "matmul_all_to_all": (lambda f: lambda x, w: heads_first(heads(f(x, w)), R), multiplied, computed),
    "all_to_all_matmul": (lambda f: lambda x, w: f(AllToAll.apply(x), w), multiplied, read),
    "all_gather_matmul": (lambda f: lambda x, w: f(all_gather(x, 0, world()), w), multiplied, read),
    "matmul_reduce_scatter": (lambda f: lambda x, w: reduce_scatter(f(x, w), "sum", 0, world()), multiplied, computed),
    "matmul_all_reduce": (lambda f: lambda x, w: reduced(f(x, w).view(2, 2, 8)), multiplied, computed),
}


@pytest.mark.parametrize("op", WITH_AND_WITHOUT)
def test_a_rank_without_the_matmul_has_the_same_wire(op: str) -> None:
    collective, matmul, none = WITH_AND_WITHOUT[op]
    assert ops(collective(matmul), X, W) == [(op, "graph")]
    kind = op.removeprefix("matmul_").removesuffix("_matmul")
    assert ops(collective(none), X, W) == [(kind, "graph")]


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter((x @ w).mT, "sum", 0, world())


def of_one_x(x: Tensor, *ws: Tensor) -> list[Tensor]:
    return [heads_first(heads(x @ w), R) for w in ws]


def narrowed(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, 0, world()).bfloat16() @ w.bfloat16()


def waits_for_a_later_one(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, 0, world()) @ all_gather(w, 0, world())


@pytest.mark.parametrize("other", ["", "bucket_all_reduces_fx", SCHEDULING])
def test_inductor_keeps_what_it_is_to_overlap(other: str) -> None:
    reorder = {f"{REORDER}_passes": [] if other else ["raise_comms"], REORDER: True}  # without passes it does nothing
    with config.patch(reorder | ({other: "all"} if other else {})):
        _, report = passed(lambda x, w: reduced(x.sin()) @ w, X, W)
    assert [line.status for line in report.collectives] == ["exposed"] and "Inductor is set" in str(report)
    with config.patch({f"{REORDER}_passes": [], REORDER: True}):
        assert ops(lambda x, w: reduced(x.sin()) @ w, X, W) == [("all_reduce", "graph")]


CHANGES: dict[str, tuple[Program, list[tuple[int, ...]], list[str], list[str]]] = {  # ops with consent, and without
    "q, k and v": (of_one_x, [X, W, W, W], ["matmul_all_to_all"], ["matmul_all_to_all"] * 3),
    "another dtype": (narrowed, [X, W], ["all_gather_matmul"], ["all_gather"]),
    "rows first": (lambda x, w: heads_first(heads(x @ w), R), [(8, 6), W], ["matmul_all_to_all"], ["all_to_all"]),
    "columns first": (transposed, [X, W], ["matmul_reduce_scatter"], ["reduce_scatter"]),
    "a norm": (normed, [X, W, (4, 8)], ["matmul_all_reduce_norm"], ["matmul_all_reduce"]),
    "a norm of rows": (rows_normed, [X, W, (2, 8)], ["matmul_reduce_scatter_norm"], ["matmul_reduce_scatter"]),
    "another place": (waits_for_a_later_one, [X, (3, 8)], ["all_gather", "all_gather_matmul"], ["all_gather"] * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_sent_changes_by_consent_alone(name: str) -> None:
    program, shapes, together, alone = CHANGES[name]
    device = "cuda" if "norm" in name else "cpu"
    agreed, refused = (ops(program, *shapes, answer=answer, device=device) for answer in (Answer(YES), NO))
    assert [op for op, _ in agreed] == together and [op for op, _ in refused] == alone
    changed = next(wire for op, wire in agreed if "matmul" in op)
    assert changed.startswith("graph ") and {wire for _, wire in refused} == {"graph"}


def test_what_ranks_changed_together_they_fuse_together() -> None:
    """Else it is the backend's on ranks that find no matmul."""

    def agreed(f: Program) -> tuple[list[str], str]:
        merged = mock.patch.object(passes, "SumMerger", lambda graph, ops, plain: SumMerger(graph, ops))
        with merged, mock.patch.object(passes.wire, "agreed") as note:
            found = ops(lambda x, w: reduced(f(x, w)) + reduced(f(x, w + 1)), X, W)
        return [op for op, _ in found], note.call_args.args[1]

    (fused, digest), (left, other) = agreed(multiplied), agreed(computed)
    assert (fused, left) == (["matmul_all_reduce"], []) and digest != other
    with mock.patch.object(passes, "_phase", return_value="backward"):  # a ballot of its own: it is compiled next
        assert agreed(multiplied)[1] not in (digest, other)


SENT_OTHERWISE: dict[str, tuple[Program, tuple[int, ...], tuple[int, ...], str]] = {  # and whether blocks are equal
    "rows as one": (lambda y: y.view(-1), (64, 6), (6, 256), "all_reduce"),
    "batches that R does not divide": (lambda y: y, (3, 4, 6), (3, 6, 8), "all_reduce"),
    "batches": (lambda y: y, (4, 3, 6), (4, 6, 8), "matmul_all_reduce"),
    "few rows as one": (lambda y: y.view(-1), X, W, "matmul_all_reduce"),
}


@pytest.mark.parametrize("name", SENT_OTHERWISE)
def test_an_all_reduce_is_cut_as_where_no_matmul_is(name: str) -> None:
    view, x, w, op = SENT_OTHERWISE[name]
    assert ops(lambda x, w: reduced(view(x @ w)), x, w) == [(op, "graph")]


# Programs that look as if they could be fused: their matmuls stay as they were, and the report says why.
ROWS = 2  # ranks


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


INPUT, WEIGHT = (B, T, K), (K, N)
ARRIVING = (B, T * ROWS, HEADS // ROWS, DIM)  # whole sequences of some heads
NEAR_MISSES: dict[str, tuple[Program, list[tuple[int, ...]], str]] = {
    "result is returned": (
        lambda x, w: (y := x @ w, heads_first(y.view(B, T, HEADS, DIM), ROWS)),
        [INPUT, WEIGHT],
        "matmul_all_to_all: the matmul's result is also returned by the function, or kept for its backward",
    ),
    "result is used": (
        lambda x, w: (heads_first((y := x @ w).view(B, T, HEADS, DIM), ROWS), y.sum()),
        [INPUT, WEIGHT],
        "matmul_all_to_all: the matmul's result is also used by sum",
    ),
    "something is computed between": (
        lambda x, w: heads_first((x @ w).relu().view(B, T, HEADS, DIM), ROWS),
        [INPUT, WEIGHT],
        "matmul_all_to_all: what is exchanged is not the result of a matmul but of relu",
    ),
    "heads of keys are repeated": (
        lambda x, w: heads_first((x @ w).view(B, T, HEADS // 2, DIM).repeat_interleave(2, 2), ROWS),
        [INPUT, (K, N // 2)],
        "matmul_all_to_all: the matmul's result is repeated 2 times before it is sent: send it once, by matmul_all",
    ),
    "something is computed after": (
        lambda x, w: tokens_first(x, ROWS).relu().flatten(2) @ w,
        [ARRIVING, (N, K)],
        "all_to_all_matmul: what arrives goes to relu, not to a matmul",
    ),
    "uneven splits": (
        lambda x, w: exchanged(x @ w, [T + 1] * ROWS, [T + 1, T - 1]),
        [(T * ROWS, K), WEIGHT],
        "matmul_all_to_all: its splits are not known to be even: it sends [",
    ),
    "rounded before it is sent": (
        lambda x, w: heads_first((x @ w).bfloat16().view(B, T, HEADS, DIM), ROWS),
        [INPUT, WEIGHT],
        "matmul_all_to_all: the matmul's result is rounded to torch.bfloat16 before it is sent",
    ),
    "rounded after the gather": (
        lambda x, w: all_gather(x, 0, world()).to(torch.float8_e4m3fn).to(x.dtype) @ w,
        [INPUT, WEIGHT],
        "all_gather_matmul: what arrives goes to ",
    ),
    "cast up before the matmul": (
        lambda x, w: tokens_first(x.bfloat16(), ROWS).flatten(2).float() @ w,
        [ARRIVING, (N, K)],
        "all_to_all_matmul: what arrives is cast to a larger dtype before the matmul",
    ),
    "right operand": (
        lambda x, w: w @ tokens_first(x, ROWS).flatten(0, 1).flatten(1),
        [ARRIVING, (K, B * T)],
        "all_to_all_matmul: what arrives is the right operand of the matmul",
    ),
    "logits are gathered": (
        lambda x, w: all_gather((x @ w).view(B, T, N), 2, world()),
        [(B * T, K), WEIGHT],
        "all_gather_matmul: what arrives goes to the caller, not to a matmul",
    ),
    "part of the vocabulary": (
        parallel_embedding,
        [(B, T), WEIGHT],
        "matmul_all_reduce: what is exchanged is not the result of a matmul but of ",
    ),
    "weight from what arrives": (
        multiplied_by_itself,
        [(T, K)],
        "all_gather_matmul: the weight is computed from what arrives",
    ),
    "bias of the rows": (
        lambda x, w, bias: heads_first(torch.addmm(bias, x, w).view(1, T, HEADS, DIM), ROWS),
        [(T, K), WEIGHT, (T, 1)],
        "matmul_all_to_all: what addmm adds is not one number per column",
    ),
    "maximum": (
        lambda x, w: funcol.all_reduce(x @ w, "max", world()),
        [(T, K), WEIGHT],
        "matmul_all_reduce: reduce_op must be sum or avg, got max",
    ),
    "cast before the sum": (
        lambda x, w: funcol.all_reduce((x.bfloat16() @ w.bfloat16()).float(), "sum", world()),
        [(T, K), WEIGHT],
        "matmul_all_reduce: the matmul's result is cast before it is reduced",
    ),
    "scaled": (
        lambda x, w, bias: funcol.all_reduce(torch.addmm(bias, x, w, alpha=2), "sum", world()),
        [(T, K), WEIGHT, (N,)],
        "matmul_all_reduce: addmm scales its operands",
    ),
    "double precision": (
        lambda x, w: funcol.all_reduce(x.double() @ w.double(), "sum", world()),
        [(T, K), WEIGHT],
        "matmul_all_reduce: the matmul's dtype is torch.float64, and must be float32, float16 or bfloat16",
    ),
    "coalesced": (
        lambda x, w: funcol.all_reduce_coalesced([x @ w, x @ w.relu()], "sum", world()),
        [(T, K), WEIGHT],
        "no op of fusedcomm fuses all_reduce_coalesced",
    ),
}


NOT_SERVED = {"uneven splits", "maximum", "double precision", "coalesced"}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_the_matmul_stays_and_the_reason_is_said(name: str) -> None:
    program, shapes, reason = NEAR_MISSES[name]
    with fake_world([*range(ROWS)]):
        graph = aten_graph(program, [torch.ones(shape) for shape in shapes]).graph
        before = str(graph), targets(graph, "aten")
        (line,) = run_passes(graph).collectives
    kind = line.collective
    if name in NOT_SERVED:
        assert str(graph) == before[0]
        assert (line.status, line.op, line.saving_us) == ("exposed", None, 0.0)
    else:
        assert targets(graph, "fusedcomm") == [kind] and not collectives_of(graph)
        views = {"reshape", "squeeze"}
        left = [[each for each in names if each not in views] for names in (before[1], targets(graph, "aten"))]
        assert left[0] == left[1]
        assert (line.status, line.op, line.saving_us) == ("plain", kind, 0.0)
    assert any(each.startswith(reason) for each in line.reason.split("; ")), line.reason
