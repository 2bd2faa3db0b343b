"""Steps carried out in a simulated world, against an oracle that holds the whole tensor; then on real ranks."""

import itertools
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusedcomm
from fusedcomm.redistribution import execute, reductions, steps, uneven
from fusedcomm.redistribution.steps import Step
from tests.helpers import redistribution_world as world
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched
from tests.redistribution.test_redistribute import S0, P, R, Ranks, mesh_of

Placed = tuple[int | str | None, ...]


def plan_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], *placed: Placed, dtype: torch.dtype = torch.float32
) -> world.Plan:
    return world.Plan(tuple(world.sharding_of(shape, mesh, each) for each in placed), dtype)


def check_plan(plan: world.Plan) -> None:
    for seed in range(4):
        world.check(plan, random.Random(seed), shuffle=seed % 2 == 1)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_numbers_without_dims(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        check_plan(plan_of((), (2, 3), (op, op), (None, None), dtype=dtype))
        check_plan(plan_of((), (2, 3), (op, None), (None, None), dtype=dtype))
        check_plan(plan_of((), (2, 3), (None, None), (None, None), dtype=dtype))


def one(plan: world.Plan) -> Step:
    (step,) = plan.steps
    return step


def test_whole_numbers_are_averaged_towards_zero() -> None:
    assert torch.equal(reductions.averaged(torch.tensor([7, -7]), 2), torch.tensor([3, -3]))
    assert torch.equal(reductions.averaged(torch.tensor([7.0]), 2), torch.tensor([3.5]))


def uneven_sum(parts: list[float], dtype: torch.dtype, op: str = "sum") -> Tensor:
    """Each rank's part of a [1] tensor that a rank reduces for itself."""
    ranks = len(parts)
    step = one(plan_of((1,), (ranks,), (op,), (0,)))
    assert step.sends_as == steps.ALL_TO_ALL
    held = {(rank,): torch.tensor([parts[rank]], dtype=dtype) for rank in range(ranks)}
    return world.carry_out(step, held, random.Random(0), shuffle=False)[(0,)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    big, ulp = (256.0, 2.0) if dtype == torch.bfloat16 else (2048.0, 2.0)
    parts = [big, ulp / 2, ulp / 2]
    assert uneven_sum(parts, dtype).item() == big + ulp
    one_by_one = torch.tensor(parts, dtype=dtype)
    assert (one_by_one[0] + one_by_one[1] + one_by_one[2]).item() == big  # so it would be seen
    parts = [big, ulp, ulp / 2, ulp / 2]
    assert uneven_sum(parts, dtype, "avg").item() == torch.tensor(sum(parts) / 4, dtype=dtype).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_average_does_not_overflow(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert uneven_sum([largest] * 4, dtype).item() == float("inf")  # so it would be seen
    assert uneven_sum([largest] * 4, dtype, "avg").item() == largest
    step = one(plan_of((1,), (4,), ("avg",), (None,)))
    held = {(rank,): torch.tensor([largest], dtype=dtype) for rank in range(4)}
    assert world.carry_out(step, held, random.Random(0), shuffle=False)[(0,)].item() == largest


def test_parts_are_added_in_the_order_of_the_mesh() -> None:
    """The order of the ranks of the process group does not matter."""
    step = one(plan_of((3,), (2, 2), ("sum", "sum"), (0, 0)))
    parts = [1e8, 1.0, -1e8, 0.5]
    held = {rank: torch.full((3,), part) for rank, part in zip(world.coordinates((2, 2)), parts, strict=True)}
    want = ((torch.tensor(1e8) + 1.0) + -1e8) + 0.5
    other = ((torch.tensor(0.5) + -1e8) + 1.0) + 1e8
    assert want != other
    for seed in range(10):
        got = world.carry_out(step, held, random.Random(seed), shuffle=True)
        assert all(torch.equal(tensor, want.expand(tensor.shape)) for tensor in got.values())


def test_padding_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of((5, 3), (3,), (1,), (None,))
    uneven_plan = plan_of((4, 5), (3,), (1,), (None,))
    check_plan(uneven_plan)
    monkeypatch.setattr(uneven, "_window", lambda flat, start, shape: flat.view(-1, shape[-1]))
    check_plan(plan)  # needs none
    with pytest.raises((AssertionError, RuntimeError)):
        check_plan(uneven_plan)


# On real ranks
CASES: list[tuple[Placed, Placed, str]] = [
    ((None,), (0,), steps.SLICE),
    ((1,), (None,), steps.ALL_GATHER),
    ((0,), (1,), steps.ALL_TO_ALL),
    (("sum",), (None,), steps.ALL_REDUCE),
    (("avg",), (1,), steps.REDUCE_SCATTER),
    (("max",), (0,), steps.REDUCE_SCATTER),
]
COLLECTIVES = {
    steps.ALL_GATHER: "all_gather_into_tensor",
    steps.ALL_TO_ALL: "all_to_all_single",
    steps.ALL_REDUCE: "all_reduce",
    steps.REDUCE_SCATTER: "reduce_scatter_tensor",
}


def traced(run: Callable[..., Tensor], local: Tensor) -> Tensor:
    return make_fx(lambda x: run(x, wait=False), tracing_mode="fake")(local)(local)


@on_ranks(2)
def test_collectives_of_torch(rank: int) -> None:
    """Each step is one collective, if any. It is the same in flight, traced, and on ranks in another order."""
    for (before, after, kind), shape, order in itertools.product(CASES, [(8, 8), (7, 5), (0, 3)], [(0, 1), (1, 0)]):
        step = one(plan_of(shape, (2,), before, after))
        assert step.kind == kind
        coordinate = (order[rank],)
        oracle = world.Oracle(step.before, world.parts_of(step.before, random.Random(0)))
        local = world.strided(oracle.local(coordinate).float(), random.Random(rank))
        oracle.move(step.after)
        run = partial(execute.run, step, coordinate, order, dist.group.WORLD.group_name)
        with Dispatched() as spy:
            got = run(local)
        called = [name.partition("::")[2] for name, _ in spy.calls if name.startswith("_c10d_functional::")]
        assert called == ([] if kind == steps.SLICE else [COLLECTIVES[step.sends_as], "wait_tensor"])
        for result in (got, run(local, wait=False).clone(), traced(run, local)):
            assert result.is_contiguous() and torch.equal(result, oracle.local(coordinate).float()), step


# Bad input is refused on every rank alike, before anything is sent, with torch's own types of errors.
Call = Callable[..., DTensor]


def of_integers(x: DTensor) -> DTensor:
    whole = torch.ones(2, dtype=torch.int64)
    return DTensor.from_local(whole, x.device_mesh, [Partial("avg"), R], run_check=False)


def with_a_part_too_small(x: DTensor) -> DTensor:
    return DTensor.from_local(torch.ones(3), x.device_mesh, [S0, R], run_check=False, shape=(8,), stride=(1,))


BAD: dict[str, tuple[Callable[[Call, DTensor], Any], str]] = {
    "no placements": (lambda call, x: call(x), "given, one per dim of the mesh, got None"),
    "no list": (lambda call, x: call(x, placements=S0), r"a list, one per dim of the mesh, got Shard\(dim=0\)"),
    "class": (
        lambda call, x: call(x, placements=[R, _NormPartial(2)]),
        r"Replicate, Shard or Partial, or as they are, got _NormPartial",
    ),
    "no instance": (lambda call, x: call(x, placements=[Shard, R]), "must be Replicate, Shard or Partial, got"),
    "too few": (lambda call, x: call(x, placements=[R]), r"of the mesh, 2, got \['R'\]"),
    "dim": (lambda call, x: call(x, placements=[R, Shard(2)]), r"S\(2\) must be in \[-2, 2\)"),
    "partial": (lambda call, x: call(x, placements=[P, P]), r"dim 0 must be P\(sum\) before"),
    "mesh": (lambda call, x: call(x, mesh_of((4,)), [R]), "device_mesh must be the dtensor's own"),
    "dtype": (
        lambda call, x: call(x, placements=[R, R], forward_dtype=6),
        "forward_dtype must be a torch.dtype or None, got int",
    ),
    "integers": (
        lambda call, x: call(of_integers(x), placements=[R, R]),
        "dtype must be of floating point to be averaged, got torch.int64",
    ),
}
BY_US_ALONE: dict[str, tuple[Callable[[Call, DTensor], Any], str, type[Exception]]] = {
    "local": (
        lambda call, x: call(with_a_part_too_small(x), placements=[R, R]),
        r"must have shape \(4,\) for a tensor of shape \(8,\) that is S\(0\), R, got \(3,\)",
        ValueError,
    ),
    "text": (lambda call, x: call(x, placements="RR"), "Shard or Partial, got 'R'", TypeError),
    "tensor": (lambda call, x: call(x.to_local(), placements=[R]), "DTensor, got Tensor", TypeError),
}


def refused(rank: int) -> dict[str, str]:
    x, texts = distribute_tensor(torch.ones(4, 2), mesh_of((2, 2)), [S0, R]), {}
    for name, (use, *_, kind) in {**BAD, **BY_US_ALONE}.items():
        if name in BAD:
            with pytest.raises(Exception) as theirs:
                use(DTensor.redistribute, x)
            kind = theirs.type
        with CommDebugMode() as comm, pytest.raises(kind) as error:  # type: ignore[call-overload]
            use(fusedcomm.redistribute, x)
        assert comm.get_total_counts() == 0 and error.type is kind, name
        texts[name] = str(error.value)
    return texts


def test_bad_input_is_named_on_every_rank_before_anything_is_sent(ranks: Ranks) -> None:
    by_rank = ranks(4).run(refused)
    for name, (_, wanted, *_) in {**BAD, **BY_US_ALONE}.items():
        texts = [each[name] for each in by_rank]
        assert name == "local" or len(set(texts)) == 1
        assert all(re.search(wanted, text) for text in texts), texts
