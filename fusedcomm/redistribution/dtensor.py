"""The op ``fusedcomm::redistribute`` on DTensors: its kernel, a handler that DTensor calls, and its gradient.

Everything is decided inside the op, from facts equal on all ranks. torch.compile traces the handler, so its graphs have
the plan's collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _redistribute as torch_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fusedcomm import files
from fusedcomm.ops.library import lib
from fusedcomm.plan.cost.links import INTER_BANDWIDTH
from fusedcomm.redistribution import execute, mesh_groups, placements, search
from fusedcomm.redistribution.mesh_groups import MeshFacts
from fusedcomm.redistribution.placements import Unsupported
from fusedcomm.redistribution.sharding import Sharding
from fusedcomm.redistribution.step_time import MeshLinks, ranks_per_node
from fusedcomm.redistribution.steps import Step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from fusedcomm.redistribution.search import RedistributionPlan

log = logging.getLogger("fusedcomm")

_logged: set[str] = set()


def check_mesh(dtensor: DTensor, device_mesh: DeviceMesh | None) -> None:
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"redistribute takes a DTensor, got {type(dtensor).__name__}")
    if device_mesh is not None and device_mesh != dtensor.device_mesh:
        raise NotImplementedError(f"device_mesh must be the dtensor's own, {dtensor.device_mesh}, got {device_mesh}")


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):  # the op's schema would take an int for one
        raise TypeError(f"{name} must be a torch.dtype or None, got {type(dtype).__name__}")


def version(mesh: DeviceMesh) -> str:
    """Cache key of graphs: all inputs of plans on this mesh besides shapes and placements.

    Also makes every group that a plan can need: a cached graph calls no handler, and the groups of its backward are not
    known beforehand. Each process traces the program, so all ranks come by here.
    """
    if mesh.get_coordinate() is None:
        return ""
    facts = mesh_groups.check(mesh)
    several = [i for i, size in enumerate(facts.mesh_shape) if size > 1]
    for num in range(1, len(several) + 1):
        for mesh_dims in itertools.combinations(several, num):
            for reduces in (False, True):
                mesh_groups.flattened(mesh, mesh_dims, reduces=reduces)
    return files.cache_key(facts, torch.__version__)


version._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see placements.encode


def plan_of(dtensor: DTensor, names: Sequence[str], dtype: torch.dtype | None) -> RedistributionPlan:
    """The plan of `redistribute`. Raises the errors of `redistribute`, and ValueError where torch does it."""
    spec = dtensor._spec
    target = _target(spec, names)
    facts = mesh_groups.check(spec.mesh)
    try:
        return _plan(facts, *_shardings(facts, spec, target), dtype or dtensor.dtype)
    except Unsupported as reason:
        raise ValueError(f"torch redistributes this, without a plan of fusedcomm: {reason}") from None


def _kernel(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The handler that DTensor calls for the op: it makes this rank's part by the plan."""
    x, names, async_op, forward_dtype, _, _ = args
    spec: Any = x._spec
    held: Tensor = x._local_tensor.detach()  # a DTensor that is made of a tensor that requires grad warns
    local = held
    now, plan = spec, None
    with mesh_groups.same_call("redistribute", x, to=list(names), forward_dtype=str(forward_dtype)):
        target = _target(spec, names)
        moves = target != spec.placements and spec.mesh.get_coordinate() is not None
        if moves:  # otherwise this rank has no part of the tensor, or has its part already
            plan = _plan_of_part(held, spec, target, forward_dtype or held.dtype)
    if forward_dtype is not None and forward_dtype != local.dtype:
        local = local.to(forward_dtype)
        now = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=forward_dtype))
    after = now
    if target != now.placements:
        after = DTensorSpec(now.mesh, target, tensor_meta=now.tensor_meta)
    if moves:
        local = local.resolve_conj().resolve_neg()  # the payload is plain memory
        local = _by_torch(local, now, after, async_op) if plan is None else _by_plan(local, now.mesh, plan, async_op)
    if local is held:  # autograd takes an op's result for memory of its own, which may be written
        local = local.clone(memory_format=torch.contiguous_format)
    return DTensor(local, after, requires_grad=False)


def _plan_of_part(
    local: Tensor, now: DTensorSpec, target: tuple[Placement, ...], dtype: torch.dtype
) -> RedistributionPlan | None:
    """The plan, which ``local`` has been checked to fit, or None where torch redistributes."""
    facts = mesh_groups.check(now.mesh)
    try:
        shardings = _shardings(facts, now, target)
    except Unsupported as reason:
        if reason.what not in _logged:
            _logged.add(reason.what)
            log.warning("torch redistributes, a mesh dim at a time: %s", reason)
        return None
    plan = _plan(facts, *shardings, dtype)
    coordinate = tuple(now.mesh.get_coordinate() or ())
    if tuple(local.shape) != (wanted := plan.before.local_shape(coordinate)):
        raise ValueError(
            f"the local tensor at {coordinate} of the mesh must have shape {wanted} for a tensor of shape "
            f"{plan.before.shape} that is {plan.before}, got {tuple(local.shape)}"
        )
    return plan


