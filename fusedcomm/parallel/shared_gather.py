"""One gather, and one sum of gradients, for the linear layers that take the same x: q, k and v, gate and up.

`PrepareModuleInput` gathers x when its module is called, by one op that also makes the results of the `ColwiseLinear`
layers in the module. A layer that is called with x, or a view of it, takes its result, or multiplies the gathered x.
So the exchange does not depend on hooks, writes or checkpoints of a rank inside the module.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import parametrize

from fusedcomm.memory import group
from fusedcomm.memory.vote import agree
from fusedcomm.ops.all_gather_matmul import matmul_and_gathered
from fusedcomm.parallel.gradient_when_read import whole_of
from fusedcomm.parallel.layouts import annotated, gather_size_of, shards, token_dim, why_not_sharded
from fusedcomm.parallel.unwritten import counts_of, is_cast


class SharingLinear(nn.Linear):
    """A layer that can take part, if it ``shares``.

    ``passed_over``: indices of the module's inputs for which no rank took this layer's result in the module's first
    call; None before that.
    """

    shares = True
    passed_over: frozenset[int] | None = None


Layers = Sequence[SharingLinear]


class _Calls(threading.local):
    def __init__(self) -> None:
        self.running: list[Offers] = []  # the innermost last


_calls = _Calls()


class Offers:
    """The inputs that layers may share in one call of a module."""

    def __init__(self, module: nn.Module, layers: Layers) -> None:
        self.module, self.layers = module, layers
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
        elif isinstance(x, DTensor):  # its producer adds up a Partial gradient
            return None
        self.made.append(SharedGather(annotated(x, mesh, (layout,)), gather_dim, self.layers, len(self.made)))
        return self.made[-1].whole

    def end(self, learn: bool) -> None:
        """``learn``: from now on compute ahead only results that a rank took in this call."""
        if learn and any(each.ahead for each in self.made) and any(each.passed_over is None for each in self.layers):
            self._learn(self.made[0].mesh)
        while _calls.running and _calls.running.pop() is not self:  # calls left by a KeyboardInterrupt
            pass

    def _learn(self, mesh: DeviceMesh) -> None:
        taken = [[i for i, layer in enumerate(self.layers) if layer in each.taken] for each in self.made]
        pg, ranks = mesh.get_group(), [{"taken": taken}]
        if pg.size() > 1 and dist.get_backend(pg) != "fake":
            what = "the first call of a module with fusedcomm.parallel.PrepareModuleInput"
            ranks = agree(group.store(pg, "shared inputs"), pg.rank(), pg.size(), ranks[0], what=what)
        for i, layer in enumerate(self.layers):
            unused = [n for n in range(len(taken)) if not any(i in each["taken"][n] for each in ranks)]
            layer.passed_over = frozenset(unused)


def running_call(module: nn.Module) -> Offers | None:
    """The offers of the innermost call of ``module`` that has not ended."""
    return next((each for each in reversed(_calls.running) if each.module is module), None)


class SharedGather:
    """An x, and the results of layers for it. ``index``: its index among the inputs of its module."""

    def __init__(self, x: DTensor, gather_dim: int | None, layers: Layers, index: int) -> None:
        self.mesh, self.gather_dim, self.layers, self.taken = x.device_mesh, gather_dim, layers, set[SharingLinear]()
        self.results: dict[SharingLinear, _Result] = {}
        self.apart = {each: _why_apart(each, x, index) for each in layers}
        made: Mapping[SharingLinear, Tensor] = {}
        expected = [each for each in layers if self.apart[each] is None]
        with torch.no_grad():
            if gather_dim is None:
                whole = x.to_local()
            elif expected:
                weights, biases = zip(*map(shards, expected), strict=True)
                ws, size = [weight.mT for weight in weights], gather_size_of(x, gather_dim)
                ys, whole = matmul_and_gathered(x.to_local(), ws, gather_dim, self.mesh, biases, size)
                made = dict(zip(expected, ys, strict=True))
            else:
                whole = x.redistribute(placements=(Replicate(),)).to_local()
        self.whole = whole_of(x, whole, gather_dim)
        self.ahead = len(made)
        for layer, y in made.items():
            self.results[layer] = _Result(y, layer.weight, layer.bias, _state(layer, self.whole))

    def take(self, linear: SharingLinear, x: DTensor) -> Tensor | None:
        """This rank's columns of ``linear``'s result for x, if they were made and a call of it would give them."""
        result, whole = self.results.get(linear), self.whole
        if result is None or result.weight is not linear.weight or result.bias is not linear.bias:
            return None
        is_view = x is not whole and (x._base is not whole or x._local_tensor._version > 0)
        if not _same_memory(x, whole) or (is_view and not x.is_inference()) or result.state != _state(linear, whole):
            return None
        self.taken.add(linear)
        del self.results[linear]
        return result.y.view(*x.shape[:-1], result.y.shape[-1])


class _Result(NamedTuple):
    y: Tensor
    weight: Tensor
    bias: Tensor | None
    state: tuple[object, ...]


def taken_from(x: DTensor, linear: SharingLinear) -> tuple[Tensor | None, str]:
    """Returns (result of ``linear`` for x if an op made it ahead, note of the op that ran)."""
    why = "as each rank has the whole of x"
    for each in [shared for call in reversed(_calls.running) for shared in call.made]:
        is_its_x = linear in each.layers and _same_memory(x, each.whole)
        if is_its_x and each.gather_dim is None:
            return None, "matmul_all_reduce in the backward, shared, as all ranks hold x"
        if (y := each.take(linear, x)) is not None:
            shared = f"shared by {each.ahead} layers" if each.ahead > 1 else "for one layer"
            return y, f"all_gather_matmul, {shared}"
        if is_its_x:
            why = each.apart[linear] or why
    return None, f"F.linear, {why}"


def _why_apart(linear: SharingLinear, x: DTensor, index: int) -> str | None:
    """Why the op of x does not make the result of ``linear`` as well, or None. All ranks find it alike."""
    if index in (linear.passed_over or ()):
        return "as no rank took its result in the module's first call"
    if parametrize.is_parametrized(linear):
        return "as its weight is parametrized"
    if is_cast(x):
        return f"as autocast makes {torch.get_autocast_dtype(x.device.type)} of x, which is gathered as {x.dtype}"
    if (why := why_not_sharded(linear, x.device_mesh, 0)) is not None:
        return f"as {why} when the module is called"
    if linear.in_features != x.shape[-1]:
        return f"as x has {x.shape[-1]} features"
    if linear.weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"as its weight has dtype {linear.weight.dtype}"
    return None


def _same_memory(x: DTensor, whole: DTensor) -> bool:
    found, wanted = x._local_tensor, whole._local_tensor
    if found is wanted:
        return True
    if x.shape[-1] != whole.shape[-1] or found.numel() != wanted.numel() or found.dtype != wanted.dtype:
        return False
    return found.is_contiguous() and found.data_ptr() == wanted.data_ptr()


def _state(linear: SharingLinear, whole: DTensor) -> tuple[object, ...]:
    """State that a result depends on besides the tensors: version counters and modes."""
    tensors = [t for t in (whole, linear.weight, linear.bias) if t is not None]
    counts = [each for t in tensors for each in counts_of(t)]
    device_type = whole.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    versions = [None if each.is_inference() else each._version for each in counts]
    return *versions, autocast, torch.is_inference_mode_enabled()
