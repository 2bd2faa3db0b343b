"""`fused`: persistent Triton kernels. One kernel stores each finished tile into the peer's slot, one waits per source
in its loop, and one adds what has arrived.

A kernel that sends never waits, and one that waits never sends. So a gather is a matmul and, on the side stream, copies
to the peers: by copy engines, or by a kernel on SMs that the matmul leaves free. Meanwhile cuBLAS multiplies this
rank's own chunk where it lies in x, if its rows are complete without the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusedcomm.algorithms import kernel_launch
from fusedcomm.algorithms.chunk_matmul import GatheredMatmul
from fusedcomm.algorithms.transport import copy_between, copy_runs
from fusedcomm.geometry.spans import ChunkSpans, RoundSpans
from fusedcomm.runtime import signals, stream_writes
from fusedcomm.runtime.captures import is_for_capture
from fusedcomm.runtime.launch_order import ordered
from fusedcomm.runtime.profiler import lane
from fusedcomm.runtime.workspace import Call, Round, Workspace


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    x, w = x.contiguous(), kernel_launch.loadable(w)
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    with _kernels(call):
        for spans in _rounds(call, x):
            with lane("matmul"):
                kernel_launch.push(x, w, bias, spans, call.workspace, call.fingerprint)
            with lane("copy"):
                kernel_launch.unpack(out, spans, call.workspace, call.fingerprint)
            _launched(call)
    return out


def push_reduce(
    call: Call,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``reduce_scatter(x @ w + partial_bias) * scale + bias``; ``bias`` is the part of this rank's block."""
    x, w = x.contiguous(), kernel_launch.loadable(w)
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    with _kernels(call):
        for spans in _rounds(call, x):
            with lane("matmul"):
                kernel_launch.push(x, w, partial_bias, spans, call.workspace, call.fingerprint)
            with lane("copy"):
                kernel_launch.reduce(out, spans, bias, scale, call.workspace, call.fingerprint)
            _launched(call)
    return out


