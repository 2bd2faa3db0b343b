"""torchao's Float8Linear as a layer of the styles: its three matmuls are scaled ops, so that float8 is gathered.

Numbers are those of torchao on DTensors: an operand has one scale, by its largest element on all ranks. torchao is
known by name, and not imported.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusedcomm.memory.group import resolve
from fusedcomm.ops import splits
from fusedcomm.ops.formula import needs_now
from fusedcomm.ops.library import refuse_outside_ops
from fusedcomm.parallel.layouts import bias_of_part, shards
from fusedcomm.parallel.plain_modules import why_not_parameters
from fusedcomm.parallel.sharded_linear import GATHER, HELD, REDUCE, SCATTER, ShardedLinear
from fusedcomm.parallel.unwritten import shard_of, unwritten
from fusedcomm.plan.scaling import VALUES, Scaled, rounded
from fusedcomm.run.scaled_matmul import scaled_product

_OPERANDS = ("input", "weight", "grad_output")
_MATMULS = ("output", "grad_input", "grad_weight")
_CASTS = ("input_for_grad_weight", "weight_for_grad_input", "grad_output_for_grad_weight")
_BACKWARD = {GATHER: SCATTER, SCATTER: GATHER, HELD: REDUCE, REDUCE: HELD}


def is_float8_linear(module: nn.Module) -> bool:
    cls = type(module)
    return (cls.__module__, cls.__qualname__) == ("torchao.float8.float8_linear", "Float8Linear")


def why_not_scaled(linear: Any) -> str | None:
    """Why a Float8Linear casts otherwise than `scaled_linear`, or None."""
    for name in (*_OPERANDS, *_CASTS):
        cast = getattr(linear.config, f"cast_config_{name}")
        how = cast.scaling_type.name, cast.scaling_granularity.name
        if how != ("DYNAMIC", "TENSORWISE") or cast.target_dtype not in VALUES:
            return f"it casts {name} to {cast.target_dtype} by {' and '.join(how)} scales"
    casts = _casts_of(linear.config)
    if [casts.x, casts.weight, casts.grad].count(torch.float8_e5m2) > 1:
        return "two operands are float8_e5m2"
    return why_not_parameters(linear)  # such as torchao's weights for FSDP2, which are gathered in float8


class Casts(NamedTuple):
    """dtypes of the operands, whether their scales are powers of two, and use_fast_accum of `_MATMULS`."""

    x: torch.dtype
    weight: torch.dtype
    grad: torch.dtype
    powers_of_two: bool
    fast: tuple[bool, ...]


def _casts_of(config: Any) -> Casts:
    x, weight, grad = (getattr(config, f"cast_config_{name}").target_dtype for name in _OPERANDS)
    fast = tuple(getattr(config, f"gemm_config_{name}").use_fast_accum for name in _MATMULS)
    return Casts(x, weight, grad, config.round_scales_to_power_of_2, fast)


@functools.cache
def float8_class(layer: type[ShardedLinear], base: type[nn.Linear]) -> type[ShardedLinear]:
    """``layer`` for a Float8Linear: what no op makes runs the forward of ``base``."""
    return type(f"{layer.__name__}OfFloat8", (_Float8, layer, base), {})


class _Float8(ShardedLinear):
    config: Any
    prefix, shares = "scaled_", False

    def _run(self, op: str, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        weight, bias = shards(self)
        local = shard_of(x) if isinstance(x, DTensor) else x
        refuse_outside_ops(f"parallel.{type(self).__name__}", local, weight, bias)
        device_type, move = x.device.type, Move(op, dim, x.shape[dim], *resolve(mesh))
        if torch.is_autocast_enabled(device_type):
            local = local.to(torch.get_autocast_dtype(device_type))
        with torch.autocast(device_type, enabled=False):
            y = unwritten(scaled_linear(local, weight, move, _casts_of(self.config)), x, self.weight, keeps_x=False)
        bias = bias_of_part(self.bias) if op == SCATTER else bias
        return y if bias is None else y + bias.to(y.dtype)  # after the rounding, as torchao does


class Move(NamedTuple):
    """The op of a forward, and along which dim of x or y tokens lie on all ranks, ``size`` of them."""

    op: str
    dim: int
    size: int
    group_size: int
    group_name: str


def scaled_linear(x: Tensor, weight: Tensor, move: Move, casts: Casts) -> Tensor:
    """``F.linear(x, weight)`` by ``move.op``, forward and backward in float8, of x's dtype."""
    return _Linear.apply(x, weight, move, casts)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, move: Move, casts: Casts) -> Tensor:
        factor_x, factor_w = _factors([x, weight], [casts.x, casts.weight], casts, move.group_name)
        w = _cast(weight, factor_w, casts.weight, x.dtype)
        w = Scaled(w.values.mT, w.scale, w.dtype, fast=casts.fast[0])
        y, whole = _multiply(_cast(x, factor_x, casts.x, x.dtype), w, move)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept_x = (whole.values, whole.scale) if needs_weight else (None, None)
        ctx.save_for_backward(*kept_x, *((weight, factor_w) if needs_x else (None, None)))
        ctx.move, ctx.casts = move._replace(op=_BACKWARD[move.op]), casts
        return y

    @staticmethod
    @once_differentiable  # type: ignore[no-untyped-call, untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        values, scale, weight, factor_w = ctx.saved_tensors
        needs_x, needs_weight = needs_now(ctx)[:2]
        move, casts = ctx.move, ctx.casts
        held = move.op == HELD  # all ranks have the whole gradient
        (factor,) = _factors([grad], [casts.grad], casts, None if held else move.group_name)
        whole = _cast(grad, factor, casts.grad, grad.dtype)
        grad_x = grad_weight = None
        if needs_x:
            w = replace(_cast(weight, factor_w, casts.weight, grad.dtype), fast=casts.fast[1])
            grad_x, whole = _multiply(whole, w, move)
        elif needs_weight and move.op == GATHER:
            gathered = splits.all_gather(whole.values, move.dim, _parts(move), move.group_size, move.group_name)
            whole = Scaled(gathered, whole.scale, whole.dtype)
        if needs_weight:
            rows = Scaled(whole.values.flatten(0, -2).mT, whole.scale, grad.dtype)
            w = Scaled(values.flatten(0, -2), scale, grad.dtype, fast=casts.fast[2])
            grad_weight = scaled_product(rows, w, None)
        return grad_x, grad_weight, None, None


