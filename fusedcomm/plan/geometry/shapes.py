"""The Exchange of each op from its arguments' shapes: all checks of shapes and dims, with the texts that users see.

Sizes may be symbolic, so that fake tensors get the same checks. Each function raises ValueError for anything that the
op's docstring excludes.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedcomm.plan.geometry.cut import EVEN, Splits, cut_of
from fusedcomm.plan.geometry.exchange import FEW_ROWS, Exchange
from fusedcomm.plan.geometry.spans import block_shape
from fusedcomm.plan.scaling import VALUES

REDUCE_OPS = ("sum", "avg")
_MIN_ROWS = 32  # of a rank's block; chosen
OP_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Shape = Sequence[int]


def matmul_all_to_all(
    x: Shape,
    w: Shape,
    out_shape: Shape | None,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    splits: Splits = EVEN,
) -> Exchange:
    """``exchange((x @ w).view(out_shape), gather_dim, scatter_dim)``."""
    check_group_size(group_size)
    _check_matmul(x, w, "x")
    y = [*x[:-1], *_check_out_shape(w[-1], out_shape)]
    gather_dim, scatter_dim = check_dims(gather_dim, scatter_dim, len(y))
    cut = cut_of(splits, y[gather_dim], y[scatter_dim], group_size)
    if cut is None:
        out = gathered_shape(block_shape(y, scatter_dim, group_size), gather_dim, group_size)
        return push(x, w, y, scatter_dim, (out, gather_dim), group_size)
    (gathered, scattered), largest = cut.both, None
    if not is_symbolic((*x, *y, *cut)):
        lead, sizes = (
            len(x) - 1,
            with_sizes(y, {gather_dim: gathered.largest, scatter_dim: group_size * scattered.largest}),
        )
        columns = None if out_shape is None else tuple(sizes[lead:])
        whole = (*sizes[:lead], x[-1]), (*sizes[: len(w) - 2], x[-1], math.prod(sizes[lead:]))
        largest = of(matmul_all_to_all, *whole, columns, gather_dim, scatter_dim, group_size)
    out = with_sizes(y, {gather_dim: gathered.total, scatter_dim: scattered.sizes[cut.rank]})
    return push(x, w, y, scatter_dim, (out, gather_dim), group_size, cut=cut, largest=largest)


def all_to_all_matmul(
    x: Shape, w: Shape, gather_dim: int, scatter_dim: int, group_size: int, splits: Splits = EVEN
) -> Exchange:
    """``exchange(x, gather_dim, scatter_dim).flatten to w's K @ w``."""
    check_group_size(group_size)
    _check_ndim(x, "x")
    gather_dim, scatter_dim = check_dims(gather_dim, scatter_dim, len(x))
    cut = cut_of(splits, x[gather_dim], x[scatter_dim], group_size)
    if cut is None:
        exchanged = gathered_shape(block_shape(x, scatter_dim, group_size), gather_dim, group_size)
    else:
        gathered, scattered = cut.both
        exchanged = with_sizes(x, {gather_dim: gathered.total, scatter_dim: scattered.sizes[cut.rank]})
    num_lead = _num_lead(exchanged, w)
    lead = exchanged[:num_lead]
    _check_matmul([*lead, math.prod(exchanged[num_lead:])], w, "the exchanged x")
    largest = None
    if cut is not None and not is_symbolic((*x, *w, *cut)):
        sizes = with_sizes(x, {gather_dim: gathered.largest, scatter_dim: group_size * scattered.largest})
        all_of = with_sizes(x, {gather_dim: group_size * gathered.largest, scatter_dim: scattered.largest})
        whole_w = (*all_of[: len(w) - 2], math.prod(all_of[num_lead:]), w[-1])
        largest = of(all_to_all_matmul, tuple(sizes), whole_w, gather_dim, scatter_dim, group_size)
    outs, packed = [[*lead, w[-1]]], (list(x), scatter_dim)
    return gather(exchanged, num_lead, w, gather_dim, packed, group_size, outs, cut=cut, largest=largest)


