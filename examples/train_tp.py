"""FSDP2 and tensor parallelism: each pair of ranks shares the layers, the pairs share the batch and the parameters.

    torchrun --nproc-per-node 4 examples/train_tp.py [--compile] [--steps N] [--checkpoint FOLDER]

The styles are those of torch.distributed.tensor.parallel but for the import: parameters are DTensors, and clipping,
optimizers and checkpoints are torch's own. Started again with more steps, it goes on from the checkpoint, on any even
number of ranks. `model_of` and `Training` train the plain model as well, with the same losses.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import fusedcomm.compile
from fusedcomm.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCAB, HIDDEN, INNER, HEADS, BATCH, TOKENS, LAYERS = 256, 128, 512, 8, 8, 64, 2
TENSOR = 2  # ranks that share a layer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(HIDDEN), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(HIDDEN), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def model_of(seed: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(seed)  # the same model on every rank
    blocks = [Block() for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCAB, bias=False)).to(device)


def parallelize(model: nn.Sequential, mesh: DeviceMesh, compiled: bool) -> None:
    tokens = Shard(1)  # outside of attention and MLP a rank holds a block of the tokens
    gathered = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
    row = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens, use_local_output=False)
    head = ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.[qkv]": ColwiseParallel(),
        "attention.out": row,
        "mlp_norm": SequenceParallel(),
        "mlp": gathered,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": row,
    }
    parallelize_module(model, mesh["tensor"], {"0": embedding, str(LAYERS + 1): head})
    for block in list(model.children())[1:-1]:
        parallelize_module(block, mesh["tensor"], plan)
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


class Training:
    """A model, its optimizer and the number of steps; a part of a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer, self.steps = model, torch.optim.AdamW(model.parameters(), lr=1e-3), 0

    def step(self, batch: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["steps"]


def batch_of(step: int) -> Tensor:
    """The whole batch, of which each pair of ranks takes its part."""
    return torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step % 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if args.compile:
        fusedcomm.compile.enable()

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
    data = mesh["data"]
    resumes = args.checkpoint is not None and (args.checkpoint / ".metadata").exists()
    model = model_of(1 if resumes else 0, device)  # then all of its parameters must come from the checkpoint
    parallelize(model, mesh, args.compile)
    training = Training(model)
    if resumes:
        dcp.load({"training": training}, checkpoint_id=args.checkpoint)

    while training.steps < args.steps:
        batch = batch_of(training.steps).chunk(data.size())[data.get_local_rank()].to(device)
        loss = training.step(batch) / data.size()
        dist.all_reduce(loss, group=data.get_group())
        if rank == 0:
            print(f"step {training.steps}: loss {loss:.6f}")
    if args.checkpoint is not None:
        dcp.save({"training": training}, checkpoint_id=args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
