"""The layers of fusedcomm.nn as tests run them: what each replaces, and what part of that a rank holds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, UlyssesOut, UlyssesQKV

HIDDEN, HEADS, HEAD_DIM, TOKENS = 12, 4, 3, 8


def whole(t: Tensor) -> Tensor:
    """The whole of a DTensor of a parallel layer, whose placement must not be Partial."""
    if isinstance(t, DTensor):
        assert all(isinstance(each, (Shard, Replicate)) for each in t.placements), t.placements
        return t.full_tensor()
    return t


def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


@dataclass(frozen=True)
class Layer:
    """A layer, the plain one that it replaces, and the dims in which input, output and parameters are sharded (None:
    not).
    """

    name: str
    sizes: tuple[int, int]  # in_features and out_features
    kind: type[Any]
    x_shape: tuple[int, ...]
    x_dim: int | None
    y_dim: int | None
    shard_dims: dict[str, int]
    partial: tuple[str, ...]  # plain parameters whose gradient is this rank's part
    ops: tuple[str, ...]  # of a forward and its backward
    kv_heads: int = HEADS

    def __str__(self) -> str:
        return self.name

    def plain(self, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
        torch.manual_seed(1)
        return nn.Linear(*self.sizes, bias=bias, dtype=dtype)

    def program(self, linear: nn.Linear, x: Tensor) -> list[Tensor]:
        """The plain layer, with the views that belong to it."""
        if self.kind is UlyssesQKV:
            heads = linear(x).unflatten(-1, (HEADS + 2 * self.kv_heads, HEAD_DIM))
            return list(heads.split([HEADS, self.kv_heads, self.kv_heads], -2))
        return [linear(x.flatten(-2) if self.kind is UlyssesOut else x)]

    def options(self) -> dict[str, Any]:
        if self.kind is UlyssesQKV:
            return {"num_heads": HEADS, "num_kv_heads": self.kv_heads}
        if self.kind is UlyssesOut:
            return {"num_heads": HEADS}
        return {"sequence_dim": self.x_dim if self.shard_dims.get("weight") == 0 else self.y_dim}


X, QKV, OUT = (2, TOKENS, HIDDEN), (HIDDEN, 3 * HEADS * HEAD_DIM), (HEADS * HEAD_DIM, HIDDEN)
BOTH = ("weight", "bias")
INTO, BACK = "matmul_all_to_all", "all_to_all_matmul"
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
LAYERS = [
    Layer("qkv", QKV, UlyssesQKV, X, 1, -2, {}, BOTH, (INTO, BACK)),
    Layer("qkv-gqa", (HIDDEN, 8 * HEAD_DIM), UlyssesQKV, X, 1, -2, {}, BOTH, (INTO, INTO, BACK, BACK), kv_heads=2),
    Layer("out", OUT, UlyssesOut, (2, TOKENS, HEADS, HEAD_DIM), -2, 1, {}, BOTH, (BACK, INTO)),
    Layer(
        "column-sequence", (HIDDEN, 8), ColumnParallelLinear, X, 1, -1, dict.fromkeys(BOTH, 0), (), (GATHER, SCATTER)
    ),
    Layer("column", (HIDDEN, 8), ColumnParallelLinear, X, None, -1, dict.fromkeys(BOTH, 0), (), (REDUCE,)),
    Layer("row-sequence", (HIDDEN, 7), RowParallelLinear, X, -1, 1, {"weight": 1}, (), (SCATTER, GATHER)),
    Layer("row", (HIDDEN, 7), RowParallelLinear, X, -1, None, {"weight": 1}, (), (REDUCE,)),
]
BY_NAME = {layer.name: layer for layer in LAYERS}


class Nested(nn.Module):
    """Layers of each kind, under prefixes, one of them twice, beside plain ones and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv: Any = nn.Linear(*QKV)
        self.mlp: Any = nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN))
        self.norm = nn.BatchNorm1d(3)
        self.again = self.mlp

    def parallel(self) -> Nested:
        model = copy.deepcopy(self)
        model.qkv = UlyssesQKV.from_linear(model.qkv, num_heads=HEADS)
        model.mlp[0] = ColumnParallelLinear.from_linear(model.mlp[0])
        model.mlp[2] = RowParallelLinear.from_linear(model.mlp[2])
        return model
