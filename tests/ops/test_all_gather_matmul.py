"""all_gather_matmul: lists of weights share one gather. The rest is in the tests of all ops."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fusedcomm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched, pushed

OP = "all_gather_matmul"


@on_ranks(3)
def test_a_list_of_weights_shares_one_gather(rank: int) -> None:
    """A list of one weight gives a list too, a tensor gives a tensor, and many weights send no more than one."""
    x, ws = torch.randn(4, 8, requires_grad=True), [torch.randn(8, n, requires_grad=True) for n in (6, 3, 5)]
    biases = [torch.randn(6), None, torch.randn(5)]
    with fusedcomm.force_algorithm("chunked", strict=True):
        singles = []
        for w, bias in zip(ws, biases, strict=True):
            with pushed() as sent:
                singles.append(fusedcomm.all_gather_matmul(x, w, 0, bias=bias))
            assert sent.num_bytes == x.nbytes * (dist.get_world_size() - 1)
        with pushed() as sent, Dispatched() as dispatched:
            outs = fusedcomm.all_gather_matmul(x, ws, 0, bias=biases)
        assert sent.num_bytes == x.nbytes * (dist.get_world_size() - 1)
        assert dispatched.names("fusedcomm") == [OP]
        assert isinstance(outs, list)
        torch.testing.assert_close(outs, singles)
        (only,) = fusedcomm.all_gather_matmul(x, ws[:1], 0, bias=biases[:1])
        torch.testing.assert_close(only, singles[0])
        (unbiased,) = fusedcomm.all_gather_matmul(x, tuple(ws[1:2]), 0)
        torch.testing.assert_close(unbiased, singles[1])
        with Dispatched() as dispatched:
            torch.stack([out.sum() for out in outs]).sum().backward()
        assert dispatched.names("fusedcomm") == ["matmul_reduce_scatter"]  # one for all weights
