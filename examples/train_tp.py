"""FSDP2 and tensor parallelism: each pair of ranks shares the layers, the pairs share the batch and the parameters.

    torchrun --nproc-per-node 4 examples/train_tp.py [--compile]

The styles are those of torch.distributed.tensor.parallel but for the import: parameters are DTensors, and clipping,
optimizers and checkpoints are torch's own. After three steps a new model takes over from a checkpoint. The plain model
trains beside, on the whole batch.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
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
TENSOR, STEPS, RESUME_AT = 2, 5, 3


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
    """A model and its optimizer; a part of a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, batch: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main() -> None:
    compiled = "--compile" in sys.argv[1:]
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # The optimizer comes before the group: what torch.optim imports would keep gloo's threads alive (torch 2.13).
    plain = Training(model_of(0, device))

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (size // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
    data = mesh["data"]
    if compiled:
        fusedcomm.compile.enable()

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    for step in range(STEPS):
        # A second model, of other parameters, goes on with what the checkpoint has. Under FSDP2 a second compiled one
        # crashes on a CPU (torch 2.13, with torch's own styles too), so the first goes on.
        if step == 0 or (step == RESUME_AT and not compiled):
            model = model_of(step, device)
            parallelize(model, mesh, compiled)
            training = Training(model)
        if step == RESUME_AT:
            dcp.load({"training": training}, checkpoint_id=folder[0])
        batch = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step % 2)).to(device)
        loss = training.step(batch.chunk(data.size())[data.get_local_rank()]) / data.size()
        dist.all_reduce(loss, group=data.get_group())
        single = plain.step(batch)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}, single process {single:.6f}")
        torch.testing.assert_close(loss, single, rtol=1e-3, atol=0)
        if step == RESUME_AT - 1:
            dcp.save({"training": training}, checkpoint_id=folder[0])
    if rank == 0:
        shutil.rmtree(folder[0])
        print(f"train_tp: the losses on {size} ranks equal those of a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
