"""Private parts of torch's styles that this package's styles depend on, compared with the installed torch."""

from __future__ import annotations

import functools
import inspect
import warnings

import torch
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import style as torch_styles

_METHODS = {
    "ColwiseParallel._apply": ("self", "module", "device_mesh"),
    "ColwiseParallel._partition_linear_fn": ("self", "name", "module", "device_mesh"),
    "RowwiseParallel._apply": ("self", "module", "device_mesh"),
    "RowwiseParallel._partition_linear_fn": ("self", "name", "module", "device_mesh"),
    "PrepareModuleInput._apply": ("self", "module", "device_mesh"),
    "PrepareModuleInput._prepare_input_arg": ("self", "input", "mesh", "input_layout", "desired_layout"),
    "PrepareModuleInput._prepare_input_fn": ("self", "inputs", "device_mesh"),
    "PrepareModuleInput._prepare_input_kwarg_fn": ("self", "inputs", "kwarg_inputs", "device_mesh"),
    "PrepareModuleInputOutput._apply": ("self", "module", "device_mesh"),
}
APPLIED = "_distribute_module_applied"  # on a module that has a style: torch refuses another one
_LAYOUTS = {
    "ColwiseParallel": ("input_layouts", "output_layouts"),
    "RowwiseParallel": ("input_layouts", "output_layouts"),
}


def changed() -> str | None:
    """The first expected part that the installed torch lacks, or None."""
    for name, parameters in _METHODS.items():
        style, method = name.split(".")
        function = getattr(getattr(torch_styles, style), method, None)
        if function is None or tuple(inspect.signature(function).parameters) != parameters:
            return f"{name}({', '.join(parameters[1:])})"
    for style, attributes in _LAYOUTS.items():
        made = getattr(torch_styles, style)()
        for attribute in attributes:
            layouts = getattr(made, attribute, None)
            if not isinstance(layouts, tuple) or len(layouts) != 1:
                return f"{style}.{attribute} of one placement"
    made = torch_styles.PrepareModuleInputOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
    for attribute in ("prepare_module_input", "prepare_module_output"):
        if not isinstance(getattr(made, attribute, None), torch_styles.ParallelStyle):
            return f"PrepareModuleInputOutput.{attribute}"
    code = inspect.unwrap(distribute_module).__code__
    if APPLIED not in code.co_names or APPLIED not in code.co_consts:
        return f"{APPLIED}, set and read by distribute_module"
    for name in ("_DisableTorchDispatch", "_will_engine_execute_node"):
        if not hasattr(torch._C, name):
            return f"torch._C.{name}"
    return None


CHANGED = changed()


@functools.cache
def as_expected() -> bool:
    """Whether the styles can be used; warns once where torch's own run in their place."""
    if CHANGED is not None:
        warnings.warn(
            f"torch {torch.__version__} has no {CHANGED}, which fusedcomm.parallel is built on: torch's own styles are "
            "used",
            stacklevel=4,
        )
    return CHANGED is None
