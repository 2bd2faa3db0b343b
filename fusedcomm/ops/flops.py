"""FLOPs of a call for torch.utils.flop_counter.FlopCounterMode: this rank's multiplications and additions."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.fusedcomm


@register_flop_formula(
    [
        *(_ops.matmul_all_to_all, _ops.matmul_reduce_scatter, _ops.matmul_all_reduce),
        *(_ops.matmul_all_reduce_norm, _ops.matmul_reduce_scatter_norm),
        *(_ops.moe_combine, _ops.moe_grouped_matmul, _ops.moe_grouped_outer),
        *(_ops.scaled_matmul_all_to_all, _ops.scaled_matmul_reduce_scatter, _ops.scaled_matmul_all_reduce),
    ]
)
def _of_x(x_shape: Sequence[int], w_shape: Sequence[int] | None, *_: Any, **__: Any) -> int:
    """The matmul comes before the collective: 2 * B * M * K * N."""
    return 0 if w_shape is None else 2 * math.prod(x_shape) * w_shape[-1]


@register_flop_formula([_ops.all_to_all_matmul, _ops.scaled_all_to_all_matmul])
def _of_result(x_shape: Any, w_shape: Sequence[int], *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * math.prod(out_shape[0]) * w_shape[-2]


@register_flop_formula([_ops.all_gather_matmul, _ops.scaled_all_gather_matmul])
def _of_results(x_shape: Any, w_shapes: Sequence[Sequence[int]], *_: Any, out_shape: Any, **__: Any) -> int:
    return sum(2 * math.prod(out) * w[-2] for out, w in zip(out_shape[0], w_shapes, strict=True))


@register_flop_formula(_ops.moe_dispatch)
def _of_rows(
    x_shape: Any, ids_shape: Any, w_shapes: Sequence[Sequence[int]], *_: Any, out_shape: Any, **__: Any
) -> int:
    """All rows that the capacity allows."""
    return sum(2 * out_shape[0][0] * w[-2] * w[-1] for w in w_shapes)
