"""Mixture of experts: rows, places, values and gradients against loops over tokens and experts; graphs; faults."""

import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.ops import routed_proof
from fusedcomm.plan import planner
from fusedcomm.run import routed_rows
from fusedcomm.run.routed_rows import ByKernels, BySlots
from tests.helpers.groups import empty_is_nan, fresh_group, member_of, non_contiguous
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import saved_for_backward
from tests.helpers.tiers import nightly_but

H, N = 6, 5
WAYS = [*product((1, 2, 3), ("unfused", "chunked")), (2, "fused")]
LARGE = (4, "unfused"), (4, "chunked"), (8, "chunked"), (8, "unfused"), (3, "fused")


class Case(NamedTuple):
    """A call of all ranks. ``lead``: leading dims of rank r's x are [r + 1, lead], or all 0 on rank 0."""

    lead: int = 7
    own: int = 2  # experts of a rank
    k: int = 2
    kind: str = "any"
    room: str = "all"  # the capacity: of "all" rows, "exact", "less", "wide"
    alignment: int = 1
    dtype: torch.dtype = torch.float32


CASES = [
    Case(),
    Case(kind="one", k=1),
    Case(kind="none"),
    Case(kind="twice", own=1, room="exact"),
    Case(kind="idle", alignment=8),
    Case(room="exact", alignment=8, dtype=torch.bfloat16),
    Case(room="wide", alignment=128, dtype=torch.float16),
    Case(room="less", own=3, k=3),
    Case(room="less", own=3, alignment=4, dtype=torch.float64),
    Case(kind="one", room="less"),
]


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