def _factors(operands: list[Tensor], dtypes: list[torch.dtype], casts: Casts, group_name: str | None) -> list[Tensor]:
    """Factors by which the largest element, on all ranks of a group, becomes the dtype's largest."""
    amax = torch.stack([t.abs().amax().float() if t.numel() else t.new_zeros((), dtype=torch.float) for t in operands])
    if group_name is not None:
        c10d = torch.ops._c10d_functional
        amax = c10d.wait_tensor(c10d.all_reduce(amax, "max", group_name))
    made = []
    for each, dtype in zip(amax.double().clamp(min=1e-12), dtypes, strict=True):  # float64 and 1e-12 are torchao's
        factor = (torch.finfo(dtype).max / each).float()
        made.append(factor.log2().floor().exp2() if casts.powers_of_two else factor)
    return made


def _cast(t: Tensor, factor: Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> Scaled:
    return Scaled(rounded(t.float() * factor, dtype), factor.reciprocal(), out_dtype)


def _parts(move: Move) -> splits.Splits:
    is_even = move.size % move.group_size == 0
    return splits.splits_of(None, None if is_even else move.size, None, None, is_even, move.group_name)


def _multiply(x: Scaled, w: Scaled, move: Move) -> tuple[Tensor, Scaled]:
    """Returns (product, x or where the op gathers it the whole of x)."""
    ops, group = torch.ops.fusedcomm, (move.group_size, move.group_name)
    scales = x.scale, w.scale, x.dtype, w.fast
    if move.op == GATHER:
        where = (move.dim, True, *_parts(move).to_gather, *group)
        (y,), whole = ops.scaled_all_gather_matmul(
            x.values, [w.values], [None], x.scale, [w.scale], x.dtype, w.fast, False, *where
        )
        return y, Scaled(whole, x.scale, x.dtype)
    if move.op == SCATTER:
        where = ("sum", move.dim, *_parts(move).to_scatter, *group)
        return ops.scaled_matmul_reduce_scatter(x.values, w.values, None, *scales, *where), x
    if move.op == REDUCE:
        return ops.scaled_matmul_all_reduce(x.values, w.values, None, *scales, "sum", *group), x
    return scaled_product(x, w, None), x
