"""DTensor's exchange of shards that R does not divide, compiled: ranks have different graphs, and must do the same."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm.compile
from fusedcomm.compile.reports import CollectiveReport
from fusedcomm.memory.consent import Answer, Consent
from tests.helpers.block_checks import interpreted
from tests.helpers.graphs import recorded_graphs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.program_parts import mesh

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

    def late(self: Consent, digest: str) -> Answer:
        while rank == 1 and not asked and int(self.store.get("at/0")) < self._count + 2:
            time.sleep(0.001)
        asked.append(digest)
        return ask(self, digest)

    short = mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S="6")
    with short, mock.patch.object(Consent, "ask", late):
        check_values(rank, True, 9, 5)  # no graph that the ranks have compiled before
    assert len(asked) == len({*asked}) == 2