def all_gather_matmul(
    x: Shape, ws: Sequence[Shape], gather_dim: int, group_size: int, splits: Splits = EVEN
) -> Exchange:
    """``[all_gather(x, gather_dim) @ w for w in ws]``."""
    check_group_size(group_size)
    _check_ndim(x, "x")
    if len(ws) == 0:
        raise ValueError("w must be a tensor or a list of at least one, got an empty list")
    gather_dim = check_dim("gather_dim", gather_dim, len(x))
    cut = cut_of(splits, x[gather_dim], None, group_size)
    largest = None
    if cut is None:
        gathered = gathered_shape(x, gather_dim, group_size)
    else:
        assert cut.gathered is not None
        gathered = with_sizes(x, {gather_dim: cut.gathered.total})
    for w in ws:
        _check_matmul(gathered, w, "the gathered x")
        if len(w) != len(ws[0]):
            raise ValueError(f"either every w or none must have batch dims, got {len(ws[0])} and {len(w)} dims")
    if cut is not None and cut.gathered is not None and not is_symbolic((*x, *cut)):
        part = with_sizes(x, {gather_dim: cut.gathered.largest})
        sizes = gathered_shape(part, gather_dim, group_size)
        whole_ws = tuple((*sizes[: len(w) - 2], sizes[-1], w[-1]) for w in ws)
        largest = of(all_gather_matmul, tuple(part), whole_ws, gather_dim, group_size)
    outs, packed = [[*gathered[:-1], w[-1]] for w in ws], (list(x), None)
    return gather(gathered, len(x) - 1, ws[0], gather_dim, packed, group_size, outs, cut=cut, largest=largest)


def matmul_reduce_scatter(
    x: Shape, w: Shape, reduce_op: str, scatter_dim: int, group_size: int, splits: Splits = EVEN
) -> Exchange:
    """``reduce_scatter(x @ w, reduce_op, scatter_dim)``."""
    check_group_size(group_size)
    _check_matmul(x, w, "x")
    check_reduce_op(reduce_op)
    y = [*x[:-1], w[-1]]
    scatter_dim = check_dim("scatter_dim", scatter_dim, len(y))
    cut = cut_of(splits, None, y[scatter_dim], group_size)
    if cut is None:
        block = block_shape(y, scatter_dim, group_size)
        return push(x, w, y, scatter_dim, (block, None), group_size, reduce_op=reduce_op)
    assert cut.scattered is not None
    largest = None
    if not is_symbolic((*x, *y, *cut)):
        sizes = with_sizes(y, {scatter_dim: group_size * cut.scattered.largest})
        whole = (*sizes[:-1], x[-1]), (*sizes[: len(w) - 2], x[-1], sizes[-1])
        largest = of(matmul_reduce_scatter, *whole, reduce_op, scatter_dim, group_size)
    block = with_sizes(y, {scatter_dim: cut.scattered.sizes[cut.rank]})
    return push(x, w, y, scatter_dim, (block, None), group_size, reduce_op=reduce_op, cut=cut, largest=largest)


def matmul_all_reduce(x: Shape, w: Shape, reduce_op: str, group_size: int, *, whole_rows: bool = False) -> Exchange:
    """``all_reduce(x @ w, reduce_op)``: each rank reduces one block and gathers the others.

    Where R divides neither the rows nor the columns of y, the Exchange is that of an x with a few more rows.
    """
    check_all_reduce(x, w, reduce_op, group_size)
    rows, n = math.prod(x[:-1]), w[-1]
    lead = [*x[:-1]] if len(w) > 2 else [rows]
    y, out = [*lead, n], [*x[:-1], n]
    if cuts_columns(rows, n, group_size, whole_rows):
        split_dim = len(lead)
    else:
        split_dim = next((dim for dim, size in enumerate(lead) if size % group_size == 0), len(lead) - 1)
    if y[split_dim] % group_size:
        y[split_dim] += -y[split_dim] % group_size
        out = y
    return replace(
        push((*lead, x[-1]), w, y, split_dim, (y, split_dim), group_size, reduce_op=reduce_op), out_shapes=[out]
    )


