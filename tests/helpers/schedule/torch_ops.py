"""What an op of torch does on a GPU: whether it multiplies, copies, and by what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.schedule.operations import Kind

_MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # the place of x among the arguments
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
SYNCHRONIZES = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}


def name_of(func: Any) -> str:
    return func._schema.name.split("::")[1]


def makes_memory_alone(func: Any) -> bool:
    return name_of(func) in _EMPTY


def kind_of(func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> Kind:
    name = name_of(func)
    if name.rstrip("_") in _MATMULS:
        return Kind.MATMUL
    if name == "copy_" and not read:  # from the host
        return Kind.MEMCPY
    if name in ("copy_", "clone") and len(read) == 1 and is_memcpy(written[0], read[0]):
        return Kind.MEMCPY
    return Kind.ELEMENTS


def matmul_sizes(func: Any, args: Sequence[Any], out: Tensor) -> tuple[int, int, int, int]:
    """(batches, m, k, n)."""
    x = args[_MATMULS[name_of(func).rstrip("_")]]
    return out.shape[:-2].numel(), out.shape[-2], x.shape[-1], out.shape[-1]


def is_memcpy(to: Tensor, source: Tensor) -> bool:
    """Whether torch copies by cudaMemcpyAsync: both are dense, in the same order of elements and of one dtype."""
    if to.dtype != source.dtype or to.shape != source.shape:
        return False
    dims = [(size, *strides) for size, *strides in zip(to.shape, to.stride(), source.stride(), strict=True) if size > 1]
    expected = 1
    for size, stride, other in sorted(dims, key=lambda dim: dim[1]):
        if stride != expected or other != expected:
            return False
        expected *= size
    return True


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the op writes."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors(kwargs[argument.name] if argument.name in kwargs else args[i] if i < len(args) else None)
    return found


def tensors(*values: Any) -> list[Tensor]:
    """The tensors among an op's arguments, in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(*value)
        elif isinstance(value, Mapping):
            found += tensors(*value.values())
    return found


def launchers() -> list[Any]:
    """Triton's classes of functions, compiled and interpreted, whose ``run`` launches."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return [JITFunction, InterpretedFunction]
