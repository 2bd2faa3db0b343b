"""The types of an op's arguments, checked before torch matches them with a schema: its errors show whole tensors.

Values are checked by `fusedcomm.plan.geometry.shapes`, which the dispatcher ops call too.
"""

from collections.abc import Collection
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusedcomm.memory.group import resolve
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.call_check import is_traced, tell_peers
from fusedcomm.plan.scaling import check_out_dtype

LISTS = (list, tuple, nn.ParameterList)  # types of lists of tensors


def check_types(
    x: Any,
    w: Any,
    bias: Any,
    op: str,
    group: Any,
    gather_dim: Any = 0,
    scatter_dim: Any = 0,
    splits: tuple[Any, ...] = (),
    scaled: tuple[Any, ...] = (),
    *,
    lists: bool = False,
    out_shape: Any = None,
    partial_bias: Any = None,
    reduce_op: Any = "sum",
    norm: tuple[Any, ...] = (),
) -> None:
    """Raise TypeError unless x and w are plain tensors, the biases such or None, and the others of the schema's types;
    ValueError where splits exclude each other.

    ``op``: peers on ``group`` hear of its error, if they compare calls. ``splits``: the arguments of `check_splits`.
    ``scaled``: scale_x, scale_w, out_dtype, use_fast_accum. ``norm``: residual, norm_weight, eps, out, residual_out.
    ``lists``: w and bias may be lists of these.
    """
    try:
        check_tensor("x", x)
        is_list = lists and isinstance(w, LISTS)
        for each in w if is_list else (w,):
            check_tensor("w", each)
        for each in bias if lists and isinstance(bias, LISTS) else (bias,):
            if each is not None:
                check_tensor("bias", each)
        if lists and bias is not None and isinstance(bias, LISTS) is not is_list and len(w):
            if is_list:
                raise ValueError("bias must be a list or None beside a list of w, got a tensor")
            raise ValueError("bias must be a tensor or None beside one w, got a list")
        if type(gather_dim) is not int:  # most are
            check_int("gather_dim", gather_dim)
        if type(scatter_dim) is not int:
            check_int("scatter_dim", scatter_dim)
        if out_shape is not None:
            _check_sizes("out_shape", out_shape)
        if partial_bias is not None:
            check_tensor("partial_bias", partial_bias)
        if type(reduce_op) is not str:
            reduce_op_name(reduce_op)
        for each in splits:
            if each is not None:
                check_splits(*splits)
                break
        if scaled:
            scale_x, scale_w, out_dtype, use_fast_accum = scaled
            check_tensor("scale_x", scale_x)
            for each in scale_w if lists and isinstance(scale_w, LISTS) else (scale_w,):
                check_tensor("scale_w", each)
            if not isinstance(out_dtype, torch.dtype):
                raise TypeError(f"out_dtype must be a torch.dtype, got {_short(out_dtype)}")
            check_out_dtype(out_dtype)
            if type(use_fast_accum) is not bool:
                raise TypeError(f"use_fast_accum must be a bool, got {_short(use_fast_accum)}")
        if norm:
            residual, norm_weight, eps, out, residual_out = norm
            check_tensor("residual", residual)
            if norm_weight is not None:
                check_tensor("norm_weight", norm_weight)
            if type(eps) is not float and not isinstance(eps, Real):
                raise TypeError(f"eps must be a float, got {_short(eps)}")
            for name, each in (("out", out), ("residual_out", residual_out)):
                if each is not None:
                    check_tensor(name, each)
    except (TypeError, ValueError) as error:
        tell_peers(op, resolve(group)[1], x, error)
        raise


def check_splits(gather_splits: Any, gather_size: Any, scatter_splits: Any = None, scatter_ranges: Any = None) -> None:
    """Raise TypeError unless each is None or of the schema's type, ValueError if two say the same."""
    if gather_splits is not None:
        _check_sizes("gather_splits", gather_splits)
    if gather_size is not None:
        check_int("gather_size", gather_size)
    if scatter_splits is not None:
        _check_sizes("scatter_splits", scatter_splits)
    if scatter_ranges is not None:
        _check_ranges("scatter_ranges", scatter_ranges)
        if scatter_splits is not None:
            raise ValueError("at most one of scatter_splits and scatter_ranges may be given, got both")


