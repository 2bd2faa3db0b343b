"""The styles of `torch.distributed.tensor.parallel` whose linear layers run ops of this package."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import style as torch_styles
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.parallel.sharded_linear import ColwiseLinear, RowwiseLinear
from fusedcomm.parallel.shared_gather import Offers, shared_gather_of
from fusedcomm.parallel.torch_hooks import as_expected


class ColwiseParallel(torch_styles.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel``, which makes a `ColwiseLinear` of an nn.Linear.

    Other modules, subclasses of nn.Linear among them, are torch's own matter.

    Args:
        input_layouts: how an x lies that is no DTensor; Replicate() by default.
        output_layouts: how the result lies; Shard(-1) by default.
        use_local_output: whether the result is a plain tensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear or not as_expected():
            return super()._apply(module, device_mesh)
        self._partition_linear_fn("", module, device_mesh)
        return ColwiseLinear.convert(module, self)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel``, which makes a `RowwiseLinear` of an nn.Linear.

    Other modules, subclasses of nn.Linear among them, are torch's own matter.

    Args:
        input_layouts: how an x lies that is no DTensor; Shard(-1) by default.
        output_layouts: how the result lies; Replicate() by default.
        use_local_output: whether the result is a plain tensor.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear or not as_expected():
            return super()._apply(module, device_mesh)
        self._partition_linear_fn("", module, device_mesh)
        return RowwiseLinear.convert(module, self)


class PrepareModuleInput(torch_styles.PrepareModuleInput):
    """``torch.distributed.tensor.parallel.PrepareModuleInput``, by which the layers of a module share one op.

    An input that is to be gathered along its tokens, or that all ranks hold alike, is offered to the `ColwiseLinear`
    layers right below the module: the first that is called with it runs one op for all that take it. Whoever else
    reads it gets the gathered tensor, which is gathered then. Under torch.compile, and with ``use_local_output``,
    inputs are prepared as torch does, and `fusedcomm.compile` finds what layers share.

    Args:
        input_layouts: how the inputs lie that are no DTensors; None for those that are left as they are.
        desired_input_layouts: how the module wants them.
        input_kwarg_layouts: as input_layouts, by name.
        desired_input_kwarg_layouts: as desired_input_layouts, by name.
        use_local_output: whether the module is given plain tensors.
    """

    _offers: Offers | None = None  # those of the call whose inputs are being prepared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not as_expected():
            return super()._apply(module, device_mesh)
        module.register_forward_pre_hook(
            lambda module, args, kwargs: self._before(device_mesh, module, args, kwargs), with_kwargs=True
        )
        module.register_forward_hook(_after, with_kwargs=True, always_call=True)
        return module

    def _before(self, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self
        if not self.use_local_output and not torch.compiler.is_compiling():
            call = copy.copy(self)
            call._offers = Offers([each for each in module.children() if isinstance(each, ColwiseLinear)])
        return call._prepare_input_kwarg_fn(args, kwargs, mesh)

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if self._offers is not None and input_layout is not None and isinstance(input, Tensor):
            offer = self._offers.offer(input, mesh, input_layout, desired_layout)
            if offer is not None:
                return offer
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


def _after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    """``result``: None where the module has raised."""
    if torch.compiler.is_compiling():
        return
    for x in (*args, *kwargs.values()):
        shared = shared_gather_of(x)
        if shared is not None:
            shared.end(learn=result is not None)


class PrepareModuleInputOutput(torch_styles.PrepareModuleInputOutput):
    """``torch.distributed.tensor.parallel.PrepareModuleInputOutput`` with this package's `PrepareModuleInput`.

    Args:
        input_layouts: as in `PrepareModuleInput`.
        desired_input_layouts: as in `PrepareModuleInput`.
        input_kwarg_layouts: as in `PrepareModuleInput`.
        desired_input_kwarg_layouts: as in `PrepareModuleInput`.
        use_local_input: `PrepareModuleInput`'s use_local_output.
        output_layouts: as in torch's PrepareModuleOutput.
        desired_output_layouts: as in torch's PrepareModuleOutput.
        use_local_output: as in torch's PrepareModuleOutput.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = torch_styles.PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
