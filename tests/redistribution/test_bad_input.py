"""fusedcomm.redistribute refuses bad input on every rank alike, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode

import fusedcomm
from tests.redistribution.test_redistribute import S0, P, R, Ranks, mesh_of

BAD: dict[str, tuple[Callable[[DTensor], Any], str, type[Exception]]] = {
    "no placements": (lambda x: fusedcomm.redistribute(x), "given, one per dim of the mesh, got None", RuntimeError),
    "no list": (
        lambda x: fusedcomm.redistribute(x, placements=S0),
        r"a list, one per dim of the mesh, got Shard\(dim=0\)",
        TypeError,
    ),
    "class": (
        lambda x: fusedcomm.redistribute(x, placements=[R, _NormPartial(2)]),
        r"Replicate, Shard or Partial, or as they are, got _NormPartial",
        RuntimeError,
    ),
    "local": (
        lambda x: fusedcomm.redistribute(
            DTensor.from_local(torch.ones(3), x.device_mesh, [S0, R], run_check=False, shape=(8,), stride=(1,)),
            placements=[R, R],
        ),
        r"must have shape \(4,\) for a tensor of shape \(8,\) that is S\(0\), R, got \(3,\)",
        ValueError,
    ),
    "text": (lambda x: fusedcomm.redistribute(x, placements="RR"), "Shard or Partial, got 'R'", TypeError),
    "too few": (lambda x: fusedcomm.redistribute(x, placements=[R]), r"of the mesh, 2, got \['R'\]", IndexError),
    "dim": (lambda x: fusedcomm.redistribute(x, placements=[R, Shard(2)]), r"S\(2\) must be in \[-2, 2\)", IndexError),
    "partial": (lambda x: fusedcomm.redistribute(x, placements=[P, P]), r"dim 0 must be P\(sum\) before", RuntimeError),
    "mesh": (
        lambda x: fusedcomm.redistribute(x, mesh_of((4,)), [R]),
        "device_mesh must be the dtensor's own",
        NotImplementedError,
    ),
    "dtype": (
        lambda x: fusedcomm.redistribute(x, placements=[R, R], forward_dtype=6),
        "forward_dtype must be a torch.dtype or None, got int",
        TypeError,
    ),
    "integers": (
        lambda x: fusedcomm.redistribute(
            DTensor.from_local(torch.ones(2, dtype=torch.int64), x.device_mesh, [Partial("avg"), R]), placements=[R, R]
        ),
        "dtype must be of floating point to be averaged, got torch.int64",
        RuntimeError,
    ),
    "tensor": (lambda x: fusedcomm.redistribute(x.to_local(), placements=[R]), "DTensor, got Tensor", TypeError),
}  # type: ignore[arg-type]


def refused(rank: int, name: str) -> str:
    x = distribute_tensor(torch.ones(4, 2), mesh_of((2, 2)), [S0, R])
    with CommDebugMode() as comm, pytest.raises(BAD[name][2]) as error:
        BAD[name][0](x)
    assert comm.get_total_counts() == 0
    return str(error.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_on_every_rank_before_anything_is_sent(ranks: Ranks, name: str) -> None:
    texts = ranks(4).run(refused, name)
    assert name == "local" or len(set(texts)) == 1
    assert all(re.search(BAD[name][1], text) for text in texts), texts
