"""The styles of `torch.distributed.tensor.parallel`, with linear layers that run ops of this package."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import style as torch_styles
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.parallel.float8_linear import float8_class, is_float8_linear, why_not_scaled
from fusedcomm.parallel.plain_modules import is_defined_in, why_not_plain_call, why_on_any_rank
from fusedcomm.parallel.sharded_linear import LEFT, ColwiseLinear, RowwiseLinear, ShardedLinear
from fusedcomm.parallel.shared_gather import Offers, SharingLinear, running_call

_OF_LINEAR = ("_apply", "_partition_linear_fn", "_prepare_input_fn", "_prepare_output_fn")
_OF_INPUT = ("_apply", "_prepare_input_fn", "_prepare_input_kwarg_fn", "_prepare_input_arg")


class ColwiseParallel(torch_styles.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel``, turning an nn.Linear into a `ColwiseLinear`.

    torchao's Float8Linear becomes one whose ops are scaled, if it scales dynamically and tensor-wise. Other modules are
    left to torch: other subclasses of nn.Linear, and linears with a wrapped forward, or with forward or backward hooks;
    and any module if a derived style overrides how inputs or outputs are prepared. `explain_layers` tells why.

    Args:
        input_layouts: how an x lies that is no DTensor; Replicate() by default.
        output_layouts: how the result lies; Shard(-1) by default.
        use_local_output: whether the result is a plain tensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        why = None
        if self.desired_input_layouts != (Replicate(),):
            why = f"the style wants its input placed as {self.desired_input_layouts}"
        return _converted(self, module, device_mesh, ColwiseLinear, why) or super()._apply(module, device_mesh)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel``, turning an nn.Linear into a `RowwiseLinear`.

    It leaves to torch what `ColwiseParallel` does.

    Args:
        input_layouts: how an x lies that is no DTensor; Shard(-1) by default.
        output_layouts: how the result lies; Replicate() by default.
        use_local_output: whether the result is a plain tensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _converted(self, module, device_mesh, RowwiseLinear) or super()._apply(module, device_mesh)


class PrepareModuleInput(torch_styles.PrepareModuleInput):
    """``torch.distributed.tensor.parallel.PrepareModuleInput``, with one op shared by the layers of a module.

    An input to gather along its tokens is gathered when the module is called, as in torch, by one op that also makes
    the results of the `ColwiseLinear` layers in the module; other readers get the gathered input. The gradient of such
    an input, or of a replicated one, is summed by one op for all layers. Ranks agree in the first call of the module
    which layers take which input. Under torch.compile, and with ``use_local_output``, inputs are prepared as in torch,
    and `fusedcomm.compile` finds shared gathers.

    Args:
        input_layouts: how the inputs lie that are no DTensors; None leaves an input as it is.
        desired_input_layouts: how the module wants them.
        input_kwarg_layouts: as input_layouts, by name.
        desired_input_kwarg_layouts: as desired_input_layouts, by name.
        use_local_output: whether the module is given plain tensors.
    """

    _offers: Offers | None = None  # of the call that is being prepared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if _is_left(module, device_mesh, _why_not_own(self, *_OF_INPUT)):
            return super()._apply(module, device_mesh)
        module.register_forward_pre_hook(_Prepare(self, device_mesh), with_kwargs=True)
        module.register_forward_hook(_after, always_call=True)
        return module

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if self._offers is not None and input_layout is not None and isinstance(input, Tensor):
            offer = self._offers.offer(input, mesh, input_layout, desired_layout)
            if offer is not None:
                return offer
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


def _converted(
    style: Any, module: nn.Module, mesh: DeviceMesh, layer: type[ShardedLinear], why: str | None = None
) -> nn.Module | None:
    """``module`` as a ``layer``; None if it is left to torch."""
    if not isinstance(module, nn.Linear):
        return None
    if is_float8_linear(module):
        layer = float8_class(layer, type(module))  # type: ignore[arg-type]  # types are Hashable
        why = why_not_plain_call(module, type(module)) or why_not_scaled(module) or why
    else:
        why = why_not_plain_call(module) or why
    if _is_left(module, mesh, why or _why_not_own(style, *_OF_LINEAR)):
        return None
    style._partition_linear_fn("", module, mesh)
    return layer.convert(module, style)


def _why_not_own(style: torch_styles.ParallelStyle, *methods: str) -> str | None:
    """Why a method of ``style`` among ``methods`` is not torch's or this module's, or None."""
    theirs = next(cls for cls in type(style).__mro__ if cls.__module__ == torch_styles.__name__)
    for method in methods:
        if not is_defined_in(getattr(theirs, method), torch_styles):
            return f"{theirs.__name__}.{method} is patched"
        if method != "_apply" and not is_defined_in(getattr(style, method), torch_styles, sys.modules[__name__]):
            return f"{type(style).__name__} has a {method} of its own"
    return None


def _is_left(module: nn.Module, mesh: DeviceMesh, why: str | None) -> bool:
    """Whether ``module`` is left to torch on all ranks, as any rank has a ``why``."""
    if mesh.ndim == 1 and mesh.size() > 1 and mesh.get_coordinate() is not None:
        why = why_on_any_rank(why, mesh.get_group())
    if why is not None:
        setattr(module, LEFT, f"torch's own: {why}")
    return why is not None


class _Prepare:
    """The pre-hook of a module that `PrepareModuleInput` was applied to."""

    def __init__(self, style: PrepareModuleInput, mesh: DeviceMesh) -> None:
        self.style, self.mesh = style, mesh

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        style = self.style
        if not style.use_local_output and not torch.compiler.is_compiling():
            style = copy.copy(style)
            style._offers = Offers(module, _layers_in(module))
        return style._prepare_input_kwarg_fn(args, kwargs, self.mesh)

    def __deepcopy__(self, memo: Any) -> _Prepare:
        return self  # a mesh cannot be copied


def _layers_in(module: nn.Module) -> list[SharingLinear]:
    """The layers in ``module``, not in a prepared module below it."""
    found: list[SharingLinear] = []
    seen, parents = {module}, [module]
    for parent in parents:  # it grows
        for child in parent.children():
            prepared = any(isinstance(hook, _Prepare) for hook in child._forward_pre_hooks.values())
            if child in seen or prepared:
                continue
            seen.add(child)
            if isinstance(child, ColwiseLinear) and child.shares:
                found.append(child)
            else:
                parents.append(child)
    return found


def _after(module: nn.Module, args: Any, result: Any) -> None:
    call = None if torch.compiler.is_compiling() else running_call(module)
    if call is not None:
        call.end(learn=result is not None)


class PrepareModuleInputOutput(torch_styles.PrepareModuleInputOutput):
    """``torch.distributed.tensor.parallel.PrepareModuleInputOutput`` with this package's `PrepareModuleInput`.

    Args:
        input_layouts, desired_input_layouts: as in `PrepareModuleInput`.
        input_kwarg_layouts, desired_input_kwarg_layouts: as in `PrepareModuleInput`.
        use_local_input: `PrepareModuleInput`'s use_local_output.
        output_layouts, desired_output_layouts, use_local_output: as in torch's PrepareModuleOutput.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input.__class__ = PrepareModuleInput
        return super()._apply(module, device_mesh)
