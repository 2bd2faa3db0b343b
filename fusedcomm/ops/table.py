"""The ops as a table: schema, checks and geometry, program, and gradients of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusedcomm.ops import (
    all_gather_matmul,
    all_to_all_matmul,
    exchanges,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    norms,
    plain,
    scaled,
)
from fusedcomm.ops.arguments import check_apart
from fusedcomm.ops.call_arguments import Arguments, PerTensor
from fusedcomm.plan.cost.model import BLOCKS, FAST_FLOAT8, FLOAT8, WIDE_FLOAT8
from fusedcomm.plan.geometry.cut import Splits
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.shapes import check_bias, check_out, check_tensors
from fusedcomm.plan.planner import CALL
from fusedcomm.plan.scaling import OUT_DTYPES, VALUES, check_dtypes

Operands = tuple[tuple[Any, ...], Mapping[str, Any]]  # tensors, or lists of them, and facts


@dataclass(frozen=True)
class OpSpec:
    """One op.

    Attributes:
        geometry: checks shapes and dims, and returns the Exchange.
        program: the name that it has in every algorithm (`fusedcomm.run.calls`).
        operands: the arguments of the program.
        function: the public one.
        save: fills ctx for the backward: ``save(ctx, arguments, needs, results)``.
        backward: ``backward(ctx, needs, *gradients of results)`` returns the gradients of the tensors; None of an op
            that has none.
        gathers: whether the collective comes first. Then the exchanged x is the last result.
        bias_is_scattered: whether bias has the size of this rank's part of N, where N is scattered.
        result_shape: in fakes, in place of the Exchange, if a graph must not depend on the dim that is cut.
        num_results: results that a reduction has.
    """

    name: str
    schema: str
    geometry: Callable[[Arguments], Exchange]
    program: str
    operands: Callable[[Arguments], Operands]
    function: Callable[..., Any]
    save: Callable[[Any, Arguments, PerTensor, Sequence[Tensor]], None] | None
    backward: Callable[..., PerTensor] | None
    gathers: bool = False
    bias_is_scattered: bool = False
    result_shape: Callable[[Arguments], list[int]] | None = None
    num_results: int = 1

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The names in the schema, with the defaults."""
        return {each.name: each.default_value for each in torch._C.parse_schema(self.name + self.schema).arguments}

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The arguments behind x, w and bias, named as in `Arguments` and `Splits`."""
        names = (*self.arguments,)[1 if self.is_plain else 3 :]
        return tuple("return_gathered" if name == "return_exchanged" else name for name in names)

    @property
    def is_plain(self) -> bool:
        """Whether the op is a collective alone: x is its only tensor."""
        return "x" in self.arguments and "w" not in self.arguments and not self.takes_lists

    @property
    def takes_lists(self) -> bool:
        return "ws" in self.arguments

    @property
    def op(self) -> Any:
        return getattr(torch.ops.fusedcomm, self.name).default

    def by_name(self, args: Sequence[Any]) -> dict[str, Any]:
        """The arguments of ``torch.ops.fusedcomm.<op>(*args)``, defaults included."""
        return self.arguments | dict(zip(self.arguments, args, strict=False))

    def bind(self, args: Sequence[Any], **outs: Any) -> Arguments:
        """``args``: the schema's; the last ones may be missing."""
        x, ws, biases, *options = (args[0], [], [], *args[1:]) if self.is_plain else args
        if not self.takes_lists and not self.is_plain:
            ws, biases = [ws], [biases]
        named = dict(zip(self.options, options, strict=False))
        if "out_dtype" in named:  # the native part has numbers
            named["out_dtype"] = OUT_DTYPES.get(named["out_dtype"], named["out_dtype"])
        if "bias" in named:
            ws, biases = [None], [named.pop("bias")]
        splits = [named.pop(name, None) for name in Splits._fields]
        if any(each is not None for each in splits):
            named["splits"] = Splits(*splits).hashable
        return Arguments(x, ws, biases, **outs, **named)

    def exchange_of(self, args: Arguments) -> Exchange:
        """Check a call and work out its geometry. Raises ValueError."""
        exchange: Exchange = self._checked(args, self.geometry)
        return exchange

    def result_shapes(self, args: Arguments) -> list[Sequence[int]]:
        """The shapes of the results, after the same checks."""
        if self.result_shape is not None:
            return [self._checked(args, self.result_shape)] * self.num_results
        exchange = self.exchange_of(args)
        gathered = [exchange.shape if args.return_gathered else [0]] if self.gathers else []
        return [*exchange.out_shapes * self.num_results, *gathered]

    def check_outs(self, args: Arguments) -> None:
        if args.outs:
            for (name, out), shape in zip(args.outs.items(), self.result_shapes(args), strict=True):
                check_out(out, args.x, shape, name, args.out_dtype)
            check_apart(args)

    @property
    def is_scaled(self) -> bool:
        return "scale_x" in self.arguments

    def gathered_dtype(self, args: Arguments) -> torch.dtype:
        if self.is_scaled and args.sends_scales:
            return torch.uint8
        return args.x.dtype

    def sent_dtype(self, args: Arguments) -> torch.dtype:
        sent = self.gathered_dtype(args) if self.gathers else args.dtype
        return torch.uint8 if sent in VALUES and args.wire != CALL else sent  # a program may send float8 as bytes

    def multiplied(self, args: Arguments, exchange: Exchange) -> str | None:
        """The kind of product in `plan.cost`, where x and w are not of the payload's dtype."""
        if not self.is_scaled:
            return None
        if args.scales[0].ndim > 0 and args.scales[0].shape[-1] > 1:
            return BLOCKS
        rounds_later = args.dtype != torch.bfloat16 or (exchange.gathers and exchange.splits_columns)
        return FAST_FLOAT8 if args.use_fast_accum else WIDE_FLOAT8 if rounds_later else FLOAT8

    def _checked(self, args: Arguments, geometry: Callable[[Arguments], Any]) -> Any:
        if self.is_scaled:
            check_dtypes(args.x, args.ws, args.scales, args.dtype)
        others = {"partial_bias": args.partial_bias, "residual": args.residual, "norm_weight": args.norm_weight}
        only_moves = self.is_plain and self.program == "gather_matmul"
        check_tensors(args.x, args.ws, args.biases, args.out_dtype, only_moves, **others)
        found = geometry(args)
        if self.bias_is_scattered and found.splits_columns:
            check_bias(args.bias, found.out_shape[-1], "N / R")
        else:
            for w, bias in zip(args.ws, args.biases, strict=True):
                check_bias(bias, args.n if w is None else w.shape[-1])
        check_bias(args.partial_bias, args.n, argument="partial_bias")
        return found

    def returned(self, results: Sequence[Tensor]) -> Any:
        """The results as the schema has them."""
        if not self.gathers:
            return results[0] if self.num_results == 1 else tuple(results)
        *outs, gathered = results
        return (outs if self.takes_lists else outs[0]), gathered


