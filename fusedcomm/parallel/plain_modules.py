"""Checks that calling a module runs the forward of its class: not overridden, patched, or set on the instance."""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# A call of a module goes through these.
_CALLED = (
    *("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward", "forward"),
    *("__getattr__", "__getattribute__"),
)
PARAMETERS = ("weight", "bias")
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def is_defined_in(function: Callable[..., Any], *modules: ModuleType) -> bool:
    """False for a patched function, also for a wrapper made by functools.wraps."""
    return any(getattr(function, "__globals__", None) is vars(module) for module in modules)


def why_not_called_as(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Why a call of ``module`` may run other code than ``base.forward``, or None."""
    if not is_defined_in(base.forward, sys.modules[base.__module__]):
        return f"{base.__name__}.forward is patched"
    mro = type(module).__mro__
    for cls in mro[: mro.index(base)]:
        if found := [name for name in _CALLED if name in vars(cls)]:
            return f"{cls.__name__} has a {found[0]} of its own"
    patched = [name for name in _CALLED if (name in vars(base) and name != "forward") or name in vars(module)]
    return f"its {patched[0]} is replaced" if patched else None


def why_not_plain(linear: nn.Linear) -> str | None:
    """Why ``linear`` is more than a weight and a bias that F.linear takes, or None."""
    why = why_not_called_as(linear, nn.Linear)
    held = {**linear._modules, **linear._buffers, **linear._parameters}
    if why is None and (more := [name for name in held if name not in PARAMETERS or name not in linear._parameters]):
        why = f"it has {', '.join(more)}"
    if why is None and (any(getattr(linear, hooks) for hooks in _HOOKS) or has_parameter_hooks(linear)):
        why = "it, or a parameter of it, has hooks"
    return why or why_not_parameters(linear)


def why_not_plain_call(linear: nn.Linear, base: type[nn.Linear] = nn.Linear) -> str | None:
    """Why a call of ``linear`` may be more than ``base.forward`` with its parameters, or a hook may see its result, or
    None."""
    if type(linear) is not base:
        return f"it is a {type(linear).__name__}"
    if made := [name for name in PARAMETERS if name not in linear._parameters]:
        return f"its {made[0]} is no parameter"
    hooks = [hook for name in _HOOKS[1:4] for hook in getattr(linear, name).values()]
    return why_not_called_as(linear, base) or ("it has forward or backward hooks" if has_users(hooks) else None)


def has_users(hooks: Iterable[Any]) -> bool:
    """Whether any hook is neither torch's (as FSDP2's are) nor fusedcomm's."""
    return any(not str(getattr(each, "__module__", "")).startswith(("torch.", "fusedcomm.")) for each in hooks)


def has_parameter_hooks(module: nn.Module) -> bool:
    held = [each for each in module._parameters.values() if each is not None]
    return any(each._backward_hooks or each._post_accumulate_grad_hooks for each in held)  # type: ignore[attr-defined]


def why_on_any_rank(why: str | None, pg: ProcessGroup) -> str | None:
    """``why``, or that another rank has one: all ranks must take the same path."""
    with unset_fake_temporarily():
        found = torch.tensor([why is not None], dtype=torch.int32, device=c10d._get_object_coll_device(pg))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=pg)
        return why or ("another rank's is not plain" if found.item() else None)


def why_not_parameters(linear: nn.Linear) -> str | None:
    shapes = {"weight": (linear.out_features, linear.in_features), "bias": (linear.out_features,)}
    for name, parameter in linear._parameters.items():
        if parameter is None:
            continue
        if is_traceable_wrapper_subclass(parameter) or _computes_otherwise(type(parameter)):
            return f"its {name} is a {type(parameter).__name__}"
        if tuple(parameter.shape) != shapes[name]:
            return f"its {name} has shape {tuple(parameter.shape)}"
    return None if linear._parameters.get("weight") is not None else "it has no weight"


def _computes_otherwise(cls: Any) -> bool:
    function = cls.__torch_function__
    plain = torch._C._disabled_torch_function_impl, torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return getattr(function, "__func__", function) not in plain
