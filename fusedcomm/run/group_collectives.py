"""The process group's own collectives, begun."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fusedcomm.memory.group import find
from fusedcomm.plan.scaling import VALUES

# torch 2.13 has new names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# By binding, not by functional op: that waits for all work of a storage, and all temporaries of a call share one.
_COLLECTIVES: dict[str, Callable[..., dist.Work | None]] = {
    "all_gather": all_gather_single,
    "all_to_all": dist.all_to_all_single,
    "reduce_scatter": reduce_scatter_single,
}


def begin(kind: str, group_name: str, received: Tensor, sent: Tensor) -> Callable[[], object]:
    """Begin a `fusedcomm.plan.schedule.Collective`. Returns the wait for it; on a GPU it holds up the stream alone."""
    if sent.dtype in VALUES:  # gloo moves no float8
        received, sent = received.view(torch.uint8), sent.view(torch.uint8)
    work = _COLLECTIVES[kind](received, sent, group=find(group_name), async_op=True)
    assert work is not None
    return work.wait
