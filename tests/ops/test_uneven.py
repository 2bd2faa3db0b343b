"""Lengths and heads that the ranks do not divide, parts of given sizes, and parts that several ranks get."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.plan.cost import model
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.cut import EVEN, Splits, chunk_parts
from fusedcomm.run import group_collectives, reference
from tests.helpers.groups import empty_is_nan, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared import without_plans
from tests.helpers.spies import Dispatched
from tests.helpers.tiers import nightly_but
from tests.helpers.uneven import Uneven, chunk_sizes, draw

A2A, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter"
CALLS = 4  # from the third on prepared calls run, in both slots


def into_attention(tokens: int, heads: int, **options: Any) -> Uneven:
    return Uneven(A2A, (2, tokens, heads, 3), num_columns=2, gather_dim=1, scatter_dim=-2, **options)


def out_of_attention(tokens: int, heads: int, **options: Any) -> Uneven:
    return Uneven(BACK, (2, tokens, heads, 3), num_columns=2, gather_dim=-2, scatter_dim=1, **options)


def replicas(num_ranks: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Rank r reads one of few heads."""
    return tuple((rank * heads // num_ranks, 1) for rank in range(num_ranks))


CASES: dict[str, tuple[int, Uneven]] = {
    "tokens-7-of-3": (3, into_attention(7, 3)),
    "back-9-of-4": (4, out_of_attention(9, 5)),
    "heads-7-of-4-balanced": (4, into_attention(9, 7, scatter=(2, 2, 2, 1), bias=True)),
    "splits-with-none": (3, into_attention(8, 5, gather=(0, 6, 2), scatter=(4, 0, 1), bias=True)),
    "kv-2-of-4": (4, into_attention(10, 2, scatter=replicas(4, 2))),
    "kv-straddles": (4, into_attention(6, 3, scatter=((0, 1), (0, 2), (1, 2), (2, 1)))),
    "kv-with-a-gap": (2, into_attention(5, 4, scatter=((0, 1), (3, 1)))),
    "qkv-packed": (3, Uneven(A2A, (2, 10, 3, 4, 3), 3, gather_dim=1, scatter_dim=3, bias=True)),
    "batched-w": (2, Uneven(A2A, (2, 5, 7), gather_dim=1, scatter_dim=2, batched=True)),
    "many-rows-long-runs": (2, Uneven(A2A, (601, 2, 5), gather_dim=0, scatter_dim=1)),
    "back-splits": (3, out_of_attention(8, 5, gather=(1, 0, 4), scatter=(6, 0, 2), bias=True)),
    "back-ranges": (2, out_of_attention(7, 3, scatter=((0, 4), (3, 4)))),
    "back-long-runs": (2, Uneven(BACK, (9, 3, 130), 2, gather_dim=1, scatter_dim=0)),
    "gather-splits": (4, Uneven(GATHER, (2, 9, 4), 1, gather_dim=1, gather=(3, 0, 5, 1))),
    "gather-many-rows": (2, Uneven(GATHER, (533, 4), gather_dim=0)),
    "gather-long-k": (2, Uneven(GATHER, (4, 401), 1, gather_dim=1)),
    "reduce-rows": (3, Uneven(REDUCE, (7, 4), 1, scatter_dim=0, bias=True)),
    "reduce-columns": (3, Uneven(REDUCE, (4, 11), 1, scatter_dim=1, bias=True)),
    "reduce-ranges": (2, Uneven(REDUCE, (7, 4), 1, scatter_dim=0, scatter=((0, 5), (2, 5)))),
    "partial-columns": (3, Uneven(REDUCE, (4, 11), 1, scatter_dim=1, bias=True, partial=True)),
    "partial-ranges": (2, Uneven(REDUCE, (7, 4), scatter_dim=0, scatter=((0, 5), (2, 4)), bias=True, partial=True)),
}


def results(
    case: Uneven, rank: int, num_ranks: int, seed: int, group: Any = None, **options: Any
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    inputs = case.inputs(num_ranks, seed)
    whole = [tuple(None if t is None else t.double().requires_grad_() for t in each) for each in inputs]
    wanted = case.expected(whole)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randint(-3, 4, out.shape, generator=generator) for out in wanted]
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    own = tuple(None if t is None else t.requires_grad_() for t in inputs[rank])
    with empty_is_nan():
        out = case.call(own, group, num_ranks, **options)  # type: ignore[arg-type]
        out.backward(grads[rank].to(out.dtype))
    found = [out.detach(), *(None if t is None else t.grad for t in own)]
    return found, [wanted[rank].detach(), *(None if t is None else t.grad for t in whole[rank])]


def check_call(case: Uneven, rank: int, num_ranks: int, seed: int, group: Any = None, **options: Any) -> None:
    for found, wanted in zip(*results(case, rank, num_ranks, seed, group, **options), strict=True):
        if found is not None or wanted is not None:
            assert found is not None and wanted is not None
            assert found.shape == wanted.shape and torch.equal(found.double(), wanted), (seed, found, wanted)


def check_case(rank: int, case: Uneven, num_ranks: int, algorithm: str, calls: int = CALLS) -> None:
    with fusedcomm.force_algorithm(algorithm, strict=True):
        for seed in range(calls):
            check_call(case, rank, num_ranks, seed)


@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(ranks: Any, name: str, algorithm: str) -> None:
    num_ranks, case = CASES[name]
    ranks(num_ranks).run(check_case, case, num_ranks, algorithm)


@pytest.mark.parametrize("name", ["kv-2-of-4", "back-splits", "gather-splits", "reduce-rows"])
def test_narrow_dtypes(ranks: Any, name: str) -> None:
    num_ranks, case = CASES[name]
    ranks(num_ranks).run(check_case, replace(case, dtype=torch.bfloat16), num_ranks, "chunked", 3)


@on_ranks(3)
@pytest.mark.parametrize("op", [BACK, GATHER])
def test_nothing_is_kept_for_the_backward(rank: int, op: str) -> None:
    """What was exchanged is exchanged again."""
    case = out_of_attention(8, 5) if op == BACK else Uneven(GATHER, (7, 4), gather_dim=0)
    keeps = {"save_exchanged" if op == BACK else "save_gathered": False}
    for algorithm in ("unfused", "chunked", "pipelined"):
        with fusedcomm.force_algorithm(algorithm, strict=True):
            check_call(case, rank, 3, 0, **keeps)


RANDOM = [(3, 100, algorithm) for algorithm in ("unfused", "chunked", "pipelined")]
MANY_RANDOM = [(size, 3000, name) for size in (2, 3, 4, 5) for _, _, name in RANDOM]


@on_ranks()
@pytest.mark.parametrize(("world_size", "count", "algorithm"), nightly_but(RANDOM, [*RANDOM, *MANY_RANDOM]))
def test_random_calls(rank: int, world_size: int, count: int, algorithm: str) -> None:
    random = Random(world_size * count)
    with fusedcomm.force_algorithm(algorithm):
        for seed in range(count):
            case = draw(random, world_size)
            case = replace(case, partial=case.op == REDUCE and random.random() < 0.5)
            try:
                check_call(case, rank, world_size, seed)
            except Exception as error:
                raise AssertionError(f"{seed}: {case}") from error


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
@pytest.mark.parametrize("heads", [3, 1], ids=["one-on-a-rank", "none-on-a-rank"])
def test_ranks_that_count_other_dims_as_k(rank: int, heads: int, algorithm: str) -> None:
    """A rank with one part of K, or none, takes the dim for rows. All ranks exchange plainly, in the backward too."""
    case = Uneven(BACK, (3, 4, heads, 5), num_columns=2, gather_dim=1, scatter_dim=2)
    inputs, intervals = case.inputs(2), case.intervals(2)
    exchanged = torch.cat([x.narrow(2, *intervals[rank]) for x, _, _ in inputs], 1)
    x, w, _ = inputs[rank]
    x.requires_grad_()
    with fusedcomm.force_algorithm(algorithm):
        y = fusedcomm.all_to_all_matmul(x, w, 1, 2, gather_size=4)
        y.sum().backward()
    assert torch.equal(y.detach().flatten(), (exchanged.flatten(2) @ w).flatten())
    wanted = torch.cat([w.sum(1).view(size, 5) for (_, w, _), (_, size) in zip(inputs, intervals, strict=True)])
    assert x.grad is not None and torch.equal(x.grad, wanted.expand(x.shape))


MANY_ROUNDS = {
    "into": into_attention(200, 4, gather=(1, 180, 19)),
    "kv": into_attention(200, 3, gather=(1, 180, 19), scatter=((0, 1), (0, 2), (2, 1))),
    "out": out_of_attention(200, 5, gather=(1, 0, 4), scatter=(6, 0, 194), bias=True),
    "gather": Uneven(GATHER, (300, 40), gather_dim=0, gather=(290, 0, 10)),
    "gather-k": Uneven(GATHER, (300, 40), gather_dim=1),
    "rows-of-two-dims-on-some-ranks": Uneven(BACK, (2, 200, 21), gather_dim=2, scatter_dim=0),
    "reduce": Uneven(REDUCE, (300, 40), scatter_dim=0, scatter=(1, 299, 0)),
    "reduce-columns": Uneven(REDUCE, (300, 40), scatter_dim=1),
}


@on_ranks(3)
@pytest.mark.parametrize("name", MANY_ROUNDS)
def test_several_rounds(rank: int, name: str) -> None:
    """A round takes the same rows of every chunk, and nothing of a chunk that has no more."""
    case = MANY_ROUNDS[name]
    with fresh_group(WORKSPACE_BYTES="16384") as group, fusedcomm.force_algorithm("chunked", strict=True):
        assert case.explain(rank, group, 3).num_rounds > 1
        for seed in range(CALLS):
            check_call(case, rank, 3, seed, group)
        assert member_of(group).workspace.buffers[rank].numel() <= 16384


@on_ranks(1)
def test_one_rank_takes_its_part(rank: int) -> None:
    for name in ("kv-straddles", "reduce-ranges", "gather-splits"):
        case = CASES[name][1]
        alone = replace(case, gather=None, scatter=None if case.scatter_dim is None else ((1, 2),))
        check_call(alone, 0, 1, 0)
    x = torch.ones(4, 2)
    fusedcomm.reduce_scatter(x, 0, scatter_ranges=[(1, 2)]).zero_()
    assert x.all()  # an op's results are no views


@on_ranks(2)
@pytest.mark.parametrize("check", ["0", "1"])
def test_ranks_that_disagree_are_told(rank: int, check: str) -> None:
    """Each rank's x is as its own splits say, so that only the others can tell."""
    case = Uneven(A2A, (8, 7), gather_dim=0, scatter_dim=1, gather=(4, 4) if rank else (4, 3), scatter=(3, 4))
    with fresh_group(CHECK=check, TIMEOUT_S="20") as group, fusedcomm.force_algorithm("chunked", strict=True):
        with pytest.raises(fusedcomm.PeerMismatchError) as caught:
            case.call(case.inputs(2)[rank], group, 2)
        assert check == "0" or "gather_splits [4, 3] on rank 0 and [4, 4] on rank 1" in str(caught.value)
        dist.barrier(group)


X, W = torch.empty(4, 8), torch.empty(8, 6)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gather_splits": [4]}, ValueError, "gather_splits must have one entry per rank, 2, got 1"),
    ({"gather_splits": [4, -4]}, ValueError, r"gather_splits must be at least 0, got \[4, -4\]"),
    ({"gather_splits": [3, 3]}, ValueError, "gather_dim size must be what gather_splits gives rank 0, 3, got 4"),
    ({"gather_size": 5}, ValueError, "gather_dim size must be what gather_size=5 gives rank 0, 3, got 4"),
    ({"gather_size": -1}, ValueError, "gather_size must be at least 0, got -1"),
    ({"gather_size": 8, "gather_splits": [4, 4]}, ValueError, "at most one of gather_splits and gather_size may be"),
    ({"scatter_splits": [3, 2]}, ValueError, r"scatter_splits must add up to scatter_dim size 6, got \[3, 2\]"),
    ({"scatter_splits": [1, 2, 3]}, ValueError, "scatter_splits must have one entry per rank, 2, got 3"),
    ({"scatter_ranges": [(0, 3), (4, 3)]}, ValueError, r"must end within scatter_dim size 6, got 4 \+ 3"),
    ({"scatter_ranges": [(-1, 3), (2, 3)]}, ValueError, r"scatter_ranges must be at least 0, got \[-1, 2\]"),
    ({"scatter_ranges": [(0, 3)] * 2, "scatter_splits": [3, 3]}, ValueError, "at most one of scatter_splits and"),
    ({"gather_splits": 4}, TypeError, "gather_splits must be a list of sizes or None, got 4"),
    ({"scatter_splits": [3.5, 2.5]}, TypeError, "each size of scatter_splits must be an int, got 3.5"),
    ({"scatter_ranges": [3, 3]}, TypeError, r"each of scatter_ranges must be \(start, length\), got 3"),
    ({"scatter_ranges": [(0, "a"), (1, 2)]}, TypeError, "each start and length of scatter_ranges must be an int"),
]


@on_ranks(2)
def test_bad_parts_are_refused_before_anything_is_sent(rank: int) -> None:
    if rank == 1:
        return
    for options, kind, message in BAD:
        for device in ("cpu", "meta"):
            with pytest.raises(kind, match=message):
                fusedcomm.matmul_all_to_all(X.to(device), W.to(device), 0, 1, **options)


def test_chunks_are_those_of_torch() -> None:
    for total in range(12):
        for num_ranks in range(1, 6):
            parts = chunk_parts(total, num_ranks)
            assert list(parts.sizes) == chunk_sizes(total, num_ranks) and parts.tiles


def test_blocks_of_one_size_are_no_matter_how_they_are_said() -> None:
    """They are the same call on the wire as one that says nothing."""
    plain = shapes.matmul_all_to_all((4, 8), (8, 6), None, 0, 1, 2)
    for splits in (
        Splits(gather_splits=(4, 4), rank=0),
        Splits(gather_size=8, scatter_lengths=(3, 3), rank=1),
        Splits(scatter_starts=(0, 3), scatter_lengths=(3, 3)),
        EVEN,
    ):
        said = shapes.matmul_all_to_all((4, 8), (8, 6), None, 0, 1, 2, splits)
        assert said.cut is None and said.payload == plain.payload
    for other in (Splits(scatter_lengths=(2, 4), rank=0), Splits(None, None, (0, 2), (3, 3), 0)):
        assert shapes.matmul_all_to_all((4, 8), (8, 6), None, 0, 1, 2, other).payload != plain.payload


@on_ranks(4)
def test_a_plan_is_equal_on_all_ranks(rank: int) -> None:
    one, four = into_attention(2048, 1, scatter=replicas(4, 1)), into_attention(2048, 4)
    skewed = into_attention(2003, 4, gather=(2000, 1, 1, 1))
    found = [case.explain(rank, None, 4).reason for case in (one, four, skewed)]
    assert all("estimated" in reason for reason in found)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * 4


# by plain collectives: padded to one size, or as they are
COLLECTIVES = {
    "matmul_all_to_all": "all_to_all_single",
    "all_to_all_matmul": "all_to_all_single",
    GATHER: "all_gather_into_tensor_out",
    REDUCE: "reduce_scatter_single",
}


class Spy:
    """The collectives of a module, and what was given to each."""

    def __init__(self, module: Any, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.module, self.calls = module, calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name != "wait_tensor":
                self.calls.append((name, args))
            return getattr(self.module, name)(*args, **options)

        return call


@contextmanager
def decided(padded: bool) -> Iterator[Spy]:
    spy = Spy(torch.ops._c10d_functional, [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "pads", lambda *args: padded)
        patch.setattr(reference, "_c10d", spy)
        patch.setattr(reference, "dist", Spy(dist, spy.calls))
        patch.setattr(reference, "reduce_scatter_single", Spy(group_collectives, spy.calls).reduce_scatter_single)
        yield spy


def check_decided(rank: int, names: list[str], num_ranks: int, padded: bool) -> None:
    """Forward and backward, which is the other op of a pair, or plain."""
    for name in names:
        case = CASES[name][1]
        with pytest.MonkeyPatch.context() as patch, decided(padded) as spy:
            without_plans(patch)  # which know what was decided before
            with fresh_group() as group, fusedcomm.force_algorithm("unfused", strict=True):
                check_call(case, rank, num_ranks, 0, group)
        forward, args = spy.calls[0]
        assert forward == (COLLECTIVES[case.op] if padded else "all_to_all_single"), name
        if padded and forward == "all_to_all_single":
            received, sent = args  # without splits: NCCL's own all_to_all
            assert received.nbytes == sent.nbytes > 0 and sent.nbytes % (16 * num_ranks) == 0, name


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "as-they-are"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_either_way_gives_the_same(ranks: Any, num_ranks: int, padded: bool) -> None:
    names = [name for name, (size, _) in CASES.items() if size == num_ranks]
    ranks(num_ranks).run(check_decided, names, num_ranks, padded)


@on_ranks(3)
def test_sums_of_parts_as_they_are_are_in_rank_order_and_rounded_once(rank: int) -> None:
    """In bfloat16 256 + 1 is 256, which a sum that rounds in between, or adds in another order, may give."""
    case = Uneven(REDUCE, (4, 2), 1, scatter_dim=0, other=1, dtype=torch.bfloat16)
    x, w = torch.full((4, 1), (1.0, 1.0, 256.0)[rank]).bfloat16(), torch.ones(1, 2).bfloat16()
    with fusedcomm.force_algorithm("unfused", strict=True), decided(False):
        total = case.call((x, w, None), None, 3)
    assert torch.equal(total, torch.full_like(total, 258.0))


DISAGREE = {
    "all_gather_matmul": (
        Uneven(GATHER, (7, 4), gather_dim=0, gather=(4, 3)),
        Uneven(GATHER, (8, 4), gather_dim=0, gather=(4, 4)),
        "gather_splits [4, 3] on rank 0 and None on rank 1",
    ),
    "matmul_reduce_scatter": (
        Uneven(REDUCE, (6, 4), scatter_dim=0, scatter=(3, 3), bias=True),
        Uneven(REDUCE, (6, 4), scatter_dim=0, scatter=((0, 3), (0, 3)), bias=True),
        "scatter_ranges None on rank 0 and [[0, 3], [0, 3]] on rank 1",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("op", DISAGREE)
def test_the_check_finds_ranks_that_disagree(rank: int, op: str) -> None:
    """Each call is right by itself, so that its rank alone can tell nothing."""
    *cases, text = DISAGREE[op]
    with fresh_group(CHECK="1", TIMEOUT_S="20") as group, fusedcomm.force_algorithm("unfused", strict=True):
        with pytest.raises(fusedcomm.PeerMismatchError) as caught:
            cases[rank].call(cases[rank].inputs(2)[rank], group, 2)
        assert text in str(caught.value)
        dist.barrier(group)
        check_call(cases[0], rank, 2, 0, group)


@on_ranks(2)
@pytest.mark.parametrize(("scatter", "plain"), [((2, 2), 0), (((0, 3), (1, 3)), 1)], ids=["tile", "overlap"])
def test_gradients_of_overlapping_ranges_are_exchanged_plainly(rank: int, scatter: Any, plain: int) -> None:
    case = into_attention(5, 4, gather=(3, 2), scatter=scatter)
    with fusedcomm.force_algorithm("chunked", strict=True), Dispatched() as dispatched:
        check_call(case, rank, 2, 0)
    assert dispatched.names("fusedcomm").count("all_to_all") == plain
