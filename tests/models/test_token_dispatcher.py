"""torchtitan's RoutedExperts with fusedcomm's token dispatcher, beside its own in one process."""

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fusedcomm
from tests.helpers.on_ranks import on_ranks


def has_dispatchers() -> bool:
    try:
        return tuple(map(int, version("torchtitan").split(".")[:2])) >= (0, 3)
    except PackageNotFoundError:
        return False


pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not has_dispatchers(), reason="torchtitan 0.3 is not installed")]

DIM, HIDDEN, E, K, SIZE = 16, 32, 4, 2, 2


def routed(num_experts: int, dispatcher: Any) -> nn.Module:
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    sizes = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=num_experts)
    made: nn.Module = RoutedExperts.Config(inner_experts=sizes, token_dispatcher=dispatcher).build()
    return made


def inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    scores, ids = torch.randn(2, 5, E, generator=generator).softmax(-1).topk(K)
    x = torch.randn(2, 5, DIM, generator=generator)
    return [x.requires_grad_(), scores.requires_grad_(), ids, torch.bincount(ids.flatten(), minlength=E)]


@on_ranks(SIZE)
def test_routed_experts(rank: int) -> None:
    """In bfloat16, as torchtitan multiplies: results, and gradients of x, scores and this rank's experts."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    sizes = {"num_experts": E, "top_k": K}
    whole = routed(E, LocalTokenDispatcher.Config(**sizes))
    ours = routed(E // SIZE, fusedcomm.moe.TokenDispatcher(**sizes))
    mesh = init_device_mesh("cpu", (SIZE,))
    ours.parallelize(SimpleNamespace(get_optional_mesh=lambda name: mesh))  # type: ignore[operator]
    torch.manual_seed(0)
    with torch.no_grad():
        for p, w in zip(whole.parameters(), ours.parameters(), strict=True):
            w.copy_(p.normal_(std=0.3).chunk(SIZE)[rank])
    everyone = [inputs(r) for r in range(SIZE)]
    wants = [whole(*theirs) for theirs in everyone]
    torch.stack(wants).square().sum().backward()
    mine = inputs(rank)
    y = ours(*mine)
    y.square().sum().backward()
    torch.testing.assert_close(y, wants[rank], rtol=1e-2, atol=1e-2)
    for got, want in zip(mine[:2], everyone[rank][:2], strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=2e-2, atol=2e-2)
    for p, w in zip(whole.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(w.grad, p.grad.chunk(SIZE)[rank], rtol=2e-2, atol=2e-2)
