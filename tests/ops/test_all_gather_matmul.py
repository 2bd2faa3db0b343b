"""all_gather_matmul: lists of weights share one gather; bad input. The rest is in the tests of all ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from tests.helpers.groups import bad_ids, check_bad_input, check_values
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
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


GOOD: dict[str, Any] = {"x": (4, 8), "w": (8, 6), "gather_dim": 0, "bias": None}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": (8,)}, "x must have at least 2 dims"),
    ({"w": (8,)}, "w must be 2-D .* the gathered x's batch dims, got 1 dims beside 2"),
    ({"w": (2, 8, 6)}, "w must be 2-D .* the gathered x's batch dims, got 3 dims beside 2"),
    ({"w": (9, 6)}, "the gathered x and w must agree on K, got 8 and 9"),
    ({"gather_dim": 1}, "the gathered x and w must agree on K, got 16 and 8"),
    (
        {"x": (2, 4, 8), "w": (2, 8, 6)},
        r"batch dims of w must equal those of the gathered x, got \(2,\) and \(4,\)",
    ),
    ({"gather_dim": 2}, r"gather_dim must be in \[-2, 1\], got 2"),
    ({"gather_dim": -3}, r"gather_dim must be in \[-2, 1\], got -3"),
    ({"w": []}, "w must be a tensor or a list of at least one, got an empty list"),
    ({"w": [(8, 6), (9, 6)]}, "the gathered x and w must agree on K, got 8 and 9"),
    (
        {"x": (1, 4, 8), "gather_dim": 1, "w": [(8, 6), (1, 8, 6)]},
        "either every w or none must have batch dims, got 2 and 3 dims",
    ),
    ({"w": [(8, 6), (8, 3)], "bias": [(6,)]}, "bias must have one entry per w, 2, got 1"),
    ({"w": [(8, 6), (8, 3)], "bias": (6,)}, "bias must be a list or None beside a list of w, got a tensor"),
    ({"bias": [(6,)]}, "bias must be a tensor or None beside one w, got a list"),
    ({"bias": (1, 6)}, r"bias must have shape \[N\] = \[6\], got \[1, 6\]"),
    ({"w": [(8, 6), (8, 3)], "bias": [None, (6,)]}, r"bias must have shape \[N\] = \[3\], got \[6\]"),
]


@pytest.mark.parametrize("change, message", BAD, ids=bad_ids(BAD))
def test_bad_input_is_a_value_error_on_every_device(ranks: Any, change: dict[str, Any], message: str) -> None:
    ranks(2).run(check_bad_input, OP, GOOD | change, message)
    ranks(2).run(check_values, NAMED[f"{OP}-ragged"], torch.float32, "chunked", 1)  # nothing is lost
