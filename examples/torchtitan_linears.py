"""torchtitan 0.3's linears with collectives inside (tp_gemm_backend="dist_gemm") by fused ops: a script calls `fuse`.

torchrun --nproc-per-node 2 examples/torchtitan_linears.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import dist_gemm
from torchtitan.models.common.config_utils import make_ffn_config

import fusedcomm

DIM, HIDDEN, LAYERS, BATCH, TOKENS = 32, 96, 2, 2, 16


def all_gather_linear(x: Tensor, w: Tensor, bias: Tensor | None, group: Any, name: str) -> Tensor:
    return fusedcomm.all_gather_matmul(x, w.mT, 0, group, bias=bias)


def all_gather_linears(x: Tensor, w1: Tensor, w3: Tensor, group: Any, name: str) -> list[Tensor]:
    return fusedcomm.all_gather_matmul(x, [w1.mT, w3.mT], 0, group)


def linear_reduce_scatter(x: Tensor, w: Tensor, bias: Tensor | None, group: Any, name: str) -> Tensor:
    return fusedcomm.matmul_reduce_scatter(x, w.mT, 0, group, bias=bias)


def fuse() -> None:
    dist_gemm.AllGatherLinear = SimpleNamespace(apply=all_gather_linear)
    dist_gemm.AllGatherLinearMulti = SimpleNamespace(apply=all_gather_linears)
    dist_gemm.LinearReduceScatter = SimpleNamespace(apply=linear_reduce_scatter)


def model_of(backend: str) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    config = make_ffn_config(dim=DIM, hidden_dim=HIDDEN, w1_param_init={}, w2w3_param_init={}, tp_gemm_backend=backend)
    return nn.Sequential(*(config.build() for _ in range(LAYERS)))


def loss_of(model: nn.Sequential, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(x).square().sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    set_spmd_backend("spmd_types")
    fuse()
    single, ours = model_of("default"), model_of("dist_gemm")
    dims = {name: int("w2" in name) for name, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        p.data = p.data.chunk(num_ranks, dims[name])[rank].contiguous()
    x = 10 * torch.randn(BATCH, TOKENS, DIM)
    with set_current_spmd_mesh(init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))):
        loss, grads = loss_of(ours, x.chunk(num_ranks, 1)[rank])  # a rank's tokens
    dist.all_reduce(loss)
    expected, whole = loss_of(single, x)
    torch.testing.assert_close(loss, expected)
    for name, grad in grads.items():
        want = whole[name].chunk(num_ranks, dims[name])[rank]
        assert (grad - want).abs().max() <= 1e-5 * want.abs().max()
    if rank == 0:
        print(f"torchtitan_linears: loss {loss:.4f} and all gradients on {num_ranks} ranks are those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
