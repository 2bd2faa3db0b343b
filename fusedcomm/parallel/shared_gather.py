"""One op for the linear layers that take the same x: q, k and v of attention, gate and up of an MLP.

`PrepareModuleInput` offers an x to the `ColwiseLinear` children of its module. The first of them that is called with
that very object runs one op for all, the others take their results, and what is left is dropped when the module
returns. A layer that was not called with x is left out of the next call, but not under checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.ops.all_gather_matmul import all_gather_matmul
from fusedcomm.parallel.gathered_when_read import Gather, gathered_when_read
from fusedcomm.parallel.layouts import annotated, shards, token_dim, why_not_sharded, why_uneven
from fusedcomm.parallel.linear_of_replicated import linears_of_replicated

_ATTRIBUTE = "_fusedcomm_shared_gather"  # the object that the module is given has it


class SharingLinear(nn.Linear):
    """A layer that can take part.

    ``passed_over``: which of the offers to the layers of its module it did not take when that was called last, counted
    from 0.
    """

    passed_over: frozenset[int] = frozenset()


class Offers:
    """What the layers right below a module may share in one call of it."""

    def __init__(self, children: Sequence[SharingLinear]) -> None:
        self.children = children
        self.count = 0

    def offer(self, x: Tensor, mesh: DeviceMesh, layout: Placement, desired_layout: Placement | None) -> DTensor | None:
        """x as `PrepareModuleInput` is to make it, if layers may share an op that takes it."""
        if not self.children or desired_layout != Replicate() or not x.is_floating_point() or x.ndim < 2:
            return None
        gather_dim = None
        if layout != Replicate():
            x = annotated(x, mesh, (layout,))
            gather_dim = token_dim(x.placements[0], x.ndim)
            if gather_dim is None or x.device_mesh != mesh or why_uneven("", x.shape[gather_dim], mesh) is not None:
                return None
        elif isinstance(x, DTensor):  # whoever has made it adds up what its gradient's users leave Partial
            return None
        shared = SharedGather(annotated(x, mesh, (layout,)), gather_dim, self.children, self.count)
        self.count += 1
        return shared.offered


class SharedGather:
    """An x and the layers that it is offered to.

    ``gather_dim``: None where x is replicated, and the sum of its gradient is what they share. ``index``: which of the
    offers to one call of the module it is.
    """

    def __init__(self, x: DTensor, gather_dim: int | None, children: Sequence[SharingLinear], index: int) -> None:
        self.x, self.gather_dim, self.children, self.index = x, gather_dim, children, index
        self.called: set[SharingLinear] = set()
        self.saving = _saving_hooks()
        self.by_experience = self.saving is None
        self.results: dict[SharingLinear, _Result] = {}
        self.last = ""  # what the last call of `take` did
        self.offered: DTensor = x
        self.gather: Gather | None = None
        if gather_dim is not None:
            self.offered, self.gather = gathered_when_read(x)
        setattr(self.offered, _ATTRIBUTE, self)

    def take(self, linear: SharingLinear) -> Tensor | None:
        """This rank's columns of ``linear``'s result; None where the layers cannot share an op, so that x is read."""
        again = linear in self.called
        self.called.add(linear)
        result = self.results.pop(linear, None)
        if result is not None and result.holds(linear, self.offered):
            return result.y
        together = [linear] if again else [linear, *self._others()]
        why = self._why_not_by_op(linear, together)
        if why is not None:
            self.last = f"torch's own: {why}"
            return None
        made = [_Result.of(each, self.offered, y) for each, y in zip(together, self._run(together), strict=True)]
        self.results |= zip(together, made, strict=True)
        return self.results.pop(linear).y

    def _why_not_by_op(self, linear: SharingLinear, together: Sequence[SharingLinear]) -> str | None:
        if self.gather is not None:
            if self.gather.done:
                return "x has been gathered for another reader"
            if self.offered._backward_hooks or self.offered.retains_grad:
                return "the gradient of x is read"
        if _saving_hooks() != self.saving:  # a recomputation comes after this x, and finds it gathered
            return "x is used in a checkpoint inside the module"
        for each in together:
            if each is not linear and each._forward_pre_hooks:
                return "it shares x with a layer that has forward pre-hooks, which may change its weight"
            if why := why_not_sharded(each, self.x.device_mesh, 0):
                return f"it shares x with a layer for which {why}"
        return None

    def _others(self) -> list[SharingLinear]:
        """The layers that are expected to be called with x, too."""
        others = [each for each in self.children if each not in self.called]
        return [each for each in others if not self.by_experience or self.index not in each.passed_over]

    def _run(self, linears: Sequence[SharingLinear]) -> list[Tensor]:
        mesh, x = self.x.device_mesh, self.x.to_local()
        weights, biases = zip(*map(shards, linears), strict=True)
        shared = f"shared by {len(linears)} layers" if len(linears) > 1 else "for one layer"
        if self.gather_dim is None:
            self.last = f"matmul_all_reduce in the backward, {shared}, as all ranks hold x"
            return linears_of_replicated("parallel.ColwiseParallel", x, weights, biases, mesh)
        self.last = f"all_gather_matmul, {shared}"
        return all_gather_matmul(x, [weight.mT for weight in weights], self.gather_dim, mesh, bias=biases)

    def end(self, learn: bool) -> None:
        """``learn``: expect in the next call of the module what was done in this one."""
        for each in self.children if learn and self.by_experience else ():
            if (each in self.called) == (self.index in each.passed_over):
                each.passed_over = each.passed_over ^ {self.index}
        self.results, self.children = {}, ()
        delattr(self.offered, _ATTRIBUTE)  # it would be part of a cycle


def shared_gather_of(x: object) -> SharedGather | None:
    return None if torch.compiler.is_compiling() else getattr(x, _ATTRIBUTE, None)


class _Result(NamedTuple):
    """What was made for a layer before it was called, and of what."""

    y: Tensor
    weight: Tensor
    bias: Tensor | None
    state: tuple[object, ...]

    @classmethod
    def of(cls, linear: SharingLinear, x: Tensor, y: Tensor) -> _Result:
        return cls(y, linear.weight, linear.bias, _state(linear, x))

    def holds(self, linear: SharingLinear, x: Tensor) -> bool:
        """Whether the call of ``linear`` would give it."""
        return self.weight is linear.weight and self.bias is linear.bias and self.state == _state(linear, x)


def _state(linear: SharingLinear, x: Tensor) -> tuple[object, ...]:
    """What a result depends on besides the tensors themselves: writes to them, and modes."""
    versions = [None if t is None or t.is_inference() else t._version for t in (x, linear.weight, linear.bias)]
    device_type = x.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return *versions, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _saving_hooks() -> Any:
    """Those of checkpointing, which may run the module again in the backward, and then compares what is saved with what
    was saved here: layers must share an op then as they do now, whatever is learned in between."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
