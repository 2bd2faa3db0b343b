"""The torch library that the ops are defined in, and how their fakes, `.out` overloads and autocast are registered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library import autograd as torch_autograd
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fusedcomm.geometry.shapes import check_out
from fusedcomm.ops import call_check, prepared
from fusedcomm.ops.formula import Formula
from fusedcomm.runtime.native_part import native

lib = torch.library.Library("fusedcomm", "DEF")
_native_kernels: list[Any] = []  # registered as long as they are here


def register_fake(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the op's fake kernel."""
    return torch.library.register_fake(f"fusedcomm::{op}", lib=lib)


def register_kernel(op: str, kernel: Callable[..., Any]) -> None:
    """Make ``kernel`` the op's on CPU and CUDA. ``op``: with its overload, if that is not the default one."""
    name, _, overload = op.partition(".")
    schema = getattr(getattr(torch.ops.fusedcomm, name), overload or "default")._schema
    group_at = [each.name for each in schema.arguments].index("group_name")

    def call(*args: Any, **kwargs: Any) -> Any:
        with call_check.own_input(name, args[group_at], args[0]):
            return kernel(*args, **kwargs)

    lib.impl(op, call, "CUDA")
    if native is None:
        lib.impl(op, call, "CPU")
    else:
        _native_kernels.append(native.register_cpu_kernel(f"fusedcomm::{name}", overload, call, prepared.record))


def register_autograd_kernel(op: str, kernel: Callable[..., Any], formula: Formula, with_keyset: bool = False) -> None:
    """Make ``kernel`` the op's where an argument requires grad or has a tangent, and maybe elsewhere.

    ``formula``: its gradients, for those calls that do not go to the kernel.
    """
    if native is None:
        lib.impl(op, kernel, "Autograd", with_keyset=with_keyset)
    else:
        _native_kernels.append(native.register_autograd_kernel(f"fusedcomm::{op}", kernel, with_keyset, formula))


def new_or_given(x: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """The result of a fake kernel."""
    if out is None:
        return x.new_empty(shape)
    check_out(out, x, shape)
    return out


def define_out(op: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define ``op.out``: the same call, which puts its result into a contiguous tensor of the caller.

    ``kernel`` and ``fake`` are the op's own, which take ``out`` too.
    """
    args = str(getattr(torch.ops.fusedcomm, op).default._schema).partition("(")[2].removesuffix(") -> Tensor")
    # Inductor's fallbacks, if they find an `.out` with arguments of the same names, cut a list into its elements for it
    args = args.replace("out_shape", "view_shape")
    tags = [getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "out") if hasattr(torch.Tag, name)]
    lib.define(f"{op}.out({args}, *, Tensor(a!) out) -> Tensor(a!)", tags=tags)
    register_kernel(f"{op}.out", kernel)
    register_fake(f"{op}.out")(fake)

    def below_autograd(*args: Any, out: Tensor) -> Tensor:
        refuse_tangents(op, *args)
        tensors = [t for t in (*args, out) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(f"fusedcomm::{op}.out has no gradients: no tensor may require grad, or use no_grad()")
        with torch._C._AutoDispatchBelowAutograd():
            getattr(torch.ops.fusedcomm, op).out(*args, out=out)
        torch.autograd.graph.increment_version(out)
        return out

    lib.impl(f"{op}.out", below_autograd, "Autograd")


def register_autograd(op: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """What torch.library.register_autograd does, and tangents are refused before anything is sent."""
    info = torch_autograd.Info(backward, setup_context)
    differentiable = torch_autograd.make_autograd_impl(getattr(torch.ops.fusedcomm, op).default, info)

    defaults = [each.default_value for each in getattr(torch.ops.fusedcomm, op).default._schema.arguments]

    def kernel(keyset: Any, *args: Any) -> Any:
        refuse_tangents(op, *args)
        return differentiable(keyset, *args, *defaults[len(args) :])  # torch leaves out those at the end

    register_autograd_kernel(op, kernel, Formula(setup_context, backward), with_keyset=True)


def refuse_tangents(op: str, *args: Any) -> None:
    """Without a rule for them torch would drop the tangents where no input requires grad."""
    if forward_ad._current_level >= 0:
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise RuntimeError(f"fusedcomm.{op} has no forward-mode derivatives: use reverse mode, torch.autograd.grad")


def register_modes(op: str) -> None:
    """Under autocast the op takes its tensors in autocast's dtype, as torch.matmul does.

    vmap and torch.func's transforms have no rule for a call that other ranks take part in: inside them it raises.
    """
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        torch.library.impl(lib, op, key)(_autocast(op, device_type, key))
    for overload in getattr(torch.ops.fusedcomm, op).overloads():
        for key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
            lib.impl(f"{op}.{overload}".removesuffix(".default"), functools.partial(_inside_transform, op), key)


def _autocast(op: str, device_type: str, key: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64:
            return arg.to(torch.get_autocast_dtype(device_type))
        return arg

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return getattr(torch.ops.fusedcomm, op)(*pytree.tree_map(cast, args))

    return call


def _inside_transform(op: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"fusedcomm.{op} does not work inside vmap or torch.func transforms: use torch.autograd")


def refuse_outside_ops(layer: str, *tensors: Tensor | None) -> None:
    """What the ops refuse by themselves, for a layer whose forward calls none."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        _inside_transform(layer)
    refuse_tangents(layer, *tensors)