def _pushed(args: Arguments) -> Operands:
    return (args.x, args.w, args.bias, args.out), {}


def _reduced(args: Arguments) -> Operands:
    return (args.x, args.w, args.bias, args.partial_bias, args.out), {"scale": args.scale}


def _normed(args: Arguments) -> Operands:
    tensors = args.x, args.w, args.bias, args.residual, args.norm_weight, args.out, args.residual_out
    return tensors, {"eps": args.eps}


def _gathered(args: Arguments) -> Operands:
    return (args.x, args.ws, args.biases), {"return_gathered": args.return_gathered}


def _sent(args: Arguments) -> Operands:
    return (args.x, [], []), {"return_gathered": True}


def _scaled(spec: OpSpec, geometry: Callable[[Arguments], Exchange]) -> OpSpec:
    """The op on float8 values with scales."""
    before = "Tensor?[] biases, " if spec.takes_lists else "Tensor? bias, "
    scale_w = "Tensor[] scale_w" if spec.takes_lists else "Tensor scale_w"
    options = "ScalarType out_dtype, bool use_fast_accum, " + "bool sends_scales, " * spec.gathers

    def operands(args: Arguments) -> Operands:
        x, w, *others = spec.operands(args)[0]
        facts = {**spec.operands(args)[1], "out_dtype": args.dtype, "fast": args.use_fast_accum}
        if spec.gathers:
            facts |= exchanges.payload_facts(args, spec.geometry(args))
        return (x, w, args.scales, *others), facts

    name = f"scaled_{spec.name}"
    return replace(
        spec,
        name=name,
        schema=spec.schema.replace(before, f"{before}Tensor scale_x, {scale_w}, {options}"),
        geometry=geometry,
        program=f"scaled_{spec.program}",
        operands=operands,
        function=getattr(scaled, name),
        save=None,
        backward=None,
    )


GATHER = "SymInt[]? gather_splits, SymInt? gather_size"
SCATTER = "SymInt[]? scatter_starts, SymInt[]? scatter_lengths"
GROUP = 'int group_size, str group_name, str wire="call"'

