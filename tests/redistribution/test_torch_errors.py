"""What `fusedcomm.redistribute` raises and warns, beside torch's own DTensor.redistribute."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial

import fusedcomm
from tests.helpers.on_ranks import on_ranks

R, S0, P = Replicate(), Shard(0), Partial()


def error_of(call: Callable[[], Any]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@on_ranks(2)
def test_errors_have_the_types_of_torch(rank: int) -> None:
    x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2, 1)), [S0, R])
    average = DTensor.from_local(torch.ones(2, dtype=torch.int64), x.device_mesh, [Partial("avg"), R])
    for t, args in [
        (x, {}),
        (x, {"placements": S0}),
        (x, {"placements": [R]}),
        (x, {"placements": []}),
        (x, {"placements": [Shard(2), R]}),
        (x, {"placements": [P, R]}),
        (x, {"placements": [R, _NormPartial(2)]}),
        (x, {"placements": [Shard, R]}),
        (x, {"placements": [R, R], "device_mesh": init_device_mesh("cpu", (2,))}),
        (x, {"placements": [R, R], "device_mesh": "cpu"}),
        (x, {"placements": [R, R], "forward_dtype": 6}),
        (average, {"placements": [R, R]}),
    ]:
        wanted = error_of(lambda t=t, args=args: t.redistribute(**args))
        assert wanted is not None, args
        found = error_of(lambda t=t, args=args: fusedcomm.redistribute(t, **args))
        assert found is wanted, (args, found, wanted)


@on_ranks(2)
def test_a_part_that_requires_grad_is_redistributed_without_a_warning(rank: int) -> None:
    leaf = torch.ones(2, 2, requires_grad=True)
    x = DTensor.from_local(leaf, init_device_mesh("cpu", (2,)), [S0])
    assert x._local_tensor.requires_grad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = fusedcomm.redistribute(x, placements=[S0])
    (y.to_local() * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 2), 3.0))
    assert not caught
