"""Registers the ops of the table with torch: kernels, fakes, autograd, autocast, and `.out` overloads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.kernels.native_part import native
from fusedcomm.ops import call_check, prepared
from fusedcomm.ops.dispatch import run
from fusedcomm.ops.formula import Formula
from fusedcomm.ops.library import lib, refuse_grad, refuse_tangents, refuse_transforms
from fusedcomm.ops.table import OPS, OpSpec

_PT2 = torch.Tag.pt2_compliant_tag
_native_kernels: list[Any] = []  # registered as long as they are here


def _register(spec: OpSpec) -> None:
    lib.define(spec.name + spec.schema, tags=[_PT2])
    _register_kernel(spec, "")
    formula = Formula(spec)
    if spec.is_scaled:
        lib.impl(spec.name, partial(_without_gradients, spec), "Autograd")
    elif native is None:
        lib.impl(spec.name, partial(_autograd, formula), "Autograd")
    else:
        made = native.register_autograd_kernel(f"fusedcomm::{spec.name}", partial(_autograd, formula), formula)
        _native_kernels.append(made)
    keeps_dtype = (spec.is_plain and spec.num_results == 1) or spec.is_scaled
    for device_type in () if keeps_dtype else ("CPU", "CUDA"):
        lib.impl(spec.name, partial(_autocast, spec, device_type), f"Autocast{device_type}")
    names = [spec.name]
    if spec.takes_lists:
        names.append(f"{spec.name}.flat")
        lib.define(names[-1] + spec.schema.replace("(Tensor[], Tensor)", "Tensor[]"), tags=[_PT2])
        lib.impl(names[-1], partial(_flat, spec), "CompositeImplicitAutograd")
    if not spec.program.endswith("gather_matmul"):
        names.append(f"{spec.name}.out")
        _define_out(spec)
    for name in names:
        for key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
            lib.impl(name, partial(refuse_transforms, spec.name), key)
    if native is not None:
        packet = getattr(torch.ops.fusedcomm, spec.name)
        for each, overload in ((packet, ""), (packet.default, ""), (getattr(packet, "out", None), "out")):
            if each is not None:
                each._op = native.direct_call(f"fusedcomm::{spec.name}", overload, each._op)
        torch.jit._builtins._register_builtin(packet._op, f"fusedcomm::{spec.name}")  # as torch has its own


def _define_out(spec: OpSpec) -> None:
    # Inductor, if it finds an `.out` with arguments of the same names, cuts a list into its elements for it, and calls
    # it out of the order of collectives
    schema = spec.schema.replace("out_shape", "view_shape").replace("float eps", "float epsilon")
    schema = schema.replace(") -> Tensor", ", *, Tensor(a!) out) -> Tensor(a!)")
    two = "Tensor(a!) out, Tensor(b!) residual_out) -> (Tensor(a!), Tensor(b!))"
    schema = schema.replace(") -> (Tensor, Tensor)", f", *, {two}")
    tags = [getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "out") if hasattr(torch.Tag, name)]
    lib.define(f"{spec.name}.out{schema}", tags=tags)
    _register_kernel(spec, "out")
    lib.impl(f"{spec.name}.out", partial(_out_below_autograd, spec), "Autograd")
    if native is not None:
        _native_kernels.append(native.register_writing_kernel(f"fusedcomm::{spec.name}"))


def _register_kernel(spec: OpSpec, overload: str) -> None:
    name, kernel = f"{spec.name}.{overload}".removesuffix("."), partial(_kernel, spec)
    torch.library.register_fake(f"fusedcomm::{name}", partial(_fake, spec), lib=lib)
    for device_type in ("CPU", "CUDA"):
        if native is None:
            lib.impl(name, kernel, device_type)
        else:
            about = f"fusedcomm::{spec.name}", overload, device_type == "CUDA"
            _native_kernels.append(native.register_kernel(*about, kernel, prepared.record))


def _told(spec: OpSpec, args: Sequence[Any], check: Callable[..., Any], *given: Any) -> Any:
    """``check(*given)``. Peers hear of its error."""
    try:
        return check(*given)
    except (RuntimeError, TypeError, ValueError) as error:
        call = spec.bind(args)
        call_check.tell_peers(spec.name, call.group_name, call.x, error)
        raise


def _kernel(spec: OpSpec, *args: Any, seen: prepared.Seen | None = None, **outs: Tensor) -> Any:
    call = spec.bind(args, **outs)
    try:
        return spec.returned(run(spec, call, seen))
    except (ValueError, TypeError) as error:
        call_check.tell_peers(spec.name, call.group_name, call.x, error)
        raise


def _fake(spec: OpSpec, *args: Any, **outs: Tensor) -> Any:
    call = spec.bind(args, **outs)
    shapes = spec.result_shapes(call)
    spec.check_outs(call)
    made = [call.x.new_empty(shape, dtype=call.dtype) for shape in shapes]
    if spec.gathers:
        made[-1] = made[-1].to(spec.gathered_dtype(call) if call.return_gathered else call.x.dtype)
    return spec.returned([*outs.values()] or made)


def _autograd(formula: Formula, *args: Any) -> Any:
    """The kernel where an argument requires grad or has a tangent, and, without the native part, everywhere."""
    spec = formula.spec
    _told(spec, args, refuse_tangents, spec.name, *args)
    args = *args, *[*spec.arguments.values()][len(args) :]  # torch leaves out defaults at the end
    flat = _told(spec, args, formula.flat, args)
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in flat):
        return spec.returned(formula.function.apply(*flat))
    with torch._C._AutoDispatchBelowAutograd():
        return spec.op(*args)


def _without_gradients(spec: OpSpec, *args: Any) -> Any:
    _told(spec, args, refuse_tangents, spec.name, *args)
    _told(spec, args, refuse_grad, spec.name, *pytree.tree_leaves(args))
    with torch._C._AutoDispatchBelowAutograd():
        return spec.op(*args)


def _out_below_autograd(spec: OpSpec, *args: Any, **outs: Tensor) -> Any:
    _told(spec, args, refuse_tangents, spec.name, *args)
    _told(spec, args, refuse_grad, f"{spec.name}.out", *args, *outs.values())
    with torch._C._AutoDispatchBelowAutograd():
        getattr(torch.ops.fusedcomm, spec.name).out(*args, **outs)
    if native is None:
        torch.autograd.graph.increment_version(outs.values())
    return spec.returned([*outs.values()])


def _autocast(spec: OpSpec, device_type: str, *args: Any) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type}"))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return spec.op(*pytree.tree_map(partial(_cast, torch.get_autocast_dtype(device_type.lower())), args))


def _cast(dtype: torch.dtype, arg: Any) -> Any:
    if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64:
        return arg.to(dtype)
    return arg


def _flat(spec: OpSpec, *args: Any) -> list[Any]:
    """[*results, gathered x]: Inductor's C++ wrapper has no lists in tuples."""
    outs, gathered = spec.op(*args)
    return [*outs, gathered]


for _spec in OPS.values():
    _register(_spec)
