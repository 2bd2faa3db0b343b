"""The process group's own collectives, begun."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.memory.group import find

_c10d = torch.ops._c10d_functional


def begin(kind: str, group_name: str, received: Tensor, sent: Tensor) -> Callable[[], object]:
    """Begin a `fusedcomm.plan.schedule.Collective`. Returns the wait for it; on a GPU it holds up the stream alone."""
    group = find(group_name)
    if kind == "all_gather":  # in the form that gloo has for CUDA tensors too: see `reference`
        _c10d.all_gather_into_tensor_out(sent, group.size(), group.group_name, out=received)
        return partial(_c10d.wait_tensor, received)
    collective = dist.all_to_all_single if kind == "all_to_all" else dist.reduce_scatter_tensor
    work = collective(received, sent, group=group, async_op=True)
    assert work is not None
    return work.wait
