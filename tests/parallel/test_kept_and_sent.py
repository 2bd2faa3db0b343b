"""What layers keep for the backward and send, under torch's styles and these: the table in docs/parallel.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fusedcomm
import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched, pushed, saved_for_backward

R, BATCH, TOKENS, K, H = 2, 2, 6, 8, 10  # R ranks; M = BATCH * TOKENS
WHOLE = BATCH * TOKENS * K * 4  # bytes of M x K elements of float32
PART = WHOLE * (R - 1) // R


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, H, bias=False), nn.Linear(K, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.up(x)  # an addition keeps nothing


def up(styles: Any) -> nn.Module:
    prepare = styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"": prepare, "gate": styles.ColwiseParallel(), "up": styles.ColwiseParallel()}
    return torch_parallel.parallelize_module(Up(), init_device_mesh("cpu", (R,)), plan)


def down(styles: Any) -> nn.Module:
    style = styles.RowwiseParallel(output_layouts=Shard(1))
    return torch_parallel.parallelize_module(nn.Linear(H, K, bias=False), init_device_mesh("cpu", (R,)), style)


def kept(saved: list[Tensor], parameters: list[Tensor]) -> int:
    """Bytes of what is saved, each memory once, without the parameters."""
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in saved]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}
    own = {p.to_local().untyped_storage().data_ptr() for p in parameters if isinstance(p, DTensor)}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in own)


@on_ranks(R)
@pytest.mark.parametrize("by_ops", [False, True], ids=["torch", "fusedcomm"])
@pytest.mark.parametrize(
    ("make", "width", "tokens", "keeps"),
    [(up, K, TOKENS // R, WHOLE), (down, H // R, TOKENS, BATCH * TOKENS * H * 4 // R)],
    ids=["gather", "reduce_scatter"],
)
def test_kept_and_sent(rank: int, by_ops: bool, make: Any, width: int, tokens: int, keeps: int) -> None:
    module = make(our_parallel if by_ops else torch_parallel)
    x = torch.randn(BATCH, tokens, width, requires_grad=True)
    with fusedcomm.force_algorithm("chunked", strict=True):
        with pushed() as fused, Dispatched() as plain, saved_for_backward() as saved:
            y = module(x)
        sent = fused.num_bytes, plain.collective_bytes(R)
        with pushed() as fused_back, Dispatched() as plain_back:
            y.sum().backward()
        sent_back = fused_back.num_bytes, plain_back.collective_bytes(R)
    assert kept(saved, list(module.parameters())) == keeps
    assert sent == sent_back == ((PART, 0) if by_ops else (0, PART))
