"""Rows that travel to the ranks of their experts, and back: by the process group, or in symmetric memory, by the host
or by kernels.

In symmetric memory a dispatch takes two rounds. In the first every rank tells its counts; in the second it writes each
row where it belongs in the slot of the expert's rank. A combine takes one: a rank's rows go to its own slot, and the
owners of tokens read them there; by kernels they go to the owners' slots wherever all of these have room. So a slot
needs room for ``capacity`` rows, whatever the number of tokens, which ranks do not know of each other. Reads of peers'
slots, as those of the own one, end before the round does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.memory import group
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import is_for_capture
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.topology import architecture
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import builder, routed_rounds
from fusedcomm.plan.geometry.rank_order import peers_of, sources_of
from fusedcomm.plan.routing import Routing
from fusedcomm.plan.schedule import Schedule
from fusedcomm.run import python_executor

_MOST_KEPT = 1024  # schedules of a workspace; with more, as when sizes keep changing, it begins anew


class Alone:
    """A group of one rank: nobody waits, the host neither."""

    def __init__(self, memory: CallMemory) -> None:
        self.memory = memory

    def counts(self, own: Tensor) -> Tensor:
        return own[None]

    def send(self, x: Tensor, scores: Tensor | None, k: int, routing: Routing, capacity: int) -> Tensor:
        slots = torch.arange(len(routing.places), device=x.device)
        sent = _times_scores(x.index_select(0, slots.div(k, rounding_mode="floor")), scores, slots)
        rows = x.new_zeros(capacity + 1, x.shape[1])  # the last is for slots without a place
        places = routing.places.masked_fill(routing.places < 0, capacity).clamp(max=capacity)
        return rows.index_copy_(0, places, sent)[:capacity]

    def collect(self, h: Tensor, w: Tensor | None, routing: Routing) -> Tensor:
        rows = h if w is None else grouped_matmul(h, w, routing.ends)
        if len(rows) == 0:
            return rows.new_zeros(len(routing.places), rows.shape[1])
        found = rows.index_select(0, routing.places.clamp(0, len(rows) - 1))
        return found.masked_fill_(((routing.places < 0) | (routing.places >= len(rows)))[:, None], 0)


class ByCollective:
    """``unfused``: the group's own collectives. The host waits for the counts, which all_to_all_single needs.

    ``num_pieces``: of each rank's experts; with several, `pipelined`, one's rows travel while another's are multiplied.
    """

    def __init__(self, memory: CallMemory, num_pieces: int) -> None:
        self.memory, self.num_pieces = memory, num_pieces

    def counts(self, own: Tensor) -> Tensor:
        """Every rank's counts, [R, E], by the collective of the rows: over gloo torch's all_gather_into_tensor crashes
        on CUDA tensors.
        """
        size = self.memory.group_size
        found, work = self._exchange(own.repeat(size), [len(own)] * size, [len(own)] * size)
        work.wait()
        return found.view(size, -1)

    def send(self, x: Tensor, scores: Tensor | None, k: int, routing: Routing, capacity: int) -> Tensor:
        """[capacity, H], expert-major: rows of x [T, H], times scores [T * k]. Rows without a slot are zero."""
        return self.dispatch(x, scores, [], k, routing, capacity)[0]

    def dispatch(
        self, x: Tensor, scores: Tensor | None, ws: Sequence[Tensor], k: int, routing: Routing, capacity: int
    ) -> tuple[Tensor, list[Tensor]]:
        """The rows, and the rows times each of ``ws`` [E / R, H, N]."""
        pieces, begun = routing.pieces(self.num_pieces), []
        for piece, slots in zip(pieces, routing.slots_of(pieces), strict=True):
            sent = _times_scores(x.index_select(0, slots.div(k, rounding_mode="floor")), scores, slots)
            begun.append(self._exchange(sent, piece.sent, piece.received))
        rows = self.memory.empty((capacity, x.shape[1]), x.dtype).zero_()
        outs = [self.memory.empty((capacity, w.shape[2]), x.dtype) for w in ws]
        for piece, index, (received, work) in zip(pieces, routing.rows_of(pieces), begun, strict=True):
            work.wait()
            rows.index_copy_(0, index, received)
            for out, w in zip(outs, ws, strict=True):
                _of_piece(rows, w, routing, piece.experts, out)
        return rows, outs

    def collect(self, h: Tensor, w: Tensor | None, routing: Routing) -> Tensor:
        """[slots, N]: the row of each slot of ``h`` [capacity, H], times its expert's w. Without a place it is zero."""
        pieces, begun = routing.pieces(self.num_pieces), []
        for piece, index in zip(pieces, routing.rows_of(pieces), strict=True):
            rows = h
            if w is not None:
                rows, index = _of_piece(h, w, routing, piece.experts), index - routing.first_row(piece.experts.start)
            begun.append(self._exchange(rows.index_select(0, index), piece.received, piece.sent))
        found = _missing_zero(self.memory, routing, rows)
        for slots, (back, work) in zip(routing.slots_of(pieces), begun, strict=True):
            work.wait()
            found.index_copy_(0, slots, back)
        return found

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, dist.Work]:
        """The tensor that fills with the peers' rows, and the wait for it."""
        out, of = rows.new_empty(sum(received), *rows.shape[1:]), group.find(self.memory.group_name)
        return out, dist.all_to_all_single(out, rows, received, sent, group=of, async_op=True)


