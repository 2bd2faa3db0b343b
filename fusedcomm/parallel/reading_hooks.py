"""Hooks that may read what a module is given, or its gradient: some ranks alone may do so, and nothing tells it before.

Hooks of torch itself, as FSDP2 and pruning have, read no x.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global


def why_gradient_is_read(module: nn.Module) -> str | None:
    """Autograd then gives ``module`` a tensor of its own, of whose gradient only what the module adds is read."""
    hooks = (module._backward_hooks, module._backward_pre_hooks, _global._global_backward_hooks)
    return "a backward hook reads the gradient of x" if any(hooks) or _global._global_backward_pre_hooks else None


def why_read_first(module: nn.Module, hook: Any, x: Tensor) -> str | None:
    """What may read x before a layer of ``module`` does, or None. ``hook``: the pre-hook of ``module`` that prepares x;
    those before it are given another."""
    hooks = list(module._forward_pre_hooks.values())
    below = [each for each in module.modules() if each is not module]
    pre_hooks = [*hooks[hooks.index(hook) + 1 :], *_global._global_forward_pre_hooks.values()]
    if _has_users(pre_hooks) or any(_has_users(each._forward_pre_hooks.values()) for each in below):
        return "a forward pre-hook may read x before the layers do"
    device_type = x.device.type
    is_cast = torch.is_autocast_enabled(device_type) and x.dtype != torch.get_autocast_dtype(device_type)
    if is_cast and (reads_last(module) or any(_has_users(each._forward_hooks.values()) for each in below)):
        return "a forward hook may read x, which the layers take in autocast's dtype"
    return None


def reads_last(module: nn.Module) -> bool:
    """Whether a hook may read x after ``module`` has run."""
    return _has_users([*module._forward_hooks.values(), *_global._global_forward_hooks.values()])


def _has_users(hooks: Iterable[Any]) -> bool:
    return any(not str(getattr(each, "__module__", "")).startswith(("torch.", "fusedcomm.")) for each in hooks)
