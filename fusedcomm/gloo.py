"""all_gather for all tensors that a group takes, CUDA tensors over gloo among them."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

_c10d = torch.ops._c10d_functional


def all_gather_into_tensor(t: Tensor, group_size: int, group_name: str) -> Tensor:
    """Starts ``_c10d_functional.all_gather_into_tensor``, in a form that does not crash on CUDA tensors over gloo.

    Gloo reads and writes host memory. In torch 2.11 to 2.15 its collectives copy CUDA tensors to pinned memory first,
    except the coalesced all_gather behind this functional op, which passes device pointers on: a segmentation fault
    (pytorch/pytorch#152645). The ``out`` form is another collective of gloo, which does copy. It sends the same bytes,
    so a rank need not know which form its peers use.
    """
    if t.is_cuda and _is_gloo(group_name):
        out = t.new_empty((group_size * t.shape[0], *t.shape[1:]))
        return _c10d.all_gather_into_tensor_out(t, group_size, group_name, out=out)
    return _c10d.all_gather_into_tensor(t, group_size, group_name)


def _is_gloo(group_name: str) -> bool:
    """Whether gloo runs the group's collectives of CUDA tensors."""
    pg = c10d._resolve_process_group(cast(c10d.GroupName, group_name))
    return bool(pg._get_backend(torch.device("cuda")).name() == "gloo")


_is_gloo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result does
