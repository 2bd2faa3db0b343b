"""What reductions round in a simulated world; and bad input, refused on real ranks."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode

import fusedcomm
from fusedcomm.redistribution import steps, uneven
from fusedcomm.redistribution.steps import Step
from tests.helpers import redistribution_world as world
from tests.redistribution.test_redistribute import S0, P, R, Ranks, mesh_of


def one_step(ranks: int, before: str, after: int | None) -> Step:
    path = tuple(world.sharding_of((1,), (ranks,), (each,)) for each in (before, after))
    (step,) = world.Plan(path, torch.float32).steps
    return step


def test_whole_numbers_are_averaged_towards_zero() -> None:
    assert torch.equal(uneven.averaged(torch.tensor([7, -7]), 2), torch.tensor([3, -3]))
    assert torch.equal(uneven.averaged(torch.tensor([7.0]), 2), torch.tensor([3.5]))


def uneven_sum(parts: list[float], dtype: torch.dtype, op: str = "sum") -> Tensor:
    """Each rank's part of a [1] tensor that a rank reduces for itself."""
    ranks = len(parts)
    step = one_step(ranks, op, 0)
    assert step.sends_as == steps.ALL_TO_ALL
    held = {(rank,): torch.tensor([parts[rank]], dtype=dtype) for rank in range(ranks)}
    return world.carry_out(step, held, random.Random(0), shuffle=True)[(0,)]


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
    step = one_step(4, "avg", None)
    held = {(rank,): torch.tensor([largest], dtype=dtype) for rank in range(4)}
    assert world.carry_out(step, held, random.Random(0), shuffle=False)[(0,)].item() == largest


def test_parts_are_added_in_rank_order() -> None:
    """The order of the ranks in the process group does not matter."""
    parts = [1e8, 1.0, -1e8, 0.5]
    assert uneven_sum(parts, torch.float32).item() == 0.5
    assert uneven_sum(parts[::-1], torch.float32).item() == 0


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
