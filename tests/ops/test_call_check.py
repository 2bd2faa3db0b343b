"""FUSEDCOMM_CHECK=1: all ranks hear of a difference before anything is sent, whatever the algorithm."""

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fusedcomm
from fusedcomm import Plan, env
from fusedcomm.memory import flight_recorder, members
from fusedcomm.ops import call_check
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.call_check import compare, facts_of
from fusedcomm.plan.geometry import shapes
from fusedcomm.redistribution import mesh_groups
from tests.helpers.groups import call, check, fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.problems import OPS, Inputs, Problem, flat, integers

HEADS = NAMED["heads"]
ONE_EACH = {op: next(problem for problem in NAMED.values() if problem.op == op and problem.bias) for op in OPS}
CHECKED = {"CHECK": "1", "TIMEOUT_S": "20"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """What rank 1 does in place of ``problem``, and what all ranks must be told about ranks 0, 1 and 2."""

    text: str
    problem: Problem = HEADS
    other: Problem | None = None
    dtype: torch.dtype = torch.float32
    by_product: bool = False
    algorithm: str = "chunked"
    other_algorithm: str | None = None

    def call(self, group: Any, rank: int) -> Any:
        if rank != 1:
            return call(group, self.problem)
        problem = self.other or self.problem
        inputs: Inputs = integers(problem, rank, dist.get_world_size(group), self.dtype)
        if self.by_product:
            for each in flat(inputs)[1:]:
                each.requires_grad_()
        with fusedcomm.force_algorithm(self.other_algorithm) if self.other_algorithm else nullcontext():
            return problem.call(inputs, group)


def both(a: object, b: object) -> str:
    return f"{a} on ranks 0, 2 and {b} on rank 1"


DIFFERENCES = {  # what a call tells of itself; all facts: test_every_fact_of_a_call_is_compared
    "x": Difference(
        f"got x shape {both([2, 18, 5], [2, 21, 5])} (all_to_all_matmul, call 3 on group ",
        Problem("a", (2, 6, 5), 7, 0, 1, op="all_to_all_matmul"),
        Problem("b", (2, 7, 5), 7, 0, 1, op="all_to_all_matmul"),
    ),
    "dtype": Difference(
        f"got dtype {both('float32', 'bfloat16')} (matmul_all_to_all", dtype=torch.bfloat16, algorithm="unfused"
    ),
    "bias": Difference(
        f"got bias shape {both('[7]', None)} (matmul_reduce_scatter",
        Problem("a", (3, 5), 7, scatter_dim=0, bias=True, op="matmul_reduce_scatter"),
        Problem("b", (3, 5), 7, scatter_dim=0, op="matmul_reduce_scatter"),
    ),
    "by-product": Difference(
        f"got by-product {both(False, True)} (all_gather_matmul", ONE_EACH["all_gather_matmul"], by_product=True
    ),
    "op": Difference(
        f"got op {both('matmul_all_to_all', 'matmul_all_reduce')} (call 3 on group ",
        HEADS,
        ONE_EACH["matmul_all_reduce"],
    ),
    "algorithm": Difference(
        f"got algorithm {both('chunked', 'unfused')} (matmul_all_to_all", other_algorithm="unfused"
    ),
}


def check_difference(rank: int, name: str) -> tuple[str, list[int], str, int]:
    """Check the error of a third call. The group goes on without a reset."""
    difference = DIFFERENCES[name]
    with fresh_group(**CHECKED) as group, fusedcomm.force_algorithm(difference.algorithm, strict=True):
        for seed in range(2):
            check(group, HEADS, call(group, HEADS, seed), seed)
        with pytest.raises(fusedcomm.PeerMismatchError) as caught:
            difference.call(group, rank)
        for seed in range(2, 5):
            check(group, HEADS, call(group, HEADS, seed), seed)
        return str(caught.value), caught.value.peers, caught.value.op, caught.value.epoch


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_the_same_error_on_all_ranks(ranks: Any, name: str) -> None:
    difference = DIFFERENCES[name]
    errors = ranks(3).run(check_difference, name)
    (text,) = {error[0] for error in errors}
    assert text.startswith(f"calls must be equal on all ranks, {difference.text}"), text
    field = text.splitlines()[-1].removeprefix("Next: make ").partition(" the same on all ranks; ")[0]
    assert f" got {field} " in text, text
    assert [error[1] for error in errors] == [[1], [0, 2], [1]]
    mine, other = difference.problem.op, (difference.other or difference.problem).op
    assert [error[2] for error in errors] == [mine, other, mine]
    assert [error[3] for error in errors] == [0, 0, 0]


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {  # what `geometry` takes, and what is compared of it
    "matmul_all_to_all": (
        ((4, 5), (5, 12), (6, 2), 0, 1, 3),
        {"x shape": [4, 5], "w shape": [5, 12], "out_shape": [6, 2], "gather_dim": 0, "scatter_dim": 1},
    ),
    "all_gather_matmul": (
        ((2, 5), ((5, 7), (5, 8)), 0, 3),
        {"x shape": [2, 5], "w shapes": [[5, 7], [5, 8]], "gather_dim": 0},
    ),
    "matmul_reduce_scatter": (
        ((6, 5), (5, 7), "avg", 0, 3),
        {"x shape": [6, 5], "w shape": [5, 7], "reduce_op": "avg", "scatter_dim": 0},
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_every_fact_of_a_call_is_compared(op: str) -> None:
    given, arguments = CALLS[op]
    record = flight_recorder.Record(op, "g", torch.device("cpu"), shapes.of(getattr(shapes, op), *given), torch.float32)
    record.number = 7
    plan = Plan(op, "chunked", "why", slot_bytes=4096, num_rounds=2)
    scales, weight = [torch.ones(()), torch.ones(1, 9)], torch.ones(9)
    args = Arguments(torch.ones(()), [], [weight], 3, "g", norm_weight=weight, scale_x=scales[0], scale_w=scales[1])
    facts = facts_of(record, plan, args)
    assert facts == {
        "op": op,
        **arguments,
        "dtype": "float32",
        "bias shape": [9],
        "norm_weight": "float32",
        "dims of scales": [1, 2],
        "by-product": False,
        "algorithm": "chunked",
        "rounds": 2,
        "slot bytes": 4096,
        "number of the call": 7,
        "version": f"{version('fusedcomm')} with torch {torch.__version__}",
    }
    compare([facts] * 3, 0, op, "here")
    for name, value in facts.items():
        of_ranks = [facts, facts | {name: "another"}, facts]
        for rank in range(3):
            with pytest.raises(fusedcomm.PeerMismatchError) as caught:
                compare(of_ranks, rank, op, "here")
            text = f"calls must be equal on all ranks, got {name} {both(value, 'another')} ("
            assert str(caught.value).startswith(text)
            assert caught.value.peers == ([0, 2] if rank == 1 else [1])


@on_ranks(3)
def test_a_rank_that_does_not_come_is_named_and_may_come_later(rank: int) -> None:
    with fresh_group(CHECK="1", TIMEOUT_S="1") as group, fusedcomm.force_algorithm("unfused", strict=True):
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)
        if rank != 2:
            start = time.monotonic()
            with pytest.raises(fusedcomm.PeerTimeoutError, match=r"for ranks \[2\], which did not come") as caught:
                call(group, HEADS)
            assert time.monotonic() - start < 10
            assert caught.value.peers == [2]
            assert caught.value.op == "matmul_all_to_all"
        dist.barrier(group)
        for seed in range(3):
            check(group, HEADS, call(group, HEADS, seed), seed)


@on_ranks(3)
def test_it_is_on_for_all_ranks_if_one_asks(rank: int) -> None:
    """Rank 1 alone asks for it."""
    with fresh_group(**({"CHECK": "1"} if rank == 1 else {})) as group:
        check(group, HEADS, call(group, HEADS))
        assert member_of(group).topology.check
        for op in ("matmul_reduce_scatter", "matmul_all_reduce"):  # a partial bias, which rank 1 has not
            check(group, NAMED[f"{op}-partial-bias"], call(group, NAMED[f"{op}-partial-bias"]))
        with pytest.raises(fusedcomm.PeerMismatchError, match="calls must be equal on all ranks"):
            DIFFERENCES["bias"].call(group, rank)
    with fresh_group() as group:
        check(group, HEADS, call(group, HEADS))
        assert not member_of(group).topology.check


def num_keys(group: Any) -> int:
    store = c10d._get_process_group_store(group)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.num_keys()


@on_ranks(2)
def test_the_store_does_not_grow_with_calls(rank: int) -> None:
    with fresh_group(**CHECKED) as group:
        counts = []
        for seed in range(12):
            check(group, HEADS, call(group, HEADS, seed), seed)
            dist.barrier(group)
            counts.append(num_keys(group))
            dist.barrier(group)
        assert counts[1:] == counts[1:2] * 11, counts


@pytest.mark.thorough
@on_ranks(3)
def test_compiled_steps_and_their_backward_are_checked(rank: int) -> None:
    """The check covers a compiled step, and its backward on another thread."""
    problem = NAMED["all_gather_matmul-batch-rows-gathered"]
    size = dist.get_world_size()

    def step(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fusedcomm.all_gather_matmul(x, w, problem.gather_dim, group, bias=bias)

    with fresh_group(**CHECKED) as group:
        leaves = [t.requires_grad_() for t in flat(integers(problem, rank, size))]
        out = torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
        backward = threading.Thread(target=out.sum().backward)
        backward.start()
        backward.join(60)
        check(group, problem, out.detach())
        assert all(t.grad is not None for t in leaves)
        assert member_of(group).num_calls == 2
        with pytest.raises(fusedcomm.PeerMismatchError, match="calls must be equal"):
            DIFFERENCES["bias"].call(group, rank)


@on_ranks(3)
def test_a_broken_workspace_is_told_before_the_check(rank: int) -> None:
    """All ranks first say what is broken, at once."""
    with fresh_group(**CHECKED) as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)
        if rank == 1:
            with pytest.raises(ZeroDivisionError), member_of(group).workspace.guarded("op"):
                raise ZeroDivisionError
        dist.barrier(group)
        start = time.monotonic()
        with pytest.raises(fusedcomm.PeerError, match=re.escape("fusedcomm.reset")):
            call(group, HEADS)
        assert time.monotonic() - start < 15  # before the time-out
        dist.barrier(group)
        fusedcomm.reset(group)
        check(group, HEADS, call(group, HEADS, 1), 1)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, value in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("FUSEDCOMM_CHECK", text)
        assert env.check() is value
    monkeypatch.setenv("FUSEDCOMM_CHECK", "yes")
    with pytest.raises(ValueError, match="FUSEDCOMM_CHECK must be 0 or 1, got 'yes'"):
        env.check()


def collectives(mesh: Any, group: Any, odd: bool) -> dict[str, Callable[[], Any]]:
    """Collectives of the package, as the ``odd`` rank calls them and as the others do."""
    dtype = torch.float64 if odd else torch.float32

    def sharded(rows: int = 2, dtype: torch.dtype = torch.float32) -> DTensor:
        return DTensor.from_local(torch.ones(rows, 4, dtype=dtype), mesh, [Shard(0)], run_check=False)

    def moved(x: DTensor, *to: Any, **options: Any) -> Callable[[], Any]:
        return partial(fusedcomm.redistribute, x, placements=list(to), **options)

    def unsharded(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
        return partial(fusedcomm.nn.unshard_tokens, torch.ones(shape, dtype=dtype), 2 * mesh.size(), 0, group)

    uneven, model, parameter = sharded(), nn.Module(), nn.Parameter(torch.ones(2 + odd))
    uneven._local_tensor = uneven._local_tensor[odd:]
    model.register_buffer("b", sharded(dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return {
        "shape": moved(sharded(2 + odd), Replicate()),
        "placements": moved(sharded(), Shard(1) if odd else Replicate()),
        "moves": moved(sharded(), Shard(0) if odd else Replicate()),
        "forward_dtype": moved(sharded(), Replicate(), forward_dtype=torch.bfloat16 if odd else None),
        "local_shape": moved(uneven, Replicate()),
        "num_placements": moved(sharded(), *[Replicate()] * (1 + odd)),
        "token_dtype": unsharded(2, 3, dtype=dtype),
        "tokens": unsharded(2 + odd, 3),
        "features": unsharded(2, 3 + odd),
        "state": partial(fusedcomm.nn.full_state_dict, model),
        "gradient": partial(fusedcomm.nn.sum_replicated_gradients, nn.Module(), also=[parameter], group=group),
    }


@on_ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
def test_every_collective_is_compared(rank: int, odd: int) -> None:
    cpu, find = torch.device("cpu"), members.member
    with ExitStack() as stack:
        group = stack.enter_context(fresh_group(CHECK="1"))
        for name in ("_worlds", "_meshes"):  # WORLD has voted before
            stack.enter_context(mock.patch.object(mesh_groups, name, type(getattr(mesh_groups, name))()))
        stack.enter_context(mock.patch.object(call_check, "member", lambda *_: find(group.group_name, cpu)))
        mesh = init_device_mesh("cpu", (2,))
        alike = collectives(mesh, group, odd=False)
        for name, call_one in collectives(mesh, group, rank == odd).items():
            with pytest.raises((ValueError, IndexError, fusedcomm.PeerMismatchError)) as caught:
                call_one()
            texts: list[Any] = [None] * 2
            dist.all_gather_object(texts, (type(caught.value).__name__, str(caught.value)), group)
            own = name == "num_placements"  # torch's type of error, on the rank that made it
            assert (len(set(texts)) == 1) != own, texts
            assert (caught.type is IndexError) == (own and rank == odd)
            alike[name]()  # nothing was sent, and ranks that agree go on


@on_ranks(2)
def test_peers_hear_of_errors(rank: int) -> None:
    """Errors of kernels, and above them those of public functions and of autograd's kernels."""
    x, w, ids = torch.ones(4, 16, requires_grad=True), torch.ones(16, 16), torch.tensor([[0], [1], [1], [0]])
    x8, w8, one = torch.ones(4, 16).to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).mT, torch.ones(())
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[int, Any], dict[str, Any]]] = [
        (fusedcomm.all_gather_matmul, (x, [w], 0), (1, [w.double()]), {}),
        (fusedcomm.all_gather_matmul, (x, [w], 0), (1, [w]), {"bias": [None, None]}),
        (fusedcomm.all_gather_matmul, (x, [w], 0), (1, [w]), {"bias": torch.ones(16)}),
        (fusedcomm.all_gather_matmul, (x, w, 0), (1, w), {"bias": [torch.ones(16)]}),
        (fusedcomm.scaled_matmul_all_reduce, (x8, w8, one, one), (2, one.clone().requires_grad_()), {}),
        (fusedcomm.scaled_matmul_all_reduce, (x8, w8, one, one), (2, one), {"use_fast_accum": "no"}),
        (fusedcomm.moe_dispatch, (x, ids, 2, 8), (0, None), {}),
        *((fusedcomm.matmul_all_reduce, (x, w), (0, wrong), {}) for wrong in (None, w[:4, :3], ids, w[:4].to_sparse())),
        (fusedcomm.matmul_all_reduce, (x, w), (0, x), {"reduce_op": 3}),
        (fusedcomm.matmul_all_to_all, (x, w, 0, 1), (0, x), {"scatter_splits": [8, 8], "scatter_ranges": [(0, 8)] * 2}),
        (fusedcomm.all_reduce_norm, (w, w, None), (0, w.clone().requires_grad_()), {"out": torch.empty(16, 16)}),
    ]
    with fresh_group(**CHECKED) as group:
        fusedcomm.all_reduce(x, group)
        for call, args, (at, wrong), options in calls:
            given = [wrong if rank and i == at else arg for i, arg in enumerate(args)]
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                call(*given, group=group, **(options if rank else {}))
            about = "rank 1 found its input wrong|\\(rank 1\\)"
            assert not isinstance(caught.value, fusedcomm.PeerTimeoutError)
            assert rank or re.search(about, str(caught.value)), caught.value
