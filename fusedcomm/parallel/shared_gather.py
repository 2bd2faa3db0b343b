"""One op for the linear layers that take the same x: q, k and v of attention, gate and up of an MLP.

`PrepareModuleInput` offers an x to the `ColwiseLinear` children of its module. The first of them that is called with
that very object runs one op for all, the others take their results, and what is left is dropped when the module
returns. A layer that was not called with x is left out of the next call, but not under checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        if not self.children or desired_layout != Replicate():
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
        self.by_experience = not _saved_tensors_are_counted()
        self.results: dict[SharingLinear, Tensor] = {}
        self.modes: tuple[object, ...] = ()  # under which they were made
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
        if linear in self.results and self.modes == _modes(self.x):
            return self.results.pop(linear)
        if self.gather is not None and self.gather.done:
            self.last = "torch's own: x has been gathered for another reader"
            return None
        together = [linear] if again else [linear, *self._others()]
        mesh = self.x.device_mesh
        for each in together:
            why = why_not_sharded(each, mesh, 0)
            if why is not None:
                self.last = f"torch's own: it shares x with a layer for which {why}"
                return None
        self.modes = _modes(self.x)
        self.results |= zip(together, self._run(together), strict=True)
        return self.results.pop(linear)

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


def _saved_tensors_are_counted() -> bool:
    """Whether checkpointing may run the module again in the backward, and then compares what is saved with what was
    saved here: layers must share an op then as they do now, whatever is learned in between."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _modes(x: Tensor) -> tuple[object, ...]:
    """What a result depends on besides x and the parameters."""
    device_type = x.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
