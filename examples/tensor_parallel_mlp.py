"""A tensor-parallel MLP under sequence parallelism: a rank holds a block of the tokens, inside a block of the features.

    torchrun --nproc-per-node 2 examples/tensor_parallel_mlp.py

A plain MLP gets torch's plan for it, with the styles of fusedcomm.parallel, and trains beside the original, which has
all tokens. All parameters are DTensors, so torch's own clipping sees the whole model.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from fusedcomm.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

BATCH, TOKENS, HIDDEN, INNER, STEPS, MAX_NORM = 2, 256, 128, 512, 5, 0.1


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same model and data on every rank
    plain = MLP().to(device)
    x, target = torch.randn(2, BATCH, TOKENS, HIDDEN, device=device)
    # The optimizer comes before the group: what torch.optim imports would keep gloo's threads alive (torch 2.13).
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    dist.init_process_group()
    rank, group_size = dist.get_rank(), dist.get_world_size()

    model = copy.deepcopy(plain)
    mesh = init_device_mesh(device.type, (group_size,))
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    my_x, my_target = (t.chunk(group_size, 1)[rank] for t in (x, target))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        plain_loss = F.mse_loss(plain(x), target)
        plain_loss.backward()
        plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        plain_optimizer.step()
        plain_optimizer.zero_grad()

        loss = F.mse_loss(model(my_x), my_target) / group_size  # this rank's part of the mean over all tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total:.6f}, single process {plain_loss:.6f}")
        torch.testing.assert_close(total, plain_loss.detach(), rtol=1e-3, atol=0)
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(norm.full_tensor(), plain_norm, rtol=1e-3, atol=0)
    if rank == 0:
        print(f"tensor_parallel_mlp: the losses on {group_size} ranks equal those of a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
