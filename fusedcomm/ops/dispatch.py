"""From a checked call to an algorithm: what the ops have in common."""

from __future__ import annotations

import functools
import importlib
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedcomm.algorithms import planner
from fusedcomm.algorithms.planner import Plan
from fusedcomm.errors import PeerError
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.geometry.shapes import check_out
from fusedcomm.ops import call_check
from fusedcomm.runtime import dumps, flight_recorder, group
from fusedcomm.runtime.members import Member, WorkspaceUnavailable, member, on_device
from fusedcomm.runtime.topology import tf32_allowed
from fusedcomm.runtime.workspace import Call, Workspace

lib = torch.library.Library("fusedcomm", "DEF")


def prepare(
    op: str, exchange: Exchange, dtype: torch.dtype, device: torch.device, group_name: str
) -> tuple[Plan, Member | None]:
    """The plan of a call and this rank's part in the group. The first call of a group is a collective."""
    group.check_size(exchange.group_size, group_name)
    ours = member(group_name, device) if exchange.group_size > 1 else None
    return planner.plan(op, exchange, dtype, ours), ours


def run(
    op: str,
    verb: str,
    exchange: Exchange,
    group_name: str,
    x: Tensor,
    *args: Any,
    unfused: Callable[[], Any],
    out: Tensor | None = None,
) -> Any:
    """Plan a call and run it: the algorithm's ``verb(call, x, *args)``, or on all ranks alike ``unfused()``.

    ``out``: where to put the result; of a verb that pushes, which takes it as its last argument.
    """
    if out is not None:
        check_out(out, x, exchange.out_shape)
        args, unfused = (*args, out), functools.partial(_copied, unfused, out)
    with on_device(x.device):
        if exchange.group_size == 1:
            group.check_size(1, group_name)
            return unfused()
        dumps.arm()
        with flight_recorder.Record(op, group_name, x.device, exchange, x.dtype) as record:
            plan, ours = prepare(op, exchange, x.dtype, x.device, group_name)
            assert ours is not None
            name, loading = plan.algorithm, None
            if x.is_cuda and name != "unfused" and (name == "fused" or plan.reason != planner.FORCED):
                loading = (op, exchange.key, x.dtype, tf32_allowed(), *_layouts(x, *args))
                name = _loading(name, op, loading, ours)
            fingerprint = 0 if name == "unfused" else fingerprint_of(op, exchange.key, x.dtype)
            with ours.lock:
                workspace = _come_together(record, plan, ours, fingerprint, args)
                if workspace is not None:
                    algorithm = importlib.import_module(f"fusedcomm.algorithms.{name}")
                    result = getattr(algorithm, verb)(Call(op, fingerprint, exchange, workspace), x, *args)
                    if loading is not None and name == "fused":
                        ours.loaded.add(loading)
                    return result
            return unfused()  # the lock is ours alone: gloo's waits may be long


def _come_together(
    record: flight_recorder.Record, plan: Plan, ours: Member, fingerprint: int, args: Sequence[Any]
) -> Workspace | None:
    """The workspace for the call, or None if it runs unfused. With FUSEDCOMM_CHECK all ranks compare the call first.

    A call that fails here has sent nothing: the next one takes its number.
    """
    ours.count(record, plan.algorithm)
    try:
        if ours.topology.check:
            call_check.same_call(record, plan, ours, fingerprint, args)
        record.state = flight_recorder.RUNNING
        if plan.algorithm == "unfused":
            return None
        record.runs_on(ours.workspace_for(plan.slot_bytes, record.op, fingerprint))
    except WorkspaceUnavailable as error:
        record.algorithm = "unfused"
        planner.log_fallback(record.op, str(error))
    except PeerError:
        ours.num_calls -= 1
        raise
    return record.workspace


def _copied(unfused: Callable[[], Tensor], out: Tensor) -> Tensor:
    return out.copy_(unfused())


def by_product(gathered: Tensor | None, x: Tensor) -> Tensor:
    """The second result of a gather op: an empty tensor where it was not asked for, and never x itself."""
    if gathered is None:
        return x.new_empty(0)
    return gathered.clone() if gathered.data_ptr() == x.data_ptr() else gathered


def _layouts(*args: Any) -> list[Any]:
    """What kernels are specialised on besides shapes."""
    leaves = pytree.tree_leaves(args)
    return [(t.shape, t.stride(), t.data_ptr() % 16) if isinstance(t, Tensor) else t for t in leaves]


def _loading(name: str, op: str, call: tuple[Any, ...], ours: Member) -> str:
    """The first call of each kind runs fused unless chunked is forced: that loads the kernels, which a capture cannot.

    chunked and fused keep the same protocol, so a rank for which it is the first one fits the others.
    """
    if call in ours.loaded:
        return name
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{op}: call it once with these shapes on every rank before a CUDA graph is captured")
    return "fused"


def register_fake(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the op's fake kernel. Inductor, which calls it before it lowers a graph, gets to know our lowerings."""

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fake)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "torch._inductor.lowering" in sys.modules:  # else nothing is lowered, and to import it takes a second
                from fusedcomm.ops import lowering

                lowering.register()
            return fake(*args, **kwargs)

        torch.library.register_fake(f"fusedcomm::{op}", call, lib=lib)
        return fake

    return register


def new_or_given(x: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """The result of a fake kernel."""
    if out is None:
        return x.new_empty(shape)
    check_out(out, x, shape)
    return out


def define_out(op: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    """Define ``op.out``: the same call, its result in a contiguous tensor of the caller's.

    ``kernel`` and ``fake``: the op's own, which take ``out`` besides.
    """
    args = str(getattr(torch.ops.fusedcomm, op).default._schema).partition("(")[2].removesuffix(") -> Tensor")
    tags = [getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "out") if hasattr(torch.Tag, name)]
    lib.define(f"{op}.out({args}, *, Tensor(a!) out) -> Tensor(a!)", tags=tags)
    for key in ("CPU", "CUDA"):
        lib.impl(f"{op}.out", kernel, key)
    register_fake(f"{op}.out")(fake)

    def below_autograd(*args: Any, out: Tensor) -> Tensor:
        tensors = [t for t in (*args, out) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(f"fusedcomm::{op}.out has no gradients: no tensor may require grad, or use no_grad()")
        with torch._C._AutoDispatchBelowAutograd():
            getattr(torch.ops.fusedcomm, op).out(*args, out=out)
        torch.autograd.graph.increment_version(out)
        return out

    lib.impl(f"{op}.out", below_autograd, "Autograd")


def register_autocast(op: str) -> None:
    """Under autocast the op takes its tensors in autocast's dtype, as torch.matmul does."""
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        torch.library.impl(lib, op, key)(_autocast(op, device_type, key))


def _autocast(op: str, device_type: str, key: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64:
            return arg.to(torch.get_autocast_dtype(device_type))
        return arg

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return getattr(torch.ops.fusedcomm, op)(*pytree.tree_map(cast, args))

    return call


def refuse_transforms(op: str) -> None:
    """torch.func's transforms have no rule for a call that other ranks take part in."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"fusedcomm.{op} does not work inside torch.func transforms: use torch.autograd")


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks that make the same call."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1
