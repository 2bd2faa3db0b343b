"""A barrier of all ranks that costs a signal and a wait for each peer, as the exchange of an op does."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from fusedcomm import env
from fusedcomm.memory.group import process_group
from fusedcomm.symm_mem import enable_cpu


def rank_barrier(device: torch.device) -> Callable[[], None]:
    """A function that returns when all ranks have called it; on a GPU, the stream goes on when all streams have come.

    On a CPU it is the barrier of symmetric memory, which waits as the ops do: gloo's would take as long as some
    exchanges. On a GPU it is an all_reduce of one element. Ranks call this alike. Raises RuntimeError on a CPU without
    the native part.
    """
    if device.type == "cuda":
        token = torch.zeros(1, device=device)
        return lambda: dist.all_reduce(token)
    enable_cpu()
    shared = symm_mem.empty(1, device=device)
    handle = symm_mem.rendezvous(shared, process_group(None))
    timeout_ms = max(1, int(env.timeout_s() * 1e3))  # 0 would be no bound

    def barrier() -> None:
        handle.barrier(timeout_ms=timeout_ms)

    return barrier


def met(t: Tensor, barrier: Callable[[], None]) -> Tensor:
    """t, when all ranks have come here; its gradient likewise, when all have come there in the backward."""
    result: Tensor = _Met.apply(t, barrier)
    return result


class _Met(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, barrier: Callable[[], None]) -> Tensor:
        ctx.barrier = barrier
        barrier()
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.barrier()
        return grad, None