def push(
    x: Shape,
    w: Shape,
    y: list[int],
    split_dim: int,
    unpacked: tuple[list[int], int | None],
    group_size: int,
    **more: Any,
) -> Exchange:
    """The Exchange of y = x @ w, viewed: its blocks along split_dim go to the ranks; received blocks are the result."""
    sent, outs = (block_shape(y, split_dim, group_size), None), [unpacked[0]]
    return Exchange(y, len(x) - 1, len(w) - 2, split_dim, sent, unpacked, group_size, outs, x[-1], **more)


def gather(
    gathered: list[int], num_lead: int, w: Shape, gather_dim: int, packed: Any, group_size: int, outs: Any, **more: Any
) -> Exchange:
    """The Exchange of gathered @ w; blocks along gather_dim come from the ranks."""
    where = gather_dim, packed, (gathered, gather_dim), group_size
    return Exchange(gathered, num_lead, len(w) - 2, *where, outs, w[-2], gathers=True, **more)


def cuts_columns(rows: int, n: int, group_size: int, whole_rows: bool = False) -> bool:
    """Whether an all_reduce of [rows, n] is cut into blocks of columns.

    Cut columns read x once per rank, and cut rows read w. A few rows are multiplied once, and sent as one run.
    ``whole_rows``: rows are cut where each rank has enough of them for its matmul.
    """
    wide = n > rows >= _MIN_ROWS * group_size and not (whole_rows and rows >= FEW_ROWS * group_size)
    return n % group_size == 0 and (wide or rows % group_size != 0)


def check_all_reduce(x: Shape, w: Shape, reduce_op: str, group_size: int) -> None:
    check_group_size(group_size)
    _check_matmul(x, w, "x")
    check_reduce_op(reduce_op)


def of(make: Callable[..., Any], *args: Any) -> Any:
    """``make(*args)``, cached where the sizes are plain ints, because geometry costs more than a small matmul."""
    try:
        return _cached(make, *args)
    except TypeError:  # a SymInt has no hash
        return make(*args)


def is_symbolic(arg: Any) -> bool:
    return isinstance(arg, torch.SymInt) or (isinstance(arg, tuple) and any(map(is_symbolic, arg)))


@functools.lru_cache(maxsize=1024)
def _cached(make: Callable[..., Exchange], *args: Any) -> Exchange:
    exchange = make(*args)
    bound = inspect.signature(make).bind(*args).arguments
    exchange.arguments = {name: value for name, value in bound.items() if name != "splits"}
    if exchange.cut is not None and exchange.largest is not None:  # equal on all ranks, for their comparison
        exchange.arguments |= {**exchange.largest.arguments, **exchange.cut.arguments}
    return exchange


def check_tensors(
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype | None = None,
    takes_float8: bool = False,
    **others: Tensor | None,
) -> None:
    """Checks of dtype and device that all ops share. ``out_dtype``: of scaled ones, whose x and w are checked."""
    if out_dtype is None and x.dtype not in OP_DTYPES and not (takes_float8 and x.dtype in VALUES):
        raise ValueError(f"x must be float32, float16, bfloat16 or float64, got {x.dtype}")
    if len(biases) != len(ws):
        raise ValueError(f"bias must have one entry per w, {len(ws)}, got {len(biases)}")
    for name, tensors in {"w": ws, "bias": biases, **{name: [t] for name, t in others.items()}}.items():
        for t in tensors:
            if t is None:
                continue
            is_wide = name == "norm_weight" and x.itemsize == 2 and t.dtype == torch.float32
            if out_dtype is None and t.dtype != x.dtype and not is_wide:
                raise ValueError(f"{name} must have x's dtype {x.dtype}, got {t.dtype}")
            if out_dtype is not None and name != "w" and t.dtype != out_dtype:
                raise ValueError(f"{name} must have out_dtype {out_dtype}, got {t.dtype}")
            if t.device != x.device:
                raise ValueError(f"{name} must be on x's device {x.device}, got {t.device}")


