"""torch's ops of a mixture of experts: kernels, fakes and gradients. `fusedcomm.ops.moe` has the public functions.

A dispatch and a combine are each other's gradient. `moe_send` is a dispatch by a routing that is there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from fusedcomm import env
from fusedcomm.memory import dumps, exits, flight_recorder, group
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import WARM_UP, is_capturing, is_for_capture
from fusedcomm.memory.group_member import Member, WorkspaceUnavailable, on_device
from fusedcomm.memory.launch_order import ordered
from fusedcomm.memory.members import member
from fusedcomm.ops import routed_proof
from fusedcomm.ops.call_check import same_collective
from fusedcomm.ops.formula import needs_now
from fusedcomm.ops.library import lib, refuse_tangents, refuse_transforms
from fusedcomm.plan import planner
from fusedcomm.plan.builder import layout_of
from fusedcomm.plan.forced import force_algorithm
from fusedcomm.plan.planner import Plan, fingerprint_of
from fusedcomm.plan.routing import (
    LEAST_CUT,
    Routing,
    bytes_of_rows,
    counts_of,
    ends_of,
    num_pieces,
    pack,
    packed_shape,
    sizes_of,
)
from fusedcomm.run.routed_rows import Alone, ByCollective, ByKernels, BySlots, grouped_matmul, grouped_outer, weighed

Way = Alone | ByCollective | BySlots | ByKernels
_GROUP = "int group_size, str group_name"
SCHEMAS = {
    "moe_dispatch": "(Tensor x, Tensor expert_ids, Tensor[] ws, int num_experts, int capacity, int alignment, "
    f"{_GROUP}) -> Tensor[]",
    "moe_send": f"(Tensor x, Tensor? scores, Tensor routing, int k, int capacity, {_GROUP}) -> Tensor",
    "moe_combine": "(Tensor h, Tensor? w, Tensor? scores, Tensor routing, SymInt num_tokens, int k, "
    f"bool return_received, {_GROUP}) -> (Tensor, Tensor)",
    "moe_grouped_matmul": "(Tensor h, Tensor w, Tensor offsets) -> Tensor",
    "moe_grouped_outer": "(Tensor a, Tensor b, Tensor offsets) -> Tensor",
}
COLLECTIVES = tuple(SCHEMAS)[:3]


@contextmanager
def _call(
    op: str,
    args: Sequence[Any],
    slot_bytes: int,
    experts: int,
    facts: dict[str, Any],
    size: int,
    name: str,
    check: Callable[[bool], None],
) -> Iterator[Way]:
    """A call on all ranks. ``args``: of the op, the payload first. ``experts``: of a rank, if rows may go in pieces.
    ``facts``: equal on all of them; ``check`` raises where this rank's input is wrong, numbers included if it may look
    at them.
    """
    group.check_size(size, name)
    t: Tensor = args[0]
    if size == 1:
        check(_is_checked(t, env.check()))
        yield Alone(CallMemory(0, 1, name, t.device))
        return
    dumps.arm()
    exits.arm()
    fingerprint = fingerprint_of(op, t.dtype, *facts.items())
    record = flight_recorder.Record(op, name, t.device, dtype=t.dtype)
    with on_device(t.device), dumps.on_failure(), record:
        ours = member(name, t.device, record)
        with same_collective(op, name, t, **facts):
            record.state = flight_recorder.CHECKING
            check(_is_checked(t, ours.topology.check))
        algorithm, reason = _algorithm(op, t.dtype, t.device, slot_bytes, experts, ours, proves=True)
        has_workspace = algorithm in env.WITH_WORKSPACE
        if not has_workspace:
            _refuse_capture(op, t.device, reason)
        if not has_workspace and reason != planner.FORCED:
            planner.log_fallback(op, reason, algorithm)
        with ours.lock if has_workspace else nullcontext():
            ours.count(record, algorithm)
            record.state = flight_recorder.RUNNING
            try:
                workspace = ours.workspace_for(slot_bytes, op, fingerprint) if has_workspace else None
                kind = op, *(layout_of(each) if isinstance(each, Tensor) else each for each in args)
                is_new = workspace is not None and not ours.loaded.has(kind, workspace.slot_bytes)
                if is_new and is_capturing(t.device):
                    raise RuntimeError(f"{op}: its kernels cannot be loaded while a CUDA graph is captured; {WARM_UP}")
            except WorkspaceUnavailable as error:
                _refuse_capture(op, t.device, str(error))
                workspace, record.algorithm = None, "unfused"
                planner.log_fallback(op, str(error))
            except RuntimeError:  # nothing is sent: the next call takes its number
                ours.num_calls -= 1
                raise
            if workspace is None:
                with ours.in_order(op):
                    yield ByCollective(ours.memory, 2 if algorithm == "pipelined" else 1)
                return
            record.runs_on(workspace)
            workspace.enter(op, fingerprint)  # by it a failure in a kernel names the op
            with ordered(workspace), workspace.guarded(op):
                yield (ByKernels if algorithm == "fused" else BySlots)(workspace, op, fingerprint)
            if algorithm == "fused":
                ours.loaded.add(kind, workspace.slot_bytes)


def _refuse_capture(op: str, device: torch.device, reason: str) -> None:
    if is_for_capture(device):
        raise RuntimeError(f"{op} must run fused in a CUDA graph, got unfused, where the host reads counts: {reason}")


def _is_checked(t: Tensor, asked: bool) -> bool:
    """Whether the host looks at numbers of the input. On a GPU it would wait for them."""
    return not t.is_cuda or (asked and not is_capturing(t.device))


def plan_of(op: str, args: Sequence[Any], device: torch.device) -> Plan:
    """The plan of ``torch.ops.fusedcomm.<op>(*args)``, without the proof of its kernels."""
    t, size, name = args[0], *args[-2:]
    group.check_size(size, name)
    if size == 1:
        return Plan(op, "unfused", "one rank: nothing to exchange")
    if op == "moe_combine":
        slot_bytes, experts = _combine_bytes(*args[:2]), _own(args[3], size)
    else:
        ws, num_experts, capacity = args[2:5]
        slot_bytes, experts = _dispatch_bytes(t, num_experts, capacity, size), num_experts // size if ws else 0
    algorithm, why = _algorithm(op, t.dtype, device, slot_bytes, experts, member(name, device), proves=False)
    if algorithm not in env.WITH_WORKSPACE:
        return Plan(op, algorithm, why)
    return Plan(op, algorithm, why or f"on a {device.type} rows go straight to their places", slot_bytes, 1)


def _own(packed: Tensor, size: int) -> int:
    """A rank's experts."""
    return packed.shape[-1] // size


