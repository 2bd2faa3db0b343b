"""An all_reduce by blocks where the group divides no dim of the result: x gets a few more rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import pad

from fusedcomm.memory.group import rank_of
from fusedcomm.memory.workspace import Call


def push_reduce_gather(
    algorithm: Callable[..., Tensor],
    call: Call,
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``algorithm(call, ...)``, which takes x with the exchange's rows, and the bias of this rank's columns."""
    num_rows = x.shape[-2]
    padding = call.exchange.shape[x.ndim - 2] - num_rows
    if bias is not None and call.exchange.splits_columns:
        bias = bias.chunk(call.exchange.group_size)[rank_of(call.group_name)]
    if not padding:
        return algorithm(call, x, w, bias, scale, partial_bias, out)
    result = algorithm(call, pad(x, (0, 0, 0, padding)), w, bias, scale, partial_bias).narrow(-2, 0, num_rows)
    return result.contiguous() if out is None else out.copy_(result)