def _target(spec: DTensorSpec, names: Sequence[str]) -> tuple[Placement, ...]:
    """The placements that ``names`` stand for. Raises IndexError and RuntimeError, as torch does."""
    if len(names) != spec.mesh.ndim:
        raise IndexError(f"placements must be one per dim of the mesh, {spec.mesh.ndim}, got {list(names)}")
    target = placements.decode(names, len(spec.shape), spec.placements)
    for i, (was, wanted) in enumerate(zip(spec.placements, target, strict=True)):
        if wanted.is_partial() and was != wanted:
            raise RuntimeError(f"mesh dim {i} must be {wanted} before, as it shall be after, got {was}")
    return target


def _shardings(facts: MeshFacts, now: DTensorSpec, target: tuple[Placement, ...]) -> tuple[Sharding, Sharding]:
    """The shardings before and after. Raises Unsupported."""
    order = getattr(now, "shard_order", None)
    if order is not None and not now.is_default_device_order(order):
        raise Unsupported("shard_order is not that of the mesh", order)
    if any(not isinstance(size, int) for size in now.shape):
        raise Unsupported("sizes must be known when a graph is compiled", list(now.shape))
    return _shardings_on(facts, now.placements, target, tuple(now.shape))


@lru_cache(maxsize=4096)
def _shardings_on(
    facts: MeshFacts, now: tuple[Placement, ...], target: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[Sharding, Sharding]:
    before, after = (placements.sharding(each, shape, facts.mesh_shape) for each in (now, target))
    ranks = np.array(facts.ranks).reshape(facts.mesh_shape)  # all ranks: none may decide by its own group alone
    for i in range(ranks.ndim):
        cuts = any(i in dims for dims in (*before.cuts, *after.cuts))
        if cuts and not (np.diff(ranks, axis=i) > 0).all():
            raise Unsupported("the ranks of a mesh dim that shards do not ascend", f"mesh dim {i} of {ranks.tolist()}")
    return before, after


def _plan(facts: MeshFacts, before: Sharding, after: Sharding, dtype: torch.dtype) -> RedistributionPlan:
    averages = any(op == "avg" and op != then for op, then in zip(before.partial, after.partial, strict=True))
    if averages and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"dtype must be of floating point to be averaged, got {dtype}")
    return search.plan(before, after, dtype.itemsize, _links(facts))


@lru_cache(maxsize=256)
def _links(facts: MeshFacts) -> MeshLinks:
    per_node = ranks_per_node(facts.ranks, facts.hosts)
    return MeshLinks(facts.ranks, facts.mesh_shape, per_node, facts.constants, INTER_BANDWIDTH)


def _by_plan(local: Tensor, mesh: DeviceMesh, plan: RedistributionPlan, async_op: bool) -> Tensor:
    coordinate = tuple(mesh.get_coordinate() or ())
    flat = [_group(mesh, step) for step in plan.steps]  # all groups are there before anything is sent
    for step, (order, name) in zip(plan.steps, flat, strict=True):
        local = execute.run(step, coordinate, order, name, local, wait=not async_op or step is not plan.steps[-1])
    return local


def _group(mesh: DeviceMesh, step: Step) -> tuple[tuple[int, ...], str]:
    if not step.mesh_dims:
        return (0,), ""
    found = mesh_groups.flattened(mesh, step.mesh_dims, reduces=bool(step.reduced))
    return found.order, found.group_name


def _by_torch(local: Tensor, spec: DTensorSpec, target: DTensorSpec, async_op: bool) -> Tensor:
    """torch's own, one mesh dim at a time: its joined mesh dims can be wrong for uneven shards."""
    one_by_one = getattr(torch_redistribute, "disable_redistribute_transform_optimization", contextlib.nullcontext)
    with one_by_one():
        return torch_redistribute.redistribute_local_tensor(local, spec, target, async_op=async_op)


def _save(ctx: Any, inputs: tuple[Any, ...], output: DTensor) -> None:
    x, _, ctx.async_op, _, backward_dtype, _ = inputs
    ctx.placements, ctx.dtype = x.placements, x.dtype
    ctx.backward_dtype = backward_dtype or x.dtype


def _backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
    """As in torch, the gradient gets x's placements, but is replicated where x was partial: parts gain nothing."""
    pairs = zip(ctx.placements, grad.placements, strict=True)
    wanted = [Replicate() if then.is_partial() and not now.is_partial() else then for then, now in pairs]
    dtype, found = ctx.backward_dtype, grad
    # Where nothing changes, the gradient itself: autograd copies it, but would keep another DTensor of its memory.
    # DTensor copies no partial products.
    if tuple(wanted) != grad.placements or dtype != grad.dtype or Partial("product") in wanted:
        names = placements.encode(wanted, grad.placements)
        found = torch.ops.fusedcomm.redistribute(grad, names, ctx.async_op, dtype, dtype, "")
    return found.to(ctx.dtype), None, None, None, None, None


lib.define(
    "redistribute(Tensor x, str[] placements, bool async_op, ScalarType? forward_dtype, ScalarType? backward_dtype, "
    "str version) -> Tensor"
)
for key in ("Conjugate", "Negative"):  # torch would make a DTensor's memory of a lazy view by a collective that fails
    lib.impl("redistribute", torch.library.fallthrough_kernel, key)
torch.library.register_autograd("fusedcomm::redistribute", _backward, setup_context=_save, lib=lib)
handlers: Any = DTensor._op_dispatcher._custom_op_handlers
handlers[torch.ops.fusedcomm.redistribute.default] = _kernel
