"""One op for the linear layers that take the same x: q, k and v of attention, gate and up of an MLP.

`PrepareModuleInput` offers an x to the `ColwiseLinear` layers in its module. The first of them that is called with it,
or with a view of it, runs one op for all, the others take their results, and what is left is dropped when the module
returns. A layer that was not called with x is left out of the next call, but not under checkpointing. What the op has
gathered is what other readers of x get.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fusedcomm.ops.all_gather_matmul import matmul_and_gathered
from fusedcomm.parallel.gathered_when_read import REPLICATED, Gather, gathered_when_read, origin_of, source_of
from fusedcomm.parallel.layouts import annotated, gather_size_of, shards, token_dim, why_not_sharded
from fusedcomm.parallel.linear_of_replicated import linears_of_replicated
from fusedcomm.parallel.reading_hooks import reads_last, why_gradient_is_read, why_read_first


class SharingLinear(nn.Linear):
    """A layer that can take part.

    ``passed_over``: which of the offers to the layers of its module it did not take when that was called last, counted
    from 0.
    """

    passed_over: frozenset[int] = frozenset()


Layers = Mapping[SharingLinear, nn.Module]  # and the modules that they are children of


class _Calls(threading.local):
    def __init__(self) -> None:
        self.running: list[Offers] = []  # the innermost last


_calls = _Calls()


class Offers:
    """What layers may share in one call of a module.

    ``hook``: the pre-hook of the module that makes the offers. ``why``: what forbids them, once anything does; then x
    is gathered as torch does it.
    """

    def __init__(self, module: nn.Module, hook: object, layers: Layers) -> None:
        self.module, self.hook, self.layers = module, hook, layers
        self.why = why_gradient_is_read(module)
        self.made: list[SharedGather] = []
        _calls.running.append(self)

    def offer(self, x: Tensor, mesh: DeviceMesh, layout: Placement, desired_layout: Placement | None) -> DTensor | None:
        """x as `PrepareModuleInput` is to make it, if layers may share an op that takes it."""
        if not self.layers or desired_layout != Replicate() or not x.is_floating_point() or x.ndim < 2:
            return None
        gather_dim = None
        if layout != Replicate():
            x = annotated(x, mesh, (layout,))
            gather_dim = token_dim(x.placements[0], x.ndim)
            if gather_dim is None or x.device_mesh != mesh:
                return None
            self.why = self.why or why_read_first(self.module, self.hook, x)
        elif isinstance(x, DTensor):  # whoever has made it adds up what its gradient's users leave Partial
            return None
        if self.why is not None:
            return None
        shared = SharedGather(annotated(x, mesh, (layout,)), gather_dim, self.layers, len(self.made))
        self.made.append(shared)
        return gathered_when_read(shared.x, shared)

    def end(self, learn: bool) -> None:
        """``learn``: expect in the next call of the module what was done in this one."""
        for each in self.made:
            each.end(learn)
            if learn and reads_last(self.module):
                each.read()
        while _calls.running and _calls.running.pop() is not self:  # what a KeyboardInterrupt has left
            pass


def running_call(module: nn.Module) -> Offers | None:
    """The offers of the innermost call of ``module`` that has not ended."""
    return next((each for each in reversed(_calls.running) if each.module is module), None)


def why_not_offered(linear: SharingLinear) -> str | None:
    """Why ``linear`` is called with no x that its module offers, or None where none prepares one."""
    if torch.compiler.is_compiling():
        return None
    call = next((each for each in reversed(_calls.running) if linear in each.layers), None)
    if call is None:
        return None
    gradient_is_read = why_gradient_is_read(linear)
    for each in call.made if gradient_is_read else ():  # autograd has given the layer a tensor of its own
        each.called.add(linear)
    another = "x is another tensor than its module was given" if call.made else None
    return call.why or gradient_is_read or another


class SharedGather(Gather):
    """An x and the layers that it is offered to.

    ``gather_dim``: None where x is replicated, and the sum of its gradient is what they share. ``index``: which of the
    offers to one call of the module it is.
    """

    def __init__(self, x: DTensor, gather_dim: int | None, layers: Layers, index: int) -> None:
        super().__init__(x)
        self.x, self.gather_dim, self.layers, self.index = x, gather_dim, layers, index
        self.called: set[SharingLinear] = set()
        self.saving = _saving_hooks()
        self.by_experience = self.saving is None
        self.results: dict[SharingLinear, _Result] = {}
        self.last = ""  # what the last call of `take` did

    def take(self, linear: SharingLinear, x: Tensor) -> Tensor | None:
        """This rank's columns of ``linear``'s result for x, a view of what was offered; None where the layers cannot
        share an op, so that x is read."""
        again = linear in self.called
        self.called.add(linear)
        result = self.results.pop(linear, None)
        if result is None or not result.holds(linear, x):
            together = [linear] if again else [linear, *self._others(linear)]
            why = self._why_not_x(x) or self._why_not_together(together)
            if why is not None:
                self.last = f"torch's own: {why}"
                return None
            made = [_Result.of(each, x, y) for each, y in zip(together, self._run(together), strict=True)]
            self.results |= zip(together, made, strict=True)
            result = self.results.pop(linear)
        return result.y.view(*x.shape[:-1], result.y.shape[-1])

    def _why_not_x(self, x: Tensor) -> str | None:
        if _saving_hooks() != self.saving:  # a recomputation comes after this x, and finds it gathered
            return "x is used in a checkpoint inside the module"
        if not self.layers:
            return "the module that x was prepared for has returned"
        if self.gather_dim is not None and self.gathered is not None:
            return "x has been gathered already"
        if torch.is_grad_enabled() and origin_of(x) != (REPLICATED if self.x.requires_grad else None):
            return "x was changed, or is without its gradient"
        if x.shape[-1] != self.x.shape[-1]:
            return "x has another number of features than the module was given"
        if any(each._backward_hooks or each.retains_grad for each in (x, x._base) if each is not None):
            return "the gradient of x is read"
        return None

    def _why_not_together(self, together: Sequence[SharingLinear]) -> str | None:
        for each in together[1:]:
            if each._forward_pre_hooks:
                return "it shares x with a layer that has forward pre-hooks, which may change its weight"
            why = why_gradient_is_read(each) or why_not_sharded(each, self.x.device_mesh, 0)
            if why is not None:
                return f"it shares x with a layer for which {why}"
        return None

    def _others(self, linear: SharingLinear) -> list[SharingLinear]:
        """The layers that are expected to be called with x, too."""
        others = [each for each in self.layers if each not in self.called and each.in_features == linear.in_features]
        if self.by_experience:
            return [each for each in others if self.index not in each.passed_over]
        return [each for each in others if self.layers[each] is self.layers[linear]]

    def _run(self, linears: Sequence[SharingLinear]) -> list[Tensor]:
        mesh, x = self.x.device_mesh, self.x.to_local()
        weights, biases = zip(*map(shards, linears), strict=True)
        shared = f"shared by {len(linears)} layers" if len(linears) > 1 else "for one layer"
        if self.gather_dim is None:
            self.last = f"matmul_all_reduce in the backward, {shared}, as all ranks hold x"
            return linears_of_replicated("parallel.ColwiseParallel", x, weights, biases, mesh)
        self.last = f"all_gather_matmul, {shared}"
        ws, size = [weight.mT for weight in weights], gather_size_of(self.x, self.gather_dim)
        ys, gathered = matmul_and_gathered(x, ws, self.gather_dim, mesh, biases, size)
        if gathered.dtype == x.dtype:  # not under autocast
            self.keep(gathered.detach())
        return ys

    def end(self, learn: bool) -> None:
        for each in self.layers if learn and self.by_experience else ():
            if (each in self.called) == (self.index in each.passed_over):
                each.passed_over = each.passed_over ^ {self.index}
        self.results, self.layers = {}, {}


def shared_gather_of(x: object) -> SharedGather | None:
    source = None if torch.compiler.is_compiling() else source_of(x)
    return source if isinstance(source, SharedGather) else None


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
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, _saving_hooks())
    return *versions, origin_of(x), *modes


def _saving_hooks() -> Any:
    """Those of checkpointing, which may run the module again in the backward, and then compares what is saved with what
    was saved here: layers must share an op then as they do now, whatever is learned in between."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