def _dispatch_bytes(x: Tensor, num_experts: int, capacity: int, size: int) -> int:
    return max(bytes_of_rows(capacity, x.shape[1], x.itemsize), size * num_experts * torch.int64.itemsize)


def _combine_bytes(h: Tensor, w: Tensor | None) -> int:
    return h.shape[0] * (h if w is None else w).shape[-1] * h.itemsize


def _algorithm(
    op: str, dtype: torch.dtype, device: torch.device, slot_bytes: int, experts: int, ours: Member, *, proves: bool
) -> tuple[str, str]:
    """(algorithm, reason), which is empty where none excludes others.

    `unfused` is the group's all_to_all_single, for whose splits the host waits; `pipelined` is the same in pieces of
    ``experts``, beside their matmuls, chosen on GPUs alone: on CPUs both take the cores.
    """
    is_cuda = device.type == "cuda"
    name, strict = force_algorithm.current
    name = name or ours.topology.algorithm
    found = name or ("fused" if is_cuda else "chunked")
    reason = ours.no_workspace
    if found == "unfused" or (found == "pipelined" and experts > 1):
        return found, planner.FORCED
    if found not in env.WITH_WORKSPACE:
        reason = f"{op} runs chunked, fused or unfused, or pipelined with several experts' matmuls"
    elif found == "chunked" and is_cuda:
        reason = f"{op} copies rows whose counts the host knows: on a GPU kernels do"
    elif reason is None and slot_bytes > ours.max_slot_bytes:
        cap = f"FUSEDCOMM_WORKSPACE_BYTES={ours.topology.workspace_bytes}"
        reason = f"a slot takes {slot_bytes} bytes, and may have {ours.max_slot_bytes}: {cap}"
    elif reason is None and found == "fused":
        reason = ours.topology.no_fused or ("float64 has no kernel" if dtype == torch.float64 else None)
        if reason is None and name is None and ours.topology.prove and proves:
            with ours.lock:
                reason = routed_proof.failure(op, "fused", dtype, ours) or None
    if reason is None:
        return found, planner.FORCED if name else ""
    if strict and name is not None:
        raise RuntimeError(f"{op} cannot run as {name}: {reason}")
    cuts = is_cuda and name is None and experts > 1 and slot_bytes >= LEAST_CUT
    is_unproved = cuts and ours.topology.prove and proves and not is_capturing(device)
    if is_unproved and (wrong := routed_proof.failure(op, "pipelined", dtype, ours)):
        return "unfused", wrong
    return "pipelined" if cuts else "unfused", reason


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    ws: list[Tensor],
    num_experts: int,
    capacity: int,
    alignment: int,
    size: int,
    name: str,
) -> list[Tensor]:
    """[rows, offsets, routing], and the rows times each of ``ws``."""
    k, h = expert_ids.shape[1], x.shape[1]
    ids, hs = expert_ids.flatten(), None

    def check(looks: bool) -> None:
        for w in ws:
            right = w.ndim == 3 and w.shape[:2] == (num_experts // size, h) and w.dtype == x.dtype
            require(right and w.device == x.device, "w", f"[{num_experts // size}, {h}, N] of {x.dtype}", w.shape)
        if looks and ids.numel() and not -1 <= (bounds := ids.aminmax()).min <= bounds.max < num_experts:
            got = f"{int(bounds.min)} to {int(bounds.max)}"
            raise ValueError(f"moe: expert_ids must be in [-1, {num_experts - 1}], got {got}")

    facts: dict[str, Any] = {"num_experts": num_experts, "capacity": capacity, "alignment": alignment, "k": k, "H": h}
    if ws:
        facts["N"] = tuple(w.shape[-1] for w in ws)  # pieces depend on it
    slot_bytes, experts = _dispatch_bytes(x, num_experts, capacity, size), num_experts // size if ws else 0
    with _call("moe_dispatch", [x, ids, *ws, *facts.values()], slot_bytes, experts, facts, size, name, check) as way:
        rank = group.rank_of(name)
        if isinstance(way, ByKernels):
            taken = ws if capacity and all(w.numel() for w in ws) else []
            pieces = num_pieces(experts, slot_bytes, sum(w.shape[2] for w in ws)) if taken else 1
            rows, offsets, packed, *found = way.dispatch(x, ids, num_experts, k, capacity, alignment, taken, pieces)
            routing = Routing(packed, rank, size, ids.numel())
            hs = found if taken else None
        else:
            ids = ids.to(torch.int64)
            if x.is_cuda:  # nobody has looked at them
                ids = ids.masked_fill((ids < 0) | (ids >= num_experts), -1)
            counts = way.counts(counts_of(ids, num_experts))
            packed = pack(ids, k, counts, rank, capacity, alignment)
            routing = Routing(packed, rank, size, ids.numel())
            if isinstance(way, ByCollective):
                rows, hs = way.dispatch(x, None, ws, k, routing, capacity)
            else:
                rows = way.send(x, None, k, routing, capacity)
            offsets = routing.ends
    checks = env.check() if size == 1 else member(name, x.device).topology.check
    if checks and not is_capturing(x.device) and routing.overflow:
        need = routing.counts.sum(0).view(size, -1).sum(1).tolist()
        raise RuntimeError(f"capacity={capacity} must hold the rows of each rank, got {need}")
    return [rows, offsets, packed, *([grouped_matmul(rows, w, offsets) for w in ws] if hs is None else hs)]


def _send(x: Tensor, scores: Tensor | None, packed: Tensor, k: int, capacity: int, size: int, name: str) -> Tensor:
    facts = {"num_experts": packed.shape[-1], "capacity": capacity, "k": k, "H": x.shape[1]}
    facts["scored"] = scores is not None
    slot_bytes = bytes_of_rows(capacity, x.shape[1], x.itemsize)
    check = _fits(packed, x, scores, x.shape[0] * k, k, capacity, size)
    with _call("moe_send", [x, scores, packed, k, capacity], slot_bytes, 0, facts, size, name, check) as way:
        routing = Routing(packed, group.rank_of(name), size, x.shape[0] * k)
        return way.send(x, None if scores is None else scores.flatten(), k, routing, capacity)


def _fits(
    packed: Tensor, t: Tensor, scores: Tensor | None, num_slots: int, k: int, capacity: int, size: int
) -> Callable[[bool], None]:
    """A check of a routing: of shapes and devices, and of its sizes where they may be looked at. Gradients have one row
    a slot: k is 1.
    """

    def check(looks: bool) -> None:
        shape = packed_shape(num_slots, packed.shape[-1], size)
        right = packed.shape == shape and packed.shape[1] % size == 0
        require(right, "routing", f"of a dispatch of {num_slots} choices, {[*shape]}", packed.shape)
        require(packed.device == t.device, "routing", f"on {t.device}", packed.device)
        if scores is not None:
            require(scores.numel() == num_slots, "scores", f"of {num_slots} choices", scores.shape)
            require(scores.device == t.device, "scores", f"on {t.device}", scores.device)
        if looks:
            want, got = [num_slots, k, capacity], sizes_of(packed)
            if (got[0], got[2]) != (num_slots, capacity) or k not in (1, got[1]):
                raise ValueError(f"moe: routing, [T * k, k, capacity] of its dispatch, must be {want}, got {got}")

    return check


def require(holds: bool, name: str, what: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"moe: {name} must be {what}, got {[*got] if isinstance(got, torch.Size) else got}")


def _combine(
    h: Tensor,
    w: Tensor | None,
    scores: Tensor | None,
    packed: Tensor,
    num_tokens: int,
    k: int,
    return_received: bool,
    size: int,
    name: str,
) -> tuple[Tensor, Tensor]:
    capacity, n = h.shape[0], h.shape[1] if w is None else w.shape[2]
    facts = {"num_experts": packed.shape[-1], "capacity": capacity, "k": k, "H": n}
    check = _fits(packed, h, scores, num_tokens * k, k, capacity, size)
    slot_bytes, args = _combine_bytes(h, w), [h, w, scores, packed, num_tokens, k, return_received]
    with _call("moe_combine", args, slot_bytes, _own(packed, size), facts, size, name, check) as way:
        routing = Routing(packed, group.rank_of(name), size, num_tokens * k)
        if isinstance(way, ByKernels):
            y, *received = way.combine(h, w, scores, routing, k, return_received)
        else:
            received = [way.collect(h, w, routing).view(num_tokens, k, n)]
            y = weighed(received[0], scores, way.memory)
    return y, received[0] if return_received else h.new_empty(0)


def _fake_dispatch(x: Tensor, expert_ids: Tensor, ws: list[Tensor], *sizes: Any) -> list[Tensor]:
    num_experts, capacity, _, size, _ = sizes
    rows = x.new_empty(capacity, x.shape[1])
    offsets = x.new_empty(num_experts // size, dtype=torch.int32)
    packed = x.new_empty(packed_shape(expert_ids.numel(), num_experts, size), dtype=torch.int64)
    return [rows, offsets, packed, *(x.new_empty(capacity, w.shape[2]) for w in ws)]


def _fake_combine(
    h: Tensor, w: Tensor | None, scores: Any, packed: Any, num_tokens: int, k: int, return_received: bool, *where: Any
) -> tuple[Tensor, Tensor]:
    n = h.shape[1] if w is None else w.shape[2]
    return h.new_empty(num_tokens, n), h.new_empty((num_tokens, k, n) if return_received else 0)


def _fake_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    (rows, offsets, packed, *_), ws = output, inputs[2]
    needs_x, _, *needs_ws = ctx.needs_input_grad[: 2 + len(ws)]  # flat, unlike in a backward
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(packed, offsets, rows if any(needs_ws) else None, *(ws if needs_x else ()))
    ctx.facts = *inputs[1].shape, inputs[-2:]


def _grad_dispatch(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    (packed, offsets, rows, *ws), (num_tokens, k, where) = ctx.saved_tensors, ctx.facts
    needs_x, _, needs_ws = needs_now(ctx)[:3]
    grad_rows, _, _, *grad_hs = grads
    grad_ws = [
        _ops.moe_grouped_outer(rows, g, offsets) if needs and g is not None else None
        for g, needs in zip(grad_hs, needs_ws, strict=True)
    ]
    if not needs_x or all(g is None for g in (grad_rows, *grad_hs)):
        return None, None, grad_ws, *[None] * 5
    pairs = [(g, w.mT) for g, w in zip(grad_hs, ws, strict=True) if g is not None]
    if len(pairs) == 1 and grad_rows is None:  # rows leave as they are multiplied
        h, w = pairs[0]
    else:
        parts = [_ops.moe_grouped_matmul(*pair, offsets) for pair in pairs]
        h, w = reduce(torch.add, parts if grad_rows is None else [grad_rows, *parts]), None
    return _ops.moe_combine(h, w, None, packed, num_tokens, k, False, *where)[0], None, grad_ws, *[None] * 5


def _save_send(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scores, packed, k, _, *where = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, scores, packed)
    ctx.facts = len(x), k, where


def _grad_send(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
    (x, scores, packed), (num_tokens, k, where) = ctx.saved_tensors, ctx.facts
    needs_scores = needs_now(ctx)[1]
    grad_x, received = _ops.moe_combine(grad_rows, None, scores, packed, num_tokens, k, needs_scores, *where)
    return grad_x, _of_scores(received, x, scores) if needs_scores else None, *[None] * 5


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, w, scores, packed, _, k, has_received, *where = inputs
    needs_h, needs_w, needs_scores = ctx.needs_input_grad[:3]
    recomputes = needs_scores and not has_received
    ctx.set_materialize_grads(False)
    saved = h if recomputes or needs_w else None, w if recomputes or needs_h else None
    ctx.save_for_backward(*saved, scores, packed, output[1] if has_received else None)
    ctx.facts = h.shape[0], w is not None, k, has_received, where


def _grad_combine(ctx: Any, grad_y: Tensor | None, grad_received: Tensor | None) -> tuple[Tensor | None, ...]:
    (h, w, scores, packed, received), (capacity, has_w, k, has_received, where) = ctx.saved_tensors, ctx.facts
    needs_h, needs_w, needs_scores = needs_now(ctx)[:3]
    grad_h = grad_w = grad_scores = None
    if grad_y is not None and needs_scores:
        if received is None:
            received = _ops.moe_combine(h, w, scores, packed, grad_y.shape[0], k, True, *where)[1]
        grad_scores = _of_scores(received, grad_y, scores)
    if needs_h or needs_w:
        if grad_y is not None:
            grad_h = _ops.moe_send(grad_y, scores, packed, k, capacity, *where)
        if grad_received is not None and has_received:
            sent = _ops.moe_send(grad_received.flatten(0, 1), None, packed, 1, capacity, *where)
            grad_h = sent if grad_h is None else grad_h + sent
        if has_w and grad_h is not None:
            offsets = ends_of(packed, where[0])
            grad_w = _ops.moe_grouped_outer(h, grad_h, offsets) if needs_w else None
            grad_h = _ops.moe_grouped_matmul(grad_h, w.mT, offsets) if needs_h else None
    return grad_h, grad_w, grad_scores, *[None] * 6


def _of_scores(received: Tensor, other: Tensor, scores: Tensor) -> Tensor:
    wide = torch.promote_types(received.dtype, torch.float32)
    return (received.to(wide) * other[:, None]).sum(-1).to(scores.dtype)


def _save_grouped(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    first, second, offsets = inputs
    needs_first, needs_second, _ = ctx.needs_input_grad[:3]
    ctx.save_for_backward(first if needs_second else None, second if needs_first else None, offsets)


def _grad_matmul(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    h, w, offsets = ctx.saved_tensors
    needs_h, needs_w, _ = needs_now(ctx)
    grad_h = _ops.moe_grouped_matmul(grad, w.mT, offsets) if needs_h else None
    return grad_h, _ops.moe_grouped_outer(h, grad, offsets) if needs_w else None, None


def _grad_outer(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = ctx.saved_tensors
    needs_a, needs_b, _ = needs_now(ctx)
    grad_a = _ops.moe_grouped_matmul(b, grad.mT, offsets) if needs_a else None
    return grad_a, _ops.moe_grouped_matmul(a, grad, offsets) if needs_b else None, None


def _without_tangents(op: str, autograd: Callable[..., Any], keyset: Any, *args: Any) -> Any:
    refuse_tangents(op, *args)
    return autograd(keyset, *args)


_ops: Any = torch.ops.fusedcomm
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., None]]] = {
    "moe_dispatch": (_dispatch, _fake_dispatch, _grad_dispatch, _save_dispatch),
    "moe_send": (_send, lambda x, s, r, k, capacity, *_: x.new_empty(capacity, x.shape[1]), _grad_send, _save_send),
    "moe_combine": (_combine, _fake_combine, _grad_combine, _save_combine),
    "moe_grouped_matmul": (
        grouped_matmul,
        lambda h, w, _: h.new_empty(h.shape[0], w.shape[2]),
        _grad_matmul,
        _save_grouped,
    ),
    "moe_grouped_outer": (grouped_outer, _fake_outer, _grad_outer, _save_grouped),
}
for _name, (_kernel, _fake, _grad, _save) in _KERNELS.items():
    lib.define(_name + SCHEMAS[_name], tags=[torch.Tag.pt2_compliant_tag])
    for _key in ("CPU", "CUDA"):
        lib.impl(_name, _kernel, _key)
    for _key in ("FuncTorchDynamicLayerFrontMode", "Batched"):
        lib.impl(_name, partial(refuse_transforms, _name), _key)
    torch.library.register_fake(f"fusedcomm::{_name}", _fake, lib=lib)
    _autograd = make_autograd_impl(getattr(_ops, _name).default, Info(_grad, _save))
    lib.impl(_name, partial(_without_tangents, _name, _autograd), "Autograd", with_keyset=True)
