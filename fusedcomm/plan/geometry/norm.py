"""The geometry of an all_reduce with an RMSNorm behind it: few rows go to all ranks whole, in one round."""

import math
from dataclasses import replace

from torch import Tensor

from fusedcomm.plan.geometry import payloads
from fusedcomm.plan.geometry.cut import EVEN, Splits
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.shapes import Shape, matmul_all_reduce, matmul_reduce_scatter

# Elements of the payload, by the size of the group: vLLM's bounds of one-shot kernels on sm_90 in bfloat16, 32, 2 and
# 0.5 MiB (allreduce_rms_fusion.py). With 2 ranks both ways send the same bytes.
_MOST = {2: 16 << 20, 4: 1 << 20}
_MOST_OF_MORE = 1 << 18


def goes_at_once(shape: Shape, group_size: int) -> bool:
    """Whether each rank sends its whole payload to every other (`one_shot`), and not a part to each (`two_shot`)."""
    most = next((most for size, most in _MOST.items() if group_size <= size), _MOST_OF_MORE)
    return math.prod(shape) <= most


def one_shot(shape: Shape, k: int, eps: float, group_size: int) -> Exchange:
    """Every rank's terms, [R, *shape], to all ranks, in rounds of whole rows."""
    gathered = payloads.all_gather((1, *shape), 0, group_size)
    return replace(gathered, num_lead=len(shape), out_shapes=[[*shape]], k=k, reduce_op=_reduce_op(eps))


def two_shot(x: Shape, w: Shape | None, eps: float, group_size: int) -> Exchange:
    """That of the all_reduce, which it does not meet: here the owner of a block adds the residual, and of many rows
    none is cut.
    """
    if w is None:
        plain = payloads.all_reduce(x, "sum", group_size, whole_rows=True)
    else:
        plain = matmul_all_reduce(x, w, "sum", group_size, whole_rows=len(w) == 2)
    return replace(plain, reduce_op=_reduce_op(eps))


def reduce_scatter(
    x: Shape, w: Shape, eps: float, scatter_dim: int, group_size: int, splits: Splits = EVEN
) -> Exchange:
    """That of the reduce_scatter, which it meets on a workspace: the residual and the norm are each rank's own."""
    exchange = matmul_reduce_scatter(x, w, "sum", scatter_dim, group_size, splits)
    if exchange.splits_columns:
        raise ValueError(f"scatter_dim must not be the last dim, as each rank norms whole rows, got {scatter_dim}")
    return exchange


def _reduce_op(eps: float) -> str:
    return f"sum and norm, eps={eps}"


def check(shape: Shape, residual: Tensor | None, norm_weight: Tensor | None, eps: float) -> None:
    if residual is None or tuple(residual.shape) != tuple(shape):
        got = None if residual is None else list(residual.shape)
        raise ValueError(f"residual must have the shape of the sum, {[*shape]}, got {got}")
    if norm_weight is not None and tuple(norm_weight.shape) != (shape[-1],):
        raise ValueError(f"norm_weight must have shape [N] = [{shape[-1]}], got {list(norm_weight.shape)}")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