class Problem:
    """All ranks' inputs, float64, and by loops what must come of them."""

    def __init__(self, case: Case, size: int, seed: int) -> None:
        self.case, self.size, self.num_experts = case, size, case.own * size
        self.leads = [(0, case.lead) if case.kind == "idle" and r == 0 else (r + 1, case.lead) for r in range(size)]
        self.xs = [integers(seed + r, *lead, H) for r, lead in enumerate(self.leads)]
        self.scores = [integers(seed + 20 + r, *lead, case.k) for r, lead in enumerate(self.leads)]
        self.w = integers(seed + 40, self.num_experts, H, N)
        self.ids = [self._ids(seed + 60 + r, *lead, case.k) for r, lead in enumerate(self.leads)]
        wanted: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]  # by expert: (rank, slot)
        for r, ids in enumerate(self.ids):
            for slot, expert in enumerate(ids.flatten().tolist()):
                if expert >= 0:
                    wanted[expert].append((r, slot))
        self.counts = [len(each) for each in wanted]
        step = case.alignment
        blocks = [range(r * case.own, (r + 1) * case.own) for r in range(size)]
        most = max(sum(-(-self.counts[e] // step) * step for e in block) for block in blocks)
        self.capacity = {"all": most + 3, "exact": most, "less": most // 2 // step * step, "wide": 10 * most}[case.room]
        for block in blocks:  # drop one unit of the fullest expert, the last of them, until all fit
            while sum(-(-len(wanted[e]) // step) * step for e in block) > self.capacity:
                units = [-(-len(wanted[e]) // step) for e in block]
                fullest = max(e for e, n in zip(block, units, strict=True) if n == max(units))
                del wanted[fullest][(max(units) - 1) * step :]
        self.kept, self.overflow = wanted, sum(map(len, wanted)) < sum(self.counts)
        self.first: list[int] = []
        for block in blocks:
            at = 0
            for e in block:
                self.first.append(at)
                at += -(-len(wanted[e]) // step) * step

    def _ids(self, seed: int, *shape: int) -> Tensor:
        ids = torch.randint(-1, self.num_experts, shape, generator=torch.Generator().manual_seed(seed))
        return {
            "one": torch.full_like(ids, self.num_experts - 1),
            "none": torch.full_like(ids, -1),
            "twice": ids.clamp(min=0)[..., :1].expand(shape),
        }.get(self.case.kind, ids)

    def token(self, rank: int, slot: int) -> tuple[int, int, int]:
        token, choice = divmod(slot, self.case.k)
        return *divmod(token, self.case.lead), choice

    def rows(self, rank: int) -> tuple[Tensor, list[int]]:
        rows, ends = torch.zeros(self.capacity, H, dtype=torch.float64), []
        for e in range(rank * self.case.own, (rank + 1) * self.case.own):
            for i, (src, slot) in enumerate(self.kept[e]):
                rows[self.first[e] + i] = self.xs[src][self.token(src, slot)[:2]]
            units = -(-len(self.kept[e]) // self.case.alignment)
            ends.append(self.first[e] + units * self.case.alignment)
        return rows, ends

    def products(self, rank: int) -> Tensor:
        """The rows of a rank times the w of their experts."""
        rows, ends = self.rows(rank)
        found = rows.new_zeros(self.capacity, N)
        for w, begin, end in zip(self.w[rank * self.case.own :], [0, *ends], ends, strict=False):
            found[begin:end] = rows[begin:end] @ w
        return found

    def ys(self, xs: list[Tensor], scores: list[Tensor], w: Tensor | None) -> list[Tensor]:
        """Every rank's tokens times the w of their experts, weighed; differentiable."""
        nothing = 0 * sum(t.sum() for t in (*xs, *scores, self.w if w is None else w))
        ys = [nothing + x.new_zeros(*x.shape[:-1], H if w is None else N) for x in xs]
        for e, kept in enumerate(self.kept):
            for src, slot in kept:
                i, j, choice = self.token(src, slot)
                row = xs[src][i, j] if w is None else xs[src][i, j] @ w[e]
                one = torch.zeros_like(ys[src])
                one[i, j] = 1
                ys[src] = ys[src] + one * (row * scores[src][i, j, choice])
        return ys


def routed(problem: Problem, rank: int, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return fusedcomm.moe_dispatch(
        x, ids, problem.num_experts, problem.capacity, alignment=problem.case.alignment, max_tokens=100
    )


@on_ranks()
@pytest.mark.parametrize("world_size, algorithm", nightly_but(WAYS, [*WAYS, *LARGE]))
def test_values_and_gradients(rank: int, world_size: int, algorithm: str) -> None:
    """Exact. Calls follow each other in both slots, and ranks post results of earlier sizes."""
    with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
        cases = [*CASES, *CASES[:2]] if algorithm != "fused" else [CASES[0]._replace(lead=2), CASES[7]._replace(lead=2)]
        for seed, case in enumerate(cases):
            problem = Problem(case, world_size, 100 * seed)
            x, scores = (t[rank].to(case.dtype).requires_grad_() for t in (problem.xs, problem.scores))
            ids = problem.ids[rank].to(torch.int32 if seed % 2 else torch.int64)
            rows, offsets, routing = routed(problem, rank, non_contiguous(x) if seed % 2 else x, ids)
            want_rows, ends = problem.rows(rank)
            torch.testing.assert_close(rows.double(), want_rows, rtol=0, atol=0, msg=str(case))
            assert offsets.dtype == torch.int32 and offsets.tolist() == ends
            assert fusedcomm.moe_counts(routing).tolist() == problem.counts
            assert fusedcomm.moe_overflow(routing).item() == problem.overflow
            y = fusedcomm.moe_combine(rows, routing, scores)
            xs, all_scores = ([t.clone().requires_grad_() for t in each] for each in (problem.xs, problem.scores))
            wants = problem.ys(xs, all_scores, None)
            torch.testing.assert_close(y, wants[rank].to(case.dtype), rtol=0, atol=0, msg=str(case))
            grads = [integers(7 + r, *want.shape) for r, want in enumerate(wants)]
            got = torch.autograd.grad(y, (x, scores), grads[rank].to(case.dtype))
            want = torch.autograd.grad(wants, (xs[rank], all_scores[rank]), grads, materialize_grads=True)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b.to(case.dtype), rtol=0, atol=0, msg=str(case))


@on_ranks()
@pytest.mark.parametrize("algorithm", ["unfused", "chunked", "pipelined"])
@pytest.mark.parametrize("world_size", nightly_but([1, 2], [1, 2, 4]))
def test_matmuls(rank: int, world_size: int, algorithm: str) -> None:
    """Values and gradients of both, with the garbage that grouped_mm may leave behind the last row; in bfloat16 too."""
    for seed, case in enumerate((Case(room="wide"), Case(room="less", own=3), Case(alignment=8), Case(kind="idle"))):
        problem = Problem(case, world_size, 1000 + 100 * seed)
        own = slice(rank * case.own, (rank + 1) * case.own)
        x, scores = (t[rank].float().requires_grad_() for t in (problem.xs, problem.scores))
        w = problem.w[own].float().requires_grad_()
        xs, all_scores = ([t.clone().requires_grad_() for t in each] for each in (problem.xs, problem.scores))
        all_w = problem.w.clone().requires_grad_()
        wants = problem.ys(xs, all_scores, all_w)
        grads = [integers(7 + r, *want.shape) for r, want in enumerate(wants)]
        of_w = torch.autograd.grad(wants, all_w, grads, retain_graph=True, materialize_grads=True)[0][own]
        inputs = xs[rank], all_scores[rank]
        want = *torch.autograd.grad(wants, inputs, grads, materialize_grads=True), of_w
        options = {"alignment": case.alignment}
        facts = problem.num_experts, problem.capacity
        with fusedcomm.force_algorithm(algorithm, strict=algorithm != "pipelined"), empty_is_nan():
            for first, casts in product((True, False), (False, True)):
                with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                    if first:
                        ids = problem.ids[rank]
                        h, offsets, routing = fusedcomm.dispatch_grouped_matmul(x, ids, w, *facts, **options)
                        assert not h[offsets[-1] :].any()
                        h = torch.cat([h[: offsets[-1]], torch.full_like(h[offsets[-1] :], torch.nan)])
                        y = fusedcomm.moe_combine(h, routing, scores)
                    else:
                        rows, offsets, routing = routed(problem, rank, x, problem.ids[rank])
                        h = torch.cat([rows[: offsets[-1]], torch.full_like(rows[offsets[-1] :], torch.nan)])
                        y = fusedcomm.grouped_matmul_combine(h, w, routing, scores)
                assert y.dtype == (torch.bfloat16 if casts else torch.float32)
                torch.testing.assert_close(y.double(), wants[rank], rtol=0, atol=0, msg=str(case))
                got = torch.autograd.grad(y, (x, scores, w), grads[rank].to(y.dtype))
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a.double(), b, rtol=0, atol=0, msg=str(case))


@on_ranks(2)
def test_pieces_are_those_of_ranks_with_another_loss(rank: int) -> None:
    x, w, ids = integers(1, 4, H), integers(2, 2, H, N), torch.arange(8).view(4, 2) % 4
    grads = []
    for algorithm in ("chunked", "pipelined"):
        with fusedcomm.force_algorithm(algorithm):
            (a, b), _, _ = fusedcomm.dispatch_grouped_matmul(x.requires_grad_(), ids, [w, w + 1], 4, 16)
            grads.append(torch.autograd.grad(a.sum() + (b.sum() if rank else 0), x)[0])
    assert grads[0].equal(grads[1])


@on_ranks(2)
def test_a_call_left_between_collectives_leaves_an_error_until_a_reset(rank: int) -> None:
    x, w, ids = integers(1, 4, H).float(), integers(2, 2, H, N).float(), torch.arange(8).view(4, 2) % 4
    with fresh_group() as group, fusedcomm.force_algorithm("pipelined"):
        right = fusedcomm.dispatch_grouped_matmul(x, ids, w, 4, 16, group=group)[0]
        dense = partial(fusedcomm.matmul_all_reduce, x, w[0], group=group)
        with mock.patch.object(routed_rows, "_of_piece", side_effect=MemoryError), pytest.raises(MemoryError):
            fusedcomm.dispatch_grouped_matmul(x, ids, w, 4, 16, group=group)
        for again in (lambda: fusedcomm.dispatch_grouped_matmul(x, ids, w, 4, 16, group=group), dense):
            with pytest.raises(fusedcomm.PeerError, match=f"rank {rank}: left by MemoryError.*Call fusedcomm.reset"):
                again()
        fusedcomm.reset(group)
        assert fusedcomm.dispatch_grouped_matmul(x, ids, w, 4, 16, group=group)[0].equal(right)


@on_ranks(2)
def test_second_derivatives_and_recomputation(rank: int) -> None:
    """gradgradcheck of a program that every rank runs on the same numbers, of which each has its own experts."""
    ids = torch.tensor([[0, 1], [1, -1], [0, 0]])
    x, scores, w = (integers(i, *shape).requires_grad_() for i, shape in enumerate([(3, 2), (3, 2), (1, 2, 2)]))

    def program(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
        h, _, routing = fusedcomm.dispatch_grouped_matmul(x, ids, w, 2, 8)
        return fusedcomm.grouped_matmul_combine(h.tanh(), w, routing, scores)

    # w on both ranks is the same, and so is a change of it: its gradients are summed
    def summed(x: Tensor, scores: Tensor, w: Tensor) -> Tensor:
        grads = torch.autograd.grad(program(x, scores, w).square().sum(), (x, scores), create_graph=True)
        return torch.cat([each.flatten() for each in grads])

    assert torch.autograd.gradcheck(lambda x, scores: program(x, scores, w), (x, scores))
    assert torch.autograd.gradcheck(lambda x, scores: summed(x, scores, w), (x, scores))
    kept = torch.autograd.grad(program(x, scores, w).sum(), (x, scores, w))
    again = torch.utils.checkpoint.checkpoint(program, x, scores, w, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.sum(), (x, scores, w)), kept, strict=True):
        assert a.equal(b)
    with torch.no_grad():  # of an op that kept nothing for the scores
        rows, _, routing = fusedcomm.moe_dispatch(x, ids, 2, 8)
    y, received = torch.ops.fusedcomm.moe_combine(
        rows, None, scores, routing, 3, 2, False, *fusedcomm.memory.group.resolve(None)
    )
    assert received.numel() == 0
    (grad,) = torch.autograd.grad(y.sum(), scores)
    assert grad.equal(x.sum(1, keepdim=True) * (ids >= 0))


@on_ranks(2)
def test_only_tensors_that_the_backward_reads_are_saved(rank: int) -> None:
    problem = Problem(Case(), 2, 9)
    x, scores = problem.xs[rank].flatten(0, 1), problem.scores[rank].flatten(0, 1)
    (num_tokens, k), where = scores.shape, fusedcomm.memory.group.resolve(None)
    ids, facts = problem.ids[rank].flatten(0, 1), (4, problem.capacity, 1, *where)
    h, offsets, routing = torch.ops.fusedcomm.moe_dispatch(x, ids, [], *facts)
    w, ops = problem.w[2 * rank :][:2], torch.ops.fusedcomm

    def combine(h: Tensor, w: Tensor, scores: Tensor, has_received: bool = False) -> Tensor:
        return ops.moe_combine(h, w, scores, routing, num_tokens, k, has_received, *where)[0]

    calls: list[tuple[Callable[..., Tensor], list[Tensor], list[set[int]]]] = [  # the inputs that each gradient reads
        (combine, [h, w, scores], [{1}, {0}, {0, 1}]),
        (partial(combine, has_received=True), [h, w, scores], [{1}, {0}, set()]),
        (lambda *t: ops.moe_dispatch(t[0], ids, t[1:], *facts)[3], [x, w], [{1}, set()]),
        (lambda *t: ops.moe_send(*t, routing, k, problem.capacity, *where), [x, scores], [set(), {0}]),
        (lambda *t: ops.moe_grouped_matmul(*t, offsets), [h, w], [{1}, {0}]),
        (lambda *t: ops.moe_grouped_outer(*t, offsets), [h, h[:, :N].clone()], [{1}, {0}]),
    ]
    for call, inputs, reads in calls:
        wants = None
        for needs in sorted(product((True, False), repeat=len(inputs)), reverse=True)[:-1]:  # all need theirs first
            leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
            with saved_for_backward() as saved:
                out = call(*leaves)
            asked = [t for t in leaves if t.requires_grad]
            got = iter(torch.autograd.grad(out, asked, torch.ones_like(out)))
            grads = [next(got) if need else None for need in needs]
            wants = wants or grads
            assert all(a is None or torch.equal(a, b) for a, b in zip(grads, wants, strict=True))
            read = set().union(*(each for each, need in zip(reads, needs, strict=True) if need))
            kept = {i for i, t in enumerate(leaves) if any(t is each for each in saved)}
            assert kept - {i for i, t in enumerate(inputs) if t is scores} == read, (call, needs)


@on_ranks(2)
def test_graphs(rank: int, tmp_path: Path) -> None:
    """One compilation for all routings; opcheck."""
    w, up = integers(5, 2, H, N).float().requires_grad_(), integers(6, 2, N, H).float()
    capacity = 16 + zlib.crc32(str(tmp_path).encode()) % 1000 * 2  # no graph of an earlier run is this one's

    def program(x: Tensor, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        h, _, routing = fusedcomm.dispatch_grouped_matmul(x, ids, w, 4, capacity, alignment=2)
        return fusedcomm.grouped_matmul_combine(h, up, routing, scores), fusedcomm.moe_overflow(routing)

    for _ in range(2):  # the second time each rank takes the graphs of one of them from torch's cache
        torch._dynamo.reset()
        compiled = torch.compile(program, fullgraph=True)
        for seed in range(3):
            case = Problem(Case(lead=4, kind="one" if seed == 2 else "any"), 2, seed)
            x, scores = (t[0].float().flatten(0, 1).requires_grad_() for t in (case.xs, case.scores))
            results = []
            for each in (program, compiled):
                fails = seed and each is compiled
                with torch.compiler.set_stance("fail_on_recompile" if fails else "default"):
                    made = each(x, case.ids[0].flatten(0, 1), scores)
                    results.append([*made, *torch.autograd.grad(made[0].square().sum(), (x, scores, w))])
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)

    ids = case.ids[0].flatten(0, 1)
    where = fusedcomm.memory.group.resolve(None)
    ops, x = torch.ops.fusedcomm, x.detach().requires_grad_()
    torch.library.opcheck(ops.moe_dispatch.default, (x, ids, [], 4, 16, 2, *where))
    rows, offsets, routing = (t.detach() for t in ops.moe_dispatch(x, ids, [], 4, 16, 2, *where))
    rows.requires_grad_()
    torch.library.opcheck(ops.moe_dispatch.default, (x, ids, [w, w.detach()], 4, 16, 2, *where))
    torch.library.opcheck(ops.moe_send.default, (x, scores, routing, 2, 16, *where))
    torch.library.opcheck(ops.moe_combine.default, (rows, w, scores, routing, 4, 2, True, *where))
    torch.library.opcheck(ops.moe_grouped_matmul.default, (rows, w, offsets))
    torch.library.opcheck(ops.moe_grouped_outer.default, (rows, rows, offsets))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: fusedcomm.moe_dispatch(x, ids, 4, 16))(x[None])


def dispatch(
    group: Any, *, experts: int = 4, capacity: int = 8, columns: int = H, value: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.arange(4)[:, None] % 2
    return fusedcomm.moe_dispatch(torch.full((4, columns), float(value)), ids, experts, capacity, group)


@on_ranks(2)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name, other", [("experts", 6), ("capacity", 9), ("columns", H + 1)])
def test_ranks_that_disagree(rank: int, name: str, other: int, check: bool) -> None:
    with fresh_group(CHECK="1" if check else "0") as group:
        dispatch(group)
        with pytest.raises(fusedcomm.PeerMismatchError):
            dispatch(group, **({name: other} if rank else {}))
        dist.barrier(group)
        fusedcomm.reset(group)
        assert dispatch(group)[0].sum() == (8 * H if rank == 0 else 0)


@on_ranks(2)
def test_a_peer_that_never_comes_and_one_that_leaves_half_way(rank: int) -> None:
    with fresh_group(TIMEOUT_S="1") as group:
        dispatch(group)
        if rank == 0:
            with pytest.raises(fusedcomm.PeerTimeoutError) as late:
                dispatch(group)
            assert late.value.peers == [1] and late.value.op == "moe_dispatch"
        dist.barrier(group)
        fusedcomm.reset(group)
        rows, _, routing = dispatch(group)
        with (
            nullcontext() if rank == 0 else mock.patch.object(BySlots, "_signal", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt if rank else fusedcomm.PeerError) as left,
        ):
            fusedcomm.moe_combine(rows, routing, torch.ones(4, 1), group)
        assert rank or getattr(left.value, "peers", None) == [1]
        dist.barrier(group)
        fusedcomm.reset(group)
        dispatch(group)


@on_ranks(2)
def test_waits_are_needed(rank: int) -> None:
    """The control: a rank that does not wait for a peer that comes after it has other values."""
    with fresh_group() as group:
        assert dispatch(group)[0].sum() == (8 * H if rank == 0 else 0)
        dist.barrier(group)  # or rank 0, which then waits for nobody, signals two rounds ahead
        if rank == 0:
            with mock.patch.object(BySlots, "_wait"):
                assert dispatch(group, value=9)[0].sum() != 9 * 8 * H
        dist.barrier(group)
        if rank == 1:
            dispatch(group, value=9)
        dist.barrier(group)


@on_ranks(2)
def test_overflow_raises_with_check_and_large_calls_run_unfused(rank: int) -> None:
    with fresh_group(CHECK="1") as group, pytest.raises(RuntimeError, match=r"capacity=7 must hold .* \[8, 0\]"):
        dispatch(group, capacity=7)
    planner._logged.clear()
    with fresh_group(WORKSPACE_BYTES="8192") as group:
        with mock.patch.object(planner.log, "warning") as logged:
            assert dispatch(group, capacity=1000)[0].sum() == (8 * H if rank == 0 else 0)
        assert "FUSEDCOMM_WORKSPACE_BYTES=8192" in str(logged.call_args)
        assert member_of(group).workspace is None


@on_ranks(2)
def test_kernels_are_proved(rank: int) -> None:
    """On GPUs, before their first use; a rank whose rows are wrong turns them off for all."""
    send = ByKernels.send
    with fresh_group() as group:
        dispatch(group)
        ours = member_of(group)
        small = routed_proof.SIZES[0]._replace(tokens=5, columns=9, capacity=16)
        with mock.patch.object(routed_proof, "SIZES", [small]):
            for algorithm in ("fused", "pipelined"):
                assert routed_proof.failure("moe_dispatch", algorithm, torch.bfloat16, ours) == ""
            with mock.patch.object(ByKernels, "send", lambda *args: send(*args) + (rank == 1)):
                wrong = routed_proof.failure("moe_dispatch", "fused", torch.float32, ours)
        assert "fused of float32 failed its proof" in wrong and "gave wrong values" in wrong
        assert dispatch(group)[0].sum() == (8 * H if rank == 0 else 0)


X, IDS = torch.zeros(4, H), torch.zeros(4, 2, dtype=torch.int64)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "float8": ({"x": X.to(torch.float8_e4m3fn)}, "x must be .* got torch.float8_e4m3fn"),
    "ids of floats": ({"expert_ids": X}, "int32 or int64"),
    "ids of other tokens": ({"expert_ids": IDS[:3]}, r"must be \[\*x.shape"),
    "ids elsewhere": ({"expert_ids": IDS.to("meta")}, "expert_ids must be on cpu, got meta"),
    "no choice": ({"expert_ids": IDS[:, :0]}, "k at least 1"),
    "experts that no rank has": ({"num_experts": 3}, "a multiple of group_size, got 3"),
    "no capacity": ({"capacity": None}, "max_tokens must be an int where"),
    "less than no capacity": ({"capacity": -1}, "capacity must be at least 0, got -1"),
    "too many tokens": ({"max_tokens": 3}, "max_tokens must be at least the tokens of x, got 3"),
}


@on_ranks(2)
def test_bad_input(rank: int) -> None:
    good = {"x": X, "expert_ids": IDS, "num_experts": 4, "capacity": 16}
    for name, (changed, text) in BAD.items():
        with pytest.raises(ValueError, match=text):
            fusedcomm.moe_dispatch(**{**good, **changed})
            pytest.fail(name)
    rows, _, routing = fusedcomm.moe_dispatch(X, IDS, 4, None, max_tokens=5, alignment=4)
    assert rows.shape == (2 * 5 * 2 + 2 * 3, H)
    with pytest.raises(ValueError, match="routing must be of a dispatch"):
        fusedcomm.moe_combine(rows, routing, torch.ones(9, 2))
    with pytest.raises(ValueError, match="scores must be on cpu, got meta"):
        fusedcomm.moe_combine(rows, routing, torch.ones(4, 2, device="meta"))


@on_ranks(2)
def test_with_check_peers_hear_of_one_ranks_wrong_input(rank: int) -> None:
    """Before anything is sent: the next call is right."""
    x, w, ids, scores = torch.ones(4, 3), torch.ones(1, 3, 3), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    with fresh_group(CHECK="1") as group:
        layer = fusedcomm.nn.ExpertParallel(3, 4, 2, group, capacity=8)
        rows, _, routing = fusedcomm.moe_dispatch(x, ids, 2, 8, group)
        send, where = torch.ops.fusedcomm.moe_send, fusedcomm.memory.group.resolve(group)
        calls: dict[str, Callable[[int], Any]] = {
            r"in \[-1, 1\], got 1 to 2": lambda bad: fusedcomm.moe_dispatch(x, ids + bad, 2, 8, group),
            "x must be": lambda bad: fusedcomm.moe_dispatch(x.to_sparse() if bad else x, ids, 2, 8, group),
            "alignment must be at least 1": lambda bad: fusedcomm.moe_dispatch(x, ids, 2, 8, group, alignment=1 - bad),
            "w must be .*N": lambda bad: fusedcomm.dispatch_grouped_matmul(x, ids, w[:, bad:], 2, 8, group),
            "w must be .*list": lambda bad: fusedcomm.dispatch_grouped_matmul(x, ids, [w][bad:], 2, 8, group),
            "w must be .*K": lambda bad: fusedcomm.grouped_matmul_combine(rows, w[bad:], routing, scores, group),
            "scores must be": lambda bad: fusedcomm.moe_combine(rows, routing, scores if not bad else ids, group),
            "of a dispatch of 6": lambda bad: send(x[bad:], None, routing, 2, 8, *where),
            "scores must be of 8": lambda bad: send(x, scores[bad:], routing, 2, 8, *where),
            "of its dispatch.*7": lambda bad: fusedcomm.moe_combine(rows[bad:], routing, scores, group),
            "of its dispatch.*4": lambda bad: fusedcomm.moe_combine(rows, routing, scores.view(4 - 2 * bad, -1), group),
            "dtype and device": lambda bad: layer(x.double() if bad else x, ids, scores),
        }
        for text, call in calls.items():
            with pytest.raises((ValueError, TypeError), match=text + ("" if rank else r".*\(rank 1\)$")):
                call(rank)
            call(0)


@on_ranks(2)
def test_a_graph_holds_no_counts_of_the_host(rank: int) -> None:
    x, ids = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    routed = sys.modules["fusedcomm.ops.routed"]
    with fresh_group() as group, fusedcomm.force_algorithm("unfused"):
        with mock.patch.object(routed, "is_for_capture", return_value=True), pytest.raises(RuntimeError, match="fused"):
            fusedcomm.moe_dispatch(x, ids, 2, 8, group)
        rows, *_ = fusedcomm.moe_dispatch(x, ids, 2, 8, group)
        assert rows.sum() == (0 if rank else 64)