BOTH, AT = f"{GATHER}, {SCATTER}, int? rank, {GROUP}", f"{SCATTER}, int? rank, {GROUP}"
_MATMUL, _DIMS = "Tensor x, Tensor w, Tensor? bias", "int gather_dim, int scatter_dim"
SCHEMAS = {
    "matmul_all_to_all": f"({_MATMUL}, SymInt[]? out_shape, {_DIMS}, {BOTH}) -> Tensor",
    "all_to_all_matmul": f"({_MATMUL}, {_DIMS}, bool return_exchanged, {BOTH}) -> (Tensor, Tensor)",
    "all_gather_matmul": "(Tensor x, Tensor[] ws, Tensor?[] biases, int gather_dim, bool return_gathered, "
    f"{GATHER}, int? rank, {GROUP}) -> (Tensor[], Tensor)",
    "matmul_reduce_scatter": f"({_MATMUL}, str reduce_op, int scatter_dim, {AT}, Tensor? partial_bias=None) -> Tensor",
    "matmul_all_reduce": f"({_MATMUL}, str reduce_op, {GROUP}, Tensor? partial_bias=None) -> Tensor",
    "all_to_all": f"(Tensor x, {_DIMS}, {BOTH}) -> Tensor",
    "all_gather": f"(Tensor x, int gather_dim, {GATHER}, int? rank, {GROUP}) -> Tensor",
    "reduce_scatter": f"(Tensor x, str reduce_op, int scatter_dim, {AT}) -> Tensor",
    "all_reduce": f"(Tensor x, str reduce_op, {GROUP}) -> Tensor",
}


def _spec(module: Any, name: str, program: str, operands: Callable[[Arguments], Operands], **more: Any) -> OpSpec:
    backward = f"{name}_backward" if module is plain else "backward"
    own = getattr(module, name), module.save, getattr(module, backward)
    return OpSpec(name, SCHEMAS[name], getattr(exchanges, name), program, operands, *own, **more)


MATMUL_ALL_TO_ALL = _spec(matmul_all_to_all, "matmul_all_to_all", "push_matmul", _pushed)
ALL_TO_ALL_MATMUL = _spec(all_to_all_matmul, "all_to_all_matmul", "gather_matmul", _gathered, gathers=True)
ALL_GATHER_MATMUL = _spec(all_gather_matmul, "all_gather_matmul", "gather_matmul", _gathered, gathers=True)
MATMUL_REDUCE_SCATTER = _spec(
    matmul_reduce_scatter, "matmul_reduce_scatter", "push_reduce", _reduced, bias_is_scattered=True
)
MATMUL_ALL_REDUCE = _spec(
    matmul_all_reduce, "matmul_all_reduce", "push_reduce_gather", _reduced, result_shape=exchanges.all_reduced
)
ALL_TO_ALL = _spec(plain, "all_to_all", "gather_matmul", _sent)
ALL_GATHER = _spec(plain, "all_gather", "gather_matmul", _sent)
REDUCE_SCATTER = _spec(plain, "reduce_scatter", "push_reduce", _reduced)
ALL_REDUCE = _spec(plain, "all_reduce", "push_reduce_gather", _reduced, result_shape=exchanges.plainly_all_reduced)
MATMUL_ALL_REDUCE_NORM = OpSpec(
    name="matmul_all_reduce_norm",
    schema=f"({_MATMUL}, Tensor residual, Tensor? norm_weight, float eps, {GROUP}) -> (Tensor, Tensor)",
    geometry=exchanges.all_reduce_norm,
    result_shape=exchanges.normed,
    program="push_reduce_norm",
    operands=_normed,
    function=norms.matmul_all_reduce_norm,
    save=norms.save,
    backward=norms.backward,
    num_results=2,
)
ALL_REDUCE_NORM = replace(
    MATMUL_ALL_REDUCE_NORM,
    name="all_reduce_norm",
    schema=f"(Tensor x, Tensor residual, Tensor? norm_weight, Tensor? bias, float eps, {GROUP}) -> (Tensor, Tensor)",
    function=norms.all_reduce_norm,
)
MATMUL_REDUCE_SCATTER_NORM = replace(
    MATMUL_ALL_REDUCE_NORM,
    name="matmul_reduce_scatter_norm",
    schema=f"({_MATMUL}, Tensor residual, Tensor? norm_weight, float eps, int scatter_dim, {AT}) -> (Tensor, Tensor)",
    geometry=exchanges.matmul_reduce_scatter_norm,
    result_shape=None,
    program="push_reduce_scatter_norm",
    function=norms.matmul_reduce_scatter_norm,
    save=norms.save_scattered,
    backward=norms.scattered_backward,
)
SCALED = (
    _scaled(MATMUL_ALL_TO_ALL, exchanges.scaled_matmul_all_to_all),
    _scaled(ALL_TO_ALL_MATMUL, exchanges.scaled_all_to_all_matmul),
    _scaled(ALL_GATHER_MATMUL, exchanges.scaled_all_gather_matmul),
    _scaled(MATMUL_REDUCE_SCATTER, exchanges.scaled_matmul_reduce_scatter),
    _scaled(MATMUL_ALL_REDUCE, exchanges.scaled_matmul_all_reduce),
)
_ALL = (
    *(MATMUL_ALL_TO_ALL, ALL_TO_ALL_MATMUL, ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE),
    *(ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE),
    *(MATMUL_ALL_REDUCE_NORM, ALL_REDUCE_NORM, MATMUL_REDUCE_SCATTER_NORM),
    *SCALED,
)
OPS = {spec.name: spec for spec in _ALL}
