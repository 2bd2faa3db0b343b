"""The torch library that the ops are defined in, and the calls that they refuse or that end before them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

lib = torch.library.Library("fusedcomm", "DEF")


class Stopped(Exception):
    pass


class UpToTheOp(TorchDispatchMode):
    """Checks of a public function run, its op does not. Peers hear of no error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedcomm":
            self.op, self.args, self.outs = func.overloadpacket.__name__, args, kwargs or {}
            raise Stopped
        return func(*args, **(kwargs or {}))


def refuse_tangents(op: str, *args: Any) -> None:
    """Without a rule torch would drop tangents where no input requires grad."""
    if forward_ad._current_level >= 0:
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise RuntimeError(f"fusedcomm.{op} has no forward-mode derivatives: use reverse mode, torch.autograd.grad")


def refuse_grad(op: str, *args: Any) -> None:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
        raise RuntimeError(f"fusedcomm::{op} has no gradients: no tensor may require grad, or use no_grad()")


def refuse_transforms(op: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"fusedcomm.{op} does not work inside vmap or torch.func transforms: use torch.autograd")


def refuse_outside_ops(layer: str, *tensors: Tensor | None) -> None:
    """Refuse, in a layer without ops in its forward, the calls that the ops refuse."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        refuse_transforms(layer)
    refuse_tangents(layer, *tensors)