def check_bias(bias: Tensor | None, n: int, name: str = "N", argument: str = "bias") -> None:
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"{argument} must have shape [{name}] = [{n}], got {list(bias.shape)}")


def check_out(out: Tensor, x: Tensor, shape: Shape, name: str = "out", dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless a result of ``shape``, with x's dtype, or ``dtype``, and device, can be written to
    ``out``.
    """
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(out.shape)}")
    if out.dtype != (dtype or x.dtype):
        whose = "x's dtype" if dtype is None else "dtype"
        raise ValueError(f"{name} must have {whose} {dtype or x.dtype}, got {out.dtype}")
    if out.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {out.device}")
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {out.stride()}")


def _num_lead(exchanged: Shape, w: Shape) -> int:
    """The number of leading dims of the exchanged x that are not K.

    K is made of as few dims as possible; with a batched w, one dim of rows is left.
    """
    if len(w) != 2:
        return max(1, min(len(w) - 1, len(exchanged) - 1))
    for num_lead in range(len(exchanged) - 1, 0, -1):
        if math.prod(exchanged[num_lead:]) == w[-2]:
            return num_lead
    return len(exchanged) - 1


def with_sizes(shape: Shape, sizes: Mapping[int, int]) -> list[int]:
    return [sizes.get(dim, size) for dim, size in enumerate(shape)]


def gathered_shape(shape: Shape, dim: int, group_size: int) -> list[int]:
    return with_sizes(shape, {dim: shape[dim] * group_size})


def check_group_size(group_size: int) -> None:
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")


def _check_ndim(x: Shape, name: str) -> None:
    if len(x) < 2:
        raise ValueError(f"{name} must have at least 2 dims [..., K], got shape {tuple(x)}")


def _check_matmul(x: Shape, w: Shape, name: str) -> None:
    """``name``: of x in errors; it may have been gathered or exchanged before the matmul."""
    _check_ndim(x, name)
    if len(w) not in (2, len(x)):
        raise ValueError(f"w must be 2-D [K, N] or have {name}'s batch dims, got {len(w)} dims beside {len(x)}")
    if x[-1] != w[-2]:
        raise ValueError(f"{name} and w must agree on K, got {x[-1]} and {w[-2]}")
    if len(w) > 2 and tuple(w[:-2]) != tuple(x[:-2]):
        raise ValueError(f"batch dims of w must equal those of {name}, got {tuple(w[:-2])} and {tuple(x[:-2])}")


def _check_out_shape(n: int, out_shape: Shape | None) -> list[int]:
    if out_shape is None:
        return [n]
    if len(out_shape) == 0 or any(size < 0 for size in out_shape) or math.prod(out_shape) != n:
        raise ValueError(f"out_shape must be sizes whose product is N={n}, got {list(out_shape)}")
    return list(out_shape)


def check_dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name} must be in [{-ndim}, {ndim - 1}], got {dim}")
    return dim % ndim


def check_dims(gather_dim: int, scatter_dim: int, ndim: int) -> tuple[int, int]:
    gather, scatter = check_dim("gather_dim", gather_dim, ndim), check_dim("scatter_dim", scatter_dim, ndim)
    if gather == scatter:
        raise ValueError(f"gather_dim and scatter_dim must differ, got {gather_dim} and {scatter_dim}")
    return gather, scatter


def check_reduce_op(reduce_op: str) -> None:
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"reduce_op must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
