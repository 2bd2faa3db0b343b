"""Exchanges, gathers and scatters as public Ulysses and tensor parallel code spells them: all are fused, and right."""

import os
import random
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusedcomm.compile
from fusedcomm.compile.reports import CollectiveReport
from fusedcomm.memory.consent import Answer, Consent
from tests.helpers.block_checks import interpreted
from tests.helpers.fragments import FRAGMENTS, Fragment
from tests.helpers.graphs import check_fragment, recorded_graphs, rewritten
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import all_gather, mesh, reduce_scatter, world
from tests.helpers.tiers import nightly_but

CUT = {  # blocks along a dim, first
    "stack of chunks": lambda t, d, r: torch.stack([c.contiguous() for c in t.chunk(r, d)]),
    "stack of an unbind": lambda t, d, r: torch.stack(t.unflatten(d, (r, -1)).unbind(d)),
    "cat of views": lambda t, d, r: torch.cat([c.reshape(-1) for c in t.chunk(r, d)]).view(r, *t.chunk(r, d)[0].shape),
    "cat of unsqueezed": lambda t, d, r: torch.cat([c[None] for c in torch.tensor_split(t, r, d)]),
    "stack of slices": lambda t, d, r: torch.stack(
        [t.narrow(d, i * (t.shape[d] // r), t.shape[d] // r) for i in range(r)]
    ),
    "stack of picks": lambda t, d, r: torch.stack([t.unflatten(d, (r, -1)).select(d, i) for i in range(r)]),
    "transposed parts": lambda t, d, r: torch.stack([c.transpose(0, 1) for c in t.chunk(r, d)]).transpose(1, 2),
    "filled": lambda t, d, r: filled(t.new_empty(r, *t.chunk(r, d)[0].shape), 0, t.chunk(r, d)),
    "movedim": lambda t, d, r: t.unflatten(d, (r, -1)).movedim(d, 0),
}
JOIN = {  # and joined along a dim
    "cat of an unbind": lambda t, d: torch.cat(t.unbind(0), d),
    "cat of split ones": lambda t, d: torch.cat(t.split(1), d + 1).squeeze(0),
    "cat of picks": lambda t, d: torch.cat([t[i].contiguous() for i in range(len(t))], d),
    "cat of chunks": lambda t, d: torch.cat([c[0] for c in t.chunk(len(t))], d),
    "stack": lambda t, d: torch.stack([*t], d).flatten(d, d + 1),
    "filled": lambda t, d: filled(t[0].repeat_interleave(len(t), d).new_empty(widened(t, d)), d, t, t.shape[d + 1]),
    "waited for": lambda t, d: funcol.wait_tensor(t.movedim(0, d).flatten(d, d + 1)),
}
GATHERS = {
    "list": lambda x: gathered(x, [torch.empty_like(x) for _ in range(dist.get_world_size())]),
    "list of views": lambda x: gathered(x, [*x.new_empty(dist.get_world_size(), *x.shape).unbind(0)]),
    "tensor": lambda x: into_tensor(x).unflatten(0, (dist.get_world_size(), -1)),
}


def filled(out: Tensor, dim: int, parts: Any, size: int = 0) -> Tensor:
    for i, each in enumerate(parts):
        (out.narrow(dim, i * size, size) if size else out.select(dim, i)).copy_(each)
    return out


def widened(t: Tensor, dim: int) -> list[int]:
    return [size * (len(t) if d == dim else 1) for d, size in enumerate(t.shape[1:])]


def exchanged(t: Tensor) -> Tensor:
    received = torch.empty_like(t := t.contiguous())
    dist.all_to_all_single(received, t)
    return received


def gathered(x: Tensor, parts: list[Tensor]) -> Tensor:
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts)


def into_tensor(x: Tensor) -> Tensor:
    out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scattered(t: Tensor) -> Tensor:
    out = t.new_empty(len(t) // dist.get_world_size(), *t.shape[1:])
    dist.reduce_scatter_tensor(out, t.contiguous())
    return out


def program_of(kind: str, cut: str, join: str, gather: str, per_head: bool) -> tuple[Callable[..., Any], list[Any]]:
    """The program, and the shapes of x and w. ``per_head``: a batched matmul whose rows are exchanged in parts."""
    r, tokens, heads, dim = dist.get_world_size(), 4, 3 * dist.get_world_size(), 4
    apart, together = CUT[cut], JOIN[join]

    def matmul(x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bthd,hde->bthe", x, w) if per_head else x.flatten(2) @ w

    def program(x: Tensor, w: Tensor) -> Any:
        if kind == "push":
            y = matmul(x, w)
            return together(exchanged(apart(y if per_head else y.unflatten(-1, (heads, -1)), 2, r)), 1)
        if kind == "pull":
            return matmul(together(exchanged(apart(x, 1, r)), 2), w)
        if kind == "gather":
            return matmul(together(GATHERS[gather](x), 1), w)
        if kind == "parts":  # each of some split results is scattered
            return [scattered(apart(y, 1, r).flatten(0, 1)) for y in matmul(x, w).split([dim, 2 * dim], -1)]
        return scattered(apart(matmul(x, w), 1, r).flatten(0, 1))

    rows, own = (r * tokens if kind in ("pull", "scatter", "parts") else tokens), heads // (r if kind == "pull" else 1)
    k, n = own * dim * (r if kind == "pull" else 1), heads * dim if kind == "push" else 3 * dim
    return program, [(2, rows, own, dim), (heads, dim, 3 * dim) if per_head else (k, n)]


def check(rank: int, kind: str, cut: str, join: str, gather: str = "tensor", per_head: bool = False) -> None:
    torch._dynamo.reset()
    program, shapes = program_of(kind, cut, join, gather, per_head)
    generator = torch.Generator().manual_seed(rank)
    args = [torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes]
    want = program(*args)
    with fusedcomm.compile.enabled() as report, warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusedcomm")  # a pass that fails says so
        got = torch.compile(program, fullgraph=True, backend=interpreted)(*args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert {line.status for line in report.collectives} == {"fused"}, (cut, join, gather, str(report))


CASES = [
    ("push", "stack of chunks", "cat of an unbind"),
    ("push", "stack of slices", "stack", "tensor", True),
    ("pull", "filled", "cat of split ones", "tensor", False),
    ("gather", "movedim", "waited for"),
    ("gather", "movedim", "cat of an unbind", "list of views", True),
    ("scatter", "cat of views", "stack", "tensor", True),
    ("parts", "stack of an unbind", "stack"),
]


@on_ranks(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_spellings_are_fused(rank: int, case: tuple[Any, ...]) -> None:
    check(rank, *case)


@on_ranks(2)
@pytest.mark.parametrize("is_guarded", [True, False])
def test_halves_of_a_number_of_columns_that_is_read_from_a_tensor(rank: int, is_guarded: bool) -> None:
    """torch cuts them so: they are equal if a guard says that the number is even."""

    def program(x: Tensor, w: Tensor, number: Tensor) -> Tensor:
        n = number.item()
        torch._check(n >= 2)
        torch._check(n <= 8)
        if is_guarded:
            torch._check(n % 2 == 0)
        y = x @ w[:, :n]
        halves = [y.narrow(1, i * (n // 2), n // 2) for i in range(2)]
        return reduce_scatter(torch.cat(halves), "sum", 0, dist.group.WORLD)

    args = torch.arange(12.0).view(2, 6) + rank, torch.arange(48.0).view(6, 8), torch.tensor(6)
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        fusedcomm.compile.enabled() as report,
        torch._dynamo.config.patch(capture_scalar_outputs=True),
    ):
        got = torch.compile(program, fullgraph=True, backend=interpreted)(*args)
    torch.testing.assert_close(got, program(*args), rtol=0, atol=0)
    (line,) = report.collectives
    assert line.status == "fused" if is_guarded else "not the result of a matmul but of cat" in line.reason, report


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["push", "pull", "gather", "scatter", "parts"])
@on_ranks()
def test_any_spelling_is_fused(rank: int, kind: str, world_size: int) -> None:
    rng = random.Random(kind)
    for _ in range(10):
        per_head = kind != "parts" and rng.random() < 0.3
        check(rank, kind, rng.choice([*CUT]), rng.choice([*JOIN]), rng.choice([*GATHERS]), per_head)


# programs of tests/helpers/fragments.py
@pytest.mark.parametrize("fragment", FRAGMENTS, ids=str)
def test_graphs_and_values(ranks: Any, fragment: Fragment) -> None:
    """Inductor's graphs are run op by op: its code takes long to compile."""
    ranks(2).run(check_fragment, fragment.name, interpreted)


@pytest.mark.parametrize("name", nightly_but(["start-program"], [fragment.name for fragment in FRAGMENTS]))
def test_code_of_inductor(ranks: Any, name: str) -> None:
    ranks(2).run(check_fragment, name, "inductor")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dtensor-sequence-parallel", "q-k-v-linears-of-grouped-query-attention"])
def test_four_ranks(ranks: Any, name: str) -> None:
    ranks(4).run(check_fragment, name, interpreted)


def check_decomposed(rank: int, name: str) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    counters.clear()
    with config.patch(decompose_shard_dim_alltoall=True):
        check_fragment(rank, name, interpreted)
    assert counters["inductor"]["decompose_shard_dim_alltoall"] == 1


@pytest.mark.parametrize("name", ["shard-dim-alltoall", "shard-dim-alltoall-before"])
def test_shard_dim_alltoall_decomposed_by_inductor(ranks: Any, name: str) -> None:
    from torch._inductor import config

    if not hasattr(config, "decompose_shard_dim_alltoall"):
        pytest.skip("an option of torch 2.14")
    ranks(2).run(check_decomposed, name)


# DTensor's exchange of shards that R does not divide, compiled: ranks have different graphs, and must do the same.
K, DIM = 8, 4


def check_values(rank: int, commute: bool, tokens: int, heads: int) -> list[CollectiveReport]:
    devices, whole = mesh(), (3, tokens, heads, DIM)

    def reshard(t: Tensor, gather_dim: int, scatter_dim: int) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        strides = (tokens * heads * DIM, heads * DIM, DIM, 1)
        shards = DTensor.from_local(t, devices, [Shard(gather_dim)], shape=torch.Size(whole), stride=strides)
        return shards.redistribute(devices, [Shard(scatter_dim)]).to_local()

    def program(x: Tensor, w: Tensor, bias: Tensor, w_out: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, w, bias).view(3, -1, heads, DIM)
        return reshard(reshard(y, 1, 2).sin(), 2, 1).flatten(2) @ w_out

    generator = torch.Generator().manual_seed(0)
    shapes = (3, tokens, K), (heads * DIM, K), (heads * DIM,), (heads * DIM, K)
    x, *others = (torch.randn(shape, generator=generator) for shape in shapes)
    args = [each.requires_grad_() for each in (x.chunk(2, 1)[rank].contiguous(), *others)]
    want, found = program(*args), []
    with recorded_graphs(), fusedcomm.compile.enabled(commute=commute) as report:
        compiled = torch.compile(program, fullgraph=True, backend=interpreted)
        got = compiled(*args)
        for each in (want, got):
            found.append([each, *torch.autograd.grad(each, args, torch.ones_like(each))])
    torch.testing.assert_close(*found)
    return report.collectives


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("commute", "tokens", "heads"), [(True, 7, 4), (True, 7, 5), (False, 6, 5)])
def test_all_ranks_leave_it(rank: int, commute: bool, tokens: int, heads: int) -> None:
    report = check_values(rank, commute, tokens, heads)
    lines: list[Any] = [None] * 2
    dist.all_gather_object(lines, [(line.graph, line.status, line.reason) for line in report])
    assert all(each == lines[0] for each in lines)
    uneven = [f"dim {dim} of size {size}" for dim, size in ((1, tokens), (2, heads)) if size % 2]
    dims = " and ".join(uneven)
    assert len(lines[0]) == 4
    for _, status, reason in lines[0]:
        assert status == "exposed"  # as all ranks agreed to: on CPU DTensor gathers, and cuts
        assert f"matmul_all_to_all: DTensor's shards are uneven along {dims}, so that graphs of ranks differ" in reason


@on_ranks(2)
@pytest.mark.thorough
def test_a_rank_late_to_its_forward_does_not_meet_a_backward(rank: int) -> None:
    """Both graphs change their collectives alike, and are compiled one behind the other."""
    ask, asked = Consent.ask, list[str]()

    def late(self: Consent, digest: str, *args: Any) -> Answer:
        while rank == 1 and not asked and self._told(0)[0] < self._count + 2:
            time.sleep(0.001)
        asked.append(digest)
        return ask(self, digest, *args)

    short = mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S="6")
    with short, mock.patch.object(Consent, "ask", late):
        check_values(rank, True, 9, 5)  # no graph that the ranks have compiled before
    assert len(asked) == len({*asked}) == 2


# A bias of every shape that broadcasts: it is fused, or left with a reason, and no pass fails.
T, COLUMNS_OF_X, N = 4, 8, 8
SHAPES: dict[str, tuple[tuple[int, ...], bool]] = {  # and whether the bias is the same in every row
    "one": ((1,), True),
    "columns": ((N,), True),
    "one-row": ((1, N), True),
    "one-by-one": ((1, 1), True),
    "scalar": ((), True),
    "rows": ((T, 1), False),
    "whole": ((T, N), False),
}


def exchange(y: Tensor) -> Tensor:
    r = dist.get_world_size()
    y = y.view(-1, r, N // r).transpose(0, 1).contiguous()
    return funcol.wait_tensor(funcol.all_to_all_single(y, [1] * r, [1] * r, world()))


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda x, w, b: exchange(x @ w + b),
    "addmm": lambda x, w, b: exchange(torch.addmm(b, x, w)),
    "gather": lambda x, w, b: all_gather(x, 1, world()) @ w.repeat(dist.get_world_size(), 1) + b,
    "reduce-scatter": lambda x, w, b: reduce_scatter(x @ w + b / dist.get_world_size(), "sum", 0, world()),
    "reduce-scatter-of-columns": lambda x, w, b: reduce_scatter(x @ w + b, "sum", 1, world()),
    "all-reduce-of-addmm": lambda x, w, b: funcol.all_reduce(torch.addmm(b, x, w), "avg", world()),
    "all-reduce": lambda x, w, b: funcol.all_reduce(x @ w + b / dist.get_world_size(), "sum", world()),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_bias_of_every_shape(rank: int, kind: str) -> None:
    program = PROGRAMS[kind]
    generator = torch.Generator().manual_seed(7)
    for name, (shape, same_in_rows) in SHAPES.items():
        sizes = (T, COLUMNS_OF_X), (COLUMNS_OF_X, N), shape
        x, w, bias = (torch.randint(-3, 4, size, generator=generator).float() for size in sizes)
        bias *= 2 * (rank + 1) if "reduce" in kind else 1  # each rank's own is added before the sum
        args = [x * (rank + 1), w, bias]
        gm, report = rewritten(program, args)
        assert torch.equal(gm(*args), program(*args)), name
        (line,) = report.collectives
        assert (line.status == "fused") == (same_in_rows or kind == "gather"), line  # else it adds behind the op


WIDER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bias": lambda x, w, wide: x @ w + wide[0],
    "matmul": lambda x, w, wide: x @ w + x.float() @ wide,
}


@on_ranks(2)
@pytest.mark.parametrize("name", WIDER)
def test_what_is_added_in_a_wider_dtype(rank: int, name: str) -> None:
    """The op would add before it rounds."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(COLUMNS_OF_X, N, generator=generator)
    x, w = torch.randn(T, COLUMNS_OF_X, generator=generator).bfloat16(), wide.bfloat16()

    def program(*args: Tensor) -> Tensor:
        return funcol.all_reduce(WIDER[name](*args), "sum", world())

    gm, report = rewritten(program, (x, w, wide))
    assert torch.equal(gm(x, w, wide), program(x, w, wide))
    assert [line.status for line in report.collectives] == ["plain"], str(report)