def _of_piece(rows: Tensor, w: Tensor, routing: Routing, piece: slice, out: Tensor | None = None) -> Tensor:
    """Rows of a piece's experts times their w, those behind the last expert's too; in the same rows of ``out``."""
    begin, is_last = routing.first_row(piece.start), piece.stop == len(w)
    of_piece = slice(begin, None if is_last else routing.first_row(piece.stop))
    to = None if out is None else out[of_piece]
    return grouped_matmul(rows[of_piece], w[piece], routing.ends[piece] - begin, out=to)


class ByKernels:
    """``fused``: the host knows no count, waits for nothing, and a CUDA graph can hold calls. ``workspace``: as in
    `BySlots`.
    """

    def __init__(self, workspace: Workspace, op: str, fingerprint: int) -> None:
        self.memory = self.workspace = workspace
        self.op, self.fingerprint = op, fingerprint

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        num_experts: int,
        k: int,
        capacity: int,
        alignment: int,
        ws: Sequence[Tensor] = (),
        num_pieces: int = 1,
    ) -> list[Tensor]:
        """[rows, offsets, routing], and the rows times each of ``ws`` [E / R, H, N]."""
        facts = {
            "num_experts": num_experts,
            "k": k,
            "capacity": capacity,
            "alignment": alignment,
            "num_pieces": num_pieces,
        }
        return self._run(routed_rounds.dispatch, x, ids, *ws, **facts)

    def send(self, x: Tensor, scores: Tensor | None, k: int, routing: Routing, capacity: int) -> Tensor:
        return self._run(routed_rounds.send, x, scores, routing.packed, k=k, capacity=capacity)[0]

    def combine(
        self, h: Tensor, w: Tensor | None, scores: Tensor | None, routing: Routing, k: int, return_received: bool
    ) -> list[Tensor]:
        """[T, N], and the rows [T, k, N] if asked for."""
        facts = {"num_tokens": len(routing.places) // k, "k": k, "return_received": return_received}
        return self._run(routed_rounds.combine, h, w, scores, routing.packed, **facts)

    def _run(self, program: Callable[..., list[Tensor]], *inputs: Tensor | None, **facts: Any) -> list[Tensor]:
        workspace = self.workspace
        layouts = tuple(None if t is None else builder.layout_of(t) for t in inputs)
        key = program, layouts, workspace.device_facts(), *facts.values()
        if key not in workspace.schedules:
            if len(workspace.schedules) >= _MOST_KEPT:
                workspace.schedules.clear()
            workspace.schedules[key] = _schedule(program, workspace, layouts, facts)
        return python_executor.run(workspace.schedules[key], workspace, self.op, self.fingerprint, inputs)


@outside_modes()
def _schedule(program: Any, workspace: Workspace, layouts: Any, facts: dict[str, Any]) -> Schedule:
    s = builder.Builder(workspace.memory_facts(), workspace.device_facts(), layouts)
    return s.finish(*program(s, *s.inputs, **facts))


class BySlots:
    """Symmetric memory. ``workspace``: entered and guarded by the caller, with slots that are large enough."""

    def __init__(self, workspace: Workspace, op: str, fingerprint: int) -> None:
        self.memory = self.workspace = workspace
        self.op, self.fingerprint = op, fingerprint
        self.rank, self.group_size = workspace.rank, workspace.group_size
        self.peers = [rank for rank in peers_of(self.rank, self.group_size) if rank != self.rank]
        self.sources = [rank for rank in sources_of(self.rank, self.group_size) if rank != self.rank]

    def counts(self, own: Tensor) -> Tensor:
        """Every rank's counts, [R, E]."""
        for dst in self.peers:
            self._slot(dst, (self.group_size, *own.shape), own.dtype)[self.rank] = own
            self._signal(dst)
        found = own.repeat(self.group_size, 1)
        for src in self.sources:
            self._wait(src)
            found[src] = self._slot(self.rank, found.shape, own.dtype)[src]
        self.workspace.end_round(self.op, self.fingerprint)
        return found

    def send(self, x: Tensor, scores: Tensor | None, k: int, routing: Routing, capacity: int) -> Tensor:
        shape, dtype = (capacity, x.shape[1]), x.dtype
        rows = self.workspace.empty(shape, dtype)
        for dst in (*self.peers, self.rank):
            to = rows if dst == self.rank else self._slot(dst, shape, dtype)
            for run in routing.runs(self.rank, dst):
                slots = routing.slots(run)
                tokens = slots.div(k, rounding_mode="floor")
                if scores is None:
                    torch.index_select(x, 0, tokens, out=to[run.row :][: run.num])
                else:
                    to[run.row :][: run.num] = _times_scores(x.index_select(0, tokens), scores, slots)
            if dst != self.rank:
                self._signal(dst)
        for begin, end in routing.gaps(capacity):
            rows[begin:end] = 0
        slot = self._slot(self.rank, shape, dtype)
        for src in self.sources:
            self._wait(src)
            for run in routing.runs(src, self.rank):
                rows[run.row :][: run.num] = slot[run.row :][: run.num]
        self.workspace.end_round(self.op, self.fingerprint)
        return rows

    def collect(self, h: Tensor, w: Tensor | None, routing: Routing) -> Tensor:
        rank, shape = self.rank, (h.shape[0], h.shape[1] if w is None else w.shape[2])
        slot = self._slot(rank, shape, h.dtype)
        if w is None:
            for run in (run for src in self.peers for run in routing.runs(src, rank)):
                slot[run.row :][: run.num] = h[run.row :][: run.num]
        else:
            slot = grouped_matmul(h, w, routing.ends, out=slot)
        for dst in self.peers:
            self._signal(dst)
        found = _missing_zero(self.workspace, routing, slot)
        for src in (rank, *self.sources):
            if src != rank:
                self._wait(src)
            rows = h if src == rank and w is None else self._slot(src, shape, h.dtype)
            for run in routing.runs(rank, src):
                found.index_copy_(0, routing.slots(run), rows[run.row :][: run.num])
        self.workspace.end_round(self.op, self.fingerprint)
        return found

    def _slot(self, owner: int, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        start = self.workspace.slot_start(self.workspace.epoch + 1)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert num_bytes <= self.workspace.usable_bytes
        return self.workspace.buffers[owner][start : start + num_bytes].view(dtype).view(shape)

    def _signal(self, dst: int) -> None:
        self.workspace.signal(dst, self.workspace.epoch + 1, self.fingerprint)

    def _wait(self, src: int) -> None:
        self.workspace.wait(src, self.workspace.epoch + 1, self.op, self.fingerprint)


def weighed(received: Tensor, scores: Tensor | None, memory: CallMemory) -> Tensor:
    """[T, N]: ``received`` [T, k, N] times scores [T, k], added in float32 in the order of k, rounded once."""
    wide = torch.promote_types(received.dtype, torch.float32)
    num_tokens, k, n = received.shape
    total = memory.empty((num_tokens, n), wide)
    for choice in range(k):
        addend = received[:, choice]
        if scores is not None:
            score = scores[:, choice, None].to(wide)
            torch.mul(addend, score, out=total) if choice == 0 else total.addcmul_(addend.to(wide), score)
        elif choice == 0:
            total.copy_(addend)
        else:
            total.add_(addend)
    return total.to(received.dtype)


def grouped_matmul(h: Tensor, w: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
    """[rows, N]: each group of rows of ``h`` [rows, K] times its w of [E, K, N]; zero behind the last end."""
    if 0 in (*h.shape, w.shape[2]):
        return h.new_zeros(h.shape[0], w.shape[2]) if out is None else out.zero_()
    if _torch_takes(h, w):
        w = w if w.is_contiguous() or w.mT.is_contiguous() else w.contiguous()
        found = torch.nn.functional.grouped_mm(h.contiguous(), w, offs=ends)
        is_row = torch.arange(h.shape[0], device=h.device) < ends[-1]
        found.masked_fill_(~is_row[:, None], 0)
        return found if out is None else out.copy_(found)
    out = h.new_empty(h.shape[0], w.shape[2]) if out is None else out
    begin = 0
    for each, end in zip(w, ends.tolist(), strict=True):
        torch.mm(h[begin:end], each, out=out[begin:end])
        begin = end
    out[begin:] = 0
    return out


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[E, K, N]: ``a.mT @ b`` of each group of rows, of a [rows, K] and b [rows, N]."""
    if _torch_takes(a, b):
        return torch.nn.functional.grouped_mm(a.contiguous().mT, b.contiguous(), offs=ends)
    out = a.new_empty(ends.numel(), a.shape[1], b.shape[1])
    begin = 0
    for each, end in zip(out, ends.tolist(), strict=True):
        torch.mm(a[begin:end].mT, b[begin:end], out=each)
        begin = end
    return out


def _torch_takes(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped_mm multiplies on a's device; the host's loop reads where groups end."""
    if not a.is_cuda:
        return False
    steps = [size * a.itemsize for size in (*a.shape[1:], *b.shape[1:])]
    takes = a.dtype != torch.float64 and not any(step % 16 for step in steps)
    if is_for_capture(a.device) and not (takes and a.dtype == torch.bfloat16 and architecture(a.device) >= 90):
        raise RuntimeError(
            "a grouped matmul in a CUDA graph must be of bfloat16 on sm_90 or sm_100, with rows of multiples of "
            "16 bytes: torch reads where groups end on the host otherwise; "
            f"got {a.dtype}, {[*a.shape]} and {[*b.shape]}"
        )
    return takes


def _times_scores(rows: Tensor, scores: Tensor | None, slots: Tensor) -> Tensor:
    """In float32, rounded once."""
    if scores is None:
        return rows
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows * scores.index_select(0, slots)[:, None].to(wide)).to(rows.dtype)


def _missing_zero(memory: CallMemory, routing: Routing, rows: Tensor) -> Tensor:
    found = memory.empty((routing.order.numel(), rows.shape[1]), rows.dtype)
    return found.index_fill_(0, routing.slots(), 0)
