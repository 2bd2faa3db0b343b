"""`fused`: persistent Triton kernels. One kernel stores each finished tile into the peer's slot, one waits per source
in its loop, and one adds what has arrived.

A kernel that sends never waits, and one that waits never sends. So a gather is two kernels: the copies to the peers run
beside the matmul, on the side stream, on SMs that it leaves free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusedcomm.algorithms import kernel_launch
from fusedcomm.geometry.exchange import RoundSpans
from fusedcomm.runtime.launch_order import ordered
from fusedcomm.runtime.profiler import lane
from fusedcomm.runtime.workspace import Call, Workspace


def push_matmul(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    workspace, fingerprint = call.workspace, call.fingerprint
    x, w = x.contiguous(), kernel_launch.loadable(w)
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    with _kernels(call):
        for spans in _rounds(call, x):
            with lane("matmul"):
                kernel_launch.push(x, w, bias, spans, workspace, fingerprint)
            with lane("copy"):
                kernel_launch.unpack(out, spans.unpack, workspace, fingerprint)
            _launched(call)
    return out


def push_reduce(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, scale: float, out: Tensor | None = None
) -> Tensor:
    """``reduce_scatter(x @ w) * scale + bias``; ``bias`` is the part of this rank's block."""
    workspace, fingerprint = call.workspace, call.fingerprint
    x, w = x.contiguous(), kernel_launch.loadable(w)
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    with _kernels(call):
        for spans in _rounds(call, x):
            with lane("matmul"):
                kernel_launch.push(x, w, None, spans, workspace, fingerprint)
            with lane("copy"):
                kernel_launch.reduce(out, spans.pack, bias, scale, workspace, fingerprint)
            _launched(call)
    return out


def push_reduce_gather(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, scale: float, out: Tensor | None = None
) -> Tensor:
    """``all_reduce(x @ w) * scale + bias``: two rounds for each part, as the second sends what the first has added."""
    workspace, fingerprint = call.workspace, call.fingerprint
    x, w = x.contiguous(), kernel_launch.loadable(w)
    out = x.new_empty(call.exchange.out_shape) if out is None else out
    reduced = x.new_empty(call.exchange.block)
    with _kernels(call):
        for spans in _rounds(call, x):
            with lane("matmul"):
                kernel_launch.push(x, w, None, spans, workspace, fingerprint)
            with lane("copy"):
                kernel_launch.reduce(reduced, spans.pack, bias, scale, workspace, fingerprint)
            _launched(call)
            with lane("push"):
                kernel_launch.pack(reduced, spans.pack, workspace, fingerprint)
            with lane("copy"):
                kernel_launch.unpack(out, spans.unpack, workspace, fingerprint)
            _launched(call)
    return out


def gather_matmul(
    call: Call, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``[gathered @ w + bias for w, bias in zip(ws, biases)]``, and gathered (or exchanged) x itself if asked for."""
    workspace, fingerprint = call.workspace, call.fingerprint
    x, ws = x.contiguous(), [kernel_launch.loadable(w) for w in ws]
    outs = [x.new_empty(shape) for shape in call.exchange.out_shapes]
    gathered = x.new_empty(call.exchange.shape) if return_gathered else None
    with _kernels(call):
        for spans in _rounds(call, x):
            with _beside(workspace), lane("push"):
                kernel_launch.pack(x, spans.pack, workspace, fingerprint)
            for i, (out, w, bias) in enumerate(zip(outs, ws, biases, strict=True)):
                last = gathered is None and i == len(outs) - 1
                with lane("matmul"):
                    kernel_launch.gather_matmul(out, w, bias, spans, workspace, fingerprint, end_round=last)
            if gathered is not None:
                with lane("copy"):
                    kernel_launch.unpack(gathered, spans.unpack, workspace, fingerprint)
            if x.is_cuda:  # the next round counts its copies in the same words, and x may be freed after the last
                torch.cuda.current_stream(x.device).wait_stream(workspace.side_stream())
            _launched(call)
    return outs, gathered


@contextmanager
def _kernels(call: Call) -> Iterator[None]:
    """Enter the call, and keep its launches in order and guarded while its kernels are launched."""
    call.workspace.enter(call.op, call.fingerprint)
    with ordered(call.workspace), call.workspace.guarded(call.op):
        yield


def _rounds(call: Call, x: Tensor) -> list[RoundSpans]:
    return call.exchange.rounds(call.workspace.max_chunk_numel(x.itemsize))


def _launched(call: Call) -> None:
    workspace = call.workspace
    cuda = workspace.device.type == "cuda"
    workspace.launched(captured=cuda and torch.cuda.is_current_stream_capturing())
    if not cuda:
        workspace.check(call.op)


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
