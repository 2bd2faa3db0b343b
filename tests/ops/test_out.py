"""The `.out` overloads: the same values, written straight into the caller's tensor; what such a tensor must be."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from tests.helpers.groups import ALGORITHMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import TABLES
from tests.helpers.prepared import CALLS, started_group
from tests.helpers.problems import Problem, expected, integers
from tests.helpers.spies import Dispatched, pushed
from tests.helpers.tiers import nightly_but

OPS = ["matmul_all_to_all", "matmul_reduce_scatter", "matmul_all_reduce"]


def arguments(problem: Problem, rank: int, seed: int = 0) -> tuple[Any, ...]:
    """The arguments that the public function hands to the dispatcher."""
    with Dispatched() as dispatched:
        problem.call(integers(problem, rank, dist.get_world_size(), seed=seed))
    return dispatched.arguments(f"fusedcomm::{problem.op}")


@on_ranks(2)
@pytest.mark.parametrize("algorithm", nightly_but(["unfused", "chunked", "pipelined"], ALGORITHMS))
@pytest.mark.parametrize("op", OPS)
def test_values(rank: int, op: str, algorithm: str) -> None:
    for problem in [*TABLES[op][:5], TABLES[op][-1]]:
        with fusedcomm.force_algorithm(algorithm, strict=True):
            for seed in range(4):  # the last two are prepared calls
                args = arguments(problem, rank, seed)
                want = expected(problem, dist.get_world_size(), seed=seed)[rank]
                out = torch.full_like(want, float("nan"))
                version = out._version
                assert getattr(torch.ops.fusedcomm, op).out(*args, out=out) is out
                torch.testing.assert_close(out, want, rtol=0, atol=0)
                assert out._version == version + 1  # autograd sees that a tensor that it has saved was overwritten


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_a_bad_out_is_a_value_error_before_anything_is_sent(rank: int, op: str) -> None:
    args = arguments(TABLES[op][0], rank)
    call = getattr(torch.ops.fusedcomm, op)
    good = call.default(*args)
    rows, columns = good.shape[0], good.shape[-1]
    for bad, message in [
        (good.new_empty(rows + 1, *good.shape[1:]), r"out must have shape \[.*\], got \["),
        (good.double(), "out must have x's dtype torch.float32, got torch.float64"),
        (good.to("meta"), "out must be on x's device cpu, got meta"),
        (good.new_empty(*good.shape[:-1], 2 * columns)[..., ::2], "out must be contiguous, got strides"),
    ]:
        texts = []
        for fake in (False, True):
            with pushed() as sent, pytest.raises(ValueError, match=message) as caught:
                if fake:
                    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                        call.out(*args, out=bad)
                else:
                    call.out(*args, out=bad)
            assert not sent.chunks
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


@on_ranks(2)
def test_an_out_that_overlaps_an_input(rank: int) -> None:
    with started_group("chunked") as group:
        x, where = torch.ones(4, 6), ("sum", 2, group.group_name)
        for _ in range(CALLS):
            torch.ops.fusedcomm.all_reduce.out(x, *where, out=torch.empty(4, 6))
        with pytest.raises(ValueError, match="out must not overlap x"):
            torch.ops.fusedcomm.all_reduce.out(x, *where, out=x)
        assert x.eq(1).all()


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_it_has_no_gradients(rank: int, op: str) -> None:
    args = arguments(TABLES[op][0], rank)
    call = getattr(torch.ops.fusedcomm, op)
    out = torch.empty_like(call.default(*args))
    leaf = (args[0].detach().requires_grad_(), *args[1:])
    with pytest.raises(RuntimeError, match=rf"fusedcomm::{op}.out has no gradients"):
        call.out(*leaf, out=out)
    with torch.no_grad():
        assert not call.out(*leaf, out=out).requires_grad
    torch.testing.assert_close(out, call.default(*args))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if hasattr(torch.Tag, "out"):  # else, as in torch 2.11, no custom op that returns its argument can be traced
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(call.out, args, {"out": out}, test_utils=checks)