def push_reduce_gather(
    call: Call,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    scale: float,
    partial_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``all_reduce(x @ w + partial_bias) * scale + bias``: two rounds for each part, as the second sends what the first
    has added.
    """
    workspace, fingerprint = call.workspace, call.fingerprint
    x, w = x.contiguous(), kernel_launch.loadable(w)
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    reduced = x.new_empty(call.exchange.block)
    with _kernels(call):
        for spans in _rounds(call, x):
            with lane("matmul"):
                kernel_launch.push(x, w, partial_bias, spans, workspace, fingerprint)
            with lane("copy"):
                kernel_launch.reduce(reduced, spans, bias, scale, workspace, fingerprint)
            _launched(call)
            with lane("push"):
                kernel_launch.pack(reduced, spans, workspace, fingerprint)
            with lane("copy"):
                kernel_launch.unpack(out, spans, workspace, fingerprint)
            _launched(call)
    return out


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x itself if asked for.

    Where K is gathered, the own chunk goes through this rank's slot: the kernel adds it to the others in registers, and
    its loop loads by one descriptor. What another matmul made of it would be rounded once more.
    """
    workspace, fingerprint = call.workspace, call.fingerprint
    x, ws = x.contiguous(), [kernel_launch.loadable(w) for w in ws]
    outs = [x.new_empty(shape) for shape in call.exchange.out_shapes]
    gathered = x.new_empty(call.exchange.shape) if return_gathered else None
    by_copy = _copy_engines_send(call, x.itemsize)
    own = call.exchange.splits_columns  # whether the kernel takes the own chunk too, from the slot
    matmuls = [] if own else [GatheredMatmul(*each, call.exchange) for each in zip(outs, ws, biases, strict=True)]
    with _kernels(call):
        for spans in _rounds(call, x):
            try:
                begun = None
                if by_copy:
                    round = Round(workspace, workspace.epoch + 1, spans, x.dtype, call.op, fingerprint)
                    begun = _copy(x, round, own)
                else:
                    with _beside(workspace), lane("push"):
                        kernel_launch.pack(x, spans, workspace, fingerprint, own=own)
                    if workspace.device.type == "cuda":  # all of pack has its SMs before a matmul takes the rest
                        signals.wait_source(workspace.rank, workspace, fingerprint)
                if not own:
                    _multiply_own(matmuls, x, spans.at(workspace.rank), workspace.rank, gathered)
                if begun is not None:
                    torch.cuda.current_stream(workspace.device).wait_event(begun)
                for i, (out, w, bias) in enumerate(zip(outs, ws, biases, strict=True)):
                    last = gathered is None and i == len(outs) - 1
                    with lane("matmul"):
                        kernel_launch.gather_matmul(
                            out, w, bias, spans, workspace, fingerprint, end_round=last, all_sms=by_copy, own=own
                        )
                if gathered is not None:
                    with lane("copy"):
                        kernel_launch.unpack(gathered, spans, workspace, fingerprint, own=own)
            finally:
                if workspace.device.type == "cuda":  # the next round counts copies in the same words, or x may be freed
                    torch.cuda.current_stream(workspace.device).wait_stream(workspace.side_stream())
            _launched(call)
    return outs, gathered


def _multiply_own(
    matmuls: Sequence[GatheredMatmul], x: Tensor, spans: ChunkSpans, rank: int, gathered: Tensor | None
) -> None:
    """This rank's rows of each result, and of ``gathered``, straight from x: no peer has to send first."""
    chunk = spans.pack.view(x.view(-1), 0, rank)
    for matmul in matmuls:
        with lane("matmul", rank):
            matmul.chunk(spans, rank, chunk)
    if gathered is not None:
        with lane("copy", rank):
            copy_between(spans.unpack.view(gathered.view(-1), 0, rank), chunk)


@contextmanager
def _kernels(call: Call) -> Iterator[None]:
    """Enter the call, and keep its launches in order and guarded while its kernels are launched."""
    call.workspace.enter(call.op, call.fingerprint)
    with ordered(call.workspace), call.workspace.guarded(call.op):
        yield


def _rounds(call: Call, x: Tensor) -> list[RoundSpans]:
    assert call.exchange.cut is None, "kernels take chunks of one size"
    return call.exchange.rounds(call.workspace.max_chunk_numel(x.itemsize))


def _launched(call: Call) -> None:
    workspace = call.workspace
    cuda = workspace.device.type == "cuda"
    workspace.launched(captured=cuda and torch.cuda.is_current_stream_capturing())
    if not cuda:
        workspace.check(call.op)


def loads_for_capture(call: Call, itemsize: int) -> bool:
    """Whether a call has launched all kernels that it has in a graph, where copy engines send nothing."""
    return not (call.exchange.gathers and _copy_engines_send(call, itemsize))


def _copy_engines_send(call: Call, itemsize: int) -> bool:
    """Whether copy engines send what a gather takes, and the matmul has all SMs.

    A graph would fix the slots, and the epoch of a workspace that graphs use is known on the device alone. Copies of
    short runs need SMs, which the matmul may hold while it waits for them; so do copies within a GPU, as between ranks
    that share it, and signals that are kernels.
    """
    workspace, device = call.workspace, call.workspace.device
    if call.exchange.sent_run * itemsize < workspace.least_copied:
        return False
    for_capture = workspace.least_copied > 0 and is_for_capture(device)  # a proof takes 0, and is in no capture
    if device.type != "cuda" or workspace.captured or workspace.shares_gpu or for_capture:
        return False
    return stream_writes.available(device)


def _copy(x: Tensor, round: Round, own: bool) -> torch.cuda.Event:
    """Does the work of pack_kernel with SMs free for the matmul, but for the own chunk, which comes before it.

    Returns the event before the first copy to a peer. A kernel that waits on all SMs must come after it: if the copies
    stood in their hardware queue behind another stream's kernel, that would find no room.
    """
    workspace, main = round.workspace, torch.cuda.current_stream(round.workspace.device)
    side = workspace.side_stream()

    def copy_to(dst_rank: int) -> None:
        copy_runs(round.part(dst_rank), round.spans.at(dst_rank).pack.view(x.view(-1), 0, dst_rank))

    def signal(dst_rank: int) -> None:
        stream_writes.write(side, *workspace.flag(dst_rank, round.epoch, round.fingerprint))

    with lane("push"):
        signals.begin_push(workspace)
        if own:
            copy_to(workspace.rank)
        side.wait_stream(main)
        signal(workspace.rank)  # an operation of the queue, so that the event comes after those in front of it
        begun = side.record_event()
        for dst_rank in round.peers()[:-1]:
            with torch.cuda.stream(side):
                copy_to(dst_rank)
            signal(dst_rank)
    return begun


@contextmanager
def _beside(workspace: Workspace) -> Iterator[None]:
    """On a GPU, what is launched inside runs beside what is launched afterwards, until that waits for it."""
    if workspace.device.type != "cuda":
        yield
        return
    side = workspace.side_stream()
    side.wait_stream(torch.cuda.current_stream(workspace.device))
    with torch.cuda.stream(side):
        yield
