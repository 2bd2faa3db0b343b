"""`fused`: a persistent Triton kernel stores each finished tile into the peer's slot; a second one collects."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.algorithms import launch
from fusedcomm.algorithms.ordering import ordered
from fusedcomm.exchange import Exchange
from fusedcomm.workspace import Workspace


def push_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    exchange: Exchange,
    workspace: Workspace,
    op: str,
    fingerprint: int,
) -> Tensor:
    """``exchange((x @ w + bias).view(out_shape), gather_dim, scatter_dim)``."""
    out = x.new_empty(exchange.out_shape)
    workspace.enter(op, fingerprint)
    with ordered(workspace), workspace.guarded(op):
        for spans in exchange.rounds(workspace.max_chunk_numel(x.dtype.itemsize)):
            launch.push(x, w, bias, spans, workspace, fingerprint)
            launch.unpack(out, spans.unpack, workspace, fingerprint)
            workspace.launched(captured=x.is_cuda and torch.cuda.is_current_stream_capturing())
            if not x.is_cuda:
                workspace.check(op)
    return out