def check_apart(args: Arguments) -> None:
    """Raise ValueError if a tensor that is written overlaps another one; residual_out may be the residual."""
    if any(map(is_traced, args.outs.values())):
        return  # without addresses
    names = "x", "w", "bias", "partial_bias", "residual", "norm_weight", "scale_x", "scale_w", *args.outs
    spans = {name: _span(t) for name in names if isinstance(t := getattr(args, name), Tensor)}
    if args.residual is not None and spans["residual"] == spans.get("residual_out") and args.residual.is_contiguous():
        del spans["residual"]
    in_order = sorted(spans.values())
    if all(end <= start for (_, end), (start, _) in pairwise(in_order)):  # most calls
        return
    for name in args.outs:
        for other, (start, stop) in spans.items():
            if other != name and max(start, spans[name][0]) < min(stop, spans[name][1]):
                raise ValueError(f"{name} must not overlap {other}")


def _span(t: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and behind its last one."""
    begin = t.data_ptr()
    if t.is_contiguous():
        return begin, begin + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return begin, begin + (last + 1) * t.itemsize


def check_tensor(name: str, t: Any) -> None:
    """Raise TypeError unless t is a dense, plain tensor, or stands for one in torch functions."""
    kind = type(t)
    if kind is not Tensor and kind is not nn.Parameter:  # most calls ask no further
        if not hasattr(kind, "__torch_function__"):
            raise TypeError(f"{name} must be a tensor, got {_short(t)}")
        if hasattr(kind, "to_local"):
            raise TypeError(
                f"{name} must be a plain tensor, got a {kind.__name__}: pass its .to_local(), or use the styles of "
                "fusedcomm.parallel"
            )
    if t.layout is not torch.strided or t.is_quantized or t.is_nested:
        layout = "nested" if t.is_nested else "quantised" if t.is_quantized else str(t.layout)
        raise TypeError(f"{name} must be a dense tensor, got a {layout} one")


def reduce_op_name(reduce_op: Any) -> str:
    """``"sum"`` for ReduceOp.SUM, ``"avg"`` for AVG, else its text. Raises TypeError for other types."""
    if isinstance(reduce_op, str):
        return reduce_op
    if not isinstance(reduce_op, dist.ReduceOp):
        raise TypeError(f"reduce_op must be a str or a ReduceOp, got {_short(reduce_op)}")
    if reduce_op == dist.ReduceOp.SUM:  # type: ignore[comparison-overlap]
        return "sum"
    return "avg" if reduce_op == dist.ReduceOp.AVG else str(reduce_op)  # type: ignore[comparison-overlap]


def check_int(name: str, value: Any) -> None:
    if not isinstance(value, (int, torch.SymInt, Integral)):  # NumPy's ints are Integral
        raise TypeError(f"{name} must be an int, got {_short(value)}")


def _check_sizes(name: str, sizes: Any) -> None:
    if not isinstance(sizes, Collection):
        raise TypeError(f"{name} must be a list of sizes or None, got {_short(sizes)}")
    for size in sizes:
        check_int(f"each size of {name}", size)


def _check_ranges(name: str, ranges: Any) -> None:
    if not isinstance(ranges, Collection):
        raise TypeError(f"{name} must be a list of (start, length) or None, got {_short(ranges)}")
    for each in ranges:
        if not isinstance(each, (list, tuple)) or len(each) != 2:
            raise TypeError(f"each of {name} must be (start, length), got {_short(each)}")
        for value in each:
            check_int(f"each start and length of {name}", value)


def _short(value: Any) -> str:
    """repr of a number, a text or None; else the name of the type, as an array's text is long."""
    text = repr(value) if value is None or isinstance(value, (str, int, float)) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}..."
