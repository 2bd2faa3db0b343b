"""diffusers' Ulysses context parallelism with its attention's exchanges by fusedcomm: `register` is all of it.

    torchrun --nproc-per-node 2 examples/diffusers_ulysses.py

Under fusedcomm.compile.enable() diffusers' own exchanges are fused with their matmuls, without this: docs/models.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, WanTransformer3DModel
from diffusers.models import attention_dispatch
from torch import Tensor
from torch.nn import functional as F

import fusedcomm

HEADS, HEAD_DIM = 4, 8


def ulysses(
    q: Tensor, k: Tensor, v: Tensor, mask: None, dropout: float, causal: bool, scale: Any, *rest: Any
) -> Tensor:
    """q, k, v and the result are [batch, tokens / R, heads, features]."""
    group = rest[-1].context_parallel_config._ulysses_mesh.get_group()
    q, k, v = (fusedcomm.all_to_all(t, 1, 2, group).transpose(1, 2) for t in (q, k, v))  # all tokens of some heads
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)
    return fusedcomm.all_to_all(y.transpose(1, 2), 2, 1, group)


def register() -> None:
    attention_dispatch.TemplatedUlyssesAttention = SimpleNamespace(apply=ulysses)


def wan() -> WanTransformer3DModel:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 64, "rope_max_seq_len": 32}
    return WanTransformer3DModel(num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, num_layers=2, **sizes)


def gradients(model: WanTransformer3DModel, inputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """diffusers gathers the tokens of the result on every rank."""
    (y,) = model(*inputs, return_dict=False)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return y.detach(), dict(zip(names, torch.autograd.grad(y.square().mean(), parameters), strict=True))


def main() -> None:
    dist.init_process_group("gloo")
    register()
    inputs = [torch.randn(1, 4, 1, 8, 8), torch.tensor([5]), torch.randn(1, 8, 16)]
    dist.broadcast(inputs[0], 0)
    dist.broadcast(inputs[2], 0)
    expected, whole = gradients(wan(), inputs)
    ours = wan()
    with mock.patch("torch.accelerator.device_count", return_value=1):  # 0 on a machine without a GPU
        ours.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    y, grads = gradients(ours, inputs)
    torch.testing.assert_close(y, expected)
    for name, grad in grads.items():
        dist.all_reduce(grad)  # each rank has those of its tokens
        torch.testing.assert_close(grad, whole[name], atol=1e-6, rtol=1e-4)
    if dist.get_rank() == 0:
        size = dist.get_world_size()
        print(f"diffusers_ulysses: the result and all gradients on {size} ranks are those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
