"""Ranks whose programs differ where an exchange was moved find out before they compute anything."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

import fusedcomm
import fusedcomm.compile
from fusedcomm.runtime.members import member
from tests.compile.test_commute import BEFORE, Program, Values, check, inputs, product, results, to_heads
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.on_ranks import on_ranks


def by_rank(v: Values) -> Any:
    return to_heads((product(v) * (dist.get_rank() + 1)).sin())


def refused(program: Program) -> str:
    torch._dynamo.reset()
    with no_latency(), fusedcomm.compile.enabled(), pytest.raises(fusedcomm.PeerMismatchError) as caught:
        results(torch.compile(program, fullgraph=True, backend=interpreted), inputs())
    return str(caught.value)


@on_ranks(2)
def test_a_number_that_ranks_do_not_share(rank: int) -> None:
    text = refused(by_rank)
    assert "differ on ranks" in text and "enable(commute=False)" in text
    check(lambda v: to_heads(product(v) * 2.5))  # the group goes on


@on_ranks(2)
@pytest.mark.thorough
def test_an_op_that_ranks_do_not_share(rank: int) -> None:
    refused(lambda v: to_heads(product(v).sin() if rank else product(v).cos()))


@on_ranks(2)
@pytest.mark.thorough
def test_a_filled_tensor_that_ranks_do_not_share(rank: int) -> None:
    refused(lambda v: to_heads(product(v).sin() * torch.full((4, 1), 1.0 + rank)))


@on_ranks(2)
def test_a_number_that_ranks_do_not_share_may_stay(rank: int) -> None:
    torch._dynamo.reset()
    values = inputs()
    with fusedcomm.compile.enabled(commute=False):
        got = results(torch.compile(by_rank, fullgraph=True, backend=interpreted), values)
    torch.testing.assert_close(got, results(by_rank, values))


@on_ranks(2)
@pytest.mark.thorough
def test_a_count_that_the_program_computes_stands_in_the_way(rank: int) -> None:
    def program(v: Values) -> Any:
        return to_heads(product(v).sin() * (10 * v["number"].detach()).long().item())

    with patch.object(torch._dynamo.config, "capture_scalar_outputs", True):
        report = check(program)
    assert "mul stands between" in report.collectives[0].reason, report.collectives


@on_ranks(2)
def test_the_first_call_alone_is_a_collective(rank: int) -> None:
    group_size, group_name = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    call = torch.ops.fusedcomm.same_moves
    for _ in range(2):
        assert call("a", "cpu", group_size, group_name).shape == (0,)
    dist.barrier()
    if rank == 0:  # nobody else comes
        call("a", "cpu", group_size, group_name)
    with pytest.raises(fusedcomm.PeerMismatchError, match="differ on ranks"):
        call(f"b{rank}", "cpu", group_size, group_name)
    call("c", "cpu", group_size, group_name)


@on_ranks(2)
@pytest.mark.thorough
def test_what_inductor_generates_compares_first(rank: int) -> None:
    torch._dynamo.reset()
    values = inputs()
    with no_latency(), fusedcomm.compile.enabled(), pytest.raises(fusedcomm.PeerMismatchError):
        results(torch.compile(by_rank, fullgraph=True), values)


@on_ranks(2)
@pytest.mark.thorough
def test_without_the_comparison_values_are_wrong(rank: int) -> None:
    torch._dynamo.reset()
    values = inputs()
    with (
        no_latency(),
        fusedcomm.compile.enabled(),
        patch("fusedcomm.compile.commute.digests.check_first"),
    ):
        got = results(torch.compile(by_rank, fullgraph=True, backend=interpreted), values)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, results(by_rank, values))


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_scheduled_graphs_compare_too(rank: int, cpp_wrapper: bool) -> None:
    torch._dynamo.reset()
    values = inputs()

    def program(v: Values) -> Any:
        return to_heads(BEFORE["positions"](product(v), v))

    with (
        no_latency(),
        inductor.patch(cpp_wrapper=cpp_wrapper),
        fusedcomm.compile.enabled(overlap=not cpp_wrapper),
        patch("fusedcomm.ops.same_moves._compare") as compare,
        patch.object(member(_get_default_group().group_name, torch.device("cpu")), "same_moves", set()),
        torch.no_grad(),
    ):
        got = torch.compile(program, fullgraph=True)(values)
    torch.testing.assert_close(got, program(values))
    assert compare.call_count == 1
