"""What torch.utils.flop_counter.FlopCounterMode counts for a call: this rank's multiplications and additions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.fusedcomm


@register_flop_formula(
    [_ops.matmul_all_to_all, _ops.all_to_all_matmul, _ops.matmul_reduce_scatter, _ops.matmul_all_reduce]
)
def _one_matmul(x_shape: Sequence[int], w_shape: Sequence[int], *_: Any, **__: Any) -> int:
    """An exchange leaves as many elements of x: 2 * B * M * K * N, wherever it stands."""
    return 2 * math.prod(x_shape) * w_shape[-1]


@register_flop_formula(_ops.all_gather_matmul)
def _gathered_matmuls(
    x_shape: Sequence[int],
    w_shapes: Sequence[Sequence[int]],
    biases: Any,
    gather_dim: int,
    return_gathered: bool,
    group_size: int,
    group_name: str,
    **_: Any,
) -> int:
    return sum(2 * group_size * math.prod(x_shape) * shape[-1] for shape in w_shapes)
