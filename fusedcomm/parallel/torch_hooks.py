"""The private parts of torch's styles that those of this package are built on, compared with the installed torch."""

from __future__ import annotations

import functools
import inspect
import warnings

import torch
from torch.distributed.tensor.parallel import style as torch_styles

_METHODS = {
    "ColwiseParallel._apply": ("self", "module", "device_mesh"),
    "ColwiseParallel._partition_linear_fn": ("self", "name", "module", "device_mesh"),
    "RowwiseParallel._apply": ("self", "module", "device_mesh"),
    "RowwiseParallel._partition_linear_fn": ("self", "name", "module", "device_mesh"),
    "PrepareModuleInput._apply": ("self", "module", "device_mesh"),
    "PrepareModuleInput._prepare_input_arg": ("self", "input", "mesh", "input_layout", "desired_layout"),
    "PrepareModuleInput._prepare_input_kwarg_fn": ("self", "inputs", "kwarg_inputs", "device_mesh"),
}
_LAYOUTS = {
    "ColwiseParallel": ("input_layouts", "output_layouts"),
    "RowwiseParallel": ("input_layouts", "output_layouts"),
}


def changed() -> str | None:
    """What the installed torch has otherwise, or None."""
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
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        return "_top_saved_tensors_default_hooks"
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
