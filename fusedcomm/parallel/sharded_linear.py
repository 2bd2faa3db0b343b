"""The linear layers that `ColwiseParallel` and `RowwiseParallel` make of an nn.Linear.

Parameters are DTensors on a 1-D mesh of R ranks. A layer runs an op on the local tensors, or torch's DTensor path,
depending on placements and sizes alone: these are equal on all ranks. `explain_layers` tells why.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from fusedcomm.memory.group import Group, resolve
from fusedcomm.ops import gradients
from fusedcomm.ops.all_gather_matmul import all_gather_matmul
from fusedcomm.ops.formula import needs_now
from fusedcomm.ops.library import refuse_outside_ops
from fusedcomm.ops.matmul_all_reduce import matmul_all_reduce
from fusedcomm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fusedcomm.parallel import layouts
from fusedcomm.parallel.gradient_when_read import product
from fusedcomm.parallel.shared_gather import SharingLinear, taken_from
from fusedcomm.parallel.unwritten import shard_of, unwritten

APPLIED = "_distribute_module_applied"  # on a module that has a style: torch refuses another one
LEFT = "_fusedcomm_left"  # on a module that a style has left to torch's own: why
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
HELD = f"{REDUCE} in the backward, as all ranks hold x"
_Layer = TypeVar("_Layer", bound="ShardedLinear")


class ShardedLinear(nn.Linear):
    """The base of both layers, with the layouts of their style.

    Attributes:
        weight: a DTensor [out_features, in_features].
        bias: a DTensor [out_features], or None.
        input_layouts: how an x lies that is no DTensor.
        output_layouts: how the result lies.
        use_local_output: whether the result is a plain tensor.
        ran: the op or path of its last call outside of torch.compile, and why.
    """

    input_layouts: tuple[Placement, ...]
    output_layouts: tuple[Placement, ...]
    use_local_output: bool
    ran: str = "not called yet, or in torch.compile alone"
    prefix = ""  # of the names of its ops

    @classmethod
    def convert(cls: type[_Layer], linear: nn.Linear, style: Any) -> _Layer:
        """Make ``linear`` an instance of this class; its parameters are DTensors already."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.input_layouts, linear.output_layouts = style.input_layouts, style.output_layouts
        linear.use_local_output = style.use_local_output
        setattr(linear, APPLIED, True)
        return linear

    def extra_repr(self) -> str:
        placed = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{super().extra_repr()}, {placed}, use_local_output={self.use_local_output}"

    def _run(self, op: str, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        """This rank's part of the result for x, a DTensor or a part of one. ``dim``: of tokens that ``op`` moves."""
        raise NotImplementedError

    def _note(self, ran: str) -> None:
        if not torch.compiler.is_compiling():  # a checkpointed region may not change anything outside of it
            self.ran = ran

    def _laid_out(self, y: Tensor, mesh: DeviceMesh, placement: Placement, rows: torch.Size) -> Tensor:
        """y as the style wants it. If it is no DTensor it is the local tensor of one that lies as ``placement``, with
        the size of all dims but the last that ``rows`` has."""
        wanted = layouts.normalized(self.output_layouts, y.ndim)
        if not isinstance(y, DTensor):
            if wanted == (placement,) and self.use_local_output:
                return y
            y = layouts.from_part(y, mesh, placement, (*rows[:-1], self.weight.shape[0]))
        if y.placements != wanted:
            y = y.redistribute(placements=wanted, async_op=True)
        return y.to_local() if self.use_local_output else y


class ColwiseLinear(ShardedLinear, SharingLinear):
    """An nn.Linear with its output features sharded over ranks. It equals, for x as a DTensor::

        y = F.linear(x.redistribute(placements=[Replicate()]), weight, bias)
        return y.redistribute(placements=output_layouts)

    in one `all_gather_matmul` where the tokens of x are sharded. A plain x that all ranks hold alike is
    multiplied where it is, and the sum of its gradient is one `matmul_all_reduce`. Weight and bias are placed as
    Shard(0).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]. Raises the errors of the ops, and of DTensors."""
        mesh = layouts.mesh_of_weight(self)
        y = self._by_op(x, mesh)
        if y is None:
            x = layouts.annotated(x, mesh, self.input_layouts)
            if self.input_layouts != (Replicate(),):
                x = x.redistribute(placements=(Replicate(),), async_op=True)
            y = super().forward(x)
        return self._laid_out(y, mesh, Shard(y.ndim - 1), y.shape)

    def _by_op(self, x: Tensor, mesh: DeviceMesh) -> Tensor | None:
        """This rank's columns, or None where no op makes them."""
        why = layouts.why_not_sharded(self, mesh, 0) or layouts.why_no_rows(x)
        why = why or layouts.why_elsewhere(x, mesh)
        shares = self.shares and not torch.compiler.is_compiling()
        if why is None and isinstance(x, DTensor) and x.placements == (Replicate(),) and shares:
            made, ran = taken_from(x, self)
            self._note(ran)
            return _linear_of_whole(self, x, made)
        if why is None and not isinstance(x, DTensor) and self.input_layouts == (Replicate(),):
            self._note(self.prefix + HELD)
            return self._run(HELD, x, 0, mesh)
        laid_out = layouts.annotated(x, mesh, self.input_layouts)
        gather_dim = layouts.token_dim(laid_out.placements[0], x.ndim)
        if gather_dim is None:
            why = why or f"x is placed as {laid_out.placements}, where no tokens are to be gathered"
        if why is not None or gather_dim is None:
            self._note(f"torch's own: {why}")
            return None
        self._note(self.prefix + GATHER)
        return self._run(GATHER, laid_out, gather_dim, mesh)

    def _run(self, op: str, x: Any, dim: int, mesh: DeviceMesh) -> Tensor:
        if op == HELD:
            return _linear_of_replicated(self, x, mesh)
        weight, bias = layouts.shards(self)
        y = all_gather_matmul(shard_of(x), weight.mT, dim, mesh, bias=bias, gather_size=layouts.gather_size_of(x, dim))
        return unwritten(y, x, self.weight, keeps_x=False)


class RowwiseLinear(ShardedLinear):
    """An nn.Linear with its input features sharded over ranks. It equals, for x as a DTensor::

        y = F.linear(x.redistribute(placements=[Shard(-1)]), weight, bias)
        return y.redistribute(placements=output_layouts)

    in one `matmul_reduce_scatter` where the tokens of the result are sharded, in one `matmul_all_reduce` where
    it is replicated. The weight is placed as Shard(1), the bias as Replicate(); its gradient is complete.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]. Raises the errors of the ops, and of DTensors."""
        mesh, features = layouts.mesh_of_weight(self), (Shard(x.ndim - 1),)
        if isinstance(x, DTensor) or layouts.normalized(self.input_layouts, x.ndim) != features:
            x = layouts.annotated(x, mesh, self.input_layouts)
            if x.placements != features:
                x = x.redistribute(placements=features, async_op=True)
        y = self._by_op(x, mesh)
        if y is None:
            y = super().forward(layouts.annotated(x, mesh, features))
        return self._laid_out(y, mesh, layouts.normalized(self.output_layouts, x.ndim)[0], x.shape)

    def _by_op(self, x: Tensor, mesh: DeviceMesh) -> Tensor | None:
        """This rank's part of the sum, or None where no op makes it."""
        (placement,) = self.output_layouts
        scatter_dim = layouts.token_dim(placement, x.ndim)
        why = layouts.why_not_sharded(self, mesh, 1) or layouts.why_elsewhere(x, mesh) or layouts.why_no_rows(x)
        if why is None and scatter_dim is None and not isinstance(placement, Replicate):
            why = f"the result is placed as {placement!r}"
        if why is not None:
            self._note(f"torch's own: {why}")
            return None
        op = REDUCE if scatter_dim is None else SCATTER
        self._note(self.prefix + op)
        return self._run(op, x, scatter_dim or 0, mesh)

    def _run(self, op: str, x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
        part = shard_of(x) if isinstance(x, DTensor) else x
        weight, bias = layouts.shards(self)
        if op == REDUCE:
            y = matmul_all_reduce(part, weight.mT, mesh, bias=bias)
        else:
            y = matmul_reduce_scatter(part, weight.mT, dim, mesh, bias=layouts.bias_of_part(self.bias))
        return unwritten(y, x, self.weight)


def explain_layers(module: nn.Module) -> dict[str, str]:
    """Return the op that each layer of `ColwiseParallel` and `RowwiseParallel` in ``module`` ran last, and why.

    Linears and modules that these styles and `PrepareModuleInput` have left to torch are listed too; calls inside
    torch.compile are not: `fusedcomm.compile.report` lists them.

    Args:
        module: any module.

    Returns:
        By the name of a layer, the name of an op, or the reason why torch's own path ran.
    """
    ran = {
        name: each.ran if isinstance(each, ShardedLinear) else vars(each).get(LEFT)
        for name, each in module.named_modules()
    }
    return {name: why for name, why in ran.items() if why is not None}


def _linear_of_replicated(linear: Any, x: Tensor, group: Group) -> Tensor:
    """``F.linear(x, weight, bias)`` for an x that all ranks hold alike, and this rank's rows of the weight.

    Only its backward communicates: the gradient of a plain x is summed by one `matmul_all_reduce`.
    """
    weight, bias = layouts.shards(linear)
    refuse_outside_ops("parallel.ColwiseParallel", x, weight, bias)
    inputs = _autocast(x, weight, bias)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        y = F.linear(*inputs)  # Dynamo traces no autograd.Function that saves something there
    else:
        y = _Linear.apply(*resolve(group), None, *inputs)
    return unwritten(y, x, linear.weight)


def _linear_of_whole(linear: Any, x: DTensor, made: Tensor | None) -> Tensor:
    """The same for a DTensor, whose gradient is Partial, and multiplied when it is read.

    ``made``: the result without its gradients, if something has made it.
    """
    weight, bias = layouts.shards(linear)
    local = shard_of(x, (Partial(),))
    refuse_outside_ops("parallel.ColwiseParallel", local, weight, bias)
    y = _Linear.apply(1, None, [made], *_autocast(local, weight, bias))
    return unwritten(y, x, linear.weight)


class _Linear(torch.autograd.Function):
    """``group_name``: None if the gradient of x is left to `product`."""

    @staticmethod
    def forward(
        ctx: Any, group_size: int, group_name: str | None, given: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad[3:]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.layout, ctx.group = gradients.layout_of(weight), (group_size, group_name)
        return F.linear(x, weight, bias) if given is None or given[0] is None else given[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = needs_now(ctx)[3:]
        grad_x = None
        if ctx.group[1] is None:
            grad_x = product(grad, weight, ctx.next_functions[0][0]) if needs_x else None
        else:
            x = x if x is None else gradients.same_on_all_ranks(x, ctx.group)
            if needs_x:
                grad_x = torch.ops.fusedcomm.matmul_all_reduce(grad, weight, None, "sum", *ctx.group)
        grad_weight = gradients.of_w(grad, x, ctx.layout) if needs_weight else None
        return None, None, None, grad_x, grad_weight, gradients.of_bias(grad) if needs_bias else None


def _autocast(*tensors: Tensor | None) -> list[Any]:
    """Cast to autocast's dtype, outside of the autograd.Function: its backward runs without autocast."""
    device_type = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
