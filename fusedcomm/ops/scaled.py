"""The five ops on float8 values with scales: ``fusedcomm::scaled_matmul_all_to_all`` and its siblings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import splits
from fusedcomm.ops.all_gather_matmul import lists_of
from fusedcomm.ops.arguments import LISTS, check_types, reduce_op_name
from fusedcomm.plan import scaling
from fusedcomm.plan.planner import CALL


def quantize(t: Tensor, scaling_type: Any, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return t in float8, and the scales with which ``values * scales`` is t, rounded.

    The largest element of each block becomes the dtype's largest. It quantises x as it is, and w by its transpose::

        x8, scale_x = fusedcomm.quantize(x, "RowWise")     # [..., K], [..., 1]
        w8, scale_w = fusedcomm.quantize(w.mT, "RowWise")  # w [K, N]; pass w8.mT, scale_w.mT: K is contiguous, as GPUs
                                                           # need it

    Args:
        t: [..., rows, K], at least 2-D; of any floating point dtype.
        scaling_type: a torch.nn.functional.ScalingType or its name: "TensorWise", "RowWise", "BlockWise1x128",
            "BlockWise128x128".
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        (values, scales): values of t's shape; scales float32 of shape [], [..., rows, 1], [..., rows, ceil(K / 128)] or
        [..., ceil(rows / 128), ceil(K / 128)].

    Raises:
        ValueError: another scaling_type, dtype or number of dims.

    Example::

        values, scales = fusedcomm.quantize(torch.tensor([[1.0, 2.0], [0.0, 448.0]]), "RowWise")
        assert scales.tolist() == [[2 / 448], [1.0]] and values.float().tolist() == [[224.0, 448.0], [0.0, 448.0]]
    """
    name = getattr(scaling_type, "name", scaling_type)
    if name not in scaling.SCALINGS:
        raise ValueError(f"scaling_type must be one of {', '.join(scaling.SCALINGS)}, got {name!r}")
    if dtype not in scaling.VALUES:
        raise ValueError(f"dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    if t.ndim < 2:
        raise ValueError(f"t must have at least 2 dims [..., rows, K], got shape {tuple(t.shape)}")
    return scaling.quantized(t, scaling.SCALINGS[name], dtype)


def scaled_matmul_all_to_all(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    out_shape: Sequence[int] | None = None,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """`matmul_all_to_all` of float8 x and w with scales. It equals, but for the one rounding to out_dtype::

        fusedcomm.matmul_all_to_all(x.float() * scale_x, w.float() * scale_w, gather_dim, scatter_dim, ...)

    Args:
        x: [..., K], float8_e4m3fn or float8_e5m2.
        w: [K, N], or [..., K, N] with x's batch dims, likewise; not both float8_e5m2. CUDA kernels read it with K
            contiguous, ``w.stride(-2) == 1``, and copy others.
        scale_x: float32; with scale_w it tells the recipe, by torch's names: TensorWise [] or [1], and so scale_w;
            RowWise [..., 1], scale_w [..., 1, N]; BlockWise1x128 [..., ceil(K / 128)], and BlockWise128x128 of w
            [..., ceil(K / 128), ceil(N / 128)], where K and N are cut at multiples of 128 alone. Each rank's x has its
            own. See `quantize`.
        scale_w: float32, likewise.
        gather_dim, scatter_dim: as in `matmul_all_to_all`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of out_dtype.
        out_dtype: bfloat16, float16 or float32, of the result and of what is sent.
        use_fast_accum: as in ``torch._scaled_mm``: GPUs may add products in fewer bits than float32 has, which is much
            faster on sm_90, where scales do not change along K.
        out_shape, gather_splits, gather_size, scatter_splits, scatter_ranges: as in `matmul_all_to_all`.

    Result and errors are those of `matmul_all_to_all`. Without ``use_fast_accum`` products are added in float32.
    There are no gradients: a tensor that requires grad is a RuntimeError.

    Example, on each of 2 ranks::

        x, scale_x = fusedcomm.quantize(torch.ones(2, 4, 8), "RowWise")
        w, scale_w = fusedcomm.quantize(torch.ones(6, 8), "RowWise")  # [N, K]
        y = fusedcomm.scaled_matmul_all_to_all(x, w.mT, scale_x, scale_w.mT, gather_dim=1, scatter_dim=-1)
        assert y.shape == (2, 8, 3) and (y == 8).all()
    """
    scales = (scale_x, scale_w, out_dtype, use_fast_accum)
    given = (gather_splits, gather_size, scatter_splits, scatter_ranges)
    check_types(
        x, w, bias, "scaled_matmul_all_to_all", group, gather_dim, scatter_dim, given, scales, out_shape=out_shape
    )
    group_size, group_name = resolve(group)
    shape = None if out_shape is None else list(out_shape)
    divisible = splits.divides_product(group_size, x, w, scatter_dim, shape)
    parts = splits.splits_of(*given, divisible, group_name)
    op = torch.ops.fusedcomm.scaled_matmul_all_to_all
    return op(x, w, bias, *scales, shape, gather_dim, scatter_dim, *parts, group_size, group_name)  # type: ignore[no-any-return]


def scaled_all_to_all_matmul(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """`all_to_all_matmul` of float8 x and w with scales: x travels in float8, each row with its scales behind it.

    Each source's rows, or its part of K, are multiplied by the scales that it sent. Where K is gathered or scattered,
    the dims of K before that one have size 1, and beside block-wise scales each part is a multiple of 128.

    Args:
        x: as in `all_to_all_matmul`, float8.
        w: as in `scaled_matmul_all_to_all`.
        scale_x: likewise: the dims of x that are not K, and [1], or [ceil(K / 128)] of this rank's K.
        scale_w: likewise.
        gather_dim, scatter_dim: as in `all_to_all_matmul`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of out_dtype.
        out_dtype: bfloat16, float16 or float32, of the result.
        use_fast_accum: as in `scaled_matmul_all_to_all`.
        gather_splits, gather_size, scatter_splits, scatter_ranges: as in `all_to_all_matmul`.

    Example, on each of 2 ranks::

        x, scale_x = fusedcomm.quantize(torch.ones(8, 4), "RowWise")  # [tokens, K / R]
        w, scale_w = fusedcomm.quantize(torch.ones(6, 8), "RowWise")  # [N, K]
        y = fusedcomm.scaled_all_to_all_matmul(x, w.mT, scale_x, scale_w.mT, gather_dim=1, scatter_dim=0)
        assert y.shape == (4, 6) and (y == 8).all()  # [tokens / R, N]
    """
    scales = (scale_x, scale_w, out_dtype, use_fast_accum)
    given = (gather_splits, gather_size, scatter_splits, scatter_ranges)
    check_types(x, w, bias, "scaled_all_to_all_matmul", group, gather_dim, scatter_dim, given, scales)
    group_size, group_name = resolve(group)
    divisible = splits.divides(group_size, x.shape, scatter_dim)
    parts = splits.splits_of(*given, divisible, group_name)
    op = torch.ops.fusedcomm.scaled_all_to_all_matmul
    return op(x, w, bias, *scales, True, gather_dim, scatter_dim, False, *parts, group_size, group_name)[0]  # type: ignore[no-any-return]


def scaled_all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    scale_x: Tensor,
    scale_w: Tensor | Sequence[Tensor],
    gather_dim: int,
    group: Group = None,
    *,
    bias: Sequence[Tensor | None] | Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    gather_splits: Sequence[int] | None = None,
    gather_size: int | None = None,
) -> Any:
    """`all_gather_matmul` of float8 x and w with scales: x travels in float8, each row with its scales behind it.

    Each source's rows, or its part of K, are multiplied by the scales that it sent.

    Args:
        x: as in `all_gather_matmul`, float8.
        w: as in `scaled_matmul_all_to_all`, or a list.
        scale_x: as there.
        scale_w: as there; for a list of w a list, of one recipe.
        gather_dim: as in `all_gather_matmul`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        bias: [N], of out_dtype; for a list of w None or a list.
        out_dtype: bfloat16, float16 or float32, of the results.
        use_fast_accum: as in `scaled_matmul_all_to_all`.
        gather_splits, gather_size: as in `all_gather_matmul`.

    Example, on each of 2 ranks::

        x, scale_x = fusedcomm.quantize(torch.ones(4, 8), "TensorWise")  # [tokens / R, K]
        w, scale_w = fusedcomm.quantize(torch.ones(6, 8), "TensorWise")  # [N, K]
        y = fusedcomm.scaled_all_gather_matmul(x, w.mT, scale_x, scale_w, gather_dim=0)
        assert y.shape == (8, 6) and (y == 8).all()  # [tokens, N]
    """
    scales = (scale_x, scale_w, out_dtype, use_fast_accum)
    given = (gather_splits, gather_size)
    check_types(x, w, bias, "scaled_all_gather_matmul", group, gather_dim, 0, given, scales, lists=True)
    group_size, group_name = resolve(group)
    ws, biases = lists_of(w, bias)
    scale_ws = [scale_w] if isinstance(scale_w, Tensor) else list(scale_w)
    parts = splits.splits_of(*given, None, None, True, group_name).to_gather
    where = (gather_dim, False, *parts, group_size, group_name)
    op = torch.ops.fusedcomm.scaled_all_gather_matmul
    outs = op(x, ws, biases, scale_x, scale_ws, out_dtype, use_fast_accum, True, *where)[0]
    return outs if isinstance(w, LISTS) else outs[0]


def scaled_matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    scatter_dim: int,
    group: Group = None,
    *,
    reduce_op: str | ReduceOp = "sum",
    bias: Tensor | None = None,
    partial_bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    scatter_splits: Sequence[int] | None = None,
    scatter_ranges: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """`matmul_reduce_scatter` of float8 x and w with scales. Partial sums are rounded to out_dtype, added in float32 in
    rank order, and rounded once more.

    Args:
        x, w, scale_x, scale_w: as in `scaled_matmul_all_to_all`.
        scatter_dim: as in `matmul_reduce_scatter`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        reduce_op: as in `matmul_reduce_scatter`.
        bias, partial_bias: as there, of out_dtype.
        out_dtype: bfloat16, float16 or float32, of the result and of what is sent.
        use_fast_accum: as in `scaled_matmul_all_to_all`.
        scatter_splits, scatter_ranges: as in `matmul_reduce_scatter`.

    Example, on each of 2 ranks::

        x, scale_x = fusedcomm.quantize(torch.ones(8, 4), "TensorWise")  # [tokens, K / R]
        w, scale_w = fusedcomm.quantize(torch.ones(6, 4), "TensorWise")  # [N, K / R]
        y = fusedcomm.scaled_matmul_reduce_scatter(x, w.mT, scale_x, scale_w, scatter_dim=0)
        assert y.shape == (4, 6) and (y == 8).all()  # [tokens / R, N], summed over K
    """
    scales = (scale_x, scale_w, out_dtype, use_fast_accum)
    given = (None, None, scatter_splits, scatter_ranges)
    name = "scaled_matmul_reduce_scatter"
    check_types(x, w, bias, name, group, 0, scatter_dim, given, scales, partial_bias=partial_bias, reduce_op=reduce_op)
    group_size, group_name = resolve(group)
    divisible = splits.divides_product(group_size, x, w, scatter_dim)
    parts = splits.splits_of(*given, divisible, group_name).to_scatter
    where = (reduce_op_name(reduce_op), scatter_dim, *parts, group_size, group_name, CALL, partial_bias)
    op = torch.ops.fusedcomm.scaled_matmul_reduce_scatter
    return op(x, w, bias, *scales, *where)  # type: ignore[no-any-return]


def scaled_matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    group: Group = None,
    *,
    reduce_op: str | ReduceOp = "sum",
    bias: Tensor | None = None,
    partial_bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """`matmul_all_reduce` of float8 x and w with scales. Partial sums are rounded to out_dtype, added in float32 in
    rank order, and rounded once more.

    Args:
        x, w, scale_x, scale_w: as in `scaled_matmul_all_to_all`.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        reduce_op: as in `matmul_all_reduce`.
        bias, partial_bias: as there, of out_dtype.
        out_dtype: bfloat16, float16 or float32, of the result and of what is sent.
        use_fast_accum: as in `scaled_matmul_all_to_all`.

    Example, on each of 2 ranks::

        x, scale_x = fusedcomm.quantize(torch.ones(8, 4), "TensorWise")  # [tokens, K / R]
        w, scale_w = fusedcomm.quantize(torch.ones(6, 4), "TensorWise")  # [N, K / R]
        y = fusedcomm.scaled_matmul_all_reduce(x, w.mT, scale_x, scale_w)
        assert y.shape == (8, 6) and (y == 8).all()  # [tokens, N], summed over K
    """
    scales = (scale_x, scale_w, out_dtype, use_fast_accum)
    name = "scaled_matmul_all_reduce"
    check_types(x, w, bias, name, group, scaled=scales, partial_bias=partial_bias, reduce_op=reduce_op)
    where = (reduce_op_name(reduce_op), *resolve(group), CALL, partial_bias)
    op = torch.ops.fusedcomm.scaled_matmul_all_reduce
    return op(x, w, bias, *scales, *where)  # type: ignore[no-any-return]
