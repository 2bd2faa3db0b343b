"""The Ulysses layers as tests run them: the plain ones that they replace, and where a rank's part of x and y lies."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fusedcomm.nn import UlyssesOut, UlyssesQKV
from fusedcomm.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN, HEADS, HEAD_DIM, TOKENS = 12, 4, 3, 8


@dataclass(frozen=True)
class Layer:
    """A layer, the plain one that it replaces, and the dims in which input and output are sharded."""

    name: str
    sizes: tuple[int, int]  # in_features and out_features
    kind: type[Any]
    x_shape: tuple[int, ...]
    x_dim: int
    y_dim: int
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
        return {"num_heads": HEADS}


X, QKV, OUT = (2, TOKENS, HIDDEN), (HIDDEN, 3 * HEADS * HEAD_DIM), (HEADS * HEAD_DIM, HIDDEN)
INTO, BACK = "matmul_all_to_all", "all_to_all_matmul"
LAYERS = [
    Layer("qkv", QKV, UlyssesQKV, X, 1, -2, (INTO, BACK)),
    Layer("qkv-gqa", (HIDDEN, 8 * HEAD_DIM), UlyssesQKV, X, 1, -2, (INTO, INTO, BACK, BACK), kv_heads=2),
    Layer("out", OUT, UlyssesOut, (2, TOKENS, HEADS, HEAD_DIM), -2, 1, (BACK, INTO)),
]
BY_NAME = {layer.name: layer for layer in LAYERS}


class Nested(nn.Module):
    """Linears under prefixes, one of them twice, beside a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv: Any = nn.Linear(*QKV)
        self.mlp: Any = nn.Sequential(nn.Linear(HIDDEN, 8), nn.GELU(), nn.Linear(8, HIDDEN))
        self.norm = nn.BatchNorm1d(3)
        self.again = self.mlp

    def parallel(self) -> Nested:
        """A Ulysses layer beside DTensors of the styles."""
        model = copy.deepcopy(self)
        model.qkv = UlyssesQKV.from_linear(model.qkv, num_heads=HEADS)
        parallelize_module(model.mlp, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model
