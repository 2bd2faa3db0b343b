"""Ranks whose programs differ where an exchange was moved find out before they compute anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

import fusedcomm
import fusedcomm.compile
from fusedcomm import env
from fusedcomm.memory import consent
from fusedcomm.memory.consent import YES, Answer, Consent
from fusedcomm.ops import same_moves
from tests.compile.test_commute import BEFORE, HEADS, TOKENS, Program, Values, check, inputs, product, results, to_heads
from tests.helpers.block_checks import interpreted, no_latency
from tests.helpers.on_ranks import forget_consents, on_ranks


def by_rank(v: Values) -> Any:
    return to_heads((product(v) * (dist.get_rank() + 1)).sin())


def left(program: Program) -> str:
    """The reasons in the report; the values are the program's, as the exchanges stay where they are."""
    torch._dynamo.reset()
    values = inputs()
    with no_latency(), fusedcomm.compile.enabled(commute=True) as report:
        got = results(torch.compile(program, fullgraph=True, backend=interpreted), values)
    torch.testing.assert_close(got, results(program, values))
    return "; ".join(line.reason for line in report.collectives)


@on_ranks(2)
def test_a_number_that_ranks_do_not_share(rank: int) -> None:
    check(lambda v: to_heads(product(v) * 1.5))  # what compilers load takes its time, and ranks may miss each other
    forget_consents(rank)
    began = time.monotonic()
    with patch("fusedcomm.compile.inductor.leave_out_of_caches") as of_caches:
        assert "compiled another one" in left(by_rank)
    assert of_caches.call_args_list[-1].args == (True,)
    assert time.monotonic() - began < env.timeout_s() / 2  # nobody waited for a rank that was elsewhere
    check(lambda v: to_heads(product(v) * 2.5))  # the group goes on


@on_ranks(2)
@pytest.mark.thorough
def test_without_consent_the_wire_tells(rank: int) -> None:
    """Nothing but a number differs: values would be wrong, if the ops did not carry what their ranks agreed to."""
    with patch.object(Consent, "ask", lambda *args, **kwargs: Answer(YES)), pytest.raises(fusedcomm.PeerMismatchError):
        left(by_rank)
    dist.barrier()
    fusedcomm.reset()


OF_THEIR_OWN: dict[str, Callable[[Tensor, Values, int], Tensor]] = {
    "op": lambda y, v, rank: y.sinh() if rank else y.cosh(),
    "filled tensor": lambda y, v, rank: y.sin() * torch.full((4, 1), 1.0 + rank),
    "dtype": lambda y, v, rank: y.sin() * (v["token"].bfloat16() if rank else v["token"]),
}


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_steps_that_ranks_do_not_share(rank: int, name: str) -> None:
    check(lambda v: to_heads(OF_THEIR_OWN[name](product(v), v, 0)))  # as rank 0's alone, later
    assert "compiled another one" in left(lambda v: to_heads(OF_THEIR_OWN[name](product(v), v, rank)))


SIZED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # whose result has the same size on all ranks, and own not
    "begin of a slice": lambda y, own: y.narrow(0, own.shape[0], TOKENS),
    "constant": lambda y, own: y * own.sum(0),
    "index": lambda y, own: y.unflatten(0, (-1, 6)).select(1, own.shape[0]),
}


def sized(name: str, own: Tensor, v: Values) -> Any:
    y = SIZED[name]((torch.cat([v["x"]] * 3) @ v["w"]).sin(), own @ v["w"])
    return to_heads(y.cos().unflatten(1, (HEADS, -1)))


@on_ranks(2)
@pytest.mark.parametrize("name", SIZED)
def test_dynamic_sizes_are_compared_when_they_are_new(rank: int, name: str) -> None:
    torch._dynamo.reset()
    values = inputs()
    ask = patch.object(same_moves, "_ask", wraps=same_moves._ask)
    with no_latency(), fusedcomm.compile.enabled(commute=True), torch.no_grad(), ask as votes:
        compiled = torch.compile(sized, fullgraph=True, backend=interpreted)
        met = []
        for rows in (2, 3, 2):
            own = values["w"].detach()[:rows]
            torch._dynamo.mark_dynamic(own, 0)
            torch.testing.assert_close(compiled(name, own, values), sized(name, own, values))
            met.append(votes.call_count)
        assert met == [1, 2, 2], met
        own = values["w"].detach()[: 4 + rank]
        torch._dynamo.mark_dynamic(own, 0)
        with pytest.raises(fusedcomm.PeerMismatchError, match="other sizes"):
            compiled(name, own, values)


@on_ranks(2)
@pytest.mark.thorough
def test_a_size_that_is_known_too_late_stands_in_the_way(rank: int) -> None:
    """It is no input of the forward, although a gradient of its results has this size."""
    torch._dynamo.reset()

    def program(v: Values) -> Any:
        length = (10 * v["all"].detach().sigmoid()).long().sum().remainder(4).item() + 1
        torch._check(length >= 1)
        torch._check(length <= 4)
        own = v["w"].narrow(0, 0, length)
        y = SIZED["begin of a slice"]((torch.cat([v["x"]] * 3) @ v["w"]).sin(), own)
        return to_heads(y.cos().unflatten(1, (HEADS, -1))), own * 2

    values = inputs()
    with (
        patch.object(torch._dynamo.config, "capture_scalar_outputs", True),
        no_latency(),
        fusedcomm.compile.enabled(commute=True) as report,
    ):
        got = torch.compile(program, fullgraph=True, backend=interpreted)(values)
    torch.testing.assert_close(got, program(values))
    reasons = [line.reason for line in report.collectives]
    assert any("is known too late to be compared between ranks" in reason for reason in reasons), reasons


@on_ranks(2)
def test_the_first_call_alone_is_a_collective(rank: int) -> None:
    group_size, group_name = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    call = torch.ops.fusedcomm.same_moves
    for _ in range(2):
        assert call("a", [], "cpu", group_size, group_name).shape == (0,)
    dist.barrier()
    if rank == 0:  # nobody else comes
        call("a", [], "cpu", group_size, group_name)
    with pytest.raises(fusedcomm.PeerMismatchError, match="compiled another one"):
        call(f"b{rank}", [], "cpu", group_size, group_name)
    call("c", [], "cpu", group_size, group_name)


@on_ranks(2)
@pytest.mark.thorough
@pytest.mark.parametrize("cpp_wrapper", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_scheduled_graphs_compare_too(rank: int, cpp_wrapper: bool) -> None:
    torch._dynamo.reset()
    values = inputs()

    def program(v: Values) -> Any:
        return to_heads(BEFORE["positions"](product(v), v))

    with (
        no_latency(),
        inductor.patch(cpp_wrapper=cpp_wrapper, force_disable_caches=True),  # a cached graph asks when it runs
        fusedcomm.compile.enabled(overlap=not cpp_wrapper, commute=True),
        patch("fusedcomm.ops.same_moves._ask") as ask,
        torch.no_grad(),
    ):
        compiled = torch.compile(program, fullgraph=True)
        torch.testing.assert_close(compiled(values), program(values))
        assert ask.call_count == 0  # all have agreed while they compiled
        with patch.object(consent.of(_get_default_group()), "agreed", set()):  # as in a process that has not compiled
            torch.testing.assert_close(compiled(values), program(values))
        assert ask.call_count == (1 if cpp_wrapper else 2)  # for the moves, and for the order
